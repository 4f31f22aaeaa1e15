"""Finds whose work the host does in a step."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import DataLoader

from lmbench.callbacks.observer import Observer
from lmbench.instruments.host_ledger import HostLedger, function_owner
from lmbench.instruments.phases import BorderProfiler
from lmbench.instruments.window import ProbeKind
from lmbench.records.host_time import HostTime, WorkOwner
from lmbench.records.vocabulary import Stage

#: Calls of a logger that Lightning makes in its loop.
_LOGGER_CALLS = ("log_metrics", "save")


class HostOwners(Observer):
    """Times the hooks that Lightning calls, by name and line, in probe steps.

    In your own Trainer, which takes no probe steps, it times the steps of the warm-up after the first. Hooks,
    `self.log`, loggers, the loader and garbage collection are timed; a task within another counts for itself alone.

    Recorded under `host_time`:

    - `steps`: number of steps that were timed.
    - `owners`: phase, name, location, calls and `host_s` of each owner per step.
    """

    def prepare(self) -> None:
        self._undo = ExitStack()

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.HOST:
            self._begin()

    def probe_ended(self, kind: ProbeKind) -> None:
        self._undo.close()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if self.session.only_watches and stage is Stage.WARMUP and self.session.steps_done == 1:
            self._begin()

    def before_window(self) -> None:
        self._undo.close()

    def run_closing(self, exception: BaseException | None) -> None:
        self._undo.close()

    def _begin(self) -> None:
        profiler, track, undo = self.trainer.profiler, self.session.track, self._undo  # type: ignore[attr-defined]
        if not isinstance(profiler, BorderProfiler):
            return
        ledger = HostLedger(track)
        undo.callback(self._end, ledger, self.session.steps_done)
        profiler.book(partial(ledger.around, self.trainer))
        undo.callback(profiler.book)
        track.listeners.append(ledger.book)
        undo.callback(track.unlisten, ledger.book)
        gc.callbacks.append(ledger.collect)
        undo.callback(gc.callbacks.remove, ledger.collect)
        self.module.log = ledger.timed(self.module.log)  # type: ignore[method-assign]
        undo.callback(delattr, self.module, "log")
        for logger in self.trainer.loggers:
            for call in _LOGGER_CALLS:
                setattr(logger, call, ledger.timed(getattr(logger, call), WorkOwner(f"{type(logger).__name__}.{call}")))
                undo.callback(delattr, logger, call)
        loader: Any = getattr(self.trainer, "train_dataloader", None)
        if isinstance(loader, DataLoader) and not loader.num_workers:
            # The iterator that is in use has a reference of its own to the function.
            iterators: Any = self.trainer.fit_loop._combined_loader._iterator.iterators
            for holder in (loader, *(getattr(iterator, "_dataset_fetcher", loader) for iterator in iterators)):
                collate = holder.collate_fn
                holder.collate_fn = ledger.timed(collate, function_owner(collate, "collate_fn"))
                undo.callback(setattr, holder, "collate_fn", collate)
        restart = _DataFetcher.__iter__
        _DataFetcher.__iter__ = ledger.timed(restart, WorkOwner("restart of the loader"))  # type: ignore[method-assign]
        undo.callback(setattr, _DataFetcher, "__iter__", restart)

    def _end(self, ledger: HostLedger, first_step: int) -> None:
        if steps := self.session.steps_done - first_step:
            self.session.run.host_time = HostTime(steps, ledger.owned_times(steps))
