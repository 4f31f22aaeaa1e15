"""`lmbench memory`: what the peak of the device's memory consists of, in a recorded run or of one to come."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lmbench.commands import memory_prediction
from lmbench.commands.parser import CommandParser, command
from lmbench.configs import shipped_configs
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.memory.recorded import SNAPSHOT_FILE
from lmbench.report.chosen import add_options, chosen_of
from lmbench.standard_output import write_result

if TYPE_CHECKING:
    from lmbench.memory.history.findings import Findings
    from lmbench.memory.shortage import Shortage
    from lmbench.records.load import Run

DESCRIPTION = (
    """\
Shows what the device's memory is made of at its peak, from a history of PyTorch's
allocator: bytes by category and by part of the model, the largest allocations with
where they come from, what is saved for the backward, and what is reserved in vain. RUN
is a result recorded with `lmbench fit ... --memory.history true`; SNAPSHOT is any
snapshot that torch.cuda.memory._dump_snapshot wrote, lmbench's or not: read as a
pickle of plain values, from which nothing is run. Needs no GPU and no PyTorch. Of a run
that ended out of memory it says what was held, and what would fit.

"""
    + memory_prediction.DESCRIPTION
)

#: Options that only what was recorded has.
_OF_RECORDED = ("--top", "--device", "--format", "--html", "--svg", "--table", "--all", "-h", "--help")


@command
def run(args: list[str]) -> int:
    """Print the tables; returns the exit code."""
    if _is_to_come(args[1:]):
        return memory_prediction.run(args[1:])
    usage = f"lmbench memory RUN|SNAPSHOT [OPTIONS]\n       {memory_prediction.USAGE}"
    parser = CommandParser("memory", DESCRIPTION, usage)
    parser.add_argument("source", metavar="RUN|SNAPSHOT", help="a run's folder or a snapshot")
    parser.add_argument("--top", type=_positive, default=15, metavar="N", help="allocations shown (default 15)")
    parser.add_argument("--device", type=int, metavar="N", help="whose history, where a snapshot has several devices'")
    add_options(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with a timeline")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the timeline as a picture")
    output.add_argument("--format", choices=("markdown", "csv"), help="tables to paste, or what the peak holds as CSV")
    options = parser.parse_args(args[1:])
    chosen = chosen_of(options, options.json, options.format)
    # Help does not wait for these.
    from lmbench.memory.history.findings import as_record as history_record
    from lmbench.memory.history.findings import examine
    from lmbench.memory.shortage_table import as_record, print_shortage
    from lmbench.memory.tables import print_findings, to_csv, to_markdown
    from lmbench.report.screen import make_console

    for target in (options.html, options.svg):
        if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
            raise UsageError(f"{str(target)!r} cannot be written; name a file in a folder that exists")
    short = _ran_out(options.source)
    if short is not None and not (short.path / SNAPSHOT_FILE).is_file():
        told = _explained(short)
        if options.json:
            _print_json(as_record(told))
        else:
            print_shortage(told, make_console())
        return ExitCode.OK
    found = examine(options.source, options.device)
    _draw(found, options.html, options.svg)
    if options.json:
        history = history_record(found)
        _print_json(history if short is None else {**history, "shortage": as_record(_explained(short))})
    elif options.format == "csv":
        sys.stdout.write(to_csv(found))
    elif options.format == "markdown":
        sys.stdout.write(to_markdown(found, options.top))
    else:
        if short is not None and not chosen.names:
            print_shortage(_explained(short), make_console())
            print("\nThe history until then:\n")
        print_findings(found, options.top, chosen, make_console())
    return ExitCode.OK


def _ran_out(source: str) -> Run | None:
    """The run, where it ended for want of memory."""
    from lmbench.records.load import is_run_folder, load_run

    path = Path(source)
    if not is_run_folder(path):
        return None
    found = load_run(path, with_steps=False)
    return found if found.outcome == "oom" else None


def _explained(found: Run) -> Shortage:
    from lmbench.memory.shortage import explain

    tell("predicting what would fit; about a minute")
    return explain(found.record, found.path)


def _print_json(told: object) -> None:
    write_result(json.dumps(told, indent=1, allow_nan=False) + "\n")


def _is_to_come(words: list[str]) -> bool:
    """Whether the words are a configuration's, which is options and nothing else; `validate` is told so there."""
    first = next((word for word in words if word != "--json"), "")
    if (first == "validate" or first in shipped_configs()) and not Path(first).exists():
        return True
    return first.startswith("-") and first.partition("=")[0] not in _OF_RECORDED


def _draw(found: Findings, page: Path | None, svg: Path | None) -> None:
    """Write the timeline where it was asked for."""
    if page is None and svg is None:
        return
    from lmbench.memory.tables import answer_html, tables_html
    from lmbench.memory.timeline import memory_timeline
    from lmbench.memory.timeline_picture import memory_picture, own_page, own_svg

    picture = memory_picture(found.title, memory_timeline(found))
    for target, text in ((page, own_page(picture, answer_html(found), tables_html(found))), (svg, own_svg(picture))):
        if target is None:
            continue
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{str(target)!r} cannot be written: {error.strerror}; choose another file") from error
        tell(f"timeline written to {target}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of allocations; give 1 or more")
    return int(text)
