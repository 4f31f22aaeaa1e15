"""Planted input pipelines: who is slow, and the settings that help. Times are compared with each other alone."""

from __future__ import annotations

import time

import torch
from fit_process import measure_here
from strangers import OwnLoaders, Regression
from tables import cases, flat
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

MODEL_S = 0.004


class Rows(Dataset):
    """Eight rows a batch; reading sleeps and decoding computes."""

    def __init__(self, read_s=0.0, decode_s=0.0, count=400):
        self.read_s, self.decode_s, self.count = read_s, decode_s, count

    def __len__(self):
        return self.count

    def decode(self, end_s):
        while time.thread_time() < end_s:
            pass

    def __getitem__(self, index):
        if self.read_s:
            time.sleep(self.read_s)
        self.decode(time.thread_time() + self.decode_s)
        return (torch.zeros(16),)


def slow_collate(rows):
    time.sleep(2 * MODEL_S)
    return default_collate(rows)


class Piped(Regression):
    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def training_step(self, batch, batch_idx):
        time.sleep(MODEL_S)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return self.loader


def examine(module):
    run = measure_here(module, steps=6, probe_steps=1, loader=True)
    return run, run.record.input_pipeline


@cases(
    "rows | settings | slowest | line | waits",
    (Rows(read_s=0.002), {}, "reader_s", "__getitem__", True),
    (Rows(decode_s=0.002), {}, "reader_s", "decode", False),
    (Rows(), {"collate_fn": slow_collate}, "collate_s", "slow_collate", True),
    ids=["slow disk", "slow decode", "slow collate"],
)
def test_a_slow_pipeline_is_told_with_its_cause_and_fix(rows, settings, slowest, line, waits):
    run, facts = examine(Piped(DataLoader(rows, batch_size=8, **settings)))
    assert facts.reason is None
    assert facts.reader == f"Rows.__getitem__ (test_loader_probe.py:{Rows.__getitem__.__code__.co_firstlineno})"
    assert max(("reader_s", "collate_s"), key=lambda name: getattr(facts, name)) == slowest
    assert next(iter(facts.slowest_lines)).startswith(f"{line} (test_loader_probe.py:")
    assert (facts.idle_fraction > 0.5) == waits
    # On a machine that is busy enough the model outlasts the loader, and less is to be mended.
    assert facts.fix.keys() >= {"num_workers", "prefetch_factor"} or facts.loader_step_s < 1.5 * facts.resident_step_s
    # How fast the steps were, a busy machine decides.
    assert facts.resident_step_s >= MODEL_S
    low_s, high_s = facts.predicted_interval
    assert low_s < facts.predicted_step_s < high_s
    assert not facts.fix or facts.fixed_step_s >= MODEL_S
    told = flat(str(run))
    assert all(f"{name}={value}" in told for name, value in facts.fix.items())


def test_a_fine_pipeline_has_no_fix():
    run, facts = examine(Piped(DataLoader(Rows(count=24000), batch_size=8, num_workers=1)))
    assert (facts.fix, facts.fixed_step_s) == ({}, None)
    assert "fine: loader alone" in flat(str(run))


class Stream(IterableDataset):
    def __init__(self):
        self.rows = iter([(torch.zeros(16),)] * 400)

    def __iter__(self):
        return self.rows


class Alone(Rows):
    def __getitem__(self, index):
        if (worker := get_worker_info()) and worker.num_workers > 1:
            raise OSError("one worker is the most")
        return super().__getitem__(index)


class Batches:
    def __iter__(self):
        return iter([(torch.zeros(4, 16),)] * 400)


@cases(
    "loader | reason",
    (Batches(), "Batches is no DataLoader; lmbench's own data has one with --data.placement pinned"),
    (DataLoader(Stream(), 4), "its data can be read only once"),
    (DataLoader(Alone(read_s=0.008), 8), "OSError: one worker is the most"),
)
def test_a_loader_that_cannot_be_timed_has_a_reason_and_a_complete_run(loader, reason):
    run, facts = examine(Piped(loader))
    assert (run.outcome, reason in facts.reason, facts.fix) == ("ok", True, {})
    assert "UsageError" not in facts.reason


def test_inference_is_the_reason_why_nothing_is_examined():
    facts = measure_here(OwnLoaders(), mode="inference", probe_steps=1, loader=True).record.input_pipeline
    assert facts.reason == "only training is examined"
