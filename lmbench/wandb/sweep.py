"""W&B's copy of a sweep, written when it is done: its runs in one group, and a run of its own with their summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lmbench.wandb.mirror import ensure_mirrors
from lmbench.wandb.place import Place
from lmbench.wandb.sweep_mirror import filed_runs
from lmbench.wandb.upload import DEFAULT_TIMEOUT_S

#: So many runs one process writes: it imports wandb once, and each run takes a quarter of a second.
_TOGETHER = 50


@dataclass(frozen=True)
class Written:
    """What was written; `uploads` where the settings ask for more than files."""

    uploads: bool


def write_sweep(folder: Path, has_changed: bool, tell: Callable[[str], None]) -> Written | None:
    """Write what is missing of a sweep's offline runs; `tell` hears in a few words how far it is.

    Args:
        has_changed: the summary is another than it was when it was written before.

    Returns None where no run's settings name a WandbLogger.

    Raises:
        BoardProblem: what is missing could not be written, all or in part.
    """
    asks: dict[Path, bool] = {run.path: bool(run.run["wandb"].get("uploads")) for run in filed_runs(folder)}
    if not asks:
        return None
    missing = [path for path in asks if Place(path).mirror is None]
    place = Place(folder)
    if missing or has_changed or place.mirror is None:
        place.forget()
        missing.append(folder)
    for first in range(0, len(missing), _TOGETHER):
        some = missing[first : first + _TOGETHER]
        tell(f"writing for W&B: {first} of {len(missing)}")
        with ExitStack() as locks:
            for path in some:
                locks.enter_context(Place(path).locked(DEFAULT_TIMEOUT_S))
            ensure_mirrors(some)
    return Written(any(asks.values()))
