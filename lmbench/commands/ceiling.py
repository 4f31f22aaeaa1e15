"""`lmbench ceiling`: what this device attains at best, beside its datasheet."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError
from lmbench.records.store import write_whole

DESCRIPTION = """\
Measures what matrix products and copies attain on this device, in bursts of 40 ms and
held for seconds, with the clock and power they ran at. The result goes to
RESULTS/ceiling_NAME.json, where `lmbench kernels` looks for it."""

#: Power and clock have settled long before.
LONGEST_S = 600.0


@command
def run(args: list[str]) -> int:
    """Measure, print a table, and store the result.

    Raises:
        UsageError: an option is wrong, or the folder cannot be written.
    """
    options = _parser().parse_args(args[1:])
    if not 0 < options.sustained_s <= LONGEST_S:
        raise UsageError(f"--sustained-s is {options.sustained_s:g}; it must be above 0 and at most {LONGEST_S:g}")
    import torch

    from lmbench.kernels.ceiling import measure_ceiling
    from lmbench.measure.environment import capture_environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = measure_ceiling(device, options.sustained_s)
    record = {
        "schema_version": 1,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": capture_environment(device),
        "rates": rates,
    }
    path = _store(record, Path(options.results_dir))
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        from lmbench.kernels.shown.ceiling_table import print_ceiling

        print_ceiling(record, path)
    return ExitCode.OK


def _parser() -> CommandParser:
    parser = CommandParser("ceiling", DESCRIPTION)
    parser.add_argument("--sustained-s", type=float, default=3.0, metavar="S", help="seconds held (default 3)")
    parser.add_argument("--results-dir", default="results", metavar="RESULTS", help="folder of results")
    parser.add_argument("--json", action="store_true", help="the record on standard output")
    return parser


def _store(record: dict[str, Any], folder: Path) -> Path:
    environment = record["environment"]
    name = environment["gpu"].get("name") or environment["host"].get("cpu_model") or "cpu"
    path = folder / f"ceiling_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        # What was measured is not lost with the disk.
        print(json.dumps(record), file=sys.stderr)
        raise UsageError(f"{path} cannot be written: {error.strerror}; the record is above") from error
    return path
