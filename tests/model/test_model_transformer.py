"""The whole network: equal to transformers' Llama, with equal results under every choice, in parts with names."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import permutations

import pytest
import torch
from refusals import usage_error
from tables import cases
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from lmbench.instruments.recomputing import RecomputeOptions, recompute_in_place, recomputed_flops
from lmbench.kernels.names import part_of
from lmbench.model.layers import RMSNorm, rope_tables
from lmbench.model.transformer import Transformer
from lmbench.sizes import SIZES, ModelShape

SHAPE = ModelShape(d_model=32, d_ff=48, num_layers=2, num_heads=2, vocab_size=300)
PARTS = {"embedding", "norm", "qkv", "rope", "output", "ffn", "residual", "head", "loss"}


def batch(shape=SHAPE, seq=64):
    windows = torch.randint(shape.vocab_size, (4, seq + 1))
    return windows[:, :-1], windows[:, 1:]


LAYERS = "attention.q attention.k attention.v attention.output ffn.gate ffn.up ffn.down attention_norm ffn_norm"


@cases("attention", "naive", "sdpa", "sdpa_flash", "sdpa_math")
def test_the_network_is_transformers_llama(attention):
    """Logits, loss and every gradient agree with an independent rotation, norm, attention and feed-forward layer."""
    network = Transformer(SHAPE, 64, attention)
    settings = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**settings, num_attention_heads=2, rms_norm_eps=1e-5))
    names = ["embedding", *(f"blocks.{i}.{name}" for i in range(2) for name in LAYERS.split()), "norm", "head"]
    weights = [network.get_parameter(f"{name}.weight") for name in names]
    for weight, copy in zip(weights, llama.parameters(), strict=True):
        torch.nn.init.normal_(weight, std=0.5)
        copy.data = weight.detach().clone()
    tokens, targets = batch()
    expected = llama(tokens, labels=targets, shift_labels=targets.contiguous())
    torch.testing.assert_close(network(tokens), expected.logits, rtol=1e-4, atol=1e-4)
    loss = network(tokens, targets)
    torch.testing.assert_close(loss, expected.loss)
    expected.loss.backward()
    for gradient, copy in zip(torch.autograd.grad(loss, weights), llama.parameters(), strict=True):
        assert (gradient - copy.grad).norm() < 1e-4 * copy.grad.norm()


def test_positions_stay_exact_far_out():
    assert rope_tables(100_001, 4)[0][100_000, 0, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_norms_are_computed_in_float32():
    # Squares up to 1e6 would overflow float16.
    x = (torch.randn(4, 256) * 300).half()
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(RMSNorm(256)(x), expected.half(), rtol=2e-3, atol=2e-3)


@cases("shape", SIZES["tiny"], ModelShape(d_model=256, d_ff=512, num_layers=24, num_heads=4, vocab_size=2000))
def test_first_loss_is_near_ln_vocab_at_any_width_depth_and_vocabulary(shape):
    torch.manual_seed(0)
    loss = Transformer(shape, context_length=64)(*batch(shape))
    assert loss.item() == pytest.approx(math.log(shape.vocab_size), rel=0.05)


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
    with usage_error("33 tokens is longer than the model's context_length 32"):
        network(*batch(seq=33))


def recomputing(network, settings):
    return nullcontext() if settings is None else recompute_in_place(network, RecomputeOptions(**settings))


@cases("""
- [choices, recompute, compiled]
- [{fused: true}, null, false]
- [{fused: qkv}, null, false]
- [{is_chunked: true}, null, false]
- [{residual_dtype: bfloat16}, null, false]
- [{}, {}, false]
- [{}, {group: 2, nested: true}, false]
- [{}, {}, true]
- [{fused: true, is_chunked: true, residual_dtype: bfloat16}, {keep: matmuls}, true]
""")
def test_choices_give_the_plain_networks_loss_and_gradients_and_compile_without_breaks(choices, recompute, compiled):
    def run(autocast, compiled, recompute, **choices):
        torch.manual_seed(0)
        network, dtypes = Transformer(SHAPE, 64, "sdpa_math", **choices), []
        network.norm.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
        # 4 x 63 = 252 tokens do not divide into equal chunks.
        torch.manual_seed(1)
        inputs = batch(seq=63)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), recomputing(network, recompute):
            with torch.inference_mode():
                inference = network(*inputs)
            # Compile the whole network, or each block.
            for part in ([network] if "fused" in choices else network.blocks) if compiled else []:
                part.compile(backend="aot_eager", fullgraph=True)
            loss = network(*inputs)
        assert inference.item() == pytest.approx(loss.item(), rel=1e-3 if compiled else 1e-6)
        assert {*dtypes} == {choices.get("residual_dtype", torch.float32)}
        loss.backward()
        # The gradient of a fused projection is that of the plain ones, one after the other.
        return loss.item(), torch.cat([parameter.grad.flatten() for parameter in network.parameters()])

    torch._dynamo.reset()
    if "residual_dtype" in choices:
        choices = {**choices, "residual_dtype": torch.bfloat16}
    for autocast, loss_tolerance, gradient_tolerance in ((False, 1e-6, 1e-6), (True, 1e-4, 2e-2)):
        if autocast or not (compiled or "residual_dtype" in choices):
            plain_loss, plain_gradients = run(autocast, False, None)
            loss, gradients = run(autocast, compiled, recompute, **choices)
            assert loss == pytest.approx(plain_loss, rel=loss_tolerance)
            assert (gradients - plain_gradients).norm() < gradient_tolerance * plain_gradients.norm()


@cases("attention", "naive", "sdpa_math", "sdpa_flash")
@cases(
    "settings", {}, {"first": 1}, {"group": 2}, {"group": 2, "nested": True}, {"keep": "attention"}, {"keep": "matmuls"}
)
def test_recomputed_flops_are_those_of_pytorchs_counter(settings, attention):
    network, options = Transformer(SHAPE, 64, attention), RecomputeOptions(**settings)

    def flops(settings):
        with FlopCounterMode(display=False) as counter, recomputing(network, settings):
            network(*batch()).backward()
        return counter.get_total_flops()

    is_fused = attention == "sdpa_flash"
    recomputed = recomputed_flops(options, SHAPE, 64, not is_fused)
    if is_fused and options.keep == "inputs":
        # PyTorch's counter has no formula for the CPU's fused kernel, so the kernel's products are not in its count.
        runs = {(1, False): options.first or 2, (2, False): 2, (2, True): 3}[options.group, options.nested]
        recomputed -= runs * 4 * 64 * SHAPE.d_model
    assert flops(settings) - flops(None) == recomputed * 4 * 64


def test_networks_whose_projections_are_fused_in_other_ways_load_each_others_weights():
    for source_fused, target_fused in permutations([True, False, "qkv"], 2):
        source, target = (Transformer(SHAPE, context_length=8, fused=fused) for fused in (source_fused, target_fused))
        inputs = batch(seq=8)
        assert source(*inputs) != target(*inputs)
        target.load_state_dict(source.state_dict())
        torch.testing.assert_close(source(*inputs), target(*inputs))


@cases("fused", False, "qkv", True)
@cases("attention | inner", ("naive", {"scores", "mask", "softmax", "values"}), ("sdpa", {"attention"}))
def test_every_module_that_computes_belongs_to_a_part(attention, inner, fused):
    network = Transformer(SHAPE, context_length=32, attention=attention, fused=fused)
    leaves = [name for name, module in network.named_modules() if name and not list(module.children())]
    parts = {name: part_of(name) for name in leaves}
    assert set(parts.values()) == PARTS | inner, parts
    assert part_of("network.blocks.0.attention.v") == "qkv"
    assert part_of("blocks.0") is None
