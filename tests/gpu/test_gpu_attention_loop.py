"""Attention by itself against a plain loop on a GPU: 100 passes with one synchronize at each end.

python -m pytest -q -m gpu tests/gpu/test_gpu_attention_loop.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lmbench.records.load import load_run

pytestmark = pytest.mark.gpu

BATCH, HEAD_DIM, PASSES = 8, 64, 100
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@cache
def later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * HEAD_DIM**-0.5
    return scores.masked_fill_(later(q.shape[-2]), float("-inf")).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain_s(attention: Attention, length: int) -> float:
    """Seconds of a forward and a backward pass, the mean over 100 of them."""
    torch.set_float32_matmul_precision("highest")
    q, k, v, gradient = (torch.randn(BATCH, 1, length, HEAD_DIM, device="cuda") for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def step() -> None:
        torch.autograd.grad(attention(*inputs), inputs, gradient)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(PASSES):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / PASSES


@pytest.mark.parametrize(("name", "attention", "length"), [("naive", naive, 8192), ("sdpa", fused, 16384)])
def test_the_spans_of_a_device_bound_shape_are_those_of_a_plain_loop(name, attention, length, tmp_path):
    words = [
        "--model=lmbench.AttentionLayer", f"--model.attention={name}", "--model.causal=true",
        f"--model.head_dim={HEAD_DIM}", f"--data.batch_size={BATCH}", f"--data.context_length={length}",
        f"--measure.steps={PASSES}", "--measure.min_window_s=0", f"--measure.results_dir={tmp_path}",
        "--measure.run_id=own", "--trainer.precision=32-true",
    ]  # fmt: skip
    before_s = plain_s(attention, length)
    subprocess.run([sys.executable, "-m", "lmbench", "fit", *words], check=True)
    after_s = plain_s(attention, length)
    record = load_run(tmp_path / "own").record
    phases, begins = record.phases, record.memory.phase_begin_allocated_bytes
    spans_s = phases.forward.mean_s + phases.backward.mean_s
    print(f"{name} {length}: plain {before_s * 1e3:.3f} and {after_s * 1e3:.3f} ms, spans {spans_s * 1e3:.3f} ms")
    assert spans_s == pytest.approx((before_s + after_s) / 2, rel=0.01)
    # What the forward keeps: what autograd saves, and of naive the output too, which a fused one has saved.
    output = BATCH * length * HEAD_DIM * 4 if name == "naive" else 0
    assert begins.backward - begins.forward == pytest.approx(record.memory.saved_bytes + output, rel=0.01)
