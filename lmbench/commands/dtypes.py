"""`lmbench dtypes RUN...`: which dtype every tensor of a step had, and why."""

from __future__ import annotations

import json
import sys

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode
from lmbench.standard_output import write_result

DESCRIPTION = """\
Shows the dtypes of a run that was recorded with `lmbench fit ... --dtypes.record true`:
parameters, batch, logits, loss, gradients and optimizer state; what every module gets
and returns; and the operators of the forward pass, each with the reason for its casts:
autocast's lists as the run's PyTorch had them on its device. Several runs (two
precisions, say) stand side by side. Needs no GPU and no PyTorch."""


@command
def run(args: list[str]) -> int:
    """Print the tables; returns the exit code."""
    parser = CommandParser("dtypes", DESCRIPTION)
    parser.add_argument("sources", metavar="RUN", nargs="+", help="a run's folder")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="everything as JSON on standard output, a list of runs")
    output.add_argument("--format", choices=("markdown", "csv"), help="tables to paste, or every call as CSV")
    options = parser.parse_args(args[1:])
    # Help does not wait for these.
    from lmbench.dtypes.findings import as_record, examine
    from lmbench.dtypes.tables import print_findings, to_csv, to_markdown
    from lmbench.report.screen import make_console

    found = [examine(source) for source in options.sources]
    if options.json:
        write_result(json.dumps([as_record(each) for each in found], indent=1, allow_nan=False) + "\n")
    elif options.format == "csv":
        sys.stdout.write(to_csv(found))
    elif options.format == "markdown":
        sys.stdout.write(to_markdown(found))
    else:
        print_findings(found, make_console())
    return ExitCode.OK
