"""Times a DataLoader alone, and predicts the step with other settings of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice, pairwise, product
from statistics import fmean
from typing import Any

from torch.utils.data import DataLoader

from lmbench.errors import UsageError
from lmbench.instruments.host import read_host
from lmbench.instruments.host_ledger import reader_of
from lmbench.records.input_pipeline import InputPipeline
from lmbench.records.vocabulary import Values

#: Steps that are timed or simulated, and the first of them that do not count.
STEPS, LEAD_STEPS = 30, 10
#: Batches that a loader is timed for, unless that takes longer than a second, and in any case.
_MOST_BATCHES, _LEAST_BATCHES = 200, 4
#: Settings of a DataLoader that makes batches where they are asked for.
IN_PROCESS: Values = {
    "num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False, "timeout": 0,
}  # fmt: skip
#: Numbers of workers, and batches that each holds ready, that are tried.
_WORKERS, _PREFETCHED = range(1, 33), (2, 4, 8)
#: Settings that are slower than the best by a smaller factor are as good.
_GOOD = 1.02
#: Starting workers takes some 0.1 s, which matters where an epoch is shorter than this.
_SHORT_EPOCH_S = 10.0


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


def _spans_s(batches: Iterator[Any]) -> list[float]:
    """Seconds that each of the next batches takes."""
    marks_s = [time.perf_counter()]
    while len(marks_s) <= _LEAST_BATCHES or (marks_s[-1] - marks_s[0] < 1.0 and len(marks_s) <= _MOST_BATCHES):
        next(batches)
        marks_s.append(time.perf_counter())
    return [end_s - begin_s for begin_s, end_s in pairwise(marks_s)]


def _first_batch_s(loader: DataLoader[Any]) -> float:
    began_s = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - began_s


def time_alone(loader: DataLoader[Any], facts: InputPipeline) -> float:
    """Time the loader without a model: the first batch of two epochs; returns the mean seconds of a further batch."""
    clone = changed(loader)
    facts.first_batch_s, facts.turn_s = _first_batch_s(clone), _first_batch_s(clone)
    batches = endless(clone)
    # These may have been made while the first batch was waited for.
    list(islice(batches, 1 + loader.num_workers * (loader.prefetch_factor or 0)))
    return fmean(_spans_s(batches))


def time_production(loader: DataLoader[Any], facts: InputPipeline) -> tuple[list[float], float]:
    """Make batches in this process, as each worker does; returns the seconds of each, and the mean CPU seconds."""
    collates_s: list[float] = []

    def collate(samples: Any) -> Any:
        began_s = time.perf_counter()
        batch = loader.collate_fn(samples)
        collates_s.append(time.perf_counter() - began_s)
        return batch

    single = changed(loader, **IN_PROCESS, collate_fn=collate)
    opened, cpu_s = read_host(), time.thread_time()
    spans_s = _spans_s(endless(single))
    cpu_s, closed = time.thread_time() - cpu_s, read_host()
    waited_s = (closed.waited_s or 0.0) - (opened.waited_s or 0.0)
    facts.idle_fraction = max(0.0, 1.0 - (cpu_s + waited_s) / sum(spans_s))
    facts.collate_s = fmean(collates_s)
    facts.reader, facts.reader_s = reader_of(single), fmean(spans_s) - facts.collate_s
    return spans_s, cpu_s / len(spans_s)


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
    ends_s = [0.0]
    for index in range(STEPS):
        place = index % (epoch or STEPS)
        if place == 0:
            taken_s, free_s = list[float](), [ends_s[-1]] * workers
        # A worker goes on when the batch before its oldest one has been taken.
        held = place - workers * prefetched
        begin_s = max(free_s[place % workers], taken_s[held] if held >= 0 else 0.0)
        free_s[place % workers] = begin_s + batches_s[index % len(batches_s)]
        taken_s.append(max(ends_s[-1], free_s[place % workers]))
        ends_s.append(taken_s[-1] + model_s)
    return (ends_s[-1] - ends_s[LEAD_STEPS]) / (STEPS - LEAD_STEPS)


def best_settings(
    loader: DataLoader[Any], batches_s: Sequence[float], model_s: float, cores_s: float, epoch: int | None
) -> tuple[Values, float]:
    """The fewest workers and prefetched batches that are as good as any, and the predicted seconds of a batch.

    Args:
        loader: its settings stay if they are as good.
        batches_s: seconds in which one process makes each batch.
        model_s: seconds of the model for a batch.
        cores_s: seconds that all cores together need for a batch's work, the model's included.
        epoch: batches of an epoch; None for an endless loader.
    """
    own = loader.num_workers, loader.prefetch_factor or _PREFETCHED[0]
    predicted_s = {
        choice: max(cores_s, simulated_step_s(batches_s, model_s, *choice, epoch))
        for choice in (own, *product(_WORKERS, _PREFETCHED))
    }
    best_s = min(predicted_s.values())
    workers, prefetched = next(choice for choice, step_s in predicted_s.items() if step_s <= _GOOD * best_s)
    step_s = predicted_s[workers, prefetched]
    is_short = epoch is not None and epoch * step_s < _SHORT_EPOCH_S
    return {
        "num_workers": workers,
        "prefetch_factor": prefetched if workers else None,
        "persistent_workers": workers > 0 and (is_short or loader.persistent_workers),
    }, step_s
