"""Phase and part of the work, on real traces of a small model on the CPU, where operators stand for kernels."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trace_events import AUTOGRAD, HandWritten, record_steps

from lmbench.instruments.ranges import ModuleRanges
from lmbench.kernels.host import ENGINE
from lmbench.kernels.parts import part_of
from lmbench.kernels.trace import load_trace
from lmbench.model.transformer import Transformer
from lmbench.records.intervals import NONE
from lmbench.sizes import SIZES

FORWARD_PARTS = {
    "embedding", "norm", "qkv", "rope", "scores", "mask", "softmax", "values", "attention", "output", "ffn", "residual",
    "head", "loss",
}  # fmt: skip


def traced(path, autocast=False, attention="naive", micro_batches=1):
    torch.manual_seed(0)
    model = Transformer(SIZES["tiny"], 16, attention)
    ModuleRanges(model, uses_nvtx=False)
    tokens = torch.randint(0, 100, (2, 16))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = model(tokens, tokens)
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return load_trace(record_steps(path / "t.json", forward, optimizer, micro_batches=micro_batches))


def operators_of(trace, phase):
    phases = trace.timeline.at(trace.host.events.start_ns)
    return [
        index for index, name in enumerate(trace.host.names) if name.startswith("aten::") and phases[index] == phase
    ]


def parts_in(trace, phase):
    return Counter(trace.host.part(index) for index in operators_of(trace, phase))


def slow_innermost(trace, event, prefixes):
    """The shortest event of the wanted names around an event, by looking at all of them."""
    host, start, end = trace.host.events, trace.host.events.start_ns, trace.host.events.end_ns
    is_around = (start <= start[event]) & (end >= end[event]) & (host.thread == host.thread[event])
    around = [index for index in np.flatnonzero(is_around) if trace.host.names[index].startswith(prefixes)]
    return min((int(index) for index in around if index != event), key=(end - start).__getitem__, default=NONE)


def test_backward_operators_have_the_part_of_the_forward_operator_that_made_their_node(tmp_path):
    trace = traced(tmp_path)
    host, checked = trace.host.events, Counter[str]()
    for index in operators_of(trace, "backward")[::3]:
        engine = slow_innermost(trace, index, (ENGINE,))
        if engine == NONE or "AccumulateGrad" in trace.host.names[engine]:
            continue
        # The operator that began last of those with the node's sequence number, before the node.
        is_made = (host.sequence == host.sequence[engine]) & (host.forward_thread <= 0)
        is_made &= host.start_ns < host.start_ns[engine]
        forward = max(np.flatnonzero(is_made).tolist(), key=host.start_ns.__getitem__, default=NONE)
        module = slow_innermost(trace, forward, ("lmbench.module:",))
        part = part_of(trace.host.names[module].removeprefix("lmbench.module:"))
        if part is not None and trace.host.part(index) != "residual":
            assert trace.host.part(index) == part, (trace.host.names[index], trace.host.names[engine])
            checked[part] += 1
    assert checked.keys() >= FORWARD_PARTS - {"attention", "residual", "loss"}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_every_part_is_found_forward_and_backward_and_almost_nothing_is_left(tmp_path, autocast):
    trace = traced(tmp_path, autocast)
    for phase in ("forward", "backward"):
        parts = parts_in(trace, phase)
        assert parts.keys() - {None} == FORWARD_PARTS
        # The first gradient, and tables of positions and mask cast once for all blocks.
        assert parts[None] < 0.04 * parts.total()


def test_gradients_are_accumulated_on_behalf_of_their_parameter(tmp_path):
    trace = traced(tmp_path, micro_batches=2)
    stored: Counter[str | None] = Counter()
    for index in operators_of(trace, "backward"):
        engine = slow_innermost(trace, index, (ENGINE,))
        if engine != NONE and "AccumulateGrad" in trace.host.names[engine] and trace.host.names[index] == "aten::add_":
            stored[trace.host.part(index)] += 1
    # The second micro-batch adds to what the first stored: a parameter each, in two steps.
    assert stored == {"qkv": 12, "output": 4, "ffn": 12, "norm": 10, "head": 2, "embedding": 2}


def test_the_residual_streams_gradients_are_summed_by_residual_additions(tmp_path):
    trace = traced(tmp_path)
    sums = 0
    for index in operators_of(trace, "backward"):
        engine = slow_innermost(trace, index, (ENGINE,))
        inside = (
            engine != NONE and slow_innermost(trace, index, (trace.host.names[engine].removeprefix(ENGINE),)) != NONE
        )
        if trace.host.names[index] in ("aten::add", "aten::add_") and not inside:
            sums += trace.host.part(index) == "residual"
    # Each of the two layers has two branches that leave the stream and come back; two steps.
    assert sums == 2 * 2 * 2


def test_a_recomputed_forward_keeps_its_modules_parts(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.ffn = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            return self.head(checkpoint(self.ffn, x, use_reentrant=False)).sum()

    net = Net()
    ModuleRanges(net, uses_nvtx=False)
    x = torch.randn(4, 8, requires_grad=True)
    trace = load_trace(record_steps(tmp_path / "t.json", lambda: net(x), torch.optim.SGD(net.parameters(), 0.1)))
    recomputed = [index for index in operators_of(trace, "backward") if trace.host.names[index] == "aten::linear"]
    assert len(recomputed) == 2
    assert {trace.host.part(index) for index in recomputed} == {"ffn"}


def test_kernels_of_autograds_thread_belong_to_the_phase_and_part_of_their_launch():
    trace = HandWritten()
    trace.step(0, 0, 1000)
    trace.phase("forward", 0, 100)
    trace.phase("backward", 100, 300)
    trace.phase("optimizer", 400, 600)
    trace.module("blocks.0.attention", 1, 90)
    trace.module("blocks.0.attention.q", 2, 40)
    trace.op("aten::linear", 3, 30, **{"Sequence number": 5, "Fwd thread id": 0})
    trace.op("aten::mm", 5, 20, **{"Sequence number": 6, "Fwd thread id": 0})
    trace.launch(1, 6)
    trace.op("aten::ones_like", 105, 10)
    trace.launch(2, 106)
    trace.op(f"{ENGINE}MmBackward0", 150, 50, AUTOGRAD, **{"Sequence number": 6, "Fwd thread id": 1})
    trace.op("MmBackward0", 151, 40, AUTOGRAD, **{"Sequence number": 6, "Fwd thread id": 1})
    trace.op("aten::mm", 152, 30, AUTOGRAD)
    trace.launch(3, 153, tid=AUTOGRAD)
    trace.op("aten::_fused_adamw_", 410, 20)
    trace.launch(4, 411)
    # On the device all of it comes late: backward's product runs while the host is in the optimizer.
    # Launches with nothing around them, on either thread, are nobody's: not the loss's.
    trace.launch(5, 250, tid=AUTOGRAD)
    trace.launch(6, 260)
    kernels = [("sgemm", 300), ("fill", 420), ("sgemm", 450), ("adam", 700), ("unknown", 800), ("unknown", 820)]
    for number, (name, at) in enumerate(kernels, start=1):
        trace.kernel(number, name, at, 10)
    table = trace.loaded().kernels
    assert table.phase.tolist() == ["forward", "backward", "backward", "optimizer", "backward", "backward"]
    assert table.part.tolist() == ["qkv", "loss", "qkv", "optimizer", "unclassified", "unclassified"]


def test_input_communication_and_kernels_of_one_part_by_their_name_need_no_operator():
    trace = HandWritten()
    trace.phase("transfer", 0, 50)
    trace.phase("backward", 50, 50)
    for number, (at, name) in enumerate((
        (10, "Memcpy HtoD (Pinned -> Device)"), (60, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)"),
        (70, "void vllm::paged_attention_v1_kernel<float>(float*)"), (80, "void vllm::rms_norm_kernel<float>(float*)"),
        (90, "softmax_warp_forward"),
    )):  # fmt: skip
        trace.launch(number, at)
        trace.kernel(number, name, 100 + 10 * number, 5)
    kernels = trace.loaded().kernels
    assert kernels.part.tolist() == ["data", "comm", "attention", "norm", "unclassified"]


def test_attention_of_a_foreign_model_is_told_apart_by_its_softmax(tmp_path):
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

    model = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Linear(8, 8))
    ModuleRanges(model, uses_nvtx=False)
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    trace = load_trace(
        record_steps(tmp_path / "t.json", lambda: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1))
    )
    for phase in ("forward", "backward"):
        products = Counter(
            trace.host.part(index) for index in operators_of(trace, phase) if trace.host.names[index] == "aten::bmm"
        )
        assert products.keys() == {"scores", "values"}
        assert products["scores"] == products["values"]
        assert {"softmax", "norm", "residual"} <= parts_in(trace, phase).keys()
