"""Times keep their nanoseconds, launches find their kernels, and every broken, foreign or hostile trace is one line."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from trace_events import HandWritten

from lmbench.errors import UsageError
from lmbench.kernels import events
from lmbench.kernels.events import find_trace, read_trace
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.trace import load_trace


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


def statuses(found: Findings) -> dict[str, str]:
    return {guard.name: guard.status for guard in found.guards}


def launches_of(trace: HandWritten, path: Path) -> list[int]:
    return load_trace(trace.write(path / "t.json")).kernels.launch.tolist()


def test_plain_and_gzipped_files_and_lists_of_events_read_alike(tmp_path: Path) -> None:
    plain = small().write(tmp_path / "t.json")
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "packed.json").write_bytes((tmp_path / "t.json.gz").read_bytes())
    (tmp_path / "list.json").write_text(json.dumps(small().events))
    phases = [examine(path).phases for path in sorted(tmp_path.iterdir())]
    assert phases == phases[:1] * 4


@pytest.mark.parametrize("base_us", [0.0, 4_386_447_563_678.886, 1_700_000_000_000_000.0])
def test_durations_keep_their_nanoseconds_whatever_time_counts_from(tmp_path: Path, base_us: float) -> None:
    trace = small()
    for event in trace.events:
        event["ts"] += base_us
    read, _ = read_trace(find_trace(trace.write(tmp_path / "t.json"))[0])
    assert (read.kernels.end_ns - read.kernels.start_ns).tolist() == [10_250]
    # A float has quarters of a microsecond left in 2023 counted from 1970.
    error_ns = 1 if base_us < 1e13 else 500
    assert read.kernels.start_ns[0] - read.launches.start_ns[0] == pytest.approx(6_500, abs=error_ns)


DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b'{"traceEvents": [{"ph": "X", "na', "truncated"),
        (b"hello", "malformed"),
        (b"\xff\xfe\x00\x01", "is no trace"),
        (b'{"loss": 1}', "missing required field traceEvents"),
        (b'{"traceEvents": {}}', "Expected array"),
        (b'{"traceEvents": []}', "no operators and no kernels among its 0 events"),
        (b'{"traceEvents": [3]}', "Expected object, got int - at $.traceEvents[0]"),
        (b'{"traceEvents": [{"ph": "M"}]}', "no operators and no kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": NaN, "dur": 1}]}', "malformed"),
        (b'[{"x": ' + DEEP + b"}]", "nested too deeply"),
        (b"PK\x03\x04" + b"\x00" * 600, "is no trace"),
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
        ({"ts": "noon"}, "Expected float"),
        ({"ts": None}, "Expected float"),
        ({"ts": 1e300}, "no time in us"),
        ({"dur": 1e17}, "no time in us"),
        ({"dur": True}, "Expected float"),
        ({"name": 7}, "Expected str"),
        ({"args": [1]}, "Expected object"),
        ({"args": {"correlation": "one"}}, "Expected int"),
        ({"args": {"stream": 10**30}}, "Expected int"),
        ({"cat": "xpu_runtime"}, "has events of xpu_runtime, which are not read"),
        ({"cat": "Kernel"}, "has events of Kernel, which are not read"),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", [2, 4], ids=["operator", "kernel"])
def test_values_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], reason: str, which: int) -> None:
    trace = small()
    trace.events[which].update(change)
    assert reason in refusal(trace.write(tmp_path / "t.json"))


def test_a_damaged_gzip_file_and_a_gzip_bomb_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json.gz"
    packed = bytearray(gzip.compress(json.dumps(small().document()).encode()))
    path.write_bytes(packed[: len(packed) // 2])
    assert "it is damaged: Compressed file ended" in refusal(path)
    packed[len(packed) // 2] ^= 0xFF
    path.write_bytes(packed)
    assert "is damaged" in refusal(path) or "is no trace" in refusal(path)
    monkeypatch.setattr(events, "MAX_JSON_BYTES", 1 << 22)
    path.write_bytes(gzip.compress(b" " * (1 << 26)))
    assert "holds more than 4 MiB, which is the most that is read; record fewer steps" in refusal(path)


def test_damage_anywhere_is_one_line(tmp_path: Path) -> None:
    text, pick, path = json.dumps(small().document()).encode(), random.Random(3), tmp_path / "t.json"
    refused = []
    for _ in range(300):
        damaged = bytearray(text)
        for _ in range(pick.randrange(1, 4)):
            damaged[pick.randrange(len(text))] = pick.randrange(256)
        path.write_bytes(damaged[: pick.randrange(len(text))] if pick.random() < 0.3 else damaged)
        try:
            examine(path)
        except UsageError as error:
            refused.append(str(error))
    assert len(refused) > 90
    assert not [text for text in refused if "\n" in text]


def test_several_processes_are_refused(tmp_path: Path) -> None:
    trace = small()
    trace.op("aten::mm", 1.0, 10.0)
    trace.events[-1]["pid"] = 1
    assert "holds 2 processes" in refusal(trace.write(tmp_path / "processes.json"))


def test_paths_that_hold_no_trace_say_what_to_give(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in {
        tmp_path / "nothing": "does not exist",
        tmp_path / "pipe": "write the trace to a file",
        tmp_path / ("a" * 5000): "File name too long",
        tmp_path: "no lmbench result",
    }.items():
        assert reason in refusal(path)
    (tmp_path / "steps.jsonl").write_text("")
    assert "--trainer.profiler kernels" in refusal(tmp_path)


@pytest.mark.parametrize("stored", [3, [3], [{}], [{"kernels": 3}], [{"kernels": [["mm", [3, None]]]}]])
def test_notes_of_another_form_are_said_in_one_line(stored: object, tmp_path: Path) -> None:
    trace = small()
    trace.metadata["compiled_graphs"] = stored
    assert "compiled_graphs" in refusal(trace.write(tmp_path / "t.json"))


def test_a_number_of_steps_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    trace = small()
    del trace.events[0]
    trace.metadata["steps"] = 10**18
    timeline = load_trace(trace.write(tmp_path / "t.json")).timeline
    assert (timeline.steps, timeline.has_step_count) == (1, False)


def test_numbers_written_as_text_are_numbers(tmp_path: Path) -> None:
    texts = small()
    for event in texts.events:
        event["ts"], event["dur"] = str(event["ts"]), str(event["dur"])
        event["args"] = {name: str(value) for name, value in event["args"].items()}
    found = examine(texts.write(tmp_path / "t.json"))
    assert found.phases == examine(small().write(tmp_path / "u.json")).phases


@pytest.mark.parametrize("change", [{"dur": None}, {"dur": -5.0}], ids=str)
def test_events_without_a_duration_are_left_out_and_said(tmp_path: Path, change: dict[str, Any]) -> None:
    trace = small()
    trace.op("aten::never_ended", 90.0, 1.0)
    trace.events[-1].update(change)
    found, complete = examine(trace.write(tmp_path / "t.json")), examine(small().write(tmp_path / "u.json"))
    assert statuses(found) == statuses(complete) | {"unfinished_events": "warn"}
    assert found.phases == complete.phases


def test_where_correlation_ids_link_nothing_the_operators_number_does(tmp_path: Path) -> None:
    trace = HandWritten()
    for number, operator in enumerate((7, 7, 8)):
        trace.launch(100 + number, 10.0 * number, name="hipLaunchKernel")
        trace.events[-1]["args"]["External id"] = operator
    for number, operator in enumerate((7, 7, 8, 8, 9)):
        trace.kernel(900 + number, f"k{number}", 50.0 + 10 * number, 5.0, **{"External id": operator})
    # The second kernel of operator 8 comes from the only call in it; operator 9 has none.
    assert launches_of(trace, tmp_path) == [0, 1, 2, 2, -1]
    trace.kernel(100, "linked", 200.0, 5.0)
    # Where they link anything, they alone do.
    assert launches_of(trace, tmp_path) == [-1] * 5 + [0]


def test_a_kernel_belongs_to_the_last_launch_of_its_id_before_it(tmp_path: Path) -> None:
    trace = HandWritten()
    for at in (10, 30, 50):
        trace.launch(1, at)
    for at in (5, 20, 40, 60, 61):
        trace.kernel(1, "k", at, 1)
    assert launches_of(trace, tmp_path) == [0, 0, 1, 2, 2]


def captured(begin: str | None, end: str | None) -> HandWritten:
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


@pytest.mark.parametrize(
    ("calls", "missing"),
    [
        (("hipStreamBeginCapture", "hipStreamEndCapture"), 0),
        (("cudaStreamBeginCapture", None), 0),
        ((None, "hipStreamEndCapture"), 5),
    ],
)
def test_what_is_captured_into_a_graph_is_no_missing_kernel(
    tmp_path: Path, calls: tuple[str | None, str | None], missing: int
) -> None:
    found = examine(captured(*calls).write(tmp_path / "t.json"))
    assert found.completeness.captured_launches == 5 - missing
    assert found.completeness.launches_without_kernel == missing
    assert statuses(found)["launches_without_kernel"] == ("fail" if missing else "pass")
    assert statuses(found)["kernels_without_launch"] == "pass"


def test_a_fill_of_no_bytes_is_no_missing_kernel(tmp_path: Path) -> None:
    trace = small()
    trace.launch(20, 80.0, name="cudaMemsetAsync")
    found = examine(trace.write(tmp_path / "t.json"))
    assert (found.completeness.empty_fills, found.completeness.launches_without_kernel) == (1, 0)
    trace.launch(21, 90.0, name="cudaMemcpyAsync")
    assert statuses(examine(trace.write(tmp_path / "t.json")))["launches_without_kernel"] == "fail"


def test_kernels_launched_before_the_trace_began_are_said_to_be(tmp_path: Path) -> None:
    trace = HandWritten()
    for number in range(10, 15):
        trace.kernel(number, "queued before", 10.0 * number, 9.0)
    trace.launch(20, 300.0)
    trace.kernel(20, "own", 310.0, 1.0)
    for status, message in (("warn", "5 of 6 kernels have no launch in the trace, all of"), ("fail", ", 5 of them")):
        guards = examine(trace.write(tmp_path / "t.json")).guards
        (guard,) = (each for each in guards if each.name == "kernels_without_launch")
        assert guard.status == status
        assert message in guard.message
        trace.kernel(25, "lost", 400.0, 90.0)


def test_a_hundred_megabytes_are_read_in_under_ten_seconds(tmp_path: Path) -> None:
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
            trace.kernel(number, "ampere_sgemm_128x64_tn", at + 20.0, 90.0, **filler)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace.document()))
    begun = time.process_time()
    found = examine(path)
    assert time.process_time() - begun < 10.0
    assert found.completeness.kernels == 80_000
    assert found.step.parts_s.keys() == {"ffn"}
