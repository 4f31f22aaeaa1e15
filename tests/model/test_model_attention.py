"""The attention back ends agree with each other, in logits and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from lmbench.model.attention import causal_block_mask
from lmbench.model.transformer import Transformer
from lmbench.sizes import ModelShape

SHAPE = ModelShape(d_model=64, d_ff=96, num_layers=2, num_heads=4, vocab_size=101)
ON_CPU = ["sdpa", "sdpa_flash", "sdpa_math"]
# The largest difference between back ends, relative to the largest value (as lmbench/model/attention.py states).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def logits_and_gradients(attention, dtype):
    torch.manual_seed(1)
    network = Transformer(SHAPE, context_length=48, attention=attention).to(dtype)
    tokens = torch.randint(SHAPE.vocab_size, (3, 48))
    loss = network(tokens, tokens.roll(-1, dims=1))
    return [network(tokens), *torch.autograd.grad(loss, list(network.parameters()))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("attention", ON_CPU)
def test_back_ends_agree_in_logits_and_every_gradient(attention, dtype):
    results = (logits_and_gradients(name, dtype) for name in ("naive", attention))
    for left, right in zip(*results, strict=True):
        assert ((left - right).abs().max() / left.abs().max()).item() < TOLERANCE[dtype]


@pytest.mark.parametrize("seq", [1, 128, 300])
def test_the_block_mask_of_causal_flex_attention_is_what_pytorch_finds_from_all_scores(seq):
    mask = causal_block_mask(seq)
    expected = create_block_mask(lambda b, h, query, key: query >= key, None, None, seq, seq, device="cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name))
