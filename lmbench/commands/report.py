"""`lmbench report RESULTS...`: results as tables to paste, as CSV, or as one page with charts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError, tell

if TYPE_CHECKING:
    from lmbench.report.feature import Catalogue

DESCRIPTION = """\
Shows results as tables: Markdown on standard output, CSV, or one HTML page that
needs no network. RESULTS are folders of runs or of sweeps. A sweep is shown by its
study's view, other runs with a row for whatever differs."""


@command
def run(args: list[str]) -> int:
    """Print or write the report; returns the exit code."""
    _report(_parser().parse_args(args[1:]))
    return ExitCode.OK


def _parser() -> CommandParser:
    parser = CommandParser("report", DESCRIPTION)
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="a run's folder, a sweep's, or a folder of them")
    parser.add_argument(
        "--format", choices=("markdown", "csv"), help="what is printed (markdown, unless on a terminal)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page to FILE")
    parser.add_argument(
        "--view", metavar="NAME", help="show all results by the view of this study, or of this YAML file"
    )
    parser.add_argument(
        "--baseline", metavar="FACT=VALUE,...", help="what speed-ups refer to: precision=32-true,matmul=highest"
    )
    parser.add_argument(
        "--reference", action="store_true",
        help="add published figures of the same size, mode, context and precision, but for implausible ones",
    )  # fmt: skip
    return parser


def make_catalogue() -> Catalogue:
    """What views may name: the report's own columns and charts, and those of every feature."""
    from lmbench.attention.in_report import ATTENTION
    from lmbench.convergence.in_report import CONVERGENCE
    from lmbench.kernels.in_report import KERNELS
    from lmbench.memory.in_report import MEMORY
    from lmbench.report.feature import Catalogue

    return Catalogue([ATTENTION, CONVERGENCE, KERNELS, MEMORY])


def _report(options: argparse.Namespace) -> None:
    # Help does not wait for these.
    from lmbench.report.gather import gather
    from lmbench.report.sections import Options, build_report

    target: Path | None = options.html
    if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
        raise UsageError(f"--html {str(target)!r} cannot be written; name a file in a folder that exists")
    wanted = Options(options.view, options.baseline, options.reference)
    report = build_report(gather(options.results), make_catalogue(), wanted)
    if target is not None:
        from lmbench.report.page import write_page

        write_page(report, target)
        tell(f"report written to {target}")
    if options.format == "csv":
        from lmbench.report.delimited import to_csv

        sys.stdout.write(to_csv(report))
    elif options.format is None and target is None and sys.stdout is not None and sys.stdout.isatty():
        from lmbench.report.on_screen import print_report
        from lmbench.report.screen import make_console

        print_report(report, make_console())
    elif options.format == "markdown" or target is None:
        from lmbench.report.markdown import to_markdown

        sys.stdout.write(to_markdown(report))
