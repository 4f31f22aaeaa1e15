"""Busy time, gaps and waits, against planted queues and streams and against plain sums of real traces."""

from __future__ import annotations

import gzip
from typing import NamedTuple

import pytest
from paths import TRACES
from plain_sums import plain_sums
from trace_events import HandWritten

from lmbench.kernels.findings import examine

LATENCY_US, GAP_US, LAUNCH_US = 2.3, 1.1, 4.0
MAIN, SIDE = 7, 20
NCCL, COPY = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", "Memcpy DtoD (Device -> Device)"


class Plan(NamedTuple):
    """A phase of a planted step: launches, the host's time between them, and the duration of each kernel."""

    phase: str
    launches: int
    host_us: float
    kernel_us: float


def simulated(steps):
    """The trace of a device with a queue: a kernel starts once it was launched and the kernel before it has ended."""
    trace = HandWritten()
    host = device = 0.0
    for index, plans in enumerate(steps):
        begin = host
        for plan in plans:
            start = host
            host += 5.0
            for _ in range(plan.launches):
                at = round(max(host + LAUNCH_US + LATENCY_US, device + GAP_US), 3)
                trace.launched(round(host, 3), "k", at, plan.kernel_us)
                device = at + plan.kernel_us
                host += LAUNCH_US + plan.host_us
            trace.phase(plan.phase, round(start, 3), round(host - start, 3))
        trace.step(index, round(begin, 3), round(host - begin, 3))
    trace.metadata["steps"] = len(steps)
    return trace


def seconds(us):
    return pytest.approx(us * 1e-6)


STEP = [("forward", 0, 50), ("backward", 50, 50), ("optimizer", 100, 50), ("transfer", 150, 50)]
ALONE = [(0, "gemm", 10, 99, MAIN), (60, "gemm", 110, 300, MAIN), (110, "gemm", 411, 100, MAIN)]
# A collective that backward launched waits on its own stream for backward's kernels, and outlasts them. A copy for the
# next step runs at once.
BESIDE = [*ALONE, (70, NCCL, 380, 60, SIDE), (160, "Memcpy HtoD (Pinned -> Device)", 200, 40, SIDE)]


@pytest.mark.parametrize(
    ("phases", "kernels", "expected"),
    [
        # The launch and the kernel before were over at 16: the second kernel waited 50 us for something else.
        ([("forward", 0, 100)], [(0, "k", 6, 10, MAIN), (12, "k", 66, 34, MAIN)],
         {"forward": {"host_wait_s": 5, "queued_gap_s": 0, "other_idle_s": 45}}),
        # An MI300 starts kernels 15 us after their launch returned, which is no other idle time.
        ([], [(100 * n, "gemm", 100 * n + 19, 10, MAIN) for n in range(20)], {"outside": {"other_idle_s": 0}}),
        (STEP, ALONE, {"forward": {"busy_s": 99}, "backward": {"busy_s": 300}, "optimizer": {"busy_s": 100}}),
        # A side stream neither ends a phase nor lengthens it; 1 us of the collective is exposed. A phase whose kernels
        # run beside others takes no time on the device.
        (STEP, BESIDE, {"forward": {"busy_s": 99}, "backward": {"busy_s": 301, "comm_s": 60, "comm_exposed_s": 1},
                        "optimizer": {"busy_s": 100}, "transfer": {"window_s": 0, "kernels": 1e6}}),
        # A copy beside a collective does not compute.
        ([("backward", 0, 100)], [(0, "gemm", 10, 50, MAIN), (5, NCCL, 40, 100, SIDE), (6, COPY, 100, 20, MAIN)],
         {"backward": {"comm_s": 100, "comm_exposed_s": 80}}),
        # A graph's kernels without launches follow each other, while the host is in a phase that launches nothing.
        ([("forward", 0, 100), ("zero_grad", 100, 900)],
         [(0, "gemm", 10, 90, MAIN), *((None, "gemm", start, 90, MAIN) for start in range(200, 700, 100))],
         {"unlinked": {"busy_s": 450, "other_idle_s": 140, "queued_gap_s": 0, "host_wait_s": 0},
          "zero_grad": {"busy_s": 0}, "forward": {"busy_s": 90}}),
    ],
    ids=["held_up", "slow_start", "alone", "side_stream", "copy_is_no_compute", "unlinked"],
)  # fmt: skip
def test_planted_times_have_their_phase_and_cause(phases, kernels, expected):
    trace = HandWritten()
    for phase in phases:
        trace.phase(*phase)
    for at, *kernel in kernels:
        if at is None:
            trace.kernel(None, *kernel[:3])
        else:
            trace.launched(at, *kernel)
    clocks = trace.examined().phases
    for phase, times in expected.items():
        assert clocks.loc[phase, [*times]].to_dict() == {name: seconds(us) for name, us in times.items()}


def test_a_host_that_is_ahead_leaves_gaps_and_the_first_step_is_not_clocked():
    step = [Plan("forward", 50, 0.0, 100.0), Plan("backward", 50, 0.0, 200.0)]
    findings = simulated([step] * 3).examined()
    phases = findings.clocks.phases
    assert findings.graph.steps == 2
    assert phases.queued_gap_s.tolist() == pytest.approx([50 * GAP_US * 1e-6] * 2, rel=0.03)
    assert phases[["host_wait_s", "launches", "kernels"]].values.tolist() == [[0, 50, 50]] * 2
    assert phases.median_kernel_s.tolist() == [seconds(100), seconds(200)]


def test_times_of_devices_are_summed():
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    trace.launched(0, "gemm", 10, 90)
    trace.launched(1, "gemm", 10, 40, device=3)
    clocks = trace.examined().clocks
    assert clocks.devices.busy_s.to_dict() == {0: seconds(90), 3: seconds(40)}
    assert clocks.phases.loc["forward", ["busy_s", "window_s"]].tolist() == [seconds(130), seconds(180)]


def test_kernels_of_a_graph_are_queued_and_its_late_first_kernel_is_not_a_wait_for_the_host():
    trace = HandWritten()
    trace.launch(1, 0, 10, name="cudaGraphLaunch")
    trace.launch(2, 20, 10, name="cudaGraphLaunch")
    for number, start, stream in ((1, 15, MAIN), (2, 500_000, SIDE), (2, 500_101, MAIN), (1, 500_202, MAIN)):
        trace.kernel(number, "gemm", start, 100, stream=stream)
    clock = trace.examined().phases.loc["outside"]
    assert (clock.queued_gap_s, clock.host_wait_s, clock.other_idle_s) == (seconds(2), 0, seconds(499_885))
    assert clock.verdict == "stalled"


def test_the_clock_runs_over_whole_foreign_steps_where_phases_do_not():
    trace = HandWritten()
    trace.range("ProfilerStep#4", 0, 1000)
    trace.range("Optimizer.step#AdamW.step", 900, 10)
    for start in range(100, 900, 100):
        trace.launched(start, "gemm", start + 10, 50)
    trace.launched(901, "gemm", 910, 20)
    clocks = trace.examined().clocks
    assert (clocks.total.busy_s, clocks.total.window_s) == (seconds(8 * 50 + 20), seconds(1000))
    assert clocks.phases.busy_s.to_dict() == {"optimizer": seconds(20), "outside": seconds(400)}


@pytest.mark.parametrize("name", ["two_gpus", "small_bf16_replayed"])
def test_recorded_traces_agree_with_plain_sums(name, tmp_path):
    path = TRACES / name / "trace.json.gz"
    plain = plain_sums(path)
    # Without steps the clock runs over the whole trace.
    (tmp_path / "t.json").write_bytes(gzip.decompress(path.read_bytes()).replace(b"lmbench.step", b"step"))
    (device,) = examine(tmp_path / "t.json").clocks.devices.itertuples()
    sums = {"busy": device.busy_s, "comm": device.comm_s, "overlapped": device.comm_s - device.comm_exposed_s}
    assert sums == pytest.approx({key: plain[key] for key in sums}, rel=1e-5)
