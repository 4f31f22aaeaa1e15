"""Memory that grows, calls of the collector and checkpoints are named, in trainings of seconds."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
import torch
from fit_process import measure_here, statuses
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from planted_faults import return_freed_memory
from strangers import OwnLoaders
from tables import cases

from lmbench.callbacks import CheckpointRecorder, memory_recorder
from lmbench.fit.checkpoints import DistributedCheckpointIO
from lmbench.instruments.window import Schedule

from conftest import measure


class Hoarder(OwnLoaders):
    """Leaves something of each step behind."""

    def __init__(self, deed):
        super().__init__()
        self.deed, self.kept, self.raw, self.by_name = deed, [], [], {"logits": []}

    def training_step(self, batch, batch_idx):
        logits = torch.ones(1_000_000)
        if self.deed == "kept":
            self.kept.append(logits)
        elif self.deed == "by_name":
            self.by_name["logits"].append({"step": batch_idx, "logits": logits.numpy()})
        elif self.deed == "kept bytes":
            self.raw.append(bytearray(logits.numpy()))
        elif self.deed == "each other":
            self.kept.append((logits, self.kept))
        elif self.deed == "cycle":
            logits.itself = logits
            # Of garbage that the collector finds, weak proxies are dead.
            logits.proxies = [weakref.proxy(logits)]
        elif self.deed == "collect":
            gc.collect()
        return super().training_step(batch, batch_idx)


def line_of(text):
    return 1 + next(number for number, line in enumerate(Path(__file__).read_text().splitlines()) if text in line)


@cases(
    "deed | keeper",
    ("kept", f"a list of tensors in Hoarder.kept, test_keepers.py:{line_of('self.kept.append')}"),
    ("by_name", f"a list of dicts in Hoarder.by_name, test_keepers.py:{line_of('.append({')}"),
    ("kept bytes", f"a list of bytearrays in Hoarder.raw, test_keepers.py:{line_of('self.raw.append')}"),
    ("each other", None),
    ("cycle", "reference cycles, which Python's collector frees: it is off in the window"),
    ("nothing", None),
)
def test_what_keeps_the_tensors_or_bytes_of_each_step_is_named_with_its_line(deed, keeper, monkeypatch, tmp_path):
    # Else what earlier tests have freed would be used again, and memory would not grow.
    return_freed_memory()
    monkeypatch.setattr(memory_recorder, "_READING_INTERVAL_S", 0.0)
    run = measure_here(Hoarder(deed), steps=40, probe_steps=2, results_dir=tmp_path).record
    assert statuses(run)["memory_growth"] == ("pass" if deed == "nothing" else "warn")
    assert run.memory.keeper == keeper
    assert not keeper or run.memory.host_growth.bytes_per_step == pytest.approx(4e6, rel=0.3)


def test_calls_of_the_collector_are_named_with_their_line(tmp_path):
    run = measure_here(Hoarder("collect"), steps=12, results_dir=tmp_path).record
    assert run.collector.location == f"{__file__}:{line_of('gc.collect()')} in training_step"
    assert (run.collector.count, run.collector.full_s > 0) == (12, True)
    assert statuses(run)["garbage_collection"] == "warn"


class SlowDisk(DistributedCheckpointIO):
    """Writes folders, and takes some steps to do so."""

    def save_checkpoint(self, *args, **options):
        super().save_checkpoint(*args, **options)
        time.sleep(0.2)


@cases("is_async", False, True)
def test_steps_beside_the_writing_of_a_checkpoint_are_marked(is_async, sleeper, tmp_path):
    plugin = AsyncCheckpointIO(SlowDisk()) if is_async else SlowDisk()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1)
    flags = {"enable_checkpointing": True, "plugins": [plugin]}
    window, session = measure(sleeper, CheckpointRecorder(), saving, schedule=Schedule(2, 40), **flags)
    saved = [step.step for step in window if step.checkpoint_s]
    assert saved == [9, 19, 29, 39]
    beside = {step.step // 10 * 10 - 1 for step in window if step.is_saving}
    assert beside >= {9, 19, 29} if is_async else not beside
    facts = session.run.saving
    assert (facts.written_s > 0.2, facts.checkpoint_bytes > 1000) == (True, True)
    path = next(tmp_path.glob("*step=10.ckpt"))
    assert SlowDisk().load_checkpoint(path)["global_step"] == 10
