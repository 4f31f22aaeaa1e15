"""The reader of traces: exact times, the launch of each kernel, and one line for every trace that cannot be read."""

from __future__ import annotations

import gzip
import json
import os

import pytest
from fit_process import statuses
from trace_events import HandWritten

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


def test_plain_and_gzipped_files_read_alike(tmp_path):
    plain = small().write(tmp_path / "t.json")
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert len({examine(path).work.rows.to_csv() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("base_us", [0.0, 4_386_447_563_678.886, 1_700_000_000_000_000.0])
def test_durations_keep_their_nanoseconds_whatever_the_origin_of_times(tmp_path, base_us):
    trace = small()
    for event in trace.events:
        event["ts"] += base_us
    read, _ = read_trace(trace.write(tmp_path / "t.json"))
    assert read.kernels.duration_ns.tolist() == [10_250]
    # A float counted from 1970 resolves only a quarter of a microsecond in 2023.
    error_ns = 1 if base_us < 1e13 else 500
    assert read.kernels.start_ns[0] - read.calls.start_ns[0] == pytest.approx(6_500, abs=error_ns)


DEEP = b"[" * 200_000 + b"]" * 200_000
NOTES, PROCESSES = small(), small()
NOTES.metadata["compiled_graphs"] = [{"kernels": [["mm", [3, None]]]}]
PROCESSES.op("aten::mm", 1.0, 10.0)
PROCESSES.events[-1]["pid"] = 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b'{"traceEvents": [{"ph": "X", "na', "truncated"),
        (b"\xff\xfe\x00\x01", "is no trace"),
        (b'{"loss": 1}', "missing required field traceEvents"),
        (b'{"traceEvents": []}', "no operators and no kernels among its 0 events"),
        (b'{"traceEvents": [3]}', "Expected object, got int - at $.traceEvents[0]"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": NaN, "dur": 1}]}', "malformed"),
        (b'{"x": ' + DEEP + b"}", "is no trace"),
        (json.dumps(small().events).encode(), "Expected object, got array"),
        (b"PK\x03\x04" + b"\x00" * 600, "is no trace"),
        (small(ts="noon"), "Expected float"),
        (small(ts=1e300), "no time in us"),
        (small(name=7), "Expected str"),
        (small(args={"correlation": 10**30}), "Expected int"),
        (small(cat="xpu_runtime"), "has events of xpu_runtime, which are not read"),
        (NOTES, "compiled_graphs"),
        (PROCESSES, "holds 2 processes"),
        (gzip.compress(b" " * (1 << 26), mtime=0), "holds more than 4 MiB, which is the most that is read"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path, monkeypatch, content, reason):
    monkeypatch.setattr(events, "MAX_JSON_BYTES", 1 << 22)
    path = tmp_path / "t.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content.document()).encode())
    assert reason in refusal(path)


def test_a_path_without_a_trace_is_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {"nothing": "is missing", "pipe": "no regular file", "a" * 5000: "File name too long"}.items():
        assert reason in refusal(tmp_path / name)
    assert "--trainer.profiler kernels" in refusal(tmp_path)


@pytest.mark.parametrize("duration", [None, -5.0])
def test_events_without_a_duration_are_left_out(duration):
    trace = small()
    trace.op("aten::never_ended", 90.0, duration)
    assert trace.examined().work.rows.equals(small().examined().work.rows)


def test_a_kernel_belongs_to_the_last_launch_of_its_id_before_it():
    trace = HandWritten()
    for at in (10, 30, 50):
        trace.launch(1, at)
    for at in (5, 20, 40, 60, 61):
        trace.kernel(1, "k", at, 1)
    trace.kernel(2, "launched before", 70, 1)
    assert trace.loaded().kernels.launch.tolist() == [0, 0, 1, 2, 2, -1]


def captured(begin, end):
    """Five launches into a graph, and the call that replays it."""
    trace = HandWritten()
    if begin:
        trace.launch(1, 0.0, name=begin)
    for number in range(2, 7):
        trace.launch(number, 10.0 * number, name="hipExtModuleLaunchKernel")
    if end:
        trace.launch(8, 80.0, name=end)
    trace.launch(9, 100.0, name="hipGraphLaunch")
    for number in range(5):
        trace.kernel(9, "Cijk_Alik_Bljk_BBS_BH", 120.0 + 10 * number, 9.0)
    return trace


def with_fill():
    trace = small()
    trace.launch(20, 80.0, name="cudaMemsetAsync")
    return trace


@pytest.mark.parametrize(
    ("trace", "missing"),
    [
        (captured("hipStreamBeginCapture", "hipStreamEndCapture"), 0),
        (captured("cudaStreamBeginCapture", None), 0),
        (captured(None, "hipStreamEndCapture"), 5),
        # A fill of no bytes starts no kernel.
        (with_fill(), 0),
    ],
)
def test_a_launch_that_starts_nothing_does_not_miss_a_kernel(trace, missing):
    findings = trace.examined()
    assert findings.completeness["launch_without_kernel_count"] == missing
    expected = {"launches_without_kernel": "fail" if missing else "pass", "kernels_without_launch": "pass"}
    assert statuses(findings).items() >= expected.items()


def test_kernels_that_the_traced_steps_did_not_launch_are_not_counted():
    trace = HandWritten()
    for number in range(10, 15):
        trace.kernel(number, "queued before", 10.0 * number, 9.0)
    for step in (0, 1):
        trace.range(f"ProfilerStep#{step}", 80.0 * step, 80.0)
        trace.launch(20 + step, 80.0 * step + 5)
        trace.kernel(20 + step, "own", 160.0 + 40 * step, 30.0)
    trace.launch(22, 165.0)
    trace.kernel(22, "behind the steps", 240.0, 7.0)
    findings = trace.examined()
    assert findings.work.seconds("name") == {"own": pytest.approx(30e-6)}
    # The clock starts when the queue from before the trace is empty, at 149.
    assert findings.clocks.total.window_s == pytest.approx((230e-6 - 149e-6) / 2)
    count = findings.completeness
    assert (count["before_s"], count["outside_steps_s"]) == (pytest.approx(45e-6), pytest.approx(7e-6))
    assert statuses(findings)["kernels_without_launch"] == "pass"
    # One that the trace lost.
    trace.kernel(25, "lost", 250.0, 90.0)
    assert statuses(trace.examined())["kernels_without_launch"] == "fail"
