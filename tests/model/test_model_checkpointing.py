"""Activation checkpointing: the same figures, less kept, and what is computed again counted by PyTorch's counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lmbench.errors import UsageError
from lmbench.model.checkpointing import CHECKPOINTS, recomputed_flops
from lmbench.model.language_model import LanguageModel
from lmbench.model.transformer import Transformer
from lmbench.sizes import ModelShape

SHAPE = ModelShape(d_model=32, d_ff=80, num_layers=3, num_heads=2, vocab_size=50)
CONTEXT = 24
NAMES = [name for name in CHECKPOINTS if name != "none"]


def tokens() -> Tensor:
    return torch.randint(SHAPE.vocab_size, (2, CONTEXT), generator=torch.Generator().manual_seed(0))


def network(attention: str, checkpoint: str, num_layers: int = SHAPE.num_layers) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(SHAPE, num_layers=num_layers), CONTEXT, attention, checkpoint)


def gradients(model: torch.nn.Module, autocast: bool = False) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens(), tokens())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_without_checkpoints(name, attention, autocast):
    expected = gradients(network(attention, "none"), autocast)
    found = gradients(network(attention, name), autocast)
    assert len(found) == len(expected) > 20
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("attention", ["naive", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_computed_again_is_what_the_counter_finds(name, attention):
    def flops(checkpoint: str) -> int:
        model = network(attention, checkpoint)
        with FlopCounterMode(display=False) as counter:
            model(tokens(), tokens()).backward()
        return counter.get_total_flops()

    # The counter knows no formula for the fused kernel of a CPU: its products are not in either count.
    is_fused = attention == "sdpa_flash"
    is_written_out = not is_fused
    again = recomputed_flops(name, SHAPE, CONTEXT, is_written_out)
    blocks = len(range(0, SHAPE.num_layers, CHECKPOINTS[name].every or SHAPE.num_layers + 1)) if name != "none" else 0
    unseen = blocks * 4 * CONTEXT * SHAPE.d_model if is_fused and not CHECKPOINTS[name].keeps_matmuls else 0
    assert flops(name) - flops("none") == (again - unseen) * tokens().numel()


def test_each_choice_keeps_less_than_none_and_blocks_keep_least():
    def kept(checkpoint: str) -> int:
        model, seen = network("naive", checkpoint), dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens(), tokens())
        del loss
        return sum(seen.values())

    assert kept("block") < kept("every_2") < kept("none")


@pytest.mark.parametrize(("name", "by_block"), [("block", False), ("selective", True)])
def test_compiled_networks_and_blocks_give_the_same_gradients(name, by_block):
    expected = gradients(network("naive", "none", 1))
    model = network("naive", name, 1)
    for compiled in model.blocks if by_block else [model]:
        # With Inductor's partitioner, and without its code, which takes half a minute.
        compiled.compile(backend="aot_eager")
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_an_unknown_choice_is_refused_with_what_there_is():
    with pytest.raises(UsageError, match=r"unknown checkpoint 'blocks'; choose one of none, block, every_2, selective"):
        LanguageModel(size="tiny", checkpoint="blocks")


def test_hardware_flops_count_what_is_computed_again_and_model_flops_do_not():
    plain, again = (LanguageModel(size="tiny", checkpoint=name).flops_per_token() for name in ("none", "block"))
    assert plain.per_token_flops == again.per_token_flops
    assert plain.recomputed_per_token_flops == 0
    assert again.recomputed_per_token_flops is not None
    assert 0.2 < again.recomputed_per_token_flops / again.per_token_flops < 1
