"""The layers against references written from their formulas, in float64 and one element at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lmbench.model.layers import Embedding, NextTokenLoss, Projection, RMSNorm, RotaryEmbedding, SwiGLU, rope_tables


def rotate_by_formula(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Each pair (i, i + d/2) at position p, as a complex number, turned by p * base^(-2i/d) (RoFormer)."""
    half = x.shape[-1] // 2
    turned = torch.empty_like(x)
    for position in range(x.shape[-2]):
        for i in range(half):
            angle = position * base ** (-2 * i / x.shape[-1])
            pair = torch.complex(x[..., position, i], x[..., position, i + half])
            pair = pair * complex(math.cos(angle), math.sin(angle))
            turned[..., position, i], turned[..., position, i + half] = pair.real, pair.imag
    return turned


def test_rope_turns_pairs_by_the_formula():
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    cos, sin = rope_tables(16, 8)
    rotated = RotaryEmbedding()(x, cos[:11].double(), sin[:11].double())
    torch.testing.assert_close(rotated, rotate_by_formula(x), rtol=0, atol=1e-6)


def test_rope_makes_products_depend_on_distance_alone():
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    cos, sin = (table.double() for table in rope_tables(64, 8))
    rotated_q = RotaryEmbedding()(q.expand(64, 8), cos, sin)
    rotated_k = RotaryEmbedding()(k.expand(64, 8), cos, sin)
    products = rotated_q @ rotated_k.T
    for distance in (0, 1, 7):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_rope_tables_stay_exact_far_out():
    cos, _ = rope_tables(100_001, 4)
    assert cos[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_rms_norm_is_the_formula():
    x = torch.randn(2, 5, 16)
    norm = RMSNorm(16)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach()
    for row, result in zip(x.flatten(0, 1), norm(x).flatten(0, 1), strict=True):
        mean_square = sum(float(value) ** 2 for value in row) / 16
        scale = 1 / math.sqrt(mean_square + 1e-5)
        expected = [float(v) * scale * float(w) for v, w in zip(row, weight, strict=True)]
        torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-6)


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
    log_probabilities = logits.double() - logits.double().logsumexp(-1, keepdim=True)
    expected = -log_probabilities.gather(-1, targets[..., None]).mean()
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_float32_and_the_same_whatever_the_default_dtype(dtype):
    def build() -> list[Tensor]:
        torch.manual_seed(7)
        return [Projection(8, 9, std=0.1).weight, Embedding(10, 8).weight, RMSNorm(8).weight]

    usual = build()
    torch.set_default_dtype(dtype)
    try:
        other = build()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, two in zip(usual, other, strict=True):
        assert two.dtype is torch.float32
        assert torch.equal(one, two)
