"""Phases of traces that lmbench did not record: by Lightning's ranges, PyTorch's, the user's, or without ranges."""

from __future__ import annotations

import numpy as np
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from tables import rows
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader
from trace_events import HandWritten, planted

from lmbench.kernels.trace import OUTSIDE, load_trace

from conftest import Sleeper, quiet_trainer


def phase_of(trace, name):
    """The phases in which operators of this name began."""
    phases = trace.timeline.at(trace.host.events.start_ns)
    return {phase for phase, other in zip(phases, trace.host.names, strict=True) if other == name}


def at_us(trace, moment_us):
    return trace.timeline.at(np.array([round(moment_us * 1e3)]))[0]


def test_lightnings_own_profiler_is_understood(tmp_path):
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="t", schedule=schedule(wait=1, warmup=1, active=3))
    module = Sleeper()
    module.forward_s = 0.0
    quiet_trainer(profiler=profiler, max_steps=12).fit(module, DataLoader(torch.randn(96, 16), batch_size=4))
    (path,) = tmp_path.glob("*.json")
    trace = load_trace(path)
    assert trace.timeline.source == "foreign"
    assert trace.timeline.steps == 3
    assert phase_of(trace, "aten::linear") == {"forward"}
    assert phase_of(trace, "PowBackward0") == {"backward"}
    assert phase_of(trace, "aten::stack") == {"data"}
    assert phase_of(trace, "aten::pow") == {"forward", "backward"}


def test_forward_and_backward_inside_the_optimizers_range_are_not_the_optimizers():
    trace = HandWritten()
    for name, start, end in rows("""
        ProfilerStep#4 | 0 | 1000
        [pl][profile][Strategy]SingleDeviceStrategy.batch_to_device | 5 | 20
        [pl][profile]run_training_batch | 30 | 900
        [pl][profile][LightningModule]Net.optimizer_step | 50 | 800
        Optimizer.step#AdamW.step | 60 | 790
        [pl][profile][Strategy]SingleDeviceStrategy.training_step | 100 | 200
        [pl][profile][LightningModule]Net.optimizer_zero_grad | 210 | 230
        [pl][profile][Strategy]SingleDeviceStrategy.backward | 250 | 500
        [pl][profile][LightningModule]Net.configure_gradient_clipping | 510 | 520
    """):
        trace.range(name, int(start), int(end) - int(start))
    trace.op("aten::mm", 101, 5)
    loaded = trace.loaded()
    moments = rows("""
        10 | transfer
        40 | outside
        55 | optimizer
        150 | forward
        205 | optimizer
        220 | zero_grad
        300 | backward
        515 | clip
        600 | optimizer
        850 | outside
        2000 | outside
    """)
    assert [[moment, at_us(loaded, int(moment))] for moment, _ in moments] == moments


def test_the_users_own_ranges_are_phases_but_autograds_engine_is_backward():
    trace = HandWritten()
    named = rows("""
        data | data_load
        forward | ## forward ##
        backward | backward
        clip | clip_grad_norm
        optimizer | optimizer.step
        outside | ## forward:over_arch ##
        forward | PP:0F3
        backward | mlp(W)
        outside | PP:0SEND_F1
        outside | lmbench.phase:of_another_version
    """)
    for number, (_, name) in enumerate(named):
        trace.range(name, 100 * number, 90)
    # An implicit layer runs autograd's engine within the user's forward.
    trace.op("autograd::engine::evaluate_function: MmBackward0", 130, 10)
    loaded = trace.loaded()
    assert [at_us(loaded, 100 * number + 50) for number in range(len(named))] == [phase for phase, _ in named]
    assert (at_us(loaded, 135), loaded.timeline.inferred) == ("backward", ())


def test_a_plain_loop_has_forward_and_backward_by_autograd(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        for _ in range(3):
            batch = torch.rand(4, 8).clamp(0.1, 0.9)
            net(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    path = tmp_path / "t.json"
    recording.export_chrome_trace(str(path))
    trace = load_trace(path)
    assert trace.timeline.source == "foreign"
    assert phase_of(trace, "aten::addmm") == {"forward"}
    assert phase_of(trace, "AddmmBackward0") == {"backward"}
    assert phase_of(trace, "aten::addcdiv_") == {"optimizer"}
    assert phase_of(trace, "aten::clamp") == {OUTSIDE}
    # Without ranges of steps, a step ends with the optimizer's; the first one began before the trace.
    assert trace.timeline.step_names == ["Optimizer.step#AdamW.step"] * 2


#: Two forward operators, their backward passes on autograd's thread, and a micro-batch's forward in between. In each
#: backward an operator that a checkpoint runs again, and the node that it makes, which the engine runs inside.
PIPELINE = """
pipeline:
- [op, aten::mm, 0, 10, {Sequence number: 1, Fwd thread id: 0}]
- [op, aten::mm, 20, 10, {Sequence number: 2, Fwd thread id: 0}]
- [op, &flash "autograd::engine::evaluate_function: FlashBackward", 100, 50, 101,
   {Sequence number: 2, Fwd thread id: 1}]
- [op, FlashBackward, 101, 45, 101, {Sequence number: 2, Fwd thread id: 1}]
- [op, aten::mm, 102, 8, 101, {Sequence number: 9, Fwd thread id: 0}]
- [op, &mm "autograd::engine::evaluate_function: MmBackward0", 120, 5, 101, {Sequence number: 9, Fwd thread id: 2}]
- [launched, 140, flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel, 160, 40, {lasts: 2, tid: 101}]
- [op, aten::mm, 200, 10, {Sequence number: 20, Fwd thread id: 0}]
- [launched, 201, sgemm, 230, 10, {lasts: 2}]
- [op, *flash, 300, 50, 101, {Sequence number: 1, Fwd thread id: 1}]
- [op, FlashBackward, 301, 45, 101, {Sequence number: 1, Fwd thread id: 1}]
- [op, aten::mm, 302, 8, 101, {Sequence number: 8, Fwd thread id: 0}]
- [op, *mm, 320, 5, 101, {Sequence number: 8, Fwd thread id: 2}]
- [launched, 340, flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel, 360, 40, {lasts: 2, tid: 101}]
"""


def test_forward_and_backward_are_inferred_from_autograds_operators():
    trace = planted(PIPELINE)["pipeline"].loaded()
    assert trace.timeline.inferred == ("forward", "backward")
    # The forward that a checkpoint runs again is backward.
    assert [at_us(trace, moment) for moment in (5, 15, 25, 105, 121, 148, 340)] == ["forward"] * 3 + ["backward"] * 4
    # The forward between two backward passes is not backward.
    assert at_us(trace, 205) == OUTSIDE
    assert trace.kernels.phase.tolist() == ["backward", OUTSIDE, "backward"]
