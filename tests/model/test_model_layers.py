"""The layers against their formulas, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from lmbench.model.layers import NextTokenLoss, RMSNorm, RotaryEmbedding, SwiGLU, rope_tables


def test_rope_turns_pairs_by_the_formula_and_its_tables_stay_exact_far_out():
    """Each pair (i, i + d/2) at position p, as a complex number, turns by p * 10000^(-2i/d) (RoFormer)."""
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    cos, sin = (table[:11].double() for table in rope_tables(16, 8))
    angle = torch.arange(11)[:, None] * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(RotaryEmbedding()(x, cos, sin), expected, rtol=0, atol=1e-6)
    assert rope_tables(100_001, 4)[0][100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_rms_norm_is_the_formula_in_float32_and_returns_its_inputs_dtype():
    norm = RMSNorm(256)
    torch.nn.init.normal_(norm.weight)
    # Squares up to 1e6 would overflow float16.
    for x, error in ((torch.randn(2, 5, 256), 1e-5), ((torch.randn(4, 256) * 300).half(), 2e-3)):
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
        torch.testing.assert_close(norm(x), expected.to(x.dtype), rtol=error, atol=error)


def test_swiglu_is_the_formula():
    layer, x = SwiGLU(8, 12, residual_scale=1.0).double(), torch.randn(3, 8, dtype=torch.float64)
    gate = x @ layer.gate.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ layer.up.weight.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_loss_is_reduced_in_float32():
    logits, targets = torch.randn(2, 64, 500, dtype=torch.bfloat16), torch.randint(500, (2, 64))
    expected = -logits.double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(NextTokenLoss()(logits, targets), expected.float(), rtol=1e-6, atol=0)
