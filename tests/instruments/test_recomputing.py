"""Blocks that the backward computes again: the same gradients, less held, and what cannot be grouped refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from fit_process import measure_here
from refusals import usage_error
from strangers import Failing
from tables import cases
from torch import nn

from lmbench.instruments import recomputing
from lmbench.instruments.recomputing import RecomputeOptions, recompute_in_place
from lmbench.model.language_model import LanguageModel


class Block(nn.Module):
    """A block with dropout, which has to drop the same when it runs again; counts its runs."""

    def __init__(self, is_tuple):
        super().__init__()
        self.inner, self.is_tuple, self.runs = nn.Linear(8, 8), is_tuple, 0

    def forward(self, x, scale):
        self.runs += 1
        x = x + nn.functional.dropout(self.inner(x).tanh() * scale, 0.5)
        return (x,) if self.is_tuple else x


class Net(nn.Module):
    def __init__(self, is_tuple=False, between=0.0):
        super().__init__()
        self.blocks, self.between = nn.ModuleList(Block(is_tuple) for _ in range(6)), between

    def forward(self, x):
        scale = torch.ones(8)
        for block in self.blocks:
            x = block(x, scale)
            x = x[0] if isinstance(x, tuple) else x
            if self.between:
                x = x * self.between
        return x.square().sum()


def gradients(net, options):
    """The gradients by parameter, the bytes saved for the backward, and the runs of each block."""
    torch.manual_seed(1)
    x = torch.ones(4, 8, requires_grad=True)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    net.zero_grad()
    for block in net.blocks:
        block.runs = 0
    recomputed = recompute_in_place(net, options) if options else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), recomputed:
        net(x).backward()
    return (
        {name: p.grad.clone() for name, p in net.named_parameters()},
        sum(saved.values()),
        [block.runs for block in net.blocks],
    )


@cases("is_tuple", False, True)
@cases("""
- [settings, runs]
- [{}, [2, 2, 2, 2, 2, 2]]
- [{first: 2}, [2, 2, 1, 1, 1, 1]]
- [{group: 4}, [2, 2, 2, 2, 2, 2]]
- [{group: 3, nested: true}, [3, 3, 2, 3, 3, 2]]
- [{keep: matmuls}, [2, 2, 2, 2, 2, 2]]
- [{keep: all, offload: true}, [1, 1, 1, 1, 1, 1]]
- [{offload: true}, [2, 2, 2, 2, 2, 2]]
""")
def test_gradients_are_the_same_and_blocks_run_again_as_asked(settings, runs, is_tuple):
    net = Net(is_tuple)
    expected, saved_bytes, _ = gradients(net, None)
    found, recomputed_bytes, found_runs = gradients(net, RecomputeOptions(**settings))
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name
    assert found_runs == runs
    assert recomputed_bytes < saved_bytes
    assert gradients(net, None)[1:] == (saved_bytes, [1] * 6)


def test_tensors_on_the_host_come_back_and_parameters_stay(monkeypatch):
    moved = []

    def moved_to_host(tensor):
        moved.append(tensor.shape)
        copy = tensor.detach().clone()
        return lambda: copy

    monkeypatch.setattr(recomputing, "moved_to_host", moved_to_host)
    net = Net()
    expected, found = gradients(net, None)[0], gradients(net, RecomputeOptions(keep="all", offload=True))[0]
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
    assert moved
    assert torch.Size([8, 8]) not in moved


def test_a_module_that_does_more_between_its_blocks_cannot_be_grouped():
    gradients(Net(between=0.5), RecomputeOptions())
    with usage_error("does more between its blocks"):
        gradients(Net(between=0.5), RecomputeOptions(group=2))


def test_blocks_that_are_called_by_name_cannot_be_grouped():
    net = Net()
    with recompute_in_place(net, RecomputeOptions(group=2)), usage_error("hidden state by name"):
        net.blocks[0](x=torch.randn(2, 8))


class FailsInBlocks(Failing):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))


def test_a_module_that_fails_has_its_blocks_back():
    module = FailsInBlocks()
    with pytest.raises(ArithmeticError):
        measure_here(module, trainer={"recompute": RecomputeOptions()})
    assert not hasattr(module, "recompute_options")
    assert not any("forward" in vars(block) for block in module.blocks)


@cases("""
- [settings, message]
- [{group: 0}, at least 1]
- [{group: 2, keep: matmuls}, keep inputs]
- [{offload: true, keep: matmuls}, keep inputs or all]
""")
def test_settings_that_exclude_each_other_are_refused(settings, message):
    with usage_error(message):
        RecomputeOptions(**settings)


def test_a_run_records_what_is_computed_again_and_counts_its_flops():
    tokens = torch.randint(64, (2, 2, 16))
    model = LanguageModel(size="tiny", vocab_size=64, context_length=16)
    record = measure_here(model, (tokens[0], tokens[1]), trainer={"recompute": RecomputeOptions(first=1)}).record
    assert record.model.checkpoint == "first block"
    # Of a block all products but the last.
    assert record.flops.recomputed_per_token_flops == 8 * 64**2 + 4 * 64 * 128 + 4 * 16 * 64
    assert measure_here(model, (tokens[0], tokens[1])).record.model.checkpoint == "none"


@cases("settings", {}, {"first": 2}, {"group": 2}, {"keep": "matmuls"})
def test_blocks_of_transformers_are_computed_again_without_a_cache(settings):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    assert config.use_cache
    network, tokens = transformers.LlamaForCausalLM(config), torch.arange(24).view(2, 12)

    def grown():
        """The gradients, and the layers of the cache that have keys."""
        network.zero_grad()
        output = network(tokens, labels=tokens)
        output.loss.backward()
        layers = [layer for layer in output.past_key_values.layers if layer.get_seq_length()]
        return [parameter.grad.clone() for parameter in network.parameters()], len(layers)

    plain, count = grown()
    with recompute_in_place(network, RecomputeOptions(**settings)):
        again, kept = grown()
    assert (count, kept) == (4, 4 - settings.get("first", 4))
    torch.testing.assert_close(again, plain)
