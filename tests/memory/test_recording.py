"""The recording of a history, run whole on a CPU with a simulated history of true addresses."""

from __future__ import annotations

import weakref
from collections import UserDict

import pytest
import torch
from cpu_allocator import CpuHistory, CpuWithHistory, annotate
from lightning.pytorch import Callback, LightningModule
from tables import cases
from torch import nn

from lmbench.callbacks import MeasurementSession, MemoryHistory, RunRecorder
from lmbench.device import DEVICES, cuda, device_of
from lmbench.fit.measurement import apply_mode
from lmbench.instruments import ranges
from lmbench.instruments.window import Schedule
from lmbench.memory import recording
from lmbench.memory.blocks import SNAPSHOT_FILE
from lmbench.memory.findings import examine
from lmbench.records.load import load_run
from lmbench.records.vocabulary import STEP

from conftest import quiet_trainer

BATCH, WIDTH, VOCAB = 64, 128, 1000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        temporary = torch.zeros(BATCH, 8 * WIDTH).sum()
        return x + self.down(self.up(x).relu()) + temporary


class Model(LightningModule):
    """Two blocks and a head, and a tensor of unknown use that lives across steps."""

    def __init__(self):
        super().__init__()
        self.vocab_size = VOCAB
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.hidden = []

    def training_step(self, batch, batch_idx):
        x, targets = batch
        self.hidden = [torch.zeros(1 << 18)]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(BATCH, WIDTH, generator=generator), torch.randint(VOCAB, (BATCH,), generator=generator)


@pytest.fixture
def findings(tmp_path, monkeypatch):
    return record(tmp_path, monkeypatch)


def record(folder, monkeypatch, module=None, first=(), **flags):
    for package in (ranges, recording):
        monkeypatch.setattr(package, "record_function", annotate)
    monkeypatch.setattr(CpuHistory, "latest", None)
    monkeypatch.setitem(DEVICES, "cpu", CpuWithHistory)
    recorder = RunRecorder(str(folder), run_id="run")
    callbacks = [MemoryHistory(steps=2), recorder, MeasurementSession(Schedule(2, 2))]
    quiet_trainer(*first, *callbacks, **flags).fit(module or Model(), batches())
    history = recorder.run.memory_history
    assert (history.steps, history.snapshot_file) == (2, SNAPSHOT_FILE)
    return examine(folder / "run")


def rounded(*numels):
    return sum(-(-4 * numel // 512) * 512 for numel in numels)


WEIGHTS = (4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH) * 2 + (WIDTH * VOCAB,)


def test_every_category_has_the_bytes_counted_by_hand(findings):
    assert findings.cuts == []
    sizes = findings.by_category
    assert sizes["parameters"] == rounded(*WEIGHTS)
    # Each weight has two moments and a step count.
    assert sizes["optimizer_state"] == rounded(*WEIGHTS, *WEIGHTS, *(1 for _ in WEIGHTS))
    # Lightning fetches one batch ahead.
    batch_bytes = rounded(BATCH * WIDTH) + 8 * BATCH
    assert sizes["inputs"] == 2 * batch_bytes
    # The tensor of unknown use, the batch that was fetched last and never used, and a few scalars.
    assert rounded(1 << 18) <= sizes["unknown"] <= rounded(1 << 18) + batch_bytes + 4096
    # Gradients are complete when the optimizer runs.
    assert findings.phases.loc["optimizer", "gradients"] == rounded(*WEIGHTS)
    assert findings.parts.loc["blocks.*.up", "parameters"] == 2 * rounded(4 * WIDTH * WIDTH)


def test_saved_tensors_logits_and_gradients_have_the_part_that_made_them(findings):
    saved = findings.saved[findings.saved["first"].str.startswith("blocks")]
    assert saved[["first", "last", "count"]].to_numpy().tolist() == [["blocks.0", "blocks.1", 2]]
    # A block saves its relu's output and its own output, which the next product needs. Its input is made outside of it.
    assert saved["each_bytes"].item() == rounded(4 * BATCH * WIDTH, BATCH * WIDTH)
    blocks = findings.blocks
    # In each of two steps: the head's output, its saved log-softmax, and its gradient.
    sizes = blocks[blocks["category"] == "logits"]["size_bytes"].tolist()
    assert sizes.count(rounded(BATCH * VOCAB)) == 2 * 3
    # `down` makes the gradient of relu's output, in each of two blocks and two steps.
    gradients = blocks[(blocks["phase"] == "backward") & (blocks["size_bytes"] == rounded(4 * BATCH * WIDTH))]
    assert gradients["owner"].str.fullmatch(r"blocks\.[01]\.down").sum() >= 4


class Mapped(Model):
    """Takes batches that are mappings which pytrees do not know, as a tokenizer's are."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return UserDict(rows=batch[0], targets=batch[1])

    def training_step(self, batch, batch_idx):
        return super().training_step(batch.values(), batch_idx)


def test_a_batch_that_is_a_mapping_is_an_input(tmp_path, monkeypatch):
    sizes = record(tmp_path, monkeypatch, Mapped()).by_category
    assert sizes["inputs"] == 2 * (rounded(BATCH * WIDTH) + 8 * BATCH)


class Checkpointed(Model):
    computed = 0

    def training_step(self, batch, batch_idx):
        x, targets = batch
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(self._counted, block, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x), targets)

    def _counted(self, block, x):
        self.computed += 1
        return block(x)


def test_recording_does_not_recompute_a_checkpoint_and_leaves_no_hook(tmp_path, monkeypatch):
    module = Checkpointed()
    findings = record(tmp_path, monkeypatch, module)
    # Two blocks run once in the forward and once in the backward, in each of four steps.
    assert module.computed == 2 * 2 * 4
    assert findings.saved_storages["size_bytes"].sum() < rounded(4 * BATCH * WIDTH) + 3 * rounded(BATCH * VOCAB)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_an_activation_ends_with_its_step_also_without_a_backward(tmp_path, monkeypatch):
    activations = []

    class Exponential(Model):
        def training_step(self, batch, batch_idx):
            # An operator that saves its own output.
            activation = self.blocks[0](batch[0]).exp()
            activations.append(weakref.ref(activation))
            return activation.sum()

    module = Exponential()
    apply_mode(module, "forward", "native")
    record(tmp_path, monkeypatch, module)
    assert [activation() for activation in activations] == [None] * 4


@cases("""
- [failing_step, phase]
- [0, forward]
- [3, backward]
""")
def test_a_run_that_ends_out_of_memory_leaves_the_history_of_its_last_step(failing_step, phase, tmp_path, monkeypatch):
    """Also in the warm-up, in which most runs end that do not fit."""

    class Refused(Model):
        def _refuse(self, reached):
            if (self.global_step, phase) == (failing_step, reached):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self._refuse("forward")
            return loss

        def on_after_backward(self):
            self._refuse("backward")

    with pytest.raises(torch.OutOfMemoryError):
        record(tmp_path, monkeypatch, Refused())
    run = load_run(tmp_path / "run").record
    assert (run.outcome, run.error and run.error.phase) == ("oom", phase)
    findings = examine(tmp_path / "run")
    assert findings.bands[STEP].names[-1] == str(failing_step)
    assert findings.phases.loc[phase, "parameters"] == rounded(*WEIGHTS)
    # The forward leaves each block's product and relu; the backward leaves gradients.
    expected = {"forward": ("activations", 2 * rounded(4 * BATCH * WIDTH, BATCH * WIDTH)), "backward": ("gradients", 1)}
    category, least_bytes = expected[phase]
    assert findings.phases.loc["other", category] >= least_bytes
    assert not CpuHistory.latest.memory.is_on


@cases("is_enabled", True, False)
def test_module_hooks_are_set_after_compiling_and_accumulated_steps_are_complete(is_enabled, tmp_path, monkeypatch):
    """torch.compile would compile the hooks, too: before the window they are set only if nothing is compiled."""

    class SetsCompile(Callback):
        def setup(self, trainer, pl_module, stage):
            MeasurementSession.of(trainer).run.compile.is_enabled = is_enabled

    class SeesHooks(Model):
        has_hooks = ()

        def training_step(self, batch, batch_idx):
            self.has_hooks += (bool(self.head._forward_hooks),)
            return super().training_step(batch, batch_idx)

    module = SeesHooks()
    findings = record(tmp_path, monkeypatch, module, first=[SetsCompile()], accumulate_grad_batches=2)
    assert module.has_hooks == (is_enabled is False,) * 4 + (True,) * 4
    assert (findings.cuts, len(findings.bands[STEP].names)) == ([], 2)


def test_the_last_listener_is_called_on_refusals_and_not_kept_alive(monkeypatch):
    observers = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr(cuda, "_listener", [])
    calls = []

    class Watcher:
        def refused(self, *facts):
            calls.append(facts)

    watchers = [Watcher(), Watcher()]
    for watcher in watchers:
        device_of(torch.device("cuda", 0)).watch_refusals(watcher.refused)
    (observed,) = observers
    observed(0, 10, 100, 5)
    del watcher, watchers
    observed(0, 10, 100, 5)
    assert calls == [(0, 10, 5)]
