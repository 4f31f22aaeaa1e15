"""Every kind of broken, foreign or hostile trace is one line to the user; times keep their nanoseconds."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from trace_events import HandWritten

from lmbench.errors import UsageError
from lmbench.kernels.trace import document as reader
from lmbench.kernels.trace.document import find_trace
from lmbench.kernels.trace.events import read_events
from lmbench.kernels.trace.findings import examine


def small() -> HandWritten:
    trace = HandWritten()
    trace.step(0, 0.0, 100.0)
    trace.phase("forward", 0.0, 100.0)
    trace.op("aten::mm", 1.0, 10.0)
    trace.launch(1, 2.0)
    trace.kernel(1, "ampere_sgemm_128x64_tn", 8.5, 10.25)
    return trace


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        examine(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text or str(path.parent) in text
    return text


def test_plain_and_gzipped_files_read_alike(tmp_path: Path) -> None:
    plain = small().write(tmp_path / "t.json")
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    misnamed = tmp_path / "packed.json"
    misnamed.write_bytes(packed.read_bytes())
    assert examine(plain).phases == examine(packed).phases == examine(misnamed).phases


def test_a_list_of_events_alone_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(small().events))
    assert examine(path).completeness.kernels == 1


@pytest.mark.parametrize("base_us", [0.0, 4_386_447_563_678.886, 1_700_000_000_000_000.0])
def test_durations_keep_their_nanoseconds_whatever_time_counts_from(tmp_path: Path, base_us: float) -> None:
    trace = small()
    for event in trace.events:
        event["ts"] += base_us
    events = read_events(find_trace(trace.write(tmp_path / "t.json")))
    assert (events.device.end_ns - events.device.start_ns).tolist() == [10_250]
    # A float has quarters of a microsecond left in 2023 counted from 1970.
    assert events.device.start_ns[0] - events.launches.start_ns[0] == pytest.approx(
        6_500, abs=1 if base_us < 1e13 else 500
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"{", "is truncated"),
        (b'{"traceEvents": [{"ph": "X", "na', "is truncated"),
        (b'{"traceEvents": [{"ph": "X"},', "is truncated"),
        (b" \n\t ", "is empty"),
        (b"hello", "not JSON"),
        (b"\xff\xfe\x00\x01", "is no trace"),
        (b'{"loss": 1}', "no list `traceEvents`"),
        (b'{"traceEvents": {}}', "no list `traceEvents`"),
        (b"3", "no list `traceEvents`"),
        (b'{"traceEvents": []}', "is an empty trace"),
        (b'{"traceEvents": [3]}', "event 0: expected object, got int"),
        (b'{"traceEvents": [{"ph": "M"}]}', "no operators and no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": NaN, "dur": 1}]}', "has ts 'None'"),
        (b"[" * 200_000 + b"]" * 200_000, "event 0: expected object, got array"),
        (b'[{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}]", "nested too deeply"),
        (b'{"traceEvents": [], "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b', "traceEvents": []}', "nested too deeply"),
        (b"PK\x03\x04" + b"\x00" * 600, "is a zip archive, which is not read; unpack it"),
        (b'{"traceEvents": ' + b"1" * 10_000 + b"}", "is no trace"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert reason in refusal(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ts": "noon"}, "has ts 'noon'"),
        ({"ts": None}, "has ts 'None'"),
        ({"ts": 1e300}, "has ts"),
        ({"dur": "nan"}, "has dur 'nan'"),
        ({"dur": True}, "has dur"),
        ({"dur": 1e17}, "has dur"),
        ({"name": 7}, "has no name"),
        ({"args": [1]}, "args of event"),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", [2, 3, 4], ids=["operator", "launch", "kernel"])
def test_values_of_wrong_types_are_named(tmp_path: Path, change: dict[str, Any], reason: str, which: int) -> None:
    trace = small()
    trace.events[which].update(change)
    assert reason in refusal(trace.write(tmp_path / "t.json"))


def test_ids_of_wrong_types_count_as_missing_and_fail_a_guard(tmp_path: Path) -> None:
    trace = small()
    trace.events[4]["args"]["correlation"] = "one"
    found = examine(trace.write(tmp_path / "t.json"))
    assert [share.phase for share in found.phases] == ["unlinked"]
    assert {guard.name: guard.status for guard in found.guards}["kernels_without_launch"] == "fail"


def test_a_truncated_gzip_file_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    whole = gzip.compress(json.dumps(small().document()).encode())
    path.write_bytes(whole[: len(whole) // 2])
    assert "it is damaged: Compressed file ended" in refusal(path)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    path.write_bytes(bytes(damaged))
    assert "is damaged" in refusal(path) or "is no trace" in refusal(path)


def test_a_gzip_bomb_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_JSON_BYTES", 1 << 22)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 26)))
    assert "holds more than 4 MiB, which is the most that is read" in refusal(path)


def test_several_processes_are_refused(tmp_path: Path) -> None:
    trace = small()
    trace.op("aten::mm", 1.0, 10.0)
    trace.events[-1]["pid"] = 1
    assert "holds 2 processes" in refusal(trace.write(tmp_path / "processes.json"))


def test_paths_that_hold_no_trace_say_what_to_give(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    assert "write the trace to a file" in refusal(tmp_path / "pipe")
    assert "File name too long" in refusal(tmp_path / ("a" * 5000))
    assert "no lmbench result" in refusal(tmp_path)
    (tmp_path / "steps.jsonl").write_text("")
    assert "--trainer.profiler kernels" in refusal(tmp_path)


def test_a_number_of_steps_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.metadata["steps"] = 10**30
    trace.phase("forward", 0, 100)
    trace.launch(1, 10)
    trace.kernel(1, "k", 20, 30)
    found = examine(trace.write(tmp_path / "t.json"))
    assert (found.steps, found.has_step_count) == (1, False)


def test_an_unknown_phase_is_named(tmp_path: Path) -> None:
    trace = small()
    trace.phase("warp", 0.0, 1.0)
    with pytest.raises(UsageError, match="'warp'"):
        examine(trace.write(tmp_path / "t.json"))


def test_hundred_megabytes_are_read_in_under_ten_seconds(tmp_path: Path) -> None:
    trace = HandWritten()
    # The blanks stand for those of torch.profiler's own layout, which Python's encoder would take a minute for.
    filler = {"External id": 123_456, "Ev Idx": 654_321, "Sequence number": 1, "Fwd thread id": 0, "": " " * 90}
    for step in range(20):
        trace.step(step, step * 1e6, 1e6)
        trace.phase("forward", step * 1e6, 1e6)
        for index in range(4_000):
            at, number = step * 1e6 + index * 200.0, step * 4_000 + index
            trace.module(f"blocks.{index % 36}.ffn", at, 150.0)
            for inner in range(3):
                trace.op("aten::linear", at + inner, 100.0 - 2 * inner, **filler)
            trace.launch(number, at + 10.0)
            trace.kernel(
                number, "ampere_sgemm_128x64_tn", at + 20.0, 90.0, **filler, grid=[12, 12, 1], block=[128, 1, 1]
            )
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace.document()))
    assert path.stat().st_size > 100 * 2**20
    begun = time.process_time()
    found = examine(path)
    taken_s = time.process_time() - begun
    assert taken_s < 10.0, taken_s
    assert found.completeness.kernels == 80_000
    assert found.step.parts_s.keys() == {"ffn"}
