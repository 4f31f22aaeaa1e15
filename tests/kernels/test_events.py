"""The reader of traces: exact times, the launch of each kernel, and one line for every trace that cannot be read."""

from __future__ import annotations

import gzip
import os

import pytest
from fit_process import statuses
from tables import cases
from trace_events import HandWritten, planted

from lmbench.errors import UsageError
from lmbench.kernels import events
from lmbench.kernels.events import read_trace
from lmbench.kernels.findings import examine


def small(**changes):
    """A step with an operator, a launch and its kernel; `changes` are made to the kernel's event."""
    trace = HandWritten()
    trace.step(0, 0.0, 100.0)
    trace.phase("forward", 0.0, 100.0)
    trace.op("aten::mm", 1.0, 10.0)
    trace.launched(2.0, "ampere_sgemm_128x64_tn", 8.5, 10.25)
    trace.events[-1].update(changes)
    return trace


def refusal(path):
    with pytest.raises(UsageError) as caught:
        examine(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path.parent) in text
    return text


@cases("base_us", 0.0, 4_386_447_563_678.886, 1_700_000_000_000_000.0)
def test_durations_keep_their_nanoseconds_whatever_the_origin_of_times(tmp_path, base_us):
    trace = small()
    for event in trace.events:
        event["ts"] += base_us
    read, _ = read_trace(trace.write(tmp_path / "t.json"))
    assert read.kernels.duration_ns.tolist() == [10_250]
    # A float counted from 1970 resolves only a quarter of a microsecond in 2023.
    error_ns = 1 if base_us < 1e13 else 500
    assert read.kernels.start_ns[0] - read.calls.start_ns[0] == pytest.approx(6_500, abs=error_ns)


@cases(
    r"""
- [content, reason]
- ["", truncated]
- ['{"traceEvents": [{"ph": "X", "na', truncated]
- ["\xff\xfe\0\x01", is no trace]
- ["PK\x03\x04\0\0", is no trace]
- ['{"loss": 1}', missing required field traceEvents]
- ['[{"ph": "X"}]', "Expected object, got array"]
- ['{"traceEvents": []}', no operators and no kernels among its 0 events]
- ['{"traceEvents": [3]}', "Expected object, got int - at $.traceEvents[0]"]
- ['{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": NaN, "dur": 1}]}', malformed]
- ['{"lmbench": {"compiled_graphs": [{"kernels": [["mm", [3, null]]]}]}, "traceEvents": []}', compiled_graphs]
""",
    ('{"x": ' + "[" * 200_000 + "]" * 200_000 + "}", "is no trace"),
    (gzip.compress(b" " * (1 << 26), mtime=0).decode("latin-1"), "holds more than 4 MiB, which is the most that"),
    ids=lambda value: value[:24],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path, monkeypatch, content, reason):
    monkeypatch.setattr(events, "MAX_JSON_BYTES", 1 << 22)
    path = tmp_path / "t.json"
    path.write_bytes(content.encode("latin-1"))
    assert reason in refusal(path)


@cases("""
- [changes, reason]
- [{ts: noon}, Expected float]
- [{ts: 1.0e+300}, no time in us]
- [{name: 7}, Expected str]
- [{args: {correlation: 1000000000000000000000000000000}}, Expected int]
- [{cat: xpu_runtime}, 'has events of xpu_runtime, which are not read']
- [{cat: cpu_op, pid: 1}, holds 2 processes]
""")
def test_a_trace_with_an_event_that_is_none_is_refused_in_one_line(tmp_path, changes, reason):
    assert reason in refusal(small(**changes).write(tmp_path / "t.json"))


def test_a_path_without_a_trace_is_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {"nothing": "is missing", "pipe": "no regular file", "a" * 5000: "File name too long"}.items():
        assert reason in refusal(tmp_path / name)
    assert "--trainer.profiler kernels" in refusal(tmp_path)


@cases("duration", None, -5.0)
def test_events_without_a_duration_are_left_out(duration):
    trace = small()
    trace.op("aten::never_ended", 90.0, duration)
    assert trace.examined().work.rows.equals(small().examined().work.rows)


PLANTED = planted("""
one_id:
- [launch, 1, 10]
- [launch, 1, 30]
- [launch, 1, 50]
- [kernel, 1, k, 5, 1]
- [kernel, 1, k, 20, 1]
- [kernel, 1, k, 40, 1]
- [kernel, 1, k, 60, 1]
- [kernel, 1, k, 61, 1]
- [kernel, 2, launched before, 70, 1]
# Launches into a graph, and the call that replays it, of a capture that the trace has as a whole, without its end and
# without its beginning.
capture:
- &begin [launch, 1, 0, 4, {name: hipStreamBeginCapture}]
- &into [launch, 2, 20, 4, {name: hipExtModuleLaunchKernel}]
- &end [launch, 3, 80, 4, {name: hipStreamEndCapture}]
- &replay [launch, 4, 100, 4, {name: hipGraphLaunch}]
- &replayed [kernel, 4, Cijk_Alik_Bljk_BBS_BH, 120, 9]
capture_without_end: [[launch, 1, 0, 4, {name: cudaStreamBeginCapture}], *into, *replay, *replayed]
capture_without_beginning: [*into, *end, *replay, *replayed]
# A launch after the capture, whose kernel the trace lost.
capture_and_loss: [*begin, *into, *end, *replay, *replayed, [launch, 5, 140]]
# A fill of no bytes starts no kernel.
fill: [[launch, 1, 80, 4, {name: cudaMemsetAsync}], *replay, *replayed]
two_steps:
- [kernel, 10, queued before, 100, 9]
- [kernel, 11, queued before, 110, 9]
- [kernel, 12, queued before, 120, 9]
- [kernel, 13, queued before, 130, 9]
- [kernel, 14, queued before, 140, 9]
- [range, ProfilerStep#0, 0, 80]
- [launch, 20, 5]
- [kernel, 20, own, 160, 30]
- [range, ProfilerStep#1, 80, 80]
- [launch, 21, 85]
- [kernel, 21, own, 200, 30]
- [launch, 22, 165]
- [kernel, 22, behind the steps, 240, 7]
""")


def test_a_kernel_belongs_to_the_last_launch_of_its_id_before_it():
    assert PLANTED["one_id"].loaded().kernels.launch.tolist() == [0, 0, 1, 2, 2, -1]


@cases("""
- [trace, missing]
- [capture, 0]
- [capture_without_end, 0]
- [capture_without_beginning, 1]
- [capture_and_loss, 1]
- [fill, 0]
""")
def test_a_launch_that_starts_nothing_does_not_miss_a_kernel(trace, missing):
    findings = PLANTED[trace].examined()
    assert findings.completeness["launch_without_kernel_count"] == missing
    expected = {"launches_without_kernel": "fail" if missing else "pass", "kernels_without_launch": "pass"}
    assert statuses(findings).items() >= expected.items()


def test_kernels_that_the_traced_steps_did_not_launch_are_not_counted():
    findings = PLANTED["two_steps"].examined()
    assert findings.work.seconds("name") == {"own": pytest.approx(30e-6)}
    # The clock starts when the queue from before the trace is empty, at 149.
    assert findings.clocks.total.window_s == pytest.approx((230e-6 - 149e-6) / 2)
    count = findings.completeness
    assert (count["before_s"], count["outside_steps_s"]) == (pytest.approx(45e-6), pytest.approx(7e-6))
    assert statuses(findings)["kernels_without_launch"] == "pass"
    # One that the trace lost.
    PLANTED["two_steps"].kernel(25, "lost", 250.0, 90.0)
    assert statuses(PLANTED["two_steps"].examined())["kernels_without_launch"] == "fail"
