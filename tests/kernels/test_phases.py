"""Phases of traces that lmbench did not make: Lightning's ranges, PyTorch's, and none at all."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader
from trace_events import AUTOGRAD, HandWritten

from lmbench.errors import UsageError
from lmbench.kernels.answer import answer_of
from lmbench.kernels.findings import examine
from lmbench.kernels.phases import OUTSIDE
from lmbench.kernels.trace import Trace, load_trace
from lmbench.report.render import render

from conftest import Sleeper, quiet_trainer


def phase_of(trace: Trace, name: str) -> set[str]:
    """Phases in which operators of a name began."""
    phases = trace.timeline.at(trace.host.events.start_ns)
    return {phase for phase, other in zip(phases, trace.host.names, strict=True) if other == name}


def at_us(trace: Trace, moment_us: float) -> str:
    return trace.timeline.at(np.array([round((moment_us - trace.events.begun_us) * 1e3)]))[0]


def test_lightnings_own_profiler_is_understood(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="t", schedule=schedule(wait=1, warmup=1, active=3))
    module = Sleeper()
    Sleeper.forward_s, before = 0.0, Sleeper.forward_s
    try:
        quiet_trainer(profiler=profiler, max_steps=12).fit(module, DataLoader(torch.randn(96, 16), batch_size=4))
    finally:
        Sleeper.forward_s = before
    (path,) = tmp_path.glob("*.json")
    trace = load_trace(path)
    assert trace.timeline.source == "foreign"
    assert trace.timeline.steps == 3
    assert phase_of(trace, "aten::linear") == {"forward"}
    assert phase_of(trace, "MeanBackward0") == {"backward"}
    assert phase_of(trace, "PowBackward0") == {"backward"}
    assert phase_of(trace, "aten::stack") == {"data"}
    assert phase_of(trace, "aten::pow") == {"forward", "backward"}


def test_forward_and_backward_inside_the_optimizers_range_are_not_the_optimizers(tmp_path: Path) -> None:
    trace = HandWritten()
    strategy = "[pl][profile][Strategy]SingleDeviceStrategy."
    for name, start, end in [
        ("ProfilerStep#4", 0, 1000),
        ("[pl][profile][Strategy]SingleDeviceStrategy.batch_to_device", 5, 20),
        ("[pl][profile]run_training_batch", 30, 900),
        ("[pl][profile][LightningModule]Net.optimizer_step", 50, 800),
        ("Optimizer.step#AdamW.step", 60, 790),
        (f"{strategy}training_step", 100, 200),
        ("[pl][profile][LightningModule]Net.optimizer_zero_grad", 210, 230),
        (f"{strategy}backward", 250, 500),
        ("[pl][profile][LightningModule]Net.configure_gradient_clipping", 510, 520),
    ]:
        trace.add("user_annotation", name, start, end - start)
    trace.op("aten::mm", 101, 5)
    found = load_trace(trace.write(tmp_path / "t.json"))
    moments = {10: "transfer", 40: OUTSIDE, 55: "optimizer", 150: "forward", 205: "optimizer", 220: "zero_grad"}
    moments |= {300: "backward", 515: "clip", 600: "optimizer", 850: OUTSIDE, 2000: OUTSIDE}
    assert {moment: at_us(found, moment) for moment in moments} == moments


@pytest.mark.parametrize("with_steps", [False, True])
def test_a_plain_loop_has_forward_and_backward_by_autograd(tmp_path: Path, with_steps: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        for step in range(3):
            with record_function(f"ProfilerStep#{step}") if with_steps else nullcontext():
                batch = torch.rand(4, 8).clamp(0.1, 0.9)
                net(batch).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    path = tmp_path / "t.json"
    recording.export_chrome_trace(str(path))
    trace = load_trace(path)
    assert trace.timeline.source == "foreign"
    assert phase_of(trace, "aten::linear") == {"forward"}
    assert phase_of(trace, "aten::addmm") == {"forward"}
    assert phase_of(trace, "AddmmBackward0") == {"backward"}
    assert phase_of(trace, "aten::addcdiv_") == {"optimizer"}
    assert phase_of(trace, "aten::clamp") == {OUTSIDE}
    assert trace.timeline.has_step_count == with_steps
    assert trace.timeline.steps == (3 if with_steps else 1)


def test_lmbenchs_ranges_win_over_all_others(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.step(0, 0, 100)
    trace.phase("forward", 0, 50)
    trace.phase("backward", 50, 50)
    trace.add("user_annotation", "Optimizer.step#AdamW.step", 10, 80)
    trace.op("aten::mm", 20, 5)
    found = load_trace(trace.write(tmp_path / "t.json"))
    assert [at_us(found, moment) for moment in (0, 20, 50, 99.9, 100)] == ["forward"] * 2 + ["backward"] * 2 + [OUTSIDE]
    assert found.timeline.source == "lmbench"


def a_pipeline(path: Path) -> Trace:
    """Two forward operators, their backward passes on autograd's thread, and between those another micro-batch."""
    trace = HandWritten()
    for number, at in ((1, 0), (2, 20)):
        trace.op("aten::mm", at, 10, **{"Sequence number": number, "Fwd thread id": 0})
    for number, at in ((2, 100), (1, 300)):
        numbers = {"Sequence number": number, "Fwd thread id": 1}
        trace.op("autograd::engine::evaluate_function: FlashBackward", at, 50, AUTOGRAD, **numbers)
        trace.op("FlashBackward", at + 1, 45, AUTOGRAD, **numbers)
        # What a checkpoint runs again, and nodes that are made and gone through inside.
        trace.op("aten::mm", at + 2, 8, AUTOGRAD, **{"Sequence number": 7 + number, "Fwd thread id": 0})
        inner = {"Sequence number": 7 + number, "Fwd thread id": 2}
        trace.op("autograd::engine::evaluate_function: MmBackward0", at + 20, 5, AUTOGRAD, **inner)
        trace.launch(number, at + 40, 2, AUTOGRAD)
        trace.kernel(number, "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", at + 60, 40)
    trace.op("aten::mm", 200, 10, **{"Sequence number": 20, "Fwd thread id": 0})
    trace.launch(3, 201, 2)
    trace.kernel(3, "sgemm", 230, 10)
    return load_trace(trace.write(path))


def test_what_a_checkpoint_runs_again_is_backward(tmp_path: Path) -> None:
    found = a_pipeline(tmp_path / "t.json")
    assert [at_us(found, moment) for moment in (5, 15, 25, 105, 121, 148, 340)] == ["forward"] * 3 + ["backward"] * 4


def test_forward_between_two_backward_passes_is_not_backward(tmp_path: Path) -> None:
    found = a_pipeline(tmp_path / "t.json")
    assert at_us(found, 205) == OUTSIDE
    assert found.kernels.phases == ["backward", OUTSIDE, "backward"]


def test_phases_that_no_range_tells_are_named_as_inferred(tmp_path: Path) -> None:
    assert a_pipeline(tmp_path / "t.json").timeline.inferred == ("forward", "backward")
    text = render(answer_of(examine(tmp_path / "t.json")), "markdown")
    assert "forward and backward inferred from what autograd runs" in text
    assert "| backward (inferred) |" in text


def test_parts_without_ranges_of_modules_are_said_to_be_what_operators_tell(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 50)
    trace.launch(1, 5)
    trace.kernel(1, "sgemm", 20, 10)
    for is_said in (True, False):
        text = render(answer_of(examine(trace.write(tmp_path / "t.json"))), "markdown")
        assert ("no ranges of modules" in text) == is_said
        assert "inferred" not in text
        trace.module("blocks.0.attention.q", 1, 40)


def test_an_unknown_phase_is_named(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("warp", 0, 1)
    with pytest.raises(UsageError, match="'warp'"):
        load_trace(trace.write(tmp_path / "t.json"))
