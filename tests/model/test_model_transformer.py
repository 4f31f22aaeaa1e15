"""The whole network: a sane start, an independent loss, one compiled region, parts that can be told apart."""

from __future__ import annotations

import math

import pytest
import torch

from lmbench.errors import UsageError
from lmbench.kernels.names import part_of
from lmbench.model.transformer import Transformer
from lmbench.sizes import SIZES, ModelShape

SHAPE = ModelShape(d_model=32, d_ff=48, num_layers=2, num_heads=2, vocab_size=300)
PARTS = {"embedding", "norm", "qkv", "rope", "output", "ffn", "residual", "head", "loss"}


def batch(shape=SHAPE, seq=64):
    windows = torch.randint(shape.vocab_size, (4, seq + 1))
    return windows[:, :-1], windows[:, 1:]


@pytest.mark.parametrize(
    "shape",
    [
        SIZES["tiny"],
        ModelShape(d_model=256, d_ff=512, num_layers=24, num_heads=4, vocab_size=2000),
        ModelShape(d_model=1024, d_ff=256, num_layers=1, num_heads=8, vocab_size=257),
    ],
)
def test_first_loss_is_near_ln_vocab_at_any_width_depth_and_vocabulary(shape):
    torch.manual_seed(0)
    loss = Transformer(shape, context_length=64)(*batch(shape))
    assert loss.item() == pytest.approx(math.log(shape.vocab_size), rel=0.05)


@pytest.mark.parametrize(("attention", "autocast"), [("naive", True), ("sdpa", False), ("sdpa_math", True)])
def test_forward_with_loss_is_one_region_without_breaks(attention, autocast):
    torch._dynamo.reset()
    network, inputs = Transformer(SHAPE, context_length=64, attention=attention), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager = network(*inputs)
        compiled = torch.compile(network, backend="eager", fullgraph=True)(*inputs)
    assert compiled.item() == pytest.approx(eager.item(), rel=1e-5)


def test_under_autocast_queries_and_tables_are_rotated_in_the_lower_dtype():
    network = Transformer(SHAPE, context_length=64, attention="naive")
    core, dtypes = network.blocks[0].attention.core, []
    core.register_forward_pre_hook(lambda _, inputs: dtypes.extend(x.dtype for x in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        network(*batch())
    assert dtypes == [torch.bfloat16] * 3 + [torch.bool]
    assert network.cos.dtype is torch.float32
    assert not set(network.state_dict()) & {"cos", "sin", "mask"}


def test_shorter_sequences_run_and_longer_ones_are_refused():
    network = Transformer(SHAPE, context_length=32)
    assert network(*batch(seq=7)).isfinite()
    with pytest.raises(UsageError, match="33 tokens is longer than the model's context_length 32"):
        network(*batch(seq=33))


@pytest.mark.parametrize(
    ("attention", "inner"), [("naive", {"scores", "mask", "softmax", "values"}), ("sdpa", {"attention"})]
)
def test_every_module_that_computes_belongs_to_a_part(attention, inner):
    network = Transformer(SHAPE, context_length=32, attention=attention)
    leaves = [name for name, module in network.named_modules() if name and not list(module.children())]
    parts = {name: part_of(name) for name in leaves}
    assert set(parts.values()) == PARTS | inner, parts
    assert part_of("network.blocks.0.attention.v") == "qkv"
    assert part_of("blocks.0") is None
