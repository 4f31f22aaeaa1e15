"""`lmbench upload RESULTS...`: bring results to W&B that are not there yet."""

from __future__ import annotations

import argparse
from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.masking import masked_text
from lmbench.records.load import find_runs, load_run
from lmbench.records.vocabulary import DAMAGED, RUNNING
from lmbench.text import shown
from lmbench.wandb.publish import DEFAULT_TIMEOUT_S, Destination, WandbProblem, elsewhere, is_uploaded, sync, write

DESCRIPTION = """\
Uploads every result at or below the given folders to W&B, unless it is there: steps,
summary, configuration, environment and guards, by wandb's own `wandb sync`. Needs
wandb, and a key from WANDB_API_KEY or `wandb login`; WANDB_BASE_URL names a server of
your own. A result goes to another project or entity than your settings name only where
an option says so."""

#: So many are written by one process, which imports wandb once; then each is uploaded.
_TOGETHER = 20


@command
def run(args: list[str]) -> int:
    """Upload, a line a result; the first that fails ends it. Returns the exit code: 2 if some are damaged, or are filed
    where nobody asked for."""
    options = _parse(args[1:])
    overrides = [f"--{name}={value}" for name in ("project", "entity") if (value := getattr(options, name))]
    found = find_runs(options.results)
    sound = [folder for folder in found if _is_sound(folder)]
    due = [folder for folder in sound if _is_due(folder)]
    left = [] if options.as_filed else _without_leave(due, options)
    due = [folder for folder in due if folder not in left]
    code = ExitCode.USAGE if left or len(sound) < len(found) else ExitCode.OK
    while due:
        together = due[:_TOGETHER]
        try:
            # Anew: what lies there may lack steps (a full disk), or name files where the result was moved from.
            write(together, options.timeout_s)
            for folder in together:
                url = sync(folder, options.timeout_s, overrides)
                print(shown(f"uploaded          {folder}{f' -> {masked_text(url)}' if url else ''}"), flush=True)
                due.remove(folder)
        except WandbProblem as problem:
            more = f"; {len(due) - 1} more not tried" if len(due) > 1 else ""
            tell(f"not uploaded: {due[0]}: {problem}{more}")
            return ExitCode.INTERNAL
    return code


def _parse(words: list[str]) -> argparse.Namespace:
    parser = CommandParser("upload", DESCRIPTION)
    parser.add_argument("results", nargs="*", metavar="RESULTS", help="result folders, or folders of them")
    parser.add_argument("--project", metavar="NAME", help="another project than the results' own")
    parser.add_argument("--entity", metavar="NAME", help="another user or team than the results' own")
    parser.add_argument(
        "--as_filed", action="store_true", help="send each to the project and entity that its own record names"
    )
    parser.add_argument(
        "--timeout_s",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds for each result (default {DEFAULT_TIMEOUT_S:g})",
    )
    options = parser.parse_args(words)
    if not options.results:
        raise UsageError("nothing to upload; name result folders, such as `lmbench upload results`")
    if not options.timeout_s > 0:
        raise UsageError(f"--timeout_s is {options.timeout_s:g}; it must be above 0")
    return options


def _is_sound(folder: Path) -> bool:
    """Whether the result can be read; says why where it cannot."""
    try:
        loaded = load_run(folder, with_steps=False)
    except UsageError as error:
        tell(f"not uploaded: {error}")
        return False
    if loaded.outcome == DAMAGED:
        tell(f"not uploaded: {folder}: {loaded.damage}")
    return loaded.outcome != DAMAGED


def _without_leave(folders: list[Path], options: argparse.Namespace) -> list[Path]:
    """Results that their own records would send where neither the user's settings nor the options do; says so, in a
    line for each such place."""
    places: dict[Destination, list[Path]] = {}
    for folder in folders:
        named = elsewhere(load_run(folder, with_steps=False).record.wandb)
        place = Destination(None if options.project else named.project, None if options.entity else named.entity)
        if place != Destination():
            places.setdefault(place, []).append(folder)
    for place, results in places.items():
        which = f"{results[0]}{f' and {len(results) - 1} more' if len(results) > 1 else ''}"
        tell(
            f"not uploaded: {which}: it names {place}, and your settings do not; give --as_filed to send it there, "
            "or --project and --entity"
        )
    return [folder for results in places.values() for folder in results]


def _is_due(folder: Path) -> bool:
    """Whether the result is to be uploaded now; says so where it is not."""
    if is_uploaded(folder):
        print(shown(f"already uploaded  {folder}"))
        return False
    if load_run(folder, with_steps=False).outcome == RUNNING:
        print(shown(f"still running     {folder}"))
        return False
    return True
