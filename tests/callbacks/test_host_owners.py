"""Whose work the host does in a step: the line that a slow loop waits for is named, also in a user's own Trainer."""

from __future__ import annotations

import gc
import time
from functools import partial

import torch
from fit_process import measure_here, statuses
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from strangers import Data, OwnLoaders, Regression
from tables import cases, flat
from torch.utils.data import DataLoader, default_collate

from lmbench.callbacks import RunRecorder
from lmbench.records.vocabulary import PHASES

from conftest import quiet_trainer

#: Longer than a busy machine keeps a thread waiting as a rule.
SLEEP_S = 0.05


class SlowHook(OwnLoaders):
    def on_train_batch_end(self, *_):
        time.sleep(SLEEP_S)


class SlowCallback(Callback):
    #: A hook that cannot be replaced.
    on_before_backward = property(lambda self: lambda *_: None)

    def on_before_zero_grad(self, *_):
        time.sleep(SLEEP_S)


class Talkative(OwnLoaders):
    def training_step(self, batch, batch_idx):
        for index in range(40):
            self.log_dict({f"a{index}": 1.0, f"b{index}": 2.0})
        return super().training_step(batch, batch_idx)


class Collecting(OwnLoaders):
    def on_train_batch_start(self, *_):
        self.cycles = [[] for _ in range(40_000)]
        gc.collect()


class Littering(OwnLoaders):
    def training_step(self, batch, batch_idx):
        self.cycles = [[] for _ in range(40_000)]
        return super().training_step(batch, batch_idx)


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        time.sleep(SLEEP_S)


class SlowRows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(SLEEP_S / 4)
        return (torch.randn(16),)


def slow_collate(rows):
    time.sleep(SLEEP_S)
    return default_collate(rows)


class Loading(Regression):
    def __init__(self, rows, **settings):
        super().__init__()
        self.loader = DataLoader(rows, batch_size=4, **settings)

    def train_dataloader(self):
        return self.loader


#: Eight rows, two batches an epoch.
ROWS = [(torch.randn(16),)] * 8


def line_of(function):
    return f"(test_host_owners.py:{function.__code__.co_firstlineno})"


@cases("module | callbacks | phase | owner", 
        (SlowHook, [], "other", f"SlowHook.on_train_batch_end {line_of(SlowHook.on_train_batch_end)}"),
        (OwnLoaders, [SlowCallback()], "other",
         f"SlowCallback.on_before_zero_grad {line_of(SlowCallback.on_before_zero_grad)}"),
        (Talkative, [], "forward",
         f"self.log (test_host_owners.py:{Talkative.training_step.__code__.co_firstlineno + 2})"),
        (Collecting, [], "other", "garbage collection"),
        (partial(Loading, SlowRows()), [], "data", f"SlowRows.__getitem__ {line_of(SlowRows.__getitem__)}"),
        (partial(Loading, ROWS, collate_fn=slow_collate), [], "data", f"collate_fn {line_of(slow_collate)}"),
        (partial(Loading, ROWS, num_workers=1), [], "data", "restart of the loader"))  # fmt: skip
def test_the_work_that_a_step_waits_for_is_named_with_its_line(module, callbacks, phase, owner):
    run = measure_here(module(), steps=6, probe_steps=4, trainer={"callbacks": callbacks})
    own = [owned for owned in run.record.host_time.owners if owned.phase == phase]
    assert (run.record.host_time.steps, own[0].owner) == (4, owner)
    assert owner.partition(" ")[0] in str(run)
    for name in PHASES:
        summary = run.record.phases.get(name)
        if summary is not None:
            owners_s = [owned.host_s for owned in run.record.host_time.owners_within(name, summary.mean_s)]
            assert sum(owners_s) <= summary.mean_s * (1 + 1e-9)
    guard = "data_share" if phase == "data" else "other_share"
    assert statuses(run.record)[guard] == "warn" or phase == "forward"


def test_collections_by_themselves_which_the_window_does_without_are_no_part_of_its_phases():
    owners = measure_here(Littering(), steps=4, probe_steps=2).record.host_time.owners
    assert [owned for owned in owners if owned.owner == "garbage collection"] == []
    assert gc.isenabled()


def test_a_users_own_trainer_is_watched_in_its_warm_up_and_left_as_it_was(tmp_path):
    recorder, logger, module = RunRecorder(str(tmp_path)), SlowLogger(str(tmp_path)), SlowHook()
    quiet_trainer(recorder, logger=logger, log_every_n_steps=1, max_steps=12).fit(module)
    times = {(owned.phase, owned.owner.partition(" ")[0]): owned for owned in recorder.run.host_time.owners}
    assert recorder.run.host_time.steps == 4
    assert {("other", "SlowHook.on_train_batch_end"), ("other", "SlowLogger.log_metrics")} <= times.keys()
    assert times["other", "SlowLogger.log_metrics"].host_s >= SLEEP_S
    assert not {"log", "log_metrics"} & (vars(module).keys() | vars(logger).keys())
    assert [callback for callback in gc.callbacks if "HostLedger" in str(callback)] == []


def test_what_an_epochs_end_does_is_not_the_restart_of_the_loader():
    class EpochEnd(Loading):
        def on_train_epoch_end(self):
            time.sleep(5 * SLEEP_S)

    window = measure_here(EpochEnd(ROWS), steps=8, probe_steps=0).record.window
    assert window.loader_end_count
    assert window.loader_restart_s < SLEEP_S


@cases("""
- [batches, restarts]
- [3, 4]
- [100, 0]
""")
def test_what_a_restart_of_the_loader_costs_is_told(batches, restarts):
    class Restarting(Data):
        def train_dataloader(self):
            loader = super().train_dataloader()
            loader.worker_init_fn = lambda _: time.sleep(SLEEP_S)
            loader.num_workers, loader.prefetch_factor = 1, 2
            return loader

    run = measure_here(Regression(), Restarting(batches=batches), warmup_steps=3, steps=12)
    window = run.record.window
    assert (f"ended {restarts} times in the window" in flat(str(run))) == bool(restarts)
    assert (window.loader_end_count, window.loader_batches) == (restarts, batches)
    assert (window.loader_restart_s or 0.0) >= SLEEP_S * bool(restarts)
