"""Times a DataLoader alone and in one worker, and predicts the step with other settings of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice, pairwise, product
from statistics import fmean
from traceback import StackSummary, walk_stack
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lmbench.code_owners import location_of, responsible_frame
from lmbench.errors import UsageError
from lmbench.instruments.host import waited_s
from lmbench.instruments.host_ledger import reader_of
from lmbench.records.input_pipeline import InputPipeline
from lmbench.records.vocabulary import Values

#: Steps that are fed or simulated, and the first of them that do not count, since workers fill their queues.
STEPS, LEAD_STEPS = 30, 10
#: Batches that a loader is timed for, unless that takes longer than a second, and in any case.
_MOST_BATCHES, _LEAST_BATCHES = 200, 4
#: Settings of a DataLoader whose one worker never waits for the process that takes its batches.
_ONE_WORKER = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True, "pin_memory": False}
#: Time between two looks at a worker's stack, each of which takes some 50 us; and lines that are kept.
_SAMPLING_S, _LINES = 0.004, 3
#: Numbers of workers, and batches that each holds ready, that are tried.
_WORKERS, _PREFETCHED = range(1, 33), (2, 4, 8)
#: How far off a prediction may be on a quiet machine.
BAND = 0.05
#: Steps that are slower than the best by a smaller factor are as good.
GOOD = 1.02
#: Starting workers takes some 0.1 s, which matters where an epoch is shorter than this.
_SHORT_EPOCH_S = 10.0


def changed(loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """A copy of a loader with other settings, and workers of its own."""
    clone = copy(loader)
    # DataLoader refuses to set some of these attributes, after its __init__ has checked them.
    vars(clone).update(settings, _iterator=None)
    return clone


def endless(loader: Iterable[Any]) -> Iterator[Any]:
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


def _for_a_second(batches: Iterator[Any]) -> Iterator[Any]:
    """The next batches of a second, at least `_LEAST_BATCHES`."""
    began_s = time.perf_counter()
    for index, batch in enumerate(batches, start=1):
        yield batch
        if index >= _LEAST_BATCHES and (time.perf_counter() - began_s > 1.0 or index >= _MOST_BATCHES):
            return


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
    began_s = time.perf_counter()
    # Only the number counts: batches that are kept would fill the memory.
    count = sum(1 for _ in _for_a_second(batches))
    return (time.perf_counter() - began_s) / count


class Progress(NamedTuple):
    """What a worker has done when it has made a batch.

    Attributes:
        made_at_s: the moment.
        collate_s: time of `collate_fn` so far.
        cpu_s: CPU time of all threads of the worker so far.
        waited_s: time so far in which its main thread was ready to run and had no core.
        lines_s: time of each line so far.
    """

    made_at_s: float
    collate_s: float
    cpu_s: float
    waited_s: float
    lines_s: dict[str, float]


class WatchedCollate:
    """A `collate_fn` that sends the worker's progress in place of the batch, and watches the worker's stack."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn, self._collate_s = collate_fn, 0.0
        self._waited_s, self._lines_s = 0.0, dict[str, float]()

    def __call__(self, samples: Any) -> Progress:
        if not self._collate_s:
            worker = threading.get_ident(), threading.get_native_id()
            self._waited_s = waited_s(worker[1]) or 0.0
            threading.Thread(target=self._watch, args=worker, daemon=True).start()
        began_s = time.perf_counter()
        self._collate_fn(samples)
        now_s = time.perf_counter()
        self._collate_s += now_s - began_s
        return Progress(now_s, self._collate_s, time.process_time(), self._waited_s, self._lines_s)

    def _watch(self, worker: int, native_id: int) -> None:
        """Book the time since the last look to the line that runs: one that holds Python's lock counts whole."""
        # Else the worker would keep Python's lock for 5 ms, or until it reads, and the line that reads would be blamed.
        sys.setswitchinterval(_SAMPLING_S / 10)
        seen_s = time.perf_counter()
        while True:
            time.sleep(_SAMPLING_S)
            stack = StackSummary.extract(walk_stack(sys._current_frames()[worker]), lookup_lines=False)[::-1]
            now_s, self._waited_s = time.perf_counter(), waited_s(native_id) or 0.0
            fetches = [index for index, frame in enumerate(stack) if frame.filename.endswith("data/_utils/fetch.py")]
            inside = [frame for frame in stack[fetches[-1] + 1 :] if frame.filename != __file__] if fetches else []
            if inside:
                frame = responsible_frame(inside)
                line = f"{frame.name} ({location_of(frame.filename, frame.lineno)})"
                # A new table each time, since the worker may be sending the old one.
                self._lines_s = {**self._lines_s, line: self._lines_s.get(line, 0.0) + now_s - seen_s}
            seen_s = now_s


class ModelAlone(NamedTuple):
    """Steps on a batch that stays on the device.

    Attributes:
        batch_s: mean seconds of a micro-batch.
        cpu_s: CPU seconds of it, of all threads.
        free_cores: cores that other processes left to it.
        cores: cores of the machine; the more threads want a core, the fewer others take.
    """

    batch_s: float
    cpu_s: float
    free_cores: float
    cores: int


class Production(NamedTuple):
    """Batches that one worker made.

    Attributes:
        batches_s: seconds of each.
        cpu_s: mean CPU seconds of one.
        epoch: batches of an epoch; None for an endless loader.
    """

    batches_s: Sequence[float]
    cpu_s: float
    epoch: int | None


def time_production(loader: DataLoader[Any], facts: InputPipeline, epoch: int | None) -> Production:
    """Make batches in one worker, whose lines are noted; `epoch` is the number of batches in an epoch."""
    single = changed(loader, **_ONE_WORKER, collate_fn=WatchedCollate(loader.collate_fn))
    reports: list[Progress] = list(_for_a_second(endless(single)))
    first, last, count = reports[0], reports[-1], len(reports) - 1
    spans_s = [after.made_at_s - before.made_at_s for before, after in pairwise(reports)]
    cpu_s = last.cpu_s - first.cpu_s
    facts.collate_s = (last.collate_s - first.collate_s) / count
    facts.reader, facts.reader_s = reader_of(loader), fmean(spans_s) - facts.collate_s
    facts.idle_fraction = max(0.0, 1.0 - cpu_s / (sum(spans_s) - (last.waited_s - first.waited_s)))
    longest = sorted(last.lines_s.items(), key=lambda item: -item[1])[:_LINES]
    facts.slowest_lines = {line: span_s / count for line, span_s in longest}
    return Production(spans_s, cpu_s / count, epoch)


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


def predicted_batch_s(made: Production, model: ModelAlone, workers: int, prefetched: int) -> tuple[float, float]:
    """Predict the seconds from batch to batch, for all cores and for those that other processes left to the model.

    They are those of the simulation, or those that the cores need for all work.
    """
    step_s = simulated_step_s(made.batches_s, model.batch_s, workers, prefetched, made.epoch)
    least_s, most_s = ((made.cpu_s + model.cpu_s) / cores for cores in (model.cores, model.free_cores))
    return max(least_s, step_s), max(most_s, step_s)


def best_settings(loader: DataLoader[Any], made: Production, model: ModelAlone) -> Values:
    """The fewest workers and prefetched batches that are predicted to be as good as any.

    Args:
        loader: its settings stay if they are as good.
        made: the batches of one worker.
        model: the model alone.
    """
    own = loader.num_workers, loader.prefetch_factor or _PREFETCHED[0]
    choices = (own, *product(_WORKERS, _PREFETCHED))
    # Settings are for the machine, whatever other processes take at present.
    predicted_s = {choice: predicted_batch_s(made, model, *choice)[0] for choice in choices}
    best_s = min(predicted_s.values())
    workers, prefetched = next(choice for choice, batch_s in predicted_s.items() if batch_s <= GOOD * best_s)
    is_short = made.epoch is not None and made.epoch * predicted_s[workers, prefetched] < _SHORT_EPOCH_S
    return {
        "num_workers": workers,
        "prefetch_factor": prefetched if workers else None,
        "persistent_workers": workers > 0 and (is_short or loader.persistent_workers),
    }
