"""`lmbench kernels RUN|TRACE`: which kernels and parts of the model take the time, and was the device working."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode
from lmbench.report.chosen import add_options, chosen_of
from lmbench.standard_output import write_result

DESCRIPTION = """\
Shows where the device's time goes, from a trace: kernels, their kinds and the parts of
the model they work for, by phase; the device's and the host's clocks side by side, with
a verdict; and what is inside attention. The answer comes first: a verdict on each phase
and what to do, and what takes most; tables follow by name. RUN is a result recorded with
`lmbench fit ... --trainer.profiler kernels`; TRACE is any trace of torch.profiler's
(.json, .json.gz; at most 2 GiB unpacked), lmbench's or not. A trace of a CPU has no
kernels; its operators are shown instead. Needs no GPU and no PyTorch."""


@command
def run(args: list[str]) -> int:
    """Print the tables; returns the exit code."""
    parser = CommandParser("kernels", DESCRIPTION)
    parser.add_argument("source", metavar="RUN|TRACE", help="a run's folder or a trace file")
    parser.add_argument("--top", type=_positive, default=10, metavar="N", help="kernels shown per phase (default 10)")
    parser.add_argument(
        "--ceiling",
        type=Path,
        metavar="FILE",
        help="a record of `lmbench ceiling` (by default one of the same GPU beside the results)",
    )
    add_options(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    output.add_argument("--format", choices=("markdown", "csv"), help="tables to paste, or every kernel as CSV")
    options = parser.parse_args(args[1:])
    chosen = chosen_of(options, options.json, options.format)
    # Help does not wait for these.
    from lmbench.kernels.ceiling import find_ceiling
    from lmbench.kernels.roofline import roofline, roofline_record
    from lmbench.kernels.shown import print_findings, to_markdown
    from lmbench.kernels.tables import to_csv
    from lmbench.kernels.trace.findings import as_record, examine
    from lmbench.report.screen import make_console

    found = examine(options.source)
    roof = roofline(found, find_ceiling(found.path.parent, found.run, options.ceiling))
    if options.json:
        record = {**as_record(found), "roofline": roofline_record(roof)}
        write_result(json.dumps(record, indent=1, allow_nan=False) + "\n")
    elif options.format == "csv":
        sys.stdout.write(to_csv(found))
    elif options.format == "markdown":
        sys.stdout.write(to_markdown(found, options.top, roof))
    else:
        print_findings(found, options.top, roof, chosen, make_console())
    return ExitCode.OK


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of kernels; give 1 or more")
    return int(text)
