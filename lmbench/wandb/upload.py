"""`lmbench upload`: brings results to W&B, each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lmbench.errors import ExitCode, tell
from lmbench.fit_options import option_words
from lmbench.masking import masked_text, shown
from lmbench.records.load import find_runs, load_known
from lmbench.records.vocabulary import DAMAGED, RUNNING
from lmbench.wandb.publish import (
    DEFAULT_TIMEOUT_S,
    WandbProblem,
    foreign_destination,
    is_uploaded,
    sync,
    write,
)


def upload_results(
    results: Iterable[str | Path], destination: Mapping[str, str], timeout_s: float = DEFAULT_TIMEOUT_S
) -> ExitCode:
    """Upload every result at or below the given folders, unless it is at W&B. The first failure ends the uploads.

    Args:
        results: folders of results.
        destination: the `project` and `entity` to send to, where these are not the results' own.
        timeout_s: seconds for each result.
    """
    pending = []
    code = ExitCode.OK
    for folder in find_runs(results):
        run = load_known(folder)
        own_destination = foreign_destination(run.record.wandb)
        unconfirmed = [f"{name} {value!r}" for name, value in own_destination.items() if name not in destination]
        if run.outcome == DAMAGED:
            tell(f"not uploaded: {folder}: {run.damage}")
            code = ExitCode.USAGE
        elif is_uploaded(folder):
            print(shown(f"already uploaded  {folder}"))
        elif run.outcome == RUNNING:
            print(shown(f"still running     {folder}"))
        elif unconfirmed:
            advice = "give --project and --entity"
            tell(f"not uploaded: {folder}: it names {' of '.join(unconfirmed)}, and your settings do not; {advice}")
            code = ExitCode.USAGE
        else:
            pending.append(folder)
    try:
        # Write the runs again: earlier ones may lack steps (a full disk), or name files where the result was before.
        if pending:
            tell(f"results to send to {write(pending, timeout_s)}: {len(pending)}")
        while pending:
            url = sync(pending[0], timeout_s, option_words(destination))
            address = f" -> {masked_text(url)}" if url else ""
            print(shown(f"uploaded          {pending.pop(0)}{address}"), flush=True)
    except WandbProblem as problem:
        more = f"; {len(pending) - 1} more not tried" if pending[1:] else ""
        tell(f"not uploaded: {pending[0]}: {str(problem).rstrip('.')}{more}")
        return ExitCode.NOT_SENT
    return code
