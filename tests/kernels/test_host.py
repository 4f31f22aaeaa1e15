"""The phase and part of operators, on real traces of a small model on the CPU, where they stand for kernels."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from trace_events import planted

from lmbench.instruments.ranges import ModuleRanges
from lmbench.kernels.trace import load_trace
from lmbench.model.transformer import Transformer
from lmbench.sizes import SIZES


def operators_of(trace, phase):
    """The name and part of each ATen operator in a phase, by event."""
    rows = pd.DataFrame({"name": trace.host.names, "phase": trace.timeline.at(trace.host.events.start_ns)})
    rows = rows[rows.name.str.startswith("aten::") & (rows.phase == phase)]
    return rows.assign(part=[trace.host.part(index) for index in rows.index])


def test_gradients_are_accumulated_on_behalf_of_their_parameter(tmp_path):
    torch.manual_seed(0)
    tokens, model = torch.randint(0, 100, (2, 16)), Transformer(SIZES["tiny"], 16, "naive")
    ModuleRanges(model, None)
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        for _ in range(2):
            with record_function("lmbench.phase:forward"):
                loss = model(tokens, tokens).sum()
            with record_function("lmbench.phase:backward"):
                loss.backward()
    recording.export_chrome_trace(str(tmp_path / "t.json"))
    trace = load_trace(tmp_path / "t.json")
    sums = operators_of(trace, "backward").query("name == 'aten::add_'")
    around = [{trace.host.names[event] for event in trace.host.nesting.climb(index)} for index in sums.index]
    stored = sums[[any("AccumulateGrad" in name for name in names) for names in around]]
    # The second micro-batch adds to the gradient of every parameter.
    assert Counter(stored.part) == {"qkv": 6, "output": 2, "ffn": 6, "norm": 5, "head": 1, "embedding": 1}


#: Kernels whose name tells their part without an operator, and one whose name does not.
NAMED = """
named:
- [phase, transfer, 0, 50]
- [phase, backward, 50, 50]
- [launched, 10, Memcpy HtoD (Pinned -> Device), 110, 5]
- [launched, 60, ncclDevKernel_AllReduce_Sum_f32_RING_LL(int), 160, 5]
- [launched, 70, void vllm::paged_attention_v1_kernel<float>(float*), 170, 5]
- [launched, 80, void vllm::rms_norm_kernel<float>(float*), 180, 5]
- [launched, 90, softmax_warp_forward, 190, 5]
"""


def test_input_communication_and_kernels_of_one_part_by_their_name_need_no_operator():
    parts = planted(NAMED)["named"].loaded().kernels.part.tolist()
    assert parts == ["data", "comm", "attention", "norm", "unclassified"]


class Attention(nn.Module):
    def forward(self, q):
        return torch.matmul(torch.softmax(torch.matmul(q, q.mT), -1), q)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(8)
        self.self_attn = Attention()

    def forward(self, x):
        return x + self.self_attn(self.input_layernorm(x))


def test_calls_of_modules_are_forward_and_tell_parts_but_in_a_checkpoint_they_are_backward(tmp_path):
    model, x = nn.Sequential(Layer(), nn.Linear(8, 8)), torch.randn(3, 4, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recording:
        model(x + 1)
        checkpoint(model, x, use_reentrant=False).sum().backward()
    recording.export_chrome_trace(str(tmp_path / "t.json"))
    trace = load_trace(tmp_path / "t.json")
    assert (trace.timeline.inferred, trace.timeline.step_names) == (("backward",), [])
    # The softmax tells scores from values.
    for phase in ("forward", "backward"):
        rows = operators_of(trace, phase)
        assert set(rows.part[rows.name == "aten::bmm"]) == {"scores", "values"}
        assert set(rows.part[rows.name == "aten::native_layer_norm"]) == {"norm"}
