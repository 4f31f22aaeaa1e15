"""Attention on a GPU: every back end and a Triton kernel against the formula; memory, kernels, and a lack of room.

python -m pytest -q -m gpu tests/gpu/test_gpu_attention.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fit_process import run_here
from refusals import usage_error
from tables import cases
from torch import Tensor

from lmbench.fit.in_process import undisturbed
from lmbench.model import attention_check
from lmbench.model.attention import ATTENTION, AttentionKind, Size, attention_kind
from lmbench.model.attention_check import Use, check_attention
from lmbench.records.load import load_run

from conftest import free_device

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LAYER = ["--model", "lmbench.AttentionLayer"]
SHORT = [
    "--measure.min_window_s=0", "--measure.steps=10", "--measure.probe_steps=3", "--wandb.mode=disabled",
]  # fmt: skip
#: In PyTorch 2.11 for Hopper; where a back end learns more, this is to be looked at again.
NO_FLOAT32 = ("sdpa_flash", "sdpa_cudnn")


@pytest.fixture(autouse=True)
def triton_module_is_found(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_is_left_of_the_test_before():
    """Neither the folder that it compiled into, nor what it compiled: after 8 shapes PyTorch compiles no more."""
    torch._dynamo.reset()
    # PyTorch's own patch: pytest's deletes an attribute that is not in the module's dictionary when it takes it back.
    with torch._dynamo.config.patch(recompile_limit=100), undisturbed():
        yield


def measured(folder, *words, code=0):
    free_device()
    return run_here(folder, "fit", *words, *SHORT, code=code).record


def as_function(kind):
    """A back end as if it were a user's own, so that it is held against the formula."""

    def function(q, k, v, is_causal):
        mask = kind.mask(q.shape[-2], is_causal)
        with kind.chosen():
            output: Tensor = kind.core(q.shape[-1], is_causal)(q, k, v, mask)
        return output

    return AttentionKind(kind.name, function, is_users=True)


@cases("dtype", torch.float32, torch.bfloat16, torch.float16, ids=str)
@cases("name", *[name for name in ATTENTION if name != "flex"])
def test_every_back_end_agrees_with_the_formula_or_refuses(name, dtype):
    use = Use(Size(2, 2, 256, 64), True, dtype, CUDA)
    if name in NO_FLOAT32 and dtype is torch.float32:
        with usage_error(f"'{name}' has no kernel for float32.*; choose sdpa, .* or naive: "):
            check_attention(attention_kind(name), use)
        return
    check_attention(attention_kind(name), use)
    with CUDA:
        assert check_attention(as_function(ATTENTION[name]), use).cases > 6


@cases("dtype", torch.float32, torch.bfloat16, ids=str)
def test_flex_agrees_with_the_formula(dtype, monkeypatch):
    # Each shape is compiled, for 6 s.
    sizes = [Size(2, 2, 256, 64), Size(1, 2, 200, 32)]
    monkeypatch.setattr(attention_check, "cases", lambda use: [replace(use, size=size) for size in sizes])
    for is_causal in (True, False):
        with CUDA:
            result = check_attention(as_function(ATTENTION["flex"]), Use(sizes[0], is_causal, dtype, CUDA))
        assert (result.cases, result.refused) == (2, [])


@cases("dtype", torch.float32, torch.bfloat16, torch.float16, ids=str)
def test_the_triton_kernel_is_right_at_every_shape(dtype):
    use = Use(Size(2, 3, 1000, 64), True, dtype, CUDA, is_strided=True)
    result = check_attention(attention_kind("triton_attention:attention"), use)
    assert (result.cases, result.refused) == (13, [])


@cases("compiled", "false", "true", ids=["eager", "compiled"])
@cases(
    "subject",
    [*LAYER, "--trainer.precision", "bf16-true"],
    [*LAYER, "--trainer.precision", "16-mixed"],
    ["--model.size", "tiny", "--trainer.precision", "bf16-mixed"],
    ids=["layer", "layer in fp16", "model"],
)
@cases("attention", "triton_attention:attention", "flex")
def test_triton_and_flex_are_measured_in_the_layer_and_the_model(attention, subject, compiled, tmp_path):
    words = ["--model.attention", attention, "--data.context_length", "200", "--trainer.compile", compiled]
    record = measured(tmp_path, *subject, *words)
    assert record.throughput.mfu_fraction
    assert (record.model.attention_check is not None) == (attention != "flex")
    assert {guard.name: guard.status for guard in record.guards}["gradients"] == "pass"


def test_the_kernels_of_a_triton_function_are_attention_by_kind_and_part(tmp_path):
    words = ["--model.attention", "triton_attention:attention", "--data.context_length", "2048"]
    record = measured(tmp_path, *LAYER, *words, "--trainer.profiler", "kernels", "--trainer.precision", "bf16-true")
    forward = record.kernels.phases.forward
    assert forward.kinds["attention_s"] > 0.8 * sum(forward.kinds.values())
    assert forward.parts["attention_s"] > 0.95 * sum(forward.parts.values())


@cases("causal", "false", "true")
@cases("precision", "32-true", "bf16-true", "bf16-mixed")
@cases("name", "naive", "sdpa", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flex")
def test_what_is_saved_is_what_the_shape_says_and_all_that_the_forward_adds(name, precision, causal, tmp_path):
    if name in NO_FLOAT32 and precision == "32-true":
        pytest.skip("no such kernel")
    batch, seq, width = 4, 1000, 64
    words = ["--model.attention", name, "--model.causal", causal, "--trainer.precision", precision]
    shape = ["--data.batch_size", str(batch), "--data.context_length", str(seq), "--model.head_dim", str(width)]
    memory = measured(tmp_path, *LAYER, *words, *shape).memory
    # Generator states of fused kernels.
    assert 0 <= memory.saved_bytes - memory.expected_saved_bytes <= 64
    begins = memory.phase_begin_allocated_bytes
    output = batch * seq * width * (4 if precision == "32-true" else 2)
    kept = begins.backward - begins.forward
    # A fused kernel saves its output, which is there all the same; of a large block up to 1 MiB is not given back.
    slack = 2 * 2**20 if name == "naive" else 64 * 1024
    assert kept == pytest.approx(memory.saved_bytes + (output if name == "naive" else 0), abs=slack)


def test_native_zero_grad_keeps_three_gradients_through_the_forward(tmp_path):
    begins = []
    for order in ("native", "after_step"):
        # In processes of their own: what this one holds, and frees in the midst, would count as gradients.
        words = [*LAYER, "--data.context_length=1024", "--data.batch_size=8", f"--measure.zero_grad={order}", *SHORT]
        command = [sys.executable, "-m", "lmbench", "fit", *words, "--measure.results_dir", str(tmp_path / order)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        begins.append(load_run(next((tmp_path / order).iterdir())).record.memory.phase_begin_allocated_bytes)
    assert begins[0].zero_grad - begins[1].backward == pytest.approx(3 * 8 * 1024 * 64 * 4, abs=64 * 1024)


def test_naive_at_131072_is_out_of_memory_and_its_bytes_are_explained(tmp_path):
    words = ["--model.attention", "naive", "--data.batch_size", "8", "--data.context_length", "131072"]
    record = measured(tmp_path, *LAYER, *words, "--model.head_dim", "16", code=3)
    scores, refused = 8 * 131072**2 * 4, record.memory.refused
    assert (record.outcome, refused.phase) == ("oom", "forward")
    assert refused.requested_bytes == record.memory.expected_saved_bytes == scores
    # q, k and v, and the output's gradient beside them.
    assert refused.parameters_bytes == 4 * (8 * 131072 * 16 * 4)
