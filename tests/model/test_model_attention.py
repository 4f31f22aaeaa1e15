"""The attention cores against the formula and against each other, forward and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from lmbench.errors import UsageError
from lmbench.model.attention import ATTENTION, NaiveCore, Size, attention_kind
from lmbench.model.attention_check import Use, check_attention
from lmbench.model.flex_attention import causal_block_mask
from lmbench.model.transformer import Transformer
from lmbench.sizes import ModelShape

SHAPE = ModelShape(d_model=64, d_ff=96, num_layers=2, num_heads=4, vocab_size=101)
CPU = torch.device("cpu")
ON_CPU = ["sdpa", "sdpa_flash", "sdpa_math"]
# The largest difference between cores, as a share of the largest value (lmbench/model/attention.py says so).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def test_naive_attention_is_the_formula():
    """An output is the mean of the values up to its position, weighted by exp(q k / sqrt(d)): plain loops."""
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    result = NaiveCore(head_dim=4, is_causal=True)(q, k, v, mask)
    for head in range(2):
        for i in range(6):
            weights = [math.exp(float(q[0, head, i] @ k[0, head, j]) / 2) for j in range(i + 1)]
            mixed = sum(weight * v[0, head, j] for j, weight in enumerate(weights)) / sum(weights)
            torch.testing.assert_close(result[0, head, i], mixed)


def use(device: torch.device, dtype: torch.dtype) -> Use:
    """The shape above, as the model uses it."""
    return Use(Size(3, SHAPE.num_heads, 48, SHAPE.head_dim), True, dtype, device, is_strided=True)


def loss_and_gradients(attention: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    torch.manual_seed(1)
    network = Transformer(SHAPE, context_length=48, attention=attention).to(device, dtype)
    tokens = torch.randint(SHAPE.vocab_size, (3, 48)).to(device)
    logits = network(tokens)
    loss = network(tokens, tokens.roll(-1, dims=1))
    return [logits, *torch.autograd.grad(loss, list(network.parameters()))]


def assert_agree(one: list[Tensor], two: list[Tensor], dtype: torch.dtype) -> None:
    for left, right in zip(one, two, strict=True):
        difference = (left - right).abs().max() / left.abs().max()
        assert difference.item() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("attention", ON_CPU)
def test_cores_agree_in_logits_and_every_gradient(attention, dtype):
    assert_agree(loss_and_gradients("naive", dtype, CPU), loss_and_gradients(attention, dtype, CPU), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", [name for name in ATTENTION if name != "naive"])
def test_cores_agree_on_the_gpu(attention):
    cuda, dtype = torch.device("cuda"), torch.bfloat16
    check_attention(attention_kind(attention), use(cuda, dtype))
    assert_agree(loss_and_gradients("naive", dtype, cuda), loss_and_gradients(attention, dtype, cuda), dtype)


@pytest.mark.gpu
def test_flash_attention_in_float32_is_refused_on_the_gpu():
    with pytest.raises(UsageError, match=r"'sdpa_flash' has no kernel for float32, .* on cuda; choose .*naive: "):
        check_attention(attention_kind("sdpa_flash"), use(torch.device("cuda"), torch.float32))


@pytest.mark.parametrize("attention", ["naive", *ON_CPU])
def test_no_position_sees_a_later_one(attention):
    network = Transformer(SHAPE, context_length=16, attention=attention)
    tokens = torch.randint(SHAPE.vocab_size, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % SHAPE.vocab_size
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[0, :9], after[0, :9])
    assert not torch.allclose(before[0, 9:], after[0, 9:])


@pytest.mark.parametrize("attention", ["sdpa_efficient", "sdpa_cudnn"])
def test_a_back_end_that_this_machine_lacks_is_refused_in_one_line(attention):
    line = f"'{attention}' has no kernel for bfloat16, batch 3, .* on cpu; choose sdpa_flash or .*naive: No"
    with pytest.raises(UsageError, match=line) as caught:
        check_attention(attention_kind(attention), use(CPU, torch.bfloat16))
    assert "\n" not in str(caught.value)


def test_the_chosen_back_end_is_the_one_that_runs():
    """On a CPU there is no memory-efficient kernel: insisting on it must fail, not fall back."""
    network = Transformer(SHAPE, context_length=16, attention="sdpa_efficient")
    with pytest.raises(RuntimeError, match=r"No (viable|available)"):
        network(torch.zeros(1, 16, dtype=torch.long))


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(UsageError, match="unknown attention 'flash'; choose one of naive, sdpa, sdpa_flash"):
        attention_kind("flash")
    with pytest.raises(UsageError, match="did you mean naive"):
        attention_kind("naiv")


@pytest.mark.parametrize("seq", [1, 128, 300])
def test_the_blocks_of_causal_flex_attention_are_those_that_pytorch_finds_from_all_scores(seq):
    ours = causal_block_mask(seq)
    expected = create_block_mask(lambda b, h, query, key: query >= key, None, None, seq, seq, device="cpu")
    assert torch.equal(ours.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(expected, name))


def test_flex_attention_is_refused_where_it_cannot_train():
    with pytest.raises(UsageError, match=r"'flex' has no backward pass on a CPU .*; choose sdpa or naive"):
        check_attention(attention_kind("flex"), use(CPU, torch.float32))
