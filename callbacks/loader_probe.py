"""Tells whether steps wait for the loader, why, and which settings of it end the waiting."""

from __future__ import annotations

import math
import time
import timeit
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from lmbench.callbacks.events import Outputs
from lmbench.callbacks.observer import Observer
from lmbench.errors import UsageError, error_line
from lmbench.instruments.host import host_state, read_host
from lmbench.instruments.input_pipeline import (
    BAND,
    GOOD,
    LEAD_STEPS,
    STEPS,
    ModelAlone,
    Production,
    best_settings,
    changed,
    endless,
    predicted_batch_s,
    time_alone,
    time_production,
)
from lmbench.instruments.window import ProbeKind
from lmbench.records.input_pipeline import InputPipeline

#: Steps of each kind that do not count; and those of the model alone, before and after the fed ones.
_LEAD = {ProbeKind.RESIDENT: 2, ProbeKind.FED: LEAD_STEPS}
_ALONE = (ProbeKind.RESIDENT,) * 12
#: Copies of a batch to the device, of which the fastest counts.
_COPIES = 3


class LoaderProbe(Observer):
    """Times the model on one batch that stays on the device, the loader alone, and both with better settings.

    These steps come after all other probe steps. The loop takes their batches from where this callback says, and it
    neither ends an epoch nor validates.

    Recorded under `input_pipeline`:

    - `waited_s`, `resident_step_s`, `loader_step_s`, `first_batch_s`, `turn_s`: what a step waited, the model alone and
      the loader alone.
    - `reader`, `reader_s`, `idle_fraction`, `collate_s`, `slowest_lines`: who makes a batch, in one worker.
    - `fix`, `predicted_step_s`, `predicted_interval`, `fixed_step_s`: settings that end the waiting, if steps wait.
    - `reason`: why the loader was not measured.
    """

    def run_started(self) -> None:
        self._batch: Any = None
        self._lead = 0
        self._facts = self.run.input_pipeline = InputPipeline()
        self.own_probes = (*_ALONE, *(ProbeKind.FED,) * STEPS, *_ALONE)
        self._alone = list[ModelAlone]()
        self._made: Production | None = None
        if self.trainer.state.fn != "fit":
            self._facts.reason, self.own_probes = "only training is examined", ()
        elif not isinstance(self.trainer.fit_loop._data_fetcher, _PrefetchDataFetcher):
            self._facts.reason, self.own_probes = "only a training_step that takes batches can be fed by other ones", ()

    def batch_ended(self, outputs: Outputs, batch: Any) -> None:
        # In the window, and in the steps that look at memory, a batch that is kept would raise the peak.
        if self.session.probe_kind is ProbeKind.TRAINING:
            self._batch = batch

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.RESIDENT:
            self._micro_batches = self.run.window.micro_batches or 1
            self._feed(repeat(self._batch), kind)
        elif kind is ProbeKind.FED:
            try:
                self._examine(self.trainer.train_dataloader)
            except Exception as error:
                self._give_up(error)

    def step_ended(self) -> None:
        if self.session.probe_kind in self.own_probes and self.session.steps_done == self._lead:
            self.device.synchronize()
            self._began, self._began_cpu_s = read_host(), time.process_time()

    def probe_ended(self, kind: ProbeKind) -> None:
        steps = self.session.steps_done - self._lead
        if kind not in self.own_probes or steps < 1:
            return
        self.device.synchronize()
        cpu_s, ended = time.process_time() - self._began_cpu_s, read_host()
        step_s = (ended.read_at_s - self._began.read_at_s) / steps
        facts, micro_batches = self._facts, self._micro_batches
        if kind is ProbeKind.FED:
            facts.fixed_step_s = step_s if facts.fix else None
            return
        others = host_state(self._began, ended).other_cpu_fraction or 0.0
        # Others that take all cores give some away to whoever asks.
        free_cores = ended.cores * max(1 - others, 0.1)
        batch_s, batch_cpu_s = step_s / micro_batches, cpu_s / (steps * micro_batches)
        self._alone.append(ModelAlone(batch_s, batch_cpu_s, free_cores, ended.cores))
        facts.resident_step_s = facts.resident_step_s or step_s
        if facts.fix and self._made is not None:
            models = map(self._with_copy, self._alone)
            predictions = [predicted_batch_s(self._made, model, *self._choice) for model in models]
            steps_s = [micro_batches * batch_s for batch_s in chain(*predictions)]
            facts.predicted_step_s = fmean(steps_s)
            facts.predicted_interval = [(1 - BAND) * min(steps_s), (1 + BAND) * max(steps_s)]

    def _give_up(self, error: Exception) -> None:
        """Record why the loader was not measured.

        The window is complete, and a dataset that only its own workers can read is no fault of the run.
        """
        self._facts.reason, self._facts.fix = error_line(error), {}

    def _as_far_as_it_goes(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, and after an error of theirs the one that stays."""
        try:
            yield from batches
        except Exception as error:
            self._give_up(error)
        yield from repeat(self._batch)

    def _with_copy(self, model: ModelAlone) -> ModelAlone:
        return model._replace(batch_s=model.batch_s + self._copy_s)

    def _time_copy(self) -> float:
        """The least seconds in which a batch gets from the host's memory to the device, which the model alone lacks."""
        batch = move_data_to_device(self._batch, torch.device("cpu"))
        if self.device.pins_memory:
            batch = pin_memory(batch)

        def copy() -> None:
            move_data_to_device(batch, self.session.device)
            self.device.synchronize()

        return min(timeit.repeat(copy, self.device.synchronize, number=1, repeat=_COPIES))

    def _feed(self, batches: Iterable[Any], kind: ProbeKind) -> None:
        """Have the loop take its batches from here, in probe steps of this kind."""
        loop: Any = self.trainer.fit_loop
        fetcher = loop._data_fetcher
        fetcher.iterator, fetcher.length, fetcher.done = ((batch, 0, 0) for batch in batches), None, False
        fetcher.batches = []
        self.undo.enter_context(patch.object(loop, "max_batches", math.inf))
        self.undo.enter_context(patch.object(self.trainer, "limit_val_batches", 0))
        self._lead = self.session.steps_done + _LEAD[kind]

    def _examine(self, loader: Any) -> None:
        """Time the loader; where other settings are better, feed the next steps by them.

        Raises:
            UsageError: the batches come from something else than a DataLoader, or can be read only once.
        """
        if not isinstance(loader, DataLoader):
            advice = "lmbench's own data has one with --data.placement pinned"
            raise UsageError(f"{type(loader).__name__} is no DataLoader; {advice}")
        # More workers than cores are right where they wait for a disk.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        facts, run = self._facts, self.run
        self._made = time_production(loader, facts, run.window.loader_batches)
        self._copy_s = self._time_copy()
        facts.loader_step_s = self._micro_batches * time_alone(loader, facts)
        fix = best_settings(loader, self._made, self._with_copy(self._alone[0]))
        self._choice = fix["num_workers"], fix["prefetch_factor"] or 0
        fix["pin_memory"] = loader.pin_memory or self.device.pins_memory
        if self._waits():
            facts.fix = {name: value for name, value in fix.items() if getattr(loader, name) != value}
        self._feed(self._as_far_as_it_goes(endless(changed(loader, **facts.fix))), ProbeKind.FED)

    def _waits(self) -> bool:
        """Whether the window's steps took notably longer than the model alone and the copy of its batches, and waited
        for their batches as notably. On a busy machine the model alone may have had a better moment."""
        steps = [record for record in self.session.window_records if record.step_s]
        if not steps:
            return True
        step_s = fmean(record.step_s or 0.0 for record in steps)
        self._facts.waited_s = fmean((record.data_s or 0.0) + (record.transfer_s or 0.0) for record in steps)
        alone_s = (self._facts.resident_step_s or 0.0) + self._micro_batches * self._copy_s
        return step_s > GOOD * alone_s and step_s > GOOD * (step_s - self._facts.waited_s)
