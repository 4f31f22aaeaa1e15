"""Attention by itself: inputs, gradients, memory, FLOPs and modes, measured as any module is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lmbench.data.shapes import ShapeData
from lmbench.fit.run import run
from lmbench.model.attention import NaiveCore, causal_mask
from lmbench.model.attention_layer import AttentionLayer
from lmbench.records.load import load_run
from lmbench.records.run import RunRecord

from conftest import quiet_trainer

SHORT = [
    "--trainer.accelerator", "cpu", "--measure.min_window_s", "0", "--measure.steps", "5", "--measure.warmup_steps",
    "1", "--measure.probe_steps", "1", "--wandb.mode", "disabled",
]  # fmt: skip


class AfterBackward(Callback):
    """Keeps the gradients of the first step."""

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self.gradients = [parameter.grad.clone() for parameter in pl_module.parameters()]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", ["naive", "sdpa", "sdpa_flash", "sdpa_math"])
def test_gradients_are_those_of_the_fixed_output_gradient(attention, causal):
    watch = AfterBackward()
    layer = AttentionLayer(heads=2, head_dim=8, causal=causal, attention=attention, batch_size=2, context_length=11)
    quiet_trainer(watch, max_steps=1).fit(layer, ShapeData(batch_size=2, context_length=11))
    q, k, v = (parameter.detach().double().requires_grad_() for parameter in layer.parameters())
    mask = causal_mask(11) if causal else None
    expected = torch.autograd.grad(NaiveCore(8, causal)(q, k, v, mask), (q, k, v), layer.gradient.double())
    assert layer.q.shape == (2, 2, 11, 8)
    for found, wanted in zip(watch.gradients, expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def measured(folder: Path, *words: str) -> RunRecord:
    code = run(["fit", "--model", "lmbench.AttentionLayer", *SHORT, "--measure.results_dir", str(folder), *words])
    assert code == 0
    return load_run(next(folder.iterdir())).record


def test_a_run_has_phases_flops_and_saved_bytes_and_no_loss(tmp_path):
    words = ["--model.attention", "naive", "--model.heads", "3", "--model.head_dim", "8", "--model.causal", "true"]
    found = measured(tmp_path, *words, "--data.batch_size", "2", "--data.context_length", "50")
    assert found.mode == "forward_backward"
    assert found.zero_grad == "after_step"
    assert (found.model.num_heads, found.model.head_dim, found.model.is_causal) == (3, 8, True)
    assert (found.data.batch_size, found.data.context_length) == (2, 50)
    assert found.phases.forward is not None
    assert found.phases.backward is not None
    # Two products of 2 * 50 * 50 * 8 for each of 2 * 3 heads and 3 passes' worth, over 100 positions.
    assert found.flops.per_token_flops == 2 * 2 * 50 * 50 * 8 * 6 * 3 // 100
    assert found.flops.causal_per_token_flops == found.flops.per_token_flops // 2
    assert found.memory.saved_bytes == found.memory.expected_saved_bytes == 2 * 3 * 50 * 50 * 4
    assert found.loss.first is None
    guards = {guard.name: guard for guard in found.guards}
    assert guards["gradients"].status == "pass"
    assert {guards[name].status for name in ("finite_loss", "first_loss", "trained")} == {"n/a"}
    assert found.throughput.tokens_per_s is not None
    assert math.isfinite(found.throughput.tokens_per_s)


@pytest.mark.parametrize(
    ("attention", "precision", "itemsize"),
    [("sdpa", "32-true", 4), ("sdpa_flash", "32-true", 4), ("sdpa", "64-true", 8)],
)
def test_fused_attention_saves_its_output_and_a_number_for_each_row(attention, precision, itemsize, tmp_path):
    words = ["--data.context_length", "64", "--data.batch_size", "1", "--trainer.precision", precision]
    found = measured(tmp_path, "--model.attention", attention, *words)
    assert found.memory.saved_bytes == found.memory.expected_saved_bytes == (64 * 64 + 64) * itemsize
    # On a CPU PyTorch takes flash attention where it may choose.
    assert found.model.attention_backend == ("sdpa_flash" if attention == "sdpa" else None)


@pytest.mark.parametrize("mode", ["forward", "train_step"])
def test_a_mode_of_training_is_refused_by_validate(mode, capsys):
    assert run(["validate", "--model", "lmbench.AttentionLayer", "--measure.mode", mode]) == 2
    told = capsys.readouterr().err
    assert told == f"lmbench: measure.mode is {mode}, and validate measures inference; use `lmbench fit`\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--measure.mode", "train_step"], "nothing to optimize; allowed: forward, forward_backward"),
        (["--model.batch_size", "3"], "model.batch_size follows data.batch_size; set that: --data.batch_size 3"),
        (["--model.heads", "0"], "heads is 0; it must be at least 1"),
        (["--data.source", "text"], "unknown option --data.source"),
        (["--model.seq", "8"], "unknown option --model.seq"),
        (["--data", "null"], "--data is null, and attention by itself holds its inputs; leave it out"),
        (["--data", "lightning.pytorch.demos.boring_classes.BoringDataModule"], "BoringDataModule, and attention by"),
    ],
)
def test_what_attention_by_itself_has_not_is_told_in_one_line(words, line, capsys, tmp_path):
    code = run(["fit", "--model", "lmbench.AttentionLayer", *SHORT, "--measure.results_dir", str(tmp_path), *words])
    told = capsys.readouterr().err
    assert code == 2
    assert line in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())
