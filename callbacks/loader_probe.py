"""Tells whether steps wait for the loader, why, and which settings of it end the waiting."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import repeat
from typing import Any
from unittest.mock import patch

from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from torch.utils.data import DataLoader

from lmbench.callbacks.observer import Observer
from lmbench.device import device_of, synchronize
from lmbench.errors import UsageError, message_of
from lmbench.instruments.host import read_host
from lmbench.instruments.input_pipeline import (
    LEAD_STEPS,
    STEPS,
    best_settings,
    changed,
    endless,
    time_alone,
    time_production,
)
from lmbench.instruments.window import ProbeKind
from lmbench.records.input_pipeline import InputPipeline
from lmbench.records.vocabulary import Stage


class LoaderProbe(Observer):
    """Times the model on one batch that stays on the device, the loader alone, and both with better settings.

    These steps come after all other probe steps. The loop takes their batches from where this callback says, and it
    neither ends an epoch nor validates.

    Recorded under `input_pipeline`:

    - `resident_step_s`, `loader_step_s`, `first_batch_s`, `turn_s`: the model alone and the loader alone.
    - `reader`, `reader_s`, `idle_fraction`, `collate_s`: who makes a batch, in one process.
    - `fix`, `predicted_step_s`, `fixed_step_s`: settings that end the waiting, if steps wait.
    - `reason`: why the loader was not measured.
    """

    def prepare(self) -> None:
        self._undo = ExitStack()

    def run_closing(self, exception: BaseException | None) -> None:
        self._undo.close()

    def run_started(self) -> None:
        self._batch: Any = None
        self._lead = 0
        self._facts = self.session.run.input_pipeline = InputPipeline()
        self.own_probes = (ProbeKind.RESIDENT,) * STEPS + (ProbeKind.FED,) * STEPS
        if not isinstance(self.trainer.fit_loop._data_fetcher, _PrefetchDataFetcher):
            self._facts.reason, self.own_probes = "only a training_step that takes batches can be fed by other ones", ()

    def batch_ended(self, outputs: Any, batch: Any) -> None:
        # In the window, and in the steps that look at memory, a batch that is kept would raise the peak.
        if self.session.probe_kind is ProbeKind.TRAINING:
            self._batch = batch

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.RESIDENT:
            self._feed(repeat(self._batch))
        elif kind is ProbeKind.FED:
            try:
                self._examine(self.trainer.train_dataloader)
            except Exception as error:
                # The window is complete, and a dataset that only its own workers can read is no fault of the run.
                self._facts.reason = f"{type(error).__name__}: {message_of(error)}"

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if kind in self.own_probes and self.session.steps_done == self._lead:
            synchronize(self.session.device)
            self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    def probe_ended(self, kind: ProbeKind) -> None:
        steps = self.session.steps_done - self._lead
        if kind not in self.own_probes or steps < 1:
            return
        synchronize(self.session.device)
        step_s = (time.perf_counter() - self._began_s) / steps
        if kind is ProbeKind.RESIDENT:
            self._facts.resident_step_s = self._resident_s = step_s
            self._cpu_s = (time.process_time() - self._began_cpu_s) / steps
        elif self._facts.fix:
            self._facts.fixed_step_s = step_s

    def _feed(self, batches: Iterable[Any]) -> None:
        """Have the loop take its batches from here."""
        loop: Any = self.trainer.fit_loop
        fetcher = loop._data_fetcher
        fetcher.iterator, fetcher.length, fetcher.done = ((batch, 0, 0) for batch in batches), None, False
        fetcher.batches = []
        self._undo.enter_context(patch.object(loop, "max_batches", math.inf))
        self._undo.enter_context(patch.object(self.trainer, "limit_val_batches", 0))
        self._lead = self.session.steps_done + LEAD_STEPS

    def _examine(self, loader: Any) -> None:
        """Time the loader; where other settings are better, feed the next steps by them.

        Raises:
            UsageError: the batches come from something else than a DataLoader, or can be read only once.
        """
        if not isinstance(loader, DataLoader):
            raise UsageError(f"{type(loader).__name__} is no DataLoader")
        # More workers than cores are right where they wait for a disk.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        facts, run = self._facts, self.session.run
        micro_batches = run.window.micro_batches or 1
        batches_s, cpu_s = time_production(loader, facts)
        facts.loader_step_s = micro_batches * time_alone(loader, facts)
        cores_s = (self._cpu_s / micro_batches + cpu_s) / read_host().cores
        model_s, epoch = self._resident_s / micro_batches, run.window.loader_batches
        fix, batch_s = best_settings(loader, batches_s, model_s, cores_s, epoch)
        fix["pin_memory"] = device_of(self.session.device).pins_memory
        facts.predicted_step_s = micro_batches * batch_s
        facts.fix = {name: value for name, value in fix.items() if getattr(loader, name) != value}
        self._feed(endless(changed(loader, **fix)))
