"""Finds whose work the host does in a step."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lmbench.callbacks.observer import Observer
from lmbench.instruments.host_ledger import HostLedger, with_location
from lmbench.instruments.phases import BorderProfiler
from lmbench.instruments.window import ProbeKind
from lmbench.records.host_time import HostTime
from lmbench.records.vocabulary import Stage


class HostOwners(Observer):
    """Times the hooks that Lightning calls, by name and line, in probe steps.

    In your own Trainer, which takes no probe steps, it times the steps of the warm-up after the first. Hooks,
    `self.log`, loggers, the loader and garbage collection are timed; a task within another counts for itself alone.

    Recorded under `host_time`:

    - `steps`: number of steps that were timed.
    - `owners`: phase, owner, calls and `host_s` of each owner per step.
    """

    def prepare(self) -> None:
        self._undo = ExitStack()

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.HOST:
            self._begin()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if self.session.only_watches and stage is Stage.WARMUP and self.session.steps_done == 1:
            self._begin()

    def probe_ended(self, kind: ProbeKind) -> None:
        self._undo.close()

    def before_window(self) -> None:
        self._undo.close()

    def run_closing(self, exception: BaseException | None) -> None:
        self._undo.close()

    def _begin(self) -> None:
        trainer: Any = self.trainer
        track, ledger, undo = self.session.track, HostLedger(self.session.track), self._undo
        undo.callback(self._end, ledger, self.session.steps_done)
        tasks = [(self.module, "log", ""), (_DataFetcher, "__iter__", "restart of the loader")]
        for logger in trainer.loggers:
            tasks += [(logger, call, f"{type(logger).__name__}.{call}") for call in ("log_metrics", "save")]
        if isinstance(trainer.train_dataloader, DataLoader) and not trainer.train_dataloader.num_workers:
            # The iterator that is in use has a reference of its own to the function.
            iterators = trainer.fit_loop._combined_loader._iterator.iterators
            fetchers = [own._dataset_fetcher for own in iterators if isinstance(own, _SingleProcessDataLoaderIter)]
            for holder in (trainer.train_dataloader, *fetchers):
                tasks.append((holder, "collate_fn", with_location("collate_fn", holder.collate_fn)))
        for holder, name, owner in tasks:
            undo.enter_context(patch.object(holder, name, ledger.timed(getattr(holder, name), owner)))
        if isinstance(trainer.profiler, BorderProfiler):
            trainer.profiler.book(partial(ledger.around, trainer))
            undo.callback(trainer.profiler.book)
        track.listeners.append(ledger.book)
        undo.callback(track.unlisten, ledger.book)
        gc.callbacks.append(ledger.collect)
        undo.callback(gc.callbacks.remove, ledger.collect)

    def _end(self, ledger: HostLedger, first_step: int) -> None:
        if steps := self.session.steps_done - first_step:
            self.session.run.host_time = HostTime(steps, ledger.owned_times(steps))
