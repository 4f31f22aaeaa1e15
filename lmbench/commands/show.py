"""`lmbench show RUN...`: print a result again."""

from __future__ import annotations

from lmbench.commands.parser import command
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.records.load import Run, find_runs, load_run
from lmbench.records.vocabulary import DAMAGED, KILLED, RUNNING
from lmbench.report.terminal import print_run

HELP = """\
usage: lmbench show RESULTS...

Prints results again as `lmbench fit` did: result folders, or folders of them."""


@command
def run(args: list[str]) -> int:
    """Print every run at or below the given folders."""
    if any(arg in ("-h", "--help") for arg in args[1:]):
        print(HELP)
        return ExitCode.OK
    unread: list[str] = []
    shown = 0
    for folder in find_runs(_paths(args[1:])):
        try:
            loaded = load_run(folder)
        except UsageError as error:
            unread.append(str(error))
            continue
        if shown:
            print()
        shown += 1
        # One that says `running` may have been killed.
        loaded.record.outcome = loaded.outcome
        print_run(loaded.record, folder, notes=_notes(loaded))
    for line in unread:
        tell(line)
    return ExitCode.OK if shown else ExitCode.USAGE


def _notes(loaded: Run) -> list[tuple[str, str]]:
    """What there is of a run that was never closed, and what of it cannot be read."""
    notes = []
    if loaded.outcome in (RUNNING, KILLED, DAMAGED):
        summary = "" if loaded.outcome == DAMAGED else ", without a summary: the run was not closed"
        notes.append(("steps", f"{len(loaded.steps)} recorded{summary}"))
    if loaded.damage is not None:
        notes.append(("damage", loaded.damage))
    return notes


def _paths(words: list[str]) -> list[str]:
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}; show takes result folders, or folders of them, and no options")
    if not words:
        raise UsageError("nothing to show; name result folders, such as `lmbench show results`")
    return words
