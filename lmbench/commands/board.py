"""`lmbench board [STUDY...]`: a board at W&B for each study, made or brought up to date."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace

import msgspec

from lmbench.commands.parser import CommandParser, command
from lmbench.commands.report import make_catalogue
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.masking import masked, masked_text
from lmbench.records.codec import indented_json
from lmbench.text import shown
from lmbench.wandb.publish import DEFAULT_TIMEOUT_S, WandbProblem, WandbSettings, save_boards

DESCRIPTION = """\
Makes a workspace at W&B for each STUDY (a shipped one by name, or its file; without
any, for all that ship and for all runs together), or brings the one that is there up
to date: what it shows of your own changes is lost, and there are never two. Its runs
are those of the study's sweeps; `lmbench upload` brings them. Needs wandb-workspaces
(`pip install 'lmbench[boards]'`), and a key from WANDB_API_KEY or `wandb login`."""


@command
def run(args: list[str]) -> int:
    """Make or update the boards, a line each; returns the exit code."""
    options = _parse(args[1:])
    # Help does not wait for these.
    from lmbench.configs import shipped_studies
    from lmbench.kernels.trace.kinds import KINDS, PARTS
    from lmbench.report.view import GENERIC, read_view
    from lmbench.wandb.board import Request, board_of, board_of_all

    names = options.studies or [name for name in shipped_studies() if not name.startswith("tiny_")]
    boards = [] if options.studies else [(board_of_all(), None)]
    for given in dict.fromkeys(names):
        view = read_view(given)
        if not re.fullmatch(r"[\w.-]+", view.name):
            raise UsageError(f"{view.name!r} is no name for a board; rename the file: only letters, digits and '_.-'")
        board = board_of_all() if view.name == GENERIC.name else board_of(view, KINDS, PARTS)
        if board.name not in (known.name for known, _ in boards):
            boards.append((board, given))
    if options.tables:
        boards = [(replace(board, text=_tables(options.tables, given)), given) for board, given in boards]
    request = Request(
        options.project,
        options.entity,
        ("report",) if options.report else ("board",),
        tuple(board for board, _ in boards),
    )
    request = msgspec.convert(masked(msgspec.to_builtins(request)), Request)
    if options.dry_run:
        print(indented_json(request, indent=2), end="")
        return ExitCode.OK
    try:
        for saved in save_boards(request, options.timeout_s):
            print(shown(f"{saved.what}  {saved.name}  {masked_text(saved.told)}"), flush=True)
    except WandbProblem as problem:
        tell(f"board: {problem}")
        return ExitCode.INTERNAL
    return ExitCode.OK


def _tables(results: list[str], view: str | None) -> str:
    """What `lmbench report` prints of results, by the study's view."""
    from lmbench.report.gather import gather
    from lmbench.report.markdown import to_markdown
    from lmbench.report.sections import Options, build_report

    return to_markdown(build_report(gather(results), make_catalogue(), Options(view)))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = CommandParser("board", DESCRIPTION)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="a study by name, or a sweep's file with a view")
    parser.add_argument(
        "--project", default=os.environ.get("WANDB_PROJECT") or WandbSettings.project, metavar="P",
        help=f"the project of the runs (WANDB_PROJECT, else {WandbSettings.project})",
    )  # fmt: skip
    parser.add_argument("--entity", metavar="E", help="the user or team that it belongs to (W&B's own default)")
    parser.add_argument("--report", action="store_true", help="a report for each study instead of a workspace")
    parser.add_argument(
        "--tables", action="append", metavar="RESULTS",
        help="with --report: put in what `lmbench report` prints of these results; may be given more than once",
    )  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help="print what would be made, as JSON; asks nobody")
    parser.add_argument(
        "--timeout_s", type=float, default=DEFAULT_TIMEOUT_S, metavar="S",
        help=f"seconds that W&B may take (default {DEFAULT_TIMEOUT_S:g})",
    )  # fmt: skip
    options = parser.parse_args(words)
    if options.tables and not options.report:
        raise UsageError("--tables goes into a report; give --report, too")
    if not options.timeout_s > 0:
        raise UsageError(f"--timeout_s is {options.timeout_s:g}; it must be above 0")
    return options
