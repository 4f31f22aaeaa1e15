"""Busy time, gaps and waits, against planted queues and streams and against plain sums of real traces."""

from __future__ import annotations

import gzip

import pytest
from paths import TRACES
from plain_sums import plain_sums
from tables import cases
from trace_events import HandWritten, planted

from lmbench.kernels.findings import examine

LATENCY_US, GAP_US, LAUNCH_US = 2.3, 1.1, 4.0


def simulated(phases, steps):
    """The trace of a device with a queue: a kernel starts once it was launched and the kernel before it has ended.

    Each phase of a step has a number of launches, the host's time between them, and the duration of each kernel, in us.
    """
    trace = HandWritten()
    host = device = 0.0
    for index in range(steps):
        begin = host
        for phase, (launches, host_us, kernel_us) in phases.items():
            start = host
            host += 5.0
            for _ in range(launches):
                at = round(max(host + LAUNCH_US + LATENCY_US, device + GAP_US), 3)
                trace.launched(round(host, 3), "k", at, kernel_us)
                device = at + kernel_us
                host += LAUNCH_US + host_us
            trace.phase(phase, round(start, 3), round(host - start, 3))
        trace.step(index, round(begin, 3), round(host - begin, 3))
    trace.metadata["steps"] = steps
    return trace


def seconds(us):
    return pytest.approx(us * 1e-6)


PLANTED = planted("""
# The launch and the kernel before were over at 16: the second kernel waited 50 us for something else.
held_up:
- [phase, forward, 0, 100]
- [launched, 0, k, 6, 10]
- [launched, 12, k, 66, 34]
# An MI300 starts kernels 15 us after their launch returned, which is no other idle time.
slow_start:
- [launched, 0, gemm, 19, 10]
- [launched, 100, gemm, 119, 10]
- [launched, 200, gemm, 219, 10]
alone:
- &forward [phase, forward, 0, 50]
- &backward [phase, backward, 50, 50]
- &optimizer [phase, optimizer, 100, 50]
- &first [launched, 0, gemm, 10, 99]
- &second [launched, 60, gemm, 110, 300]
- &third [launched, 110, gemm, 411, 100]
# A collective that backward launched waits on its own stream for backward's kernels, and outlasts them by 1 us, which
# is exposed. A copy for the next step runs at once. A side stream neither ends a phase nor lengthens it, and a phase
# whose kernels run beside others takes no time on the device.
side_stream:
- *forward
- *backward
- *optimizer
- [phase, transfer, 150, 50]
- *first
- *second
- *third
- [launched, 70, ncclDevKernel_AllReduce_Sum_f32_RING_LL(int), 380, 60, 20]
- [launched, 160, Memcpy HtoD (Pinned -> Device), 200, 40, 20]
# A copy beside a collective does not compute.
copy_is_no_compute:
- [phase, backward, 0, 100]
- [launched, 0, gemm, 10, 50]
- [launched, 5, ncclDevKernel_AllReduce_Sum_f32_RING_LL(int), 40, 100, 20]
- [launched, 6, Memcpy DtoD (Device -> Device), 100, 20]
# A graph's kernels without launches follow each other, while the host is in a phase that launches nothing.
unlinked:
- [phase, forward, 0, 100]
- [phase, zero_grad, 100, 900]
- [launched, 0, gemm, 10, 90]
- [kernel, null, gemm, 200, 90]
- [kernel, null, gemm, 300, 90]
- [kernel, null, gemm, 400, 90]
- [kernel, null, gemm, 500, 90]
- [kernel, null, gemm, 600, 90]
devices:
- [phase, forward, 0, 100]
- [launched, 0, gemm, 10, 90]
- [launched, 1, gemm, 10, 40, {device: 3}]
late_graph:
- [launch, 1, 0, 10, {name: cudaGraphLaunch}]
- [launch, 2, 20, 10, {name: cudaGraphLaunch}]
- [kernel, 1, gemm, 15, 100]
- [kernel, 2, gemm, 500000, 100, {stream: 20}]
- [kernel, 2, gemm, 500101, 100]
- [kernel, 1, gemm, 500202, 100]
foreign_step:
- [range, ProfilerStep#4, 0, 1000]
- [range, Optimizer.step#AdamW.step, 900, 10]
- [launched, 100, gemm, 110, 400]
- [launched, 901, gemm, 910, 20]
""")


@cases("""
- [trace, expected]
- [held_up, {forward: {host_wait_s: 5, queued_gap_s: 0, other_idle_s: 45}}]
- [slow_start, {outside: {other_idle_s: 0}}]
- [alone, {forward: {busy_s: 99}, backward: {busy_s: 300}, optimizer: {busy_s: 100}}]
- [side_stream, {forward: {busy_s: 99}, backward: {busy_s: 301, comm_s: 60, comm_exposed_s: 1},
                 optimizer: {busy_s: 100}, transfer: {window_s: 0, kernels: 1000000}}]
- [copy_is_no_compute, {backward: {comm_s: 100, comm_exposed_s: 80}}]
- [unlinked, {unlinked: {busy_s: 450, other_idle_s: 140, queued_gap_s: 0, host_wait_s: 0},
              zero_grad: {busy_s: 0}, forward: {busy_s: 90}}]
- [devices, {forward: {busy_s: 130, window_s: 180}}]
# Kernels of a graph are queued, and its late first kernel is not a wait for the host.
- [late_graph, {outside: {queued_gap_s: 2, host_wait_s: 0, other_idle_s: 499885}}]
- [foreign_step, {optimizer: {busy_s: 20}, outside: {busy_s: 400}}]
""")
def test_planted_times_have_their_phase_and_cause(trace, expected):
    clocks = PLANTED[trace].examined().phases
    for phase, times in expected.items():
        assert clocks.loc[phase, [*times]].to_dict() == {name: seconds(us) for name, us in times.items()}


def test_a_host_that_is_ahead_leaves_gaps_and_the_first_step_is_not_clocked():
    findings = simulated({"forward": [50, 0, 100], "backward": [50, 0, 200]}, 3).examined()
    phases = findings.clocks.phases
    assert findings.graph.steps == 2
    assert phases.queued_gap_s.tolist() == pytest.approx([50 * GAP_US * 1e-6] * 2, rel=0.03)
    assert phases[["host_wait_s", "launches", "kernels"]].values.tolist() == [[0, 50, 50]] * 2
    assert phases.median_kernel_s.tolist() == [seconds(100), seconds(200)]


def test_the_clock_of_each_device_is_its_own():
    assert PLANTED["devices"].examined().clocks.devices.busy_s.to_dict() == {0: seconds(90), 3: seconds(40)}


def test_the_clock_runs_over_whole_foreign_steps_where_phases_do_not():
    total = PLANTED["foreign_step"].examined().clocks.total
    assert (total.busy_s, total.window_s) == (seconds(420), seconds(1000))


@cases("name", "two_gpus", "small_bf16_replayed")
def test_recorded_traces_agree_with_plain_sums(name, tmp_path):
    path = TRACES / name / "trace.json.gz"
    plain = plain_sums(path)
    # Without steps the clock runs over the whole trace.
    (tmp_path / "t.json").write_bytes(gzip.decompress(path.read_bytes()).replace(b"lmbench.step", b"step"))
    (device,) = examine(tmp_path / "t.json").clocks.devices.itertuples()
    sums = {"busy": device.busy_s, "comm": device.comm_s, "overlapped": device.comm_s - device.comm_exposed_s}
    assert sums == pytest.approx({key: plain[key] for key in sums}, rel=1e-5)
