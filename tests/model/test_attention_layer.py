"""AttentionLayer measured like any module: inputs, gradients, memory, FLOPs and modes."""

from __future__ import annotations

import math

import torch
from fit_process import bench, statuses
from tables import cases
from torch.nn.attention.flex_attention import create_block_mask

from lmbench.data.datamodule import ShapeData
from lmbench.model.attention import causal_block_mask
from lmbench.model.attention_check import formula
from lmbench.model.attention_layer import AttentionLayer

from conftest import quiet_trainer

LAYER = ("--model=lmbench.AttentionLayer", "--trainer.accelerator=cpu")


@cases("causal", False, True)
@cases("attention", "naive", "sdpa", "sdpa_flash", "sdpa_math")
def test_gradients_are_those_of_the_fixed_output_gradient(attention, causal):
    layer = AttentionLayer(heads=2, head_dim=8, causal=causal, attention=attention, batch_size=2, context_length=11)
    quiet_trainer(max_steps=1).fit(layer, ShapeData(batch_size=2, context_length=11))
    assert layer.q.shape == (2, 2, 11, 8)
    inputs = [tensor.detach().double() for tensor in (*layer.parameters(), layer.gradient)]
    for parameter, (expected, _) in zip(layer.parameters(), formula(inputs, causal)[1:], strict=True):
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_run_has_phases_flops_and_saved_bytes_and_no_loss(tmp_path):
    words = ["--model.attention=naive", "--model.heads=3", "--model.head_dim=8", "--model.causal=true"]
    record = bench(tmp_path, *LAYER, *words, "--data.batch_size=2", "--data.context_length=50").record
    assert (record.mode, record.zero_grad) == ("forward_backward", "after_step")
    assert (record.model.num_heads, record.model.head_dim, record.model.is_causal) == (3, 8, True)
    assert (record.data.batch_size, record.data.context_length) == (2, 50)
    assert None not in (record.phases.forward, record.phases.backward)
    # Two products of 2 * 50 * 50 * 8 for each of 2 * 3 heads and 3 passes' worth, over 100 positions.
    assert record.flops.per_token_flops == 2 * 2 * 50 * 50 * 8 * 6 * 3 // 100
    assert record.flops.causal_per_token_flops == record.flops.per_token_flops // 2
    assert record.memory.saved_bytes == record.memory.expected_saved_bytes == 2 * 3 * 50 * 50 * 4
    assert record.loss.first is None
    expected = {"gradients": "pass", "finite_loss": "n/a", "first_loss": "n/a", "trained": "n/a"}
    assert expected.items() <= statuses(record).items()
    assert math.isfinite(record.throughput.tokens_per_s)


@cases("""
- [attention, precision, itemsize]
- [sdpa, 32-true, 4]
- [sdpa_flash, 64-true, 8]
""")
def test_fused_attention_saves_its_output_and_a_number_for_each_row(attention, precision, itemsize, tmp_path):
    words = ["--data.context_length=64", "--data.batch_size=1", "--trainer.precision", precision]
    record = bench(tmp_path, *LAYER, "--model.attention", attention, *words).record
    assert record.memory.saved_bytes == record.memory.expected_saved_bytes == (64 * 64 + 64) * itemsize
    # On a CPU PyTorch chooses flash attention.
    assert record.model.attention_backend == ("sdpa_flash" if attention == "sdpa" else None)


@cases("seq", 1, 128, 300)
def test_the_block_mask_of_causal_flex_attention_is_what_pytorch_finds_from_all_scores(seq):
    mask = causal_block_mask(seq)
    expected = create_block_mask(lambda b, h, query, key: query >= key, None, None, seq, seq, device="cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name))
