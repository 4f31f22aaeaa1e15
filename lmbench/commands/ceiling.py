"""`lmbench ceiling`: what this device attains at best, beside its datasheet."""

from __future__ import annotations

from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError
from lmbench.standard_output import write_result

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
    parser = CommandParser("ceiling", DESCRIPTION)
    parser.add_argument("--sustained_s", type=float, default=3.0, metavar="S", help="seconds held (default 3)")
    parser.add_argument("--results_dir", default="results", metavar="RESULTS", help="folder of results")
    parser.add_argument("--json", action="store_true", help="the record on standard output")
    options = parser.parse_args(args[1:])
    if not 0 < options.sustained_s <= LONGEST_S:
        raise UsageError(f"--sustained_s is {options.sustained_s:g}; it must be above 0 and at most {LONGEST_S:g}")
    # Help does not wait for these.
    from lmbench.kernels.ceiling import print_ceiling, store_ceiling
    from lmbench.kernels.recording.ceiling import measure_ceiling

    record = measure_ceiling(options.sustained_s)
    path = store_ceiling(record, Path(options.results_dir))
    if options.json:
        write_result(record.as_json() + "\n")
    else:
        print_ceiling(record, path)
    return ExitCode.OK
