"""Several streams and devices, kernels without a launch, communication, and clocks over all that was traced."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paths import TRACES
from plain_sums import plain_sums
from test_trace_clocks import clock, clocks_of
from trace_events import HandWritten

from lmbench.kernels.shown import to_markdown
from lmbench.kernels.trace.clocks import phase_clocks
from lmbench.kernels.trace.findings import examine, summarize
from lmbench.kernels.trace.kernels import load_trace

MAIN, SIDE = 7, 20
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)"
PHASES = ("data", "transfer", "forward", "backward", "clip", "optimizer", "zero_grad")


def launched(trace: HandWritten, at: float, name: str, start: float, dur: float, stream: int = MAIN) -> None:
    """A kernel with its launch."""
    number = len(trace.events) + 1
    trace.launch(number, at)
    trace.kernel(number, name, start, dur, stream=stream)


def step_with(side: bool) -> HandWritten:
    """A host that is ahead: 300 us of backward, then 100 us of optimizer; beside it, a collective and the next copy."""
    trace = HandWritten()
    for phase, start, end in (
        ("forward", 0, 50),
        ("backward", 50, 100),
        ("optimizer", 100, 150),
        ("transfer", 150, 200),
    ):
        trace.phase(phase, start, end - start)
    launched(trace, 0, "gemm", 10, 99)
    launched(trace, 60, "gemm", 110, 300)
    if side:
        # Launched in backward, it waits on its own stream for the backward pass, and outlasts it.
        launched(trace, 70, NCCL, 380, 60, SIDE)
        # Launched for the next step, and done at once.
        launched(trace, 160, "Memcpy HtoD (Pinned -> Device)", 200, 40, SIDE)
    launched(trace, 110, "gemm", 411, 100)
    return trace


def test_a_side_stream_neither_ends_a_phase_nor_lengthens_it(tmp_path: Path) -> None:
    _, alone = clocks_of(step_with(side=False), tmp_path)
    _, beside = clocks_of(step_with(side=True), tmp_path)
    for phase, busy_us in (("forward", 99), ("backward", 300), ("optimizer", 100)):
        assert clock(alone, phase).busy_s == pytest.approx(busy_us * 1e-6)
        assert clock(beside, phase).busy_s == pytest.approx(busy_us * 1e-6 + (1e-6 if phase == "backward" else 0))
    # What the host goes through without a kernel that runs alone takes no time on the device.
    assert clock(beside, "transfer").window_s == 0
    assert clock(beside, "transfer").kernels == 1
    backward = clock(beside, "backward")
    assert backward.comm_s == pytest.approx(60e-6)
    # Beside backward until 410 and beside the optimizer from 411 on; 1 us exposed.
    assert backward.comm_exposed_s == pytest.approx(1e-6)
    assert beside.whole.busy_s == pytest.approx((99 + 401) * 1e-6)


def test_a_collective_that_nothing_runs_beside_is_exposed(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("backward", 0, 100)
    launched(trace, 0, "gemm", 10, 50)
    launched(trace, 5, NCCL, 40, 100, SIDE)
    # A copy is no computing.
    launched(trace, 6, "Memcpy DtoD (Device -> Device)", 100, 20, MAIN)
    found = examine(trace.write(tmp_path / "t.json"))
    (device,) = found.clocks.devices
    assert (device.comm_s, device.comm_overlapped_s) == (pytest.approx(100e-6), pytest.approx(20e-6))
    part = summarize(found).phases.backward
    assert part is not None
    assert (part.comm_s, part.comm_exposed_s) == (pytest.approx(100e-6), pytest.approx(80e-6))


def test_kernels_without_a_launch_are_no_phases_and_no_queues(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    trace.phase("zero_grad", 100, 900)
    launched(trace, 0, "gemm", 10, 90)
    # A foreign graph: back to back, while the host is in a phase that starts nothing.
    for start in range(200, 700, 100):
        trace.kernel(None, "gemm", start, 90)
    found = examine(trace.write(tmp_path / "t.json"))
    unlinked = clock(found.clocks, "unlinked")
    assert unlinked.busy_s == pytest.approx(5 * 90e-6)
    assert (unlinked.queued_gap_s, unlinked.host_wait_s) == (0, 0)
    assert unlinked.other_idle_s == pytest.approx((100 + 4 * 10) * 1e-6)
    assert clock(found.clocks, "zero_grad").busy_s == 0
    assert clock(found.clocks, "forward").busy_s == pytest.approx(90e-6)
    assert {one.phase: one.verdict for one in found.verdicts}["unlinked"] is None
    assert found.clocks.whole.busy_s == pytest.approx(6 * 90e-6)


def test_an_unlinked_kernel_beside_a_launched_one_takes_nothing_from_it(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    trace.kernel(None, "gemm", 5, 200)
    launched(trace, 0, "gemm", 50, 100)
    _, clocks = clocks_of(trace, tmp_path)
    assert clock(clocks, "forward").busy_s == pytest.approx(100e-6)
    assert clock(clocks, "unlinked").busy_s == pytest.approx(100e-6)


def test_devices_are_summed_and_never_united(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    launched(trace, 0, "gemm", 10, 90)
    number = len(trace.events) + 1
    trace.launch(number, 1)
    trace.kernel(number, "gemm", 10, 40, device=3)
    path = trace.write(tmp_path / "t.json")
    clocks = examine(path).clocks
    assert [(one.device, one.busy_s) for one in clocks.devices] == [
        (0, pytest.approx(90e-6)),
        (3, pytest.approx(40e-6)),
    ]
    assert {device: sums["busy"] for device, sums in plain_sums(path).items()} == {
        0: pytest.approx(90e-6),
        3: pytest.approx(40e-6),
    }
    forward = clock(clocks, "forward")
    assert (forward.busy_s, forward.window_s) == (pytest.approx(130e-6), pytest.approx(200e-6))
    assert [one.idle_fraction for one in clocks.devices] == [pytest.approx(0.1), pytest.approx(0.6)]
    text = to_markdown(examine(path), 3, None)
    assert "**device 0**: busy 0.090" in text
    assert "**device 3**: busy 0.040" in text
    assert "summed over 2 devices" in text


def test_a_graphs_kernels_lie_in_the_queue_and_what_holds_up_the_first_is_not_the_host(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.launch(1, 0, 10, name="cudaGraphLaunch")
    trace.launch(2, 20, 10, name="cudaGraphLaunch")
    for number, start, stream in ((1, 15, MAIN), (2, 500_000, SIDE), (2, 500_101, MAIN), (1, 500_202, MAIN)):
        trace.kernel(number, "gemm", start, 100, stream=stream)
    (one,) = examine(trace.write(tmp_path / "t.json")).verdicts
    assert one.clock.queued_gap_s == pytest.approx(2e-6)
    assert one.clock.host_wait_s == 0
    assert one.clock.other_idle_s == pytest.approx(499_885e-6)
    assert one.verdict == "stalled"


def test_the_clock_runs_over_the_whole_trace_where_phases_do_not(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.add("user_annotation", "ProfilerStep#4", 0, 1000)
    trace.add("user_annotation", "Optimizer.step#AdamW.step", 900, 10)
    for start in range(100, 900, 100):
        launched(trace, start, "gemm", start + 10, 50)
    launched(trace, 901, "gemm", 910, 20)
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.clocks.is_whole_trace
    assert found.clocks.whole.busy_s == pytest.approx((8 * 50 + 20) * 1e-6)
    assert found.clocks.whole.window_s == pytest.approx(1000e-6)
    assert clock(found.clocks, "optimizer").busy_s == pytest.approx(20e-6)
    assert clock(found.clocks, "outside").busy_s == pytest.approx(400e-6)


def test_steps_whose_phases_have_no_length_are_clocked_as_a_whole_trace(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.metadata["steps"] = 2
    for step in (0, 1):
        trace.step(step, 100 * step, 100)
        trace.phase("forward", 100 * step, 0)
        launched(trace, 100 * step + 10, "gemm", 100 * step + 20, 30)
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.clocks.is_whole_trace
    assert found.clocks.whole.busy_s * found.clocks.steps == pytest.approx(60e-6)


def test_a_host_slower_than_an_idle_device_is_waited_for_until_the_device_starts(tmp_path: Path) -> None:
    # An MI300 starts kernels 15 us after their launch returned.
    trace = HandWritten()
    for number in range(20):
        launched(trace, 100.0 * number, "gemm", 100.0 * number + 19, 10)
    (device,) = examine(trace.write(tmp_path / "t.json")).clocks.devices
    assert device.idle_s == device.host_wait_s > 0


@pytest.mark.parametrize("seed", range(8))
def test_random_streams_agree_with_plain_sums(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace, moment = HandWritten(), 0.0
    streams = dict.fromkeys((MAIN, SIDE, 30), 0.0)
    for step in range(3):
        begin = moment
        for phase in PHASES:
            start = moment
            moment += 2.0
            for _ in range(chance.choice([0, 2, 6])):
                name = chance.choice(["gemm", "gemm", NCCL, "Memcpy DtoD (Device -> Device)"])
                stream = chance.choice(list(streams))
                at = round(max(moment + 6, streams[stream] + 1) + chance.choice([0, 0, 50]), 3)
                duration = round(chance.uniform(1, 60), 3)
                number = len(trace.events) + 1
                if is_linked := chance.random() < 0.9:
                    trace.launch(number, round(moment, 3))
                trace.kernel(number if is_linked else None, name, at, duration, stream=stream)
                streams[stream] = at + duration
                moment += chance.uniform(4, 30)
            trace.phase(phase, round(start, 3), round(moment - start, 3))
        if seed % 2:
            trace.step(step, round(begin, 3), round(moment - begin, 3))
    path = trace.write(tmp_path / "t.json")
    found = examine(path)
    clocks, plain = found.clocks, plain_sums(path)[0]
    whole = clocks.whole
    for one in (*clocks.phases, *clocks.devices):
        assert one.window_s == pytest.approx(one.busy_s + one.idle_s, abs=1e-12)
        assert 0 <= one.comm_overlapped_s <= one.comm_s
    for name in ("window_s", "busy_s", "queued_gap_s", "host_wait_s", "other_idle_s", "comm_s", "comm_overlapped_s"):
        assert getattr(whole, name) == pytest.approx(
            sum(getattr(one, name) for one in clocks.phases), rel=1e-9, abs=5e-3 * whole.window_s
        )
    for verdict in found.verdicts:
        assert verdict.verdict != "queued" or (verdict.clock.idle_fraction or 0) <= 0.3
    if clocks.is_whole_trace:
        assert whole.busy_s == pytest.approx(plain["busy"], abs=1e-9)
        assert whole.comm_s == pytest.approx(plain["comm"], abs=1e-9)
        assert whole.comm_overlapped_s == pytest.approx(plain["overlapped"], abs=1e-9)
        # From the first phase on; the last kernel ends later than the host.
        assert whole.window_s == pytest.approx(max(streams.values()) * 1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ["two_gpus", "small_bf16_eager", "small_fp32_inference", "small_bf16_replayed"])
def test_recorded_traces_agree_with_plain_sums(name: str) -> None:
    path = TRACES / name / "trace.json.gz"
    (plain,) = plain_sums(path).values()
    loaded = load_trace(path)
    # Without lmbench's steps the clock runs over everything.
    timeline = replace(loaded.timeline, step_start_ns=np.zeros(0, dtype=np.int64), steps=1)
    (device,) = phase_clocks(loaded.kernels, loaded.events, timeline).devices
    assert device.busy_s == pytest.approx(plain["busy"], rel=1e-5)
    assert device.kernel_span_s == pytest.approx(plain["span"], rel=1e-5)
    assert device.comm_s == pytest.approx(plain["comm"], rel=1e-5)
    assert device.comm_overlapped_s == pytest.approx(plain["overlapped"], rel=1e-5)
