"""`lmbench show RUN...`: print a result again."""

from __future__ import annotations

from lmbench.commands.parser import command
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.records.load import find_runs
from lmbench.report.terminal import print_run
from lmbench.runs import notes, read_run

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
            loaded = read_run(folder)
        except UsageError as error:
            unread.append(str(error))
            continue
        if shown:
            print()
        shown += 1
        print_run(loaded.record, folder, notes=notes(loaded))
    for line in unread:
        tell(line)
    return ExitCode.OK if shown else ExitCode.USAGE


def _paths(words: list[str]) -> list[str]:
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}; show takes result folders, or folders of them, and no options")
    if not words:
        raise UsageError("nothing to show; name result folders, such as `lmbench show results`")
    return words
