"""Busy, gaps and waits against a plain count of time, on made-up queues and streams and on real traces."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from paths import TRACES
from plain_sums import plain_sums
from trace_events import HandWritten

from lmbench.kernels.clocks import KERNEL_GAP_NS, QUEUED_LEAD_NS, START_NS, Clocks, PhaseClock, phase_clocks
from lmbench.kernels.findings import examine, summarize
from lmbench.kernels.sums import shares_by_phase, shares_of, work_of
from lmbench.kernels.trace import Trace, load_trace

PHASES = ("data", "transfer", "forward", "backward", "clip", "optimizer", "zero_grad")
LATENCY_US, GAP_US, LAUNCH_US = 2.3, 1.1, 4.0
MAIN, SIDE = 7, 20
NCCL, COPY = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", "Memcpy DtoD (Device -> Device)"


class Plan(NamedTuple):
    """A phase of a made-up step: launches, the host's time from one to the next, and each kernel's duration."""

    phase: str
    launches: int
    host_us: float
    kernel_us: float


def simulated(
    steps: Sequence[Sequence[Plan]], numbered: bool = True, jitter: random.Random | None = None
) -> HandWritten:
    """A device that works off a queue: a kernel starts when it has been launched and the one in front has ended."""
    trace = HandWritten()
    host = device = 0.0
    number = 0
    for index, plans in enumerate(steps):
        begin = host
        for plan in plans:
            start = host
            host += 5.0
            for _ in range(plan.launches):
                number += 1
                wobble = jitter.uniform(0.2, 2.0) if jitter else 1.0
                trace.launch(number, round(host, 3), LAUNCH_US)
                at = max(host + LAUNCH_US + LATENCY_US, device + GAP_US)
                duration = plan.kernel_us * (jitter.uniform(0.2, 2.0) if jitter else 1.0)
                trace.kernel(number, "k", round(at, 3), round(duration, 3))
                device = round(at, 3) + round(duration, 3)
                host += LAUNCH_US + plan.host_us * wobble
            trace.phase(plan.phase, round(start, 3), round(host - start, 3))
        if numbered:
            trace.step(index, round(begin, 3), round(host - begin, 3))
    trace.metadata["steps"] = len(steps)
    return trace


def launched(trace: HandWritten, at: float, name: str, start: float, dur: float, stream: int = MAIN) -> None:
    """A kernel with its launch."""
    number = len(trace.events) + 1
    trace.launch(number, at)
    trace.kernel(number, name, start, dur, stream=stream)


def clocks_of(trace: HandWritten, path: Path) -> tuple[Trace, Clocks]:
    loaded = load_trace(trace.write(path / "t.json"))
    return loaded, phase_clocks(loaded.kernels, loaded.events, loaded.timeline)


def clock(clocks: Clocks, phase: str) -> PhaseClock:
    return next(each for each in clocks.phases if each.phase == phase)


def seconds(us: float) -> Any:
    return pytest.approx(us * 1e-6)


def counted(trace: Trace) -> dict[str, dict[str, int]]:
    """The same sums in ns by going through kernels one after the other, for a trace of one stream.

    The rule is that of the code; the tests with plans check it.
    """
    kernels, launches, timeline = trace.kernels, trace.events.launches, trace.timeline
    host = list(zip(timeline.phases, timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True))
    sums = {phase: dict.fromkeys(("busy", "gap", "wait", "other"), 0) for phase in timeline.phases}

    def waits(since: int, until: int) -> None:
        for phase, start, end in host:
            sums[phase]["wait"] += max(0, min(until, end) - max(since, start))

    ended, last = host[0][1], None
    for index in range(len(kernels)):
        launch = int(kernels.launch[index])
        begun, returned = int(launches.start_ns[launch]), int(launches.end_ns[launch])
        start, own = int(kernels.events.start_ns[index]), sums[kernels.phases[index]]
        if last and returned + QUEUED_LEAD_NS <= ended:
            if start - ended <= KERNEL_GAP_NS:
                last["gap"] += start - ended
            else:
                own["other"] += start - ended
        else:
            waited = max(ended, min(start, returned + START_NS))
            waits(ended, min(begun, waited))
            own["wait"] += waited - max(ended, min(begun, waited))
            own["other"] += start - waited
        ended, last = int(kernels.events.end_ns[index]), own
        own["busy"] += ended - start
    waits(ended, host[-1][2])
    return sums


@pytest.mark.parametrize("seed", range(12))
def test_random_queues_agree_with_a_plain_count(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    phases = ("data", "forward", "backward", "optimizer", "zero_grad")
    steps = [
        [Plan(phase, chance.choice([0, 1, 3, 12]), chance.uniform(0, 30), chance.uniform(1, 60)) for phase in phases]
        for _ in range(3)
    ]
    steps[0][1] = Plan("forward", 4, 3.0, 20.0)
    trace, clocks = clocks_of(simulated(steps, numbered=False, jitter=chance), tmp_path)
    expected = counted(trace)
    for one in clocks.phases:
        got = {"busy": one.busy_s, "gap": one.queued_gap_s, "wait": one.host_wait_s, "other": one.other_idle_s}
        scaled = {name: value * 1e9 * clocks.steps for name, value in got.items()}
        assert scaled == pytest.approx(expected[one.phase], abs=2), one.phase
        assert one.window_s == pytest.approx(one.busy_s + one.idle_s, abs=1e-12)
        assert 0 <= one.first_wait_s <= one.host_wait_s + 1e-12


def test_a_host_that_is_ahead_leaves_gaps_and_no_waits(tmp_path: Path) -> None:
    step = [Plan("forward", 50, 0.0, 100.0), Plan("backward", 50, 0.0, 200.0)]
    _, clocks = clocks_of(simulated([step, step, step]), tmp_path)
    assert (clocks.steps, clocks.skipped) == (2, 1)
    for phase, kernel_us in (("forward", 100.0), ("backward", 200.0)):
        one = clock(clocks, phase)
        assert one.host_wait_s == 0
        assert one.queued_gap_s == pytest.approx(50 * GAP_US * 1e-6, rel=0.03)
        assert one.queued_gaps == pytest.approx(50, abs=1)
        assert (one.busy_s, one.median_kernel_s) == (seconds(50 * kernel_us), seconds(kernel_us))
        assert (one.launches, one.kernels) == (50, 50)


def test_a_slow_host_makes_the_device_wait_and_says_how_much_a_launch_costs(tmp_path: Path) -> None:
    step = [Plan("forward", 50, 36.0, 10.0), Plan("optimizer", 2, 36.0, 20.0)]
    forward = clock(clocks_of(simulated([step, step]), tmp_path)[1], "forward")
    assert forward.share(forward.host_wait_s) == pytest.approx(0.75, abs=0.03)
    assert forward.host_s_per_launch == pytest.approx(40e-6, rel=0.03)
    assert forward.queued_gap_s < 3e-6


def test_kernels_of_one_launched_graph_wait_for_nobody(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    trace.launch(1, 0, 90, name="cudaGraphLaunch")
    for at in range(20, 80, 10):
        trace.kernel(1, "k", at, 9)
    forward = clock(clocks_of(trace, tmp_path)[1], "forward")
    # The host is waited for until the first kernel, and while it is still in the phase behind the last.
    assert (forward.queued_gap_s, forward.host_wait_s) == (seconds(5), seconds(20 + 21))


def test_a_kernel_that_starts_long_after_its_launch_waits_for_no_host(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    launched(trace, 0, "k", 6, 10)
    # Both its launch and the kernel in front were over at 16: something else held it up for 50 us.
    launched(trace, 12, "k", 66, 34)
    forward = clock(clocks_of(trace, tmp_path)[1], "forward")
    assert (forward.host_wait_s, forward.queued_gap_s, forward.other_idle_s) == (seconds(6 + 5), 0, seconds(45))


def test_a_host_slower_than_an_idle_device_is_waited_for_until_the_device_starts(tmp_path: Path) -> None:
    # An MI300 starts kernels 15 us after their launch returned.
    trace = HandWritten()
    for number in range(20):
        launched(trace, 100.0 * number, "gemm", 100.0 * number + 19, 10)
    (device,) = clocks_of(trace, tmp_path)[1].devices
    assert device.idle_s == device.host_wait_s > 0


def step_with(side: bool) -> HandWritten:
    """A host that is ahead: 300 us of backward, then 100 us of optimizer; beside it, a collective and the next copy."""
    trace = HandWritten()
    for number, phase in enumerate(("forward", "backward", "optimizer", "transfer")):
        trace.phase(phase, 50 * number, 50)
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
        assert clock(alone, phase).busy_s == seconds(busy_us)
        assert clock(beside, phase).busy_s == seconds(busy_us + (1 if phase == "backward" else 0))
    # What the host goes through without a kernel that runs alone takes no time on the device.
    assert (clock(beside, "transfer").window_s, clock(beside, "transfer").kernels) == (0, 1)
    backward = clock(beside, "backward")
    # Beside backward until 410 and beside the optimizer from 411 on; 1 us exposed.
    assert (backward.comm_s, backward.comm_exposed_s) == (seconds(60), seconds(1))
    assert beside.whole.busy_s == seconds(99 + 401)


def test_a_collective_that_nothing_runs_beside_is_exposed(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("backward", 0, 100)
    launched(trace, 0, "gemm", 10, 50)
    launched(trace, 5, NCCL, 40, 100, SIDE)
    # A copy is no computing.
    launched(trace, 6, COPY, 100, 20)
    part = summarize(examine(trace.write(tmp_path / "t.json"))).phases.backward
    assert part is not None
    assert (part.comm_s, part.comm_exposed_s) == (seconds(100), seconds(80))


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
    assert (unlinked.busy_s, unlinked.other_idle_s) == (seconds(5 * 90), seconds(100 + 4 * 10))
    assert (unlinked.queued_gap_s, unlinked.host_wait_s) == (0, 0)
    assert (clock(found.clocks, "zero_grad").busy_s, clock(found.clocks, "forward").busy_s) == (0, seconds(90))
    assert {each.phase: each.verdict for each in found.verdicts}["unlinked"] is None


def test_devices_are_summed_and_never_united(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    launched(trace, 0, "gemm", 10, 90)
    trace.launch(9, 1)
    trace.kernel(9, "gemm", 10, 40, device=3)
    path = trace.write(tmp_path / "t.json")
    clocks = examine(path).clocks
    assert {each.device: each.busy_s for each in clocks.devices} == {0: seconds(90), 3: seconds(40)}
    assert {device: sums["busy"] for device, sums in plain_sums(path).items()} == {0: seconds(90), 3: seconds(40)}
    forward = clock(clocks, "forward")
    assert (forward.busy_s, forward.window_s) == (seconds(130), seconds(200))
    assert [each.idle_fraction for each in clocks.devices] == [pytest.approx(0.1), pytest.approx(0.6)]


def test_a_graphs_kernels_lie_in_the_queue_and_what_holds_up_the_first_is_not_the_host(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.launch(1, 0, 10, name="cudaGraphLaunch")
    trace.launch(2, 20, 10, name="cudaGraphLaunch")
    for number, start, stream in ((1, 15, MAIN), (2, 500_000, SIDE), (2, 500_101, MAIN), (1, 500_202, MAIN)):
        trace.kernel(number, "gemm", start, 100, stream=stream)
    (one,) = examine(trace.write(tmp_path / "t.json")).verdicts
    times = (one.clock.queued_gap_s, one.clock.host_wait_s, one.clock.other_idle_s)
    assert (times, one.verdict) == ((seconds(2), 0, seconds(499_885)), "stalled")


def test_the_clock_runs_over_the_whole_trace_where_phases_do_not(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.add("user_annotation", "ProfilerStep#4", 0, 1000)
    trace.add("user_annotation", "Optimizer.step#AdamW.step", 900, 10)
    for start in range(100, 900, 100):
        launched(trace, start, "gemm", start + 10, 50)
    launched(trace, 901, "gemm", 910, 20)
    _, clocks = clocks_of(trace, tmp_path)
    assert clocks.is_whole_trace
    assert (clocks.whole.busy_s, clocks.whole.window_s) == (seconds(8 * 50 + 20), seconds(1000))
    assert (clock(clocks, "optimizer").busy_s, clock(clocks, "outside").busy_s) == (seconds(20), seconds(400))


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
                name = chance.choice(["gemm", "gemm", NCCL, COPY])
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
        total = sum(getattr(one, name) for one in clocks.phases)
        assert getattr(whole, name) == pytest.approx(total, rel=1e-9, abs=5e-3 * whole.window_s)
    for verdict in found.verdicts:
        assert verdict.verdict != "queued" or (verdict.clock.idle_fraction or 0) <= 0.3
    if clocks.is_whole_trace:
        sums = (whole.busy_s, whole.comm_s, whole.comm_overlapped_s)
        assert sums == pytest.approx((plain["busy"], plain["comm"], plain["overlapped"]), abs=1e-9)
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
    sums = (device.busy_s, device.kernel_span_s, device.comm_s, device.comm_overlapped_s)
    assert sums == pytest.approx((plain["busy"], plain["span"], plain["comm"], plain["overlapped"]), rel=1e-5)


@pytest.mark.parametrize("name", ["small_fp32_inference", "small_bf16_compiled"])
def test_the_phases_of_a_real_trace_sum_to_the_captured_time(name: str) -> None:
    loaded = load_trace(TRACES / name)
    work = work_of(loaded.kernels)
    shares, step = shares_by_phase(work, 1), shares_of("step", work, 1)
    captured_s = loaded.kernels.duration_ns.sum() / 1e9
    assert sum(share.kernel_s for share in shares) == pytest.approx(captured_s)
    for share in (*shares, step):
        rows_s = {row.name: row.kernel_s for row in share.rows}
        for sums in (share.kinds_s, share.parts_s, rows_s):
            assert sum(sums.values()) == pytest.approx(share.kernel_s)
        assert sum(row.share_fraction for row in share.rows) == pytest.approx(1.0)


def test_a_real_traces_sums_agree_with_a_plain_count() -> None:
    loaded = load_trace(TRACES / "small_bf16_compiled")
    of_cat: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(gzip.decompress(loaded.path.read_bytes()))["traceEvents"]:
        of_cat.setdefault(event["cat"], []).append(event)
    launches = {one["args"]["correlation"]: one["ts"] for one in of_cat["cuda_runtime"] + of_cat.get("cuda_driver", [])}
    phases = [one for one in of_cat["user_annotation"] if one["name"].startswith("lmbench.phase:")]
    expected: dict[tuple[str, str], int] = {}
    for event in (*of_cat["kernel"], *of_cat["gpu_memcpy"], *of_cat["gpu_memset"]):
        at = launches[event["args"]["correlation"]]
        (phase,) = (one["name"][14:] for one in phases if one["ts"] <= at < one["ts"] + one["dur"])
        key = (phase, event["name"])
        expected[key] = expected.get(key, 0) + round(event["dur"] * 1e3)
    rows = [row for share in shares_by_phase(work_of(loaded.kernels), 1) for row in share.rows]
    assert {(row.phase, row.name): round(row.kernel_s * 1e9) for row in rows} == expected


@pytest.mark.parametrize(("name", "phases"), [("small_fp32_inference", 1), ("small_bf16_compiled", 3)])
def test_the_traces_window_is_the_event_span_of_the_same_steps(name: str, phases: int) -> None:
    long = [each for each in examine(TRACES / name).verdicts if (each.device_span_s or 0) > 1e-3]
    assert len(long) == phases
    for each in long:
        assert each.clock.window_s == pytest.approx(each.device_span_s, rel=0.01)
