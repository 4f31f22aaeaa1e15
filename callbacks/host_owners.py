"""Finds whose work the host does in a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from lightning.pytorch import LightningModule
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lmbench.callbacks.observer import Observer
from lmbench.code_owners import is_own_object
from lmbench.instruments.host_ledger import HostLedger, reader_of, with_location
from lmbench.instruments.window import ProbeKind, quiet_collector
from lmbench.records.host_time import HARNESS, HostTime
from lmbench.records.vocabulary import Stage

#: Hooks of callbacks, modules and data, and calls of loggers, that Lightning makes in its loop.
TASKS = (
    *(name for name in dir(LightningModule) if name.startswith("on_")),
    "lr_scheduler_step", "transfer_batch_to_device", "log_metrics", "save",
)  # fmt: skip


class HostOwners(Observer):
    """Times the hooks that Lightning calls, by name and line, in probe steps.

    In your own Trainer, which takes no probe steps, it times the steps of the warm-up after the first. Hooks,
    `self.log`, loggers, the loader and garbage collection are timed; a task within another counts for itself alone.

    Recorded under `host_time`:

    - `steps`: number of steps that were timed.
    - `owners`: phase, owner, calls and `host_s` of each owner per step.
    """

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.HOST:
            self._begin()

    def step_ended(self) -> None:
        if self.session.stage is Stage.WARMUP and self.session.only_watches and self.session.steps_done == 1:
            self._begin()

    def before_window(self) -> None:
        self.undo.close()

    def probe_ended(self, kind: ProbeKind) -> None:
        self.undo.close()

    def _begin(self) -> None:
        if not self.session.only_watches:
            # As in the window, whose phases the owners share: a collection now would visit all that was frozen in it.
            quiet_collector(self.undo)
        track, ledger, undo = self.session.track, HostLedger(self.session.track), self.undo
        undo.callback(self._end, ledger, self.session.steps_done)
        for holder, name, owner in self._tasks():
            # A hook that is a property cannot be replaced.
            with suppress(AttributeError):
                undo.enter_context(patch.object(holder, name, ledger.timed(getattr(holder, name), owner)))
        track.listen(ledger.book, undo)
        gc.callbacks.append(ledger.collect)
        undo.callback(gc.callbacks.remove, ledger.collect)

    def _tasks(self) -> Iterator[tuple[Any, str, str]]:
        """The object, method and owner of each task; the owner of `self.log` is the line that calls it."""
        trainer: Any = self.trainer
        # A loader of endless data has no length, and so no truth value.
        loader = trainer.val_dataloaders if trainer.train_dataloader is None else trainer.train_dataloader
        yield self.module, "log", ""
        yield _DataFetcher, "__iter__", "restart of the loader"
        # Workers read beside the step, which waits for them alone.
        waits = "workers with " if getattr(loader, "num_workers", 0) else ""
        yield _DataFetcher, "__next__", f"{waits}{reader_of(loader)}"
        if isinstance(loader, DataLoader) and not loader.num_workers and trainer.training:
            # The iterator that is in use has a reference of its own to the function.
            iterators = trainer.fit_loop._combined_loader._iterator.iterators
            fetchers = [own._dataset_fetcher for own in iterators if isinstance(own, _SingleProcessDataLoaderIter)]
            for holder in (loader, *fetchers):
                yield holder, "collate_fn", with_location("collate_fn", holder.collate_fn)
        for subject in (*trainer.callbacks, *trainer.loggers, self.module, trainer.datamodule):
            name = type(subject).__name__
            is_own = is_own_object(subject)
            for task in TASKS:
                if callable(method := getattr(subject, task, None)):
                    yield subject, task, HARNESS if is_own else with_location(f"{name}.{task}", method)

    def _end(self, ledger: HostLedger, first_step: int) -> None:
        if steps := self.session.steps_done - first_step:
            self.run.host_time = HostTime(steps, ledger.owned_times(steps))
