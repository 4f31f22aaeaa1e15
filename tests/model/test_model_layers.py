"""The layers against their formulas, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from lmbench.model.layers import Embedding, NextTokenLoss, Projection, RMSNorm, RotaryEmbedding, SwiGLU, rope_tables


def test_rope_turns_pairs_by_the_formula():
    """Each pair (i, i + d/2) at position p, as a complex number, turns by p * 10000^(-2i/d) (RoFormer)."""
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    cos, sin = rope_tables(16, 8)
    angle = torch.arange(11)[:, None] * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    rotated = RotaryEmbedding()(x, cos[:11].double(), sin[:11].double())
    torch.testing.assert_close(rotated, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-6)


def test_rope_tables_stay_exact_far_out():
    cos, _ = rope_tables(100_001, 4)
    assert cos[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_rms_norm_is_the_formula():
    x, norm = torch.randn(2, 5, 16), RMSNorm(16)
    torch.nn.init.normal_(norm.weight)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_computes_in_float32_and_returns_its_inputs_dtype():
    x = (torch.randn(4, 256) * 300).to(torch.float16)
    result = RMSNorm(256)(x)
    assert result.dtype is torch.float16
    assert result.isfinite().all()  # squares up to 1e6 would overflow float16
    torch.testing.assert_close(result.float(), RMSNorm(256)(x.float()), rtol=1e-3, atol=1e-3)


def test_swiglu_is_the_formula():
    layer = SwiGLU(8, 12, residual_scale=1.0).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    gate = x @ layer.gate.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ layer.up.weight.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_loss_is_reduced_in_float32():
    logits = torch.randn(2, 64, 500, dtype=torch.bfloat16)
    targets = torch.randint(500, (2, 64))
    loss = NextTokenLoss()(logits, targets)
    expected = -logits.double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_float32_and_the_same_whatever_the_default_dtype(dtype):
    def build():
        torch.manual_seed(7)
        return [Projection(8, 9, std=0.1).weight, Embedding(10, 8).weight, RMSNorm(8).weight]

    usual = build()
    try:
        torch.set_default_dtype(dtype)
        other = build()
    finally:
        torch.set_default_dtype(torch.float32)
    # Also of one dtype.
    assert all(map(torch.equal, usual, other))
