"""Activation checkpointing: the same figures, less kept, and what is computed again counted by PyTorch's counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmbench.model.transformer import CHECKPOINTS, Transformer, recomputed_flops
from lmbench.sizes import ModelShape

SHAPE = ModelShape(d_model=32, d_ff=80, num_layers=3, num_heads=2, vocab_size=50)
CONTEXT = 24
TOKENS = torch.randint(SHAPE.vocab_size, (2, CONTEXT), generator=torch.Generator().manual_seed(0))


def network(attention, checkpoint, num_layers=SHAPE.num_layers, **choices):
    torch.manual_seed(0)
    return Transformer(replace(SHAPE, num_layers=num_layers), CONTEXT, attention, checkpoint, **choices)


def gradients(model, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(TOKENS, TOKENS)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "none"])
def test_loss_and_gradients_are_those_without_checkpoints(name, attention, autocast):
    plain, again = (gradients(network(attention, checkpoint), autocast) for checkpoint in ("none", name))
    assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("attention", ["naive", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize(("name", "is_chunked"), [(name, False) for name in CHECKPOINTS] + [("selective", True)])
def test_what_is_computed_again_is_what_the_counter_finds(name, is_chunked, attention):
    def flops(checkpoint, **choices):
        with FlopCounterMode(display=False) as counter:
            network(attention, checkpoint, **choices)(TOKENS, TOKENS).backward()
        return counter.get_total_flops()

    is_fused = attention == "sdpa_flash"
    again = recomputed_flops(name, SHAPE, CONTEXT, not is_fused, is_chunked)
    if is_fused and not CHECKPOINTS[name].keeps_matmuls:
        # The counter knows no formula for the fused kernel of a CPU: its products are not in its count.
        again -= len(CHECKPOINTS[name].blocks(SHAPE.num_layers)) * 4 * CONTEXT * SHAPE.d_model
    chosen = flops(name, is_chunked=is_chunked, is_fused=is_chunked)
    assert chosen - flops("none") == again * TOKENS.numel()
