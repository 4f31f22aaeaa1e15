"""Times a DataLoader alone, and predicts the step with other settings of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice, product
from statistics import fmean
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lmbench.errors import UsageError
from lmbench.instruments.host import read_host

#: Settings of a DataLoader that decide its speed.
SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
#: Steps with the loader's or the model's alone, and the first of them that do not count.
STEPS, LEAD_STEPS = 30, 10
#: A loader is timed for this long, and for this many batches at least and at most.
_TIMED_S, _BATCHES = 1.0, (4, 200)
#: Numbers of workers, and batches that each holds ready, that are tried.
_WORKERS, _PREFETCHED = range(1, 33), (2, 4, 8)
#: Settings that are slower than the best by less are as good.
_GOOD_FRACTION = 0.02


class Production(NamedTuple):
    """How one process makes batches: seconds of each, and per batch the seconds of collating, computing and reading.

    `cores` is the number of cores that this process may use.
    """

    cores: int
    batches_s: list[float]
    collate_s: float
    cpu_s: float
    idle_s: float


class Timing(NamedTuple):
    """Seconds of a loader alone: for its first batch, for each further one, and for the first of the next epoch."""

    first_s: float
    batch_s: float
    turn_s: float


def changed(loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """A copy of a loader with other settings, and workers of its own."""
    clone = copy(loader)
    # DataLoader refuses to set some of these attributes, after its __init__ has checked them.
    vars(clone).update(settings, _iterator=None)
    return clone


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of one epoch after the other.

    Raises:
        UsageError: an epoch has no batch, as that of an iterator which was used up.
    """
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise UsageError("its data can be read only once")


def _timed(batches: Iterator[Any]) -> list[float]:
    """Seconds that each of the next batches takes."""
    spans_s: list[float] = []
    least, most = _BATCHES
    while len(spans_s) < least or (sum(spans_s) < _TIMED_S and len(spans_s) < most):
        began_s = time.perf_counter()
        next(batches)
        spans_s.append(time.perf_counter() - began_s)
    return spans_s


def time_loader(loader: DataLoader[Any]) -> Timing:
    began_s = time.perf_counter()
    batches = endless(loader)
    next(batches)
    first_s = time.perf_counter() - began_s
    # These may have been made while the first batch was waited for.
    list(islice(batches, loader.num_workers * (loader.prefetch_factor or 0)))
    batch_s = fmean(_timed(batches))
    began_s = time.perf_counter()
    next(iter(loader))
    return Timing(first_s, batch_s, time.perf_counter() - began_s)


def time_production(loader: DataLoader[Any]) -> Production:
    """Make batches in this process, as each worker of the loader does."""
    collates_s: list[float] = []

    def collate(samples: Any) -> Any:
        began_s = time.perf_counter()
        batch = loader.collate_fn(samples)
        collates_s.append(time.perf_counter() - began_s)
        return batch

    single = changed(
        loader, num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False, timeout=0,
        collate_fn=collate,
    )  # fmt: skip
    opened, cpu_s = read_host(), time.thread_time()
    batches_s = _timed(endless(single))
    cpu_s, closed = time.thread_time() - cpu_s, read_host()
    busy_s = cpu_s + (closed.waited_s or 0.0) - (opened.waited_s or 0.0)
    idle_s, count = max(0.0, sum(batches_s) - busy_s), len(batches_s)
    return Production(opened.cores, batches_s, fmean(collates_s), cpu_s / count, idle_s / count)


def simulated_step_s(
    batches_s: Sequence[float], model_s: float, workers: int, prefetched: int, epoch: int | None
) -> float:
    """Mean seconds from batch to batch, where workers make batches ahead in turn, and the model takes them in order.

    Args:
        batches_s: seconds in which a worker makes each batch; repeated as often as needed.
        model_s: seconds of the model for a batch.
        workers: number of workers; 0 makes batches in the model's process.
        prefetched: batches that each worker holds ready.
        epoch: batches after which all workers start anew; None for an endless loader.
    """
    if not workers:
        return model_s + fmean(batches_s)
    now_s, taken_s, free_s = 0.0, list[float](), [0.0] * workers
    for index in range(STEPS):
        place = index % (epoch or STEPS)
        if place == 0:
            taken_s, free_s = [], [now_s] * workers
        # A worker goes on when the batch before its oldest one has been taken.
        held = place - workers * prefetched
        begin_s = max(free_s[place % workers], taken_s[held] if held >= 0 else 0.0)
        free_s[place % workers] = begin_s + batches_s[index % len(batches_s)]
        taken_s.append(max(now_s, free_s[place % workers]))
        now_s = taken_s[-1] + model_s
        if index == LEAD_STEPS - 1:
            lead_s = now_s
    return (now_s - lead_s) / (STEPS - LEAD_STEPS)


def best_settings(
    settings: dict[str, Any], batches_s: Sequence[float], model_s: float, cores_s: float, epoch: int | None
) -> tuple[dict[str, Any], float]:
    """The fewest workers and prefetched batches that are as good as any, and the predicted seconds of a batch.

    Workers beside each other, and the model beside them, need at least the time in which all cores do their work.

    Args:
        settings: the loader's; they stay if they are as good.
        batches_s: seconds in which one process makes each batch.
        model_s: seconds of the model for a batch.
        cores_s: seconds that all cores together need for a batch's work, the model's included.
        epoch: batches of an epoch; None for an endless loader.
    """
    own = settings["num_workers"], settings["prefetch_factor"] or _PREFETCHED[0]
    predicted_s = {
        (workers, prefetched): max(cores_s, simulated_step_s(batches_s, model_s, workers, prefetched, epoch))
        for workers, prefetched in (own, *product(_WORKERS, _PREFETCHED))
    }
    good_s = (1 + _GOOD_FRACTION) * min(predicted_s.values())
    workers, prefetched = next(choice for choice, step_s in predicted_s.items() if step_s <= good_s)
    fix = {"num_workers": workers, "prefetch_factor": prefetched if workers else None}
    return fix, predicted_s[workers, prefetched]
