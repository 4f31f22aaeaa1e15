"""`lmbench show RUN...`: print a result again."""

from __future__ import annotations

import sys
from pathlib import Path

from lmbench.errors import ExitCode, UsageError
from lmbench.report.terminal import print_run
from lmbench.results.load import find_runs, load_run


def run(args: list[str]) -> int:
    """Print every run at or below the given folders."""
    paths = [arg for arg in args[1:] if not arg.startswith("-")]
    if not paths:
        print("usage: lmbench show RUN...   (a result folder, or a folder of them)")
        return ExitCode.OK if "-h" in args or "--help" in args else ExitCode.USAGE
    try:
        for folder in find_runs(paths):
            loaded = load_run(folder)
            print_run({**loaded.run, "outcome": loaded.outcome}, Path(folder))
    except UsageError as error:
        print(f"lmbench: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.OK
