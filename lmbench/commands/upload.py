"""`lmbench upload RESULTS...`: bring results to W&B that are not there yet."""

from __future__ import annotations

from pathlib import Path

from lmbench.errors import ExitCode, UsageError, tell
from lmbench.masking import masked_text
from lmbench.records.load import Run, find_runs, load_run
from lmbench.records.vocabulary import DAMAGED, RUNNING
from lmbench.text import shown
from lmbench.wandb.publish import DEFAULT_TIMEOUT_S, Destination, WandbProblem, elsewhere, is_uploaded, sync, write

#: So many are written by one process, which imports wandb once; then each is uploaded.
_TOGETHER = 20


def upload(
    *results: str,
    project: str | None = None,
    entity: str | None = None,
    as_filed: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Uploads every result at or below the given folders to W&B, unless it is there.

    Steps, summary, configuration, environment and guards, by wandb's own `wandb sync`. Needs
    wandb, and a key from WANDB_API_KEY or `wandb login`; WANDB_BASE_URL names a server of
    your own. A result goes to another project or entity than your settings name only where
    an option says so. The first upload that fails ends the command.

    Args:
        results: result folders, or folders of them
        project: another project than the results' own
        entity: another user or team than the results' own
        as_filed: send each to the project and entity that its own record names
        timeout_s: seconds for each result
    """
    if not timeout_s > 0:
        raise UsageError(f"--timeout_s is {timeout_s:g}; it must be above 0")
    folders = find_runs(results)
    runs = [run for folder in folders if (run := _read(folder)) is not None]
    due = [run for run in runs if _is_due(run)]
    refused = [] if as_filed else _without_leave(due, project, entity)
    paths = [run.path for run in due if run not in refused]
    options = [f"--{name}={value}" for name, value in (("project", project), ("entity", entity)) if value]
    while paths:
        together = paths[:_TOGETHER]
        try:
            # Anew: what lies there may lack steps (a full disk), or name files where the result was moved from.
            write(together, timeout_s)
            for path in together:
                url = sync(path, timeout_s, options)
                print(shown(f"uploaded          {path}{f' -> {masked_text(url)}' if url else ''}"), flush=True)
                paths.remove(path)
        except WandbProblem as problem:
            more = f"; {len(paths) - 1} more not tried" if len(paths) > 1 else ""
            tell(f"not uploaded: {paths[0]}: {problem}{more}")
            return ExitCode.INTERNAL
    return ExitCode.USAGE if refused or len(runs) < len(folders) else ExitCode.OK


def _read(folder: Path) -> Run | None:
    """A result without its steps; None, and why on standard error, where it cannot be read."""
    try:
        run = load_run(folder, with_steps=False)
    except UsageError as error:
        tell(f"not uploaded: {error}")
        return None
    if run.outcome == DAMAGED:
        tell(f"not uploaded: {folder}: {run.damage}")
        return None
    return run


def _is_due(run: Run) -> bool:
    """Whether the result is to be uploaded now; says so where it is not."""
    state = "already uploaded" if is_uploaded(run.path) else "still running" if run.outcome == RUNNING else None
    if state is not None:
        print(shown(f"{state:<17} {run.path}"))
    return state is None


def _without_leave(runs: list[Run], project: str | None, entity: str | None) -> list[Run]:
    """Results that their own records would send where neither the user's settings nor the options do; says so, in a
    line for each such place."""
    places: dict[Destination, list[Run]] = {}
    for run in runs:
        named = elsewhere(run.record.wandb)
        place = Destination(None if project else named.project, None if entity else named.entity)
        if place != Destination():
            places.setdefault(place, []).append(run)
    for place, (first, *others) in places.items():
        which = f"{first.path}{f' and {len(others)} more' if others else ''}"
        tell(
            f"not uploaded: {which}: it names {place}, and your settings do not; give --as_filed to send it there, "
            "or --project and --entity"
        )
    return [run for group in places.values() for run in group]
