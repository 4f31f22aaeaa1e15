"""Busy, gaps and waits against a plain count of time, on made-up queues and on a real trace."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from paths import TRACES
from trace_events import HandWritten

from lmbench.kernels.trace.clocks import KERNEL_GAP_NS, QUEUED_LEAD_NS, START_NS, Clocks, PhaseClock, phase_clocks
from lmbench.kernels.trace.findings import examine
from lmbench.kernels.trace.kernels import Trace, load_trace
from lmbench.kernels.trace.shares import captured_s, shares_by_phase, whole_step

PHASES = ("data", "forward", "backward", "optimizer", "zero_grad")
LATENCY_US, GAP_US, LAUNCH_US = 2.3, 1.1, 4.0


class Plan(NamedTuple):
    """A phase of a made-up step: launches, the host's time from one to the next, and each kernel's duration."""

    phase: str
    launches: int
    host_us: float
    kernel_us: float


def simulated(steps: list[list[Plan]], numbered: bool = True, jitter: random.Random | None = None) -> HandWritten:
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


def clocks_of(trace: HandWritten, path: Path) -> tuple[Trace, Clocks]:
    loaded = load_trace(trace.write(path / "t.json"))
    return loaded, phase_clocks(loaded.kernels, loaded.events, loaded.timeline)


def clock(clocks: Clocks, phase: str) -> PhaseClock:
    return next(one for one in clocks.phases if one.phase == phase)


def counted(trace: Trace) -> dict[str, dict[str, int]]:
    """The same sums in ns by going through kernels one after the other, for a trace of one stream.

    The rule is that of the code; the tests with plans check it.
    """
    kernels, launches, timeline = trace.kernels, trace.events.launches, trace.timeline
    host = list(zip(timeline.phases, timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True))
    sums: dict[str, dict[str, int]] = {
        phase: dict.fromkeys(("busy", "gap", "wait", "other"), 0) for phase in timeline.phases
    }

    def waits(since: int, until: int) -> None:
        for phase, start, end in host:
            sums[phase]["wait"] += max(0, min(until, end) - max(since, start))

    ended, last = host[0][1], None
    for index in range(len(kernels.names)):
        launch = int(kernels.launch[index])
        begun, returned = int(launches.start_ns[launch]), int(launches.end_ns[launch])
        start, own = int(kernels.start_ns[index]), sums[kernels.phases[index]]
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
        ended, last = int(kernels.end_ns[index]), own
        own["busy"] += ended - start
    waits(ended, host[-1][2])
    return sums


@pytest.mark.parametrize("seed", range(12))
def test_random_queues_agree_with_a_plain_count(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    steps = [
        [Plan(phase, chance.choice([0, 1, 3, 12]), chance.uniform(0, 30), chance.uniform(1, 60)) for phase in PHASES]
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
        assert one.busy_s == pytest.approx(50 * kernel_us * 1e-6, rel=1e-6)
        assert one.median_kernel_s == pytest.approx(kernel_us * 1e-6)
        assert (one.launches, one.kernels) == (50, 50)


def test_a_slow_host_makes_the_device_wait_and_says_how_much_a_launch_costs(tmp_path: Path) -> None:
    step = [Plan("forward", 50, 36.0, 10.0), Plan("optimizer", 2, 36.0, 20.0)]
    _, clocks = clocks_of(simulated([step, step]), tmp_path)
    forward = clock(clocks, "forward")
    assert forward.wait_fraction == pytest.approx(0.75, abs=0.03)
    assert forward.host_s_per_launch == pytest.approx(40e-6, rel=0.03)
    assert forward.queued_gap_s < 3e-6


def test_a_phase_without_kernels_has_the_time_in_which_the_device_waits_for_it(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("data", 0, 100)
    trace.phase("forward", 100, 100)
    trace.launch(1, 110)
    trace.kernel(1, "k", 120, 30)
    _, clocks = clocks_of(trace, tmp_path)
    assert clock(clocks, "data").window_s == pytest.approx(100e-6)
    assert clock(clocks, "data").host_wait_s == pytest.approx(100e-6)
    assert clock(clocks, "forward").window_s == pytest.approx(100e-6)
    assert clock(clocks, "forward").busy_s == pytest.approx(30e-6)


def test_kernels_of_one_launched_graph_wait_for_nobody(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    trace.launch(1, 0, 90, name="cudaGraphLaunch")
    for at in range(20, 80, 10):
        trace.kernel(1, "k", at, 9)
    _, clocks = clocks_of(trace, tmp_path)
    forward = clock(clocks, "forward")
    assert forward.queued_gap_s == pytest.approx(5e-6)
    # Until the first kernel, and while the host is still in the phase behind the last.
    assert forward.host_wait_s == pytest.approx((20 + 21) * 1e-6)


def test_a_kernel_that_starts_long_after_its_launch_waits_for_no_host(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    trace.launch(1, 0, 4)
    trace.launch(2, 12, 4)
    trace.kernel(1, "k", 6, 10)
    # Both its launch and the kernel in front were over at 16: something else held it up for 50 us.
    trace.kernel(2, "k", 66, 34)
    _, clocks = clocks_of(trace, tmp_path)
    forward = clock(clocks, "forward")
    assert forward.host_wait_s == pytest.approx((6 + 5) * 1e-6)
    assert (forward.queued_gap_s, forward.other_idle_s) == (0, pytest.approx(45e-6))


def test_a_trace_without_ranges_has_one_clock_for_all_of_it(tmp_path: Path) -> None:
    trace = HandWritten()
    for number in range(1, 11):
        trace.launch(number, 40.0 * number)
        trace.kernel(number, "k", 40.0 * number + 8, 10)
    found = examine(trace.write(tmp_path / "t.json"))
    (one,) = found.verdicts
    assert (one.phase, one.verdict, one.clock.kernels) == ("outside", "host-bound", 10)
    assert one.clock.busy_s == pytest.approx(100e-6)
    assert one.clock.window_s == pytest.approx((9 * 40 + 10) * 1e-6)


def test_kernels_that_run_at_once_are_busy_once(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("backward", 0, 100)
    for number in (1, 2):
        trace.launch(number, number)
        trace.kernel(number, "k", 20 + number, 50, stream=number)
    loaded, clocks = clocks_of(trace, tmp_path)
    assert clock(clocks, "backward").busy_s == pytest.approx(51e-6)
    assert captured_s(loaded.kernels) == pytest.approx(100e-6)


def test_the_phases_of_a_real_trace_sum_to_the_captured_time() -> None:
    for name in ("small_fp32_inference", "small_bf16_compiled"):
        loaded = load_trace(TRACES / name)
        shares = shares_by_phase(loaded.kernels)
        total = captured_s(loaded.kernels)
        assert sum(share.kernel_s for share in shares) == pytest.approx(total, rel=1e-9)
        assert whole_step(shares).kernel_s == pytest.approx(total, rel=1e-9)
        for share in (*shares, whole_step(shares)):
            for sums in (share.kinds_s, share.parts_s, {row.name: 0 for row in share.rows}):
                assert sums
            assert sum(share.kinds_s.values()) == pytest.approx(share.kernel_s)
            assert sum(share.parts_s.values()) == pytest.approx(share.kernel_s)
            assert sum(row.total_s for row in share.rows) == pytest.approx(share.kernel_s)
            assert sum(row.share_fraction for row in share.rows) == pytest.approx(1.0)


def test_a_real_traces_sums_agree_with_a_plain_count() -> None:
    loaded = load_trace(TRACES / "small_bf16_compiled")
    of_cat: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(gzip.decompress(loaded.source.path.read_bytes()))["traceEvents"]:
        of_cat.setdefault(event["cat"], []).append(event)
    launched = {one["args"]["correlation"]: one["ts"] for one in of_cat["cuda_runtime"] + of_cat.get("cuda_driver", [])}
    phases = [one for one in of_cat["user_annotation"] if one["name"].startswith("lmbench.phase:")]
    expected: dict[tuple[str, str], int] = {}
    for event in (*of_cat["kernel"], *of_cat["gpu_memcpy"], *of_cat["gpu_memset"]):
        at = launched[event["args"]["correlation"]]
        (phase,) = (one["name"][14:] for one in phases if one["ts"] <= at < one["ts"] + one["dur"])
        key = (phase, event["name"])
        expected[key] = expected.get(key, 0) + round(event["dur"] * 1e3)
    shares = shares_by_phase(loaded.kernels)
    assert {(share.phase, row.name): round(row.total_s * 1e9) for share in shares for row in share.rows} == expected


def test_the_traces_window_is_the_event_span_of_the_same_steps() -> None:
    queued = examine(TRACES / "small_fp32_inference")
    (forward,) = (one for one in queued.verdicts if one.phase == "forward")
    assert forward.device_span_s is not None
    assert forward.clock.window_s == pytest.approx(forward.device_span_s, rel=0.01)
    long = {
        one.phase: one for one in examine(TRACES / "small_bf16_compiled").verdicts if (one.device_span_s or 0) > 1e-3
    }
    assert set(long) == {"forward", "backward", "optimizer"}
    for one in long.values():
        assert one.clock.window_s == pytest.approx(one.device_span_s, rel=0.01)
