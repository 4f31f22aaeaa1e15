"""Tells whether steps wait for the loader, why, and which settings of it end the waiting."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from itertools import repeat
from statistics import fmean
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from lmbench.callbacks.observer import Observer
from lmbench.device import device_of, synchronize
from lmbench.errors import UsageError, message_of
from lmbench.instruments.host_ledger import reader_of
from lmbench.instruments.input_pipeline import (
    LEAD_STEPS,
    SETTINGS,
    STEPS,
    best_settings,
    changed,
    endless,
    time_loader,
    time_production,
)
from lmbench.instruments.window import ProbeKind
from lmbench.records.input_pipeline import BOUND_FRACTION, InputPipeline
from lmbench.records.vocabulary import Stage


class LoaderProbe(Observer):
    """Times the model on one batch that stays on the device, the loader alone, and both with better settings.

    These steps come after all other probe steps. The loop takes their batches from where this callback says, and it
    neither ends an epoch nor validates.

    Recorded under `input_pipeline`:

    - `resident_step_s`, `loader_step_s`, `first_batch_s`, `turn_s`: the model alone and the loader alone.
    - `reader`, `reader_s`, `idle_fraction`, `collate_s`: who makes a batch, in one process.
    - `is_input_bound`, `fix`, `predicted_step_s`, `fixed_step_s`: the verdict, and what ends the waiting.
    - `reason`: why the loader was not measured.
    """

    def prepare(self) -> None:
        self.own_probes = ()
        if self.trainer.state.fn == "fit":
            self.own_probes = (ProbeKind.RESIDENT,) * STEPS + (ProbeKind.FED,) * STEPS
        self._batch: Any = None

    def batch_ended(self, outputs: Any, batch: Any) -> None:
        # A batch that is kept in the window would raise its peak memory.
        if self.session.stage is Stage.PROBE:
            self._batch = batch

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.RESIDENT:
            self._facts = self.session.run.input_pipeline = InputPipeline()
            self._feed(repeat(self._batch))
        elif kind is ProbeKind.FED:
            loader: Any = self.trainer.train_dataloader
            try:
                if not isinstance(loader, DataLoader):
                    raise UsageError(f"{type(loader).__name__} is no DataLoader")
                self._examine(loader)
            except Exception as error:
                # The window is complete, and a dataset that only its own workers can read is no fault of the run.
                self._facts.reason = f"{type(error).__name__}: {message_of(error)}"

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if kind in self.own_probes:
            self._steps += 1
            if self._steps == LEAD_STEPS:
                synchronize(self.session.device)
                self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind not in self.own_probes or self._steps <= LEAD_STEPS:
            return
        synchronize(self.session.device)
        steps = self._steps - LEAD_STEPS
        step_s = (time.perf_counter() - self._began_s) / steps
        if kind is ProbeKind.RESIDENT:
            self._facts.resident_step_s = step_s
            self._cpu_s = (time.process_time() - self._began_cpu_s) / steps
        elif self._facts.fix:
            self._facts.fixed_step_s = step_s

    def _feed(self, batches: Iterable[Any]) -> None:
        """Have the loop take its batches from here."""
        loop: Any = self.trainer.fit_loop
        fetcher = loop._data_fetcher
        fetcher.iterator, fetcher.length, fetcher.done = ((batch, 0, 0) for batch in batches), None, False
        if hasattr(fetcher, "batches"):
            fetcher.batches.clear()
        loop.max_batches, self.trainer.limit_val_batches = math.inf, 0
        self._steps = 0

    def _examine(self, loader: DataLoader[Any]) -> None:
        """Time the loader; where steps wait for it, choose better settings and feed the next steps by them."""
        # More workers than cores are right where they wait for a disk.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        facts, run = self._facts, self.session.run
        micro_batches, epoch = run.window.micro_batches or 1, run.window.loader_batches
        production, timing = time_production(loader), time_loader(changed(loader))
        batch_s = fmean(production.batches_s)
        facts.loader_step_s = timing.batch_s * micro_batches
        facts.first_batch_s, facts.turn_s = timing.first_s, timing.turn_s
        facts.reader, facts.reader_s = str(reader_of(changed(loader, num_workers=0))), batch_s - production.collate_s
        facts.collate_s, facts.idle_fraction = production.collate_s, production.idle_s / batch_s
        facts.settings = {name: getattr(loader, name) for name in SETTINGS}
        window = [step for step in self.session.records if step.stage is Stage.WINDOW]
        wait_s = sum((step.data_s or 0.0) + (step.transfer_s or 0.0) for step in window)
        wait_s += sum(step.other_s or 0.0 for step in window if step.follows_loader_end)
        total_s = sum(step.step_s or 0.0 for step in window)
        gain_s = total_s - len(window) * (facts.resident_step_s or 0.0)
        facts.is_input_bound = min(wait_s, gain_s) > BOUND_FRACTION * total_s
        if not facts.is_input_bound or facts.resident_step_s is None:
            return
        pins = device_of(self.session.device).pins_memory
        model_s = facts.resident_step_s / micro_batches + self._copy_s(pins)
        free_cores = production.cores * (1.0 - (run.host_state.other_cpu_fraction or 0.0))
        cores_s = (self._cpu_s / micro_batches + production.cpu_s) / max(free_cores, 1.0)
        fix, step_s = best_settings(facts.settings, production.batches_s, model_s, cores_s, epoch)
        facts.predicted_step_s = step_s * micro_batches
        start_s = time_loader(changed(loader, **fix)).first_s - batch_s
        fix |= {
            "persistent_workers": bool(epoch and fix["num_workers"] and start_s > BOUND_FRACTION * epoch * step_s),
            "pin_memory": pins,
        }
        facts.fix = {name: value for name, value in fix.items() if facts.settings[name] != value}
        self._feed(endless(changed(loader, **fix)))

    def _copy_s(self, pins: bool) -> float:
        """Seconds to copy a batch to the device, from pinned memory where it has that."""
        batch = move_data_to_device(self._batch, torch.device("cpu"))
        batch = pin_memory(batch) if pins else batch
        synchronize(self.session.device)
        began_s = time.perf_counter()
        move_data_to_device(batch, self.session.device)
        synchronize(self.session.device)
        return time.perf_counter() - began_s
