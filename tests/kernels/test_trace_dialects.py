"""Profilers of other ages and devices: what they write is read as what it is, or refused with the true reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from trace_events import HandWritten

from lmbench.errors import UsageError
from lmbench.kernels.trace import document
from lmbench.kernels.trace.document import find_trace
from lmbench.kernels.trace.events import read_events
from lmbench.kernels.trace.findings import Findings, examine
from lmbench.kernels.trace.kernels import load_trace

# Kineto's categories up to torch 1.11; its threads are text, and its operator's number is written small.
OLD = {
    "kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "cuda_runtime": "Runtime",
    "cpu_op": "Operator", "user_annotation": "Operator",
}  # fmt: skip


def training_step() -> HandWritten:
    trace = HandWritten()
    trace.add("user_annotation", "ProfilerStep#1", 0.0, 400.0)
    trace.add("user_annotation", "Optimizer.step#SGD.step", 200.0, 100.0)
    for number, (at, name) in enumerate(((10.0, "volta_sgemm_128x64_tn"), (210.0, "multi_tensor_apply_kernel")), 1):
        trace.op("aten::mm", at, 30.0)
        trace.launch(number, at + 5)
        trace.kernel(number, name, at + 15, 20.0 * number)
    trace.launch(9, 350.0, name="cudaMemcpyAsync")
    trace.kernel(9, "Memcpy DtoH (Device -> Pageable)", 360.0, 3.0)
    return trace


def statuses(found: Findings) -> dict[str, str]:
    return {guard.name: guard.status for guard in found.guards}


def rows(found: Findings) -> list[tuple[str, str, int, float]]:
    return [(one.phase, row.name, row.instances, row.total_s) for one in found.phases for row in one.rows]


def test_kineto_of_torch_1_8_is_read_as_todays(tmp_path: Path) -> None:
    today = examine(training_step().write(tmp_path / "new.json"))
    old = training_step()
    for event in old.events:
        event["cat"] = OLD[event["cat"]]
        event["tid"] = str(event["tid"])
        event["args"]["external id"] = 62
    then = examine(old.write(tmp_path / "old.json"))
    assert rows(then) == rows(today)
    assert then.steps == today.steps == 1
    assert {one.phase for one in then.phases} >= {"optimizer"}
    assert then.completeness == today.completeness
    assert statuses(then)["kernels_without_launch"] == "pass"


@pytest.mark.parametrize(
    ("category", "call"),
    [
        ("xpu_runtime", "urEnqueueKernelLaunch"),
        ("xpu_driver", "zeCommandListAppend"),
        ("privateuse1_runtime", "Launch"),
    ],
)
def test_a_call_under_any_name_has_launched_what_carries_its_id(tmp_path: Path, category: str, call: str) -> None:
    trace = HandWritten()
    trace.add(category, "synchronize", 0.0, 2.0, correlation=1)
    trace.add(category, call, 5.0, 2.0, correlation=2)
    trace.kernel(2, "gemm_kernel", 10.0, 5.0)
    found = load_trace(trace.write(tmp_path / "t.json"))
    assert found.events.launches.names == [call]
    assert found.kernels.launch.tolist() == [0]


def test_where_correlation_ids_link_nothing_the_operators_number_does(tmp_path: Path) -> None:
    trace = HandWritten()
    for number, operator in enumerate((7, 7, 8)):
        trace.launch(100 + number, 10.0 * number, name="hipLaunchKernel")
        trace.events[-1]["args"]["External id"] = operator
    for number, operator in enumerate((7, 7, 8, 8, 9)):
        trace.kernel(900 + number, f"k{number}", 50.0 + 10 * number, 5.0, **{"External id": operator})
    linked = load_trace(trace.write(tmp_path / "t.json")).kernels.launch.tolist()
    # The second kernel of operator 8 comes from the only call in it; operator 9 has none.
    assert linked == [0, 1, 2, 2, -1]


def test_an_operators_number_links_nothing_where_correlation_ids_do(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.launch(100, 0.0)
    trace.events[-1]["args"]["External id"] = 7
    trace.kernel(100, "a", 10.0, 5.0)
    trace.kernel(3, "launched before the trace began", 20.0, 5.0, **{"External id": 7})
    assert load_trace(trace.write(tmp_path / "t.json")).kernels.launch.tolist() == [0, -1]


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


@pytest.mark.parametrize("calls", [("hipStreamBeginCapture", "hipStreamEndCapture"), ("cudaStreamBeginCapture", None)])
def test_what_is_captured_into_a_graph_is_no_missing_kernel(tmp_path: Path, calls: tuple[str, str | None]) -> None:
    found = examine(captured(*calls).write(tmp_path / "t.json"))
    assert found.completeness.captured_launches == 5
    assert found.completeness.launches_without_kernel == 0
    assert statuses(found)["launches_without_kernel"] == "pass"
    assert statuses(found)["kernels_without_launch"] == "pass"


def test_launches_without_kernel_and_capture_are_missing_still(tmp_path: Path) -> None:
    found = examine(captured(None, "hipStreamEndCapture").write(tmp_path / "t.json"))
    assert found.completeness.launches_without_kernel == 5
    assert statuses(found)["launches_without_kernel"] == "fail"


def test_a_fill_of_no_bytes_is_no_missing_kernel(tmp_path: Path) -> None:
    trace = training_step()
    trace.launch(20, 380.0, name="cudaMemsetAsync")
    found = examine(trace.write(tmp_path / "t.json"))
    assert (found.completeness.empty_fills, found.completeness.launches_without_kernel) == (1, 0)
    assert statuses(found)["launches_without_kernel"] == "pass"
    trace.launch(21, 390.0, name="cudaMemcpyAsync")
    assert statuses(examine(trace.write(tmp_path / "t.json")))["launches_without_kernel"] == "fail"


def test_kernels_launched_before_the_trace_began_are_said_to_be(tmp_path: Path) -> None:
    trace = HandWritten()
    for number in range(10, 15):
        trace.kernel(number, "queued before", 10.0 * number, 9.0)
    trace.launch(20, 300.0)
    trace.kernel(20, "own", 310.0, 1.0)
    found = examine(trace.write(tmp_path / "t.json"))
    (guard,) = (one for one in found.guards if one.name == "kernels_without_launch")
    assert guard.status == "warn"
    assert "5 of 6 kernels have no launch in the trace, all of them launched before it began" in guard.message
    trace.kernel(25, "lost", 400.0, 90.0)
    (guard,) = (one for one in examine(trace.write(tmp_path / "t.json")).guards if one.name == "kernels_without_launch")
    assert guard.status == "fail"
    assert ", 5 of them launched before it began" in guard.message


@pytest.mark.parametrize(
    ("event", "device"),
    [
        ({"cat": "mtia_ccp_events"}, "2 events of an MTIA device"),
        ({"cat": "hpu_op"}, "2 events of a Gaudi device (HPU)"),
        ({"args": {"Task Type": "AI_CORE"}}, "2 events of an Ascend NPU"),
    ],
    ids=["mtia", "hpu", "npu"],
)
def test_a_device_that_is_not_read_is_told_from_a_cpu(tmp_path: Path, event: dict[str, Any], device: str) -> None:
    trace = HandWritten()
    trace.op("aten::mm", 0.0, 10.0)
    trace.events += [{"ph": "X", "name": "pe_exe", "pid": 17, "tid": 1, "ts": 1.0, "dur": 2.0, **event}] * 2
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.why_no_kernels.startswith(f"{device} are not read")
    assert statuses(found)["device_recorded"] == "fail"


def test_numbers_written_as_text_are_numbers(tmp_path: Path) -> None:
    plain = training_step()
    for event in plain.events:
        event["ts"] -= 1_000.0
    texts = training_step()
    for event in texts.events:
        event["ts"], event["dur"] = str(event["ts"] - 1_000.0), str(event["dur"])
        if "correlation" in event["args"]:
            event["args"]["correlation"] = str(event["args"]["correlation"])
    found = examine(texts.write(tmp_path / "t.json"))
    assert rows(found) == rows(examine(plain.write(tmp_path / "u.json")))
    assert found.completeness.kernels_without_launch == 0


@pytest.mark.parametrize("change", [{"dur": None}, {"dur": -5.0}], ids=str)
def test_events_without_a_duration_are_left_out_and_said(tmp_path: Path, change: dict[str, Any]) -> None:
    trace = training_step()
    trace.op("aten::never_ended", 390.0, 1.0)
    trace.events[-1].update(change)
    found = examine(trace.write(tmp_path / "t.json"))
    assert statuses(found)["unfinished_events"] == "warn"
    assert rows(found) == rows(examine(training_step().write(tmp_path / "u.json")))
    assert "unfinished_events" not in statuses(examine(tmp_path / "u.json"))


def test_events_written_as_beginning_and_end_are_said_to_be(tmp_path: Path) -> None:
    trace = HandWritten()
    for ph, ts in (("B", 0.0), ("E", 5.0)):
        trace.op("aten::mm", ts, 0.0)
        trace.events[-1]["ph"] = ph
    with pytest.raises(UsageError, match="1 that are written as beginning and end"):
        examine(trace.write(tmp_path / "t.json"))


def test_what_profilers_write_that_is_no_json_is_read(tmp_path: Path) -> None:
    trace = training_step()
    trace.events[-1]["args"]["memory bandwidth (GB/s)"] = "INFINITE"
    trace.events[-1]["name"] = "Memcpy NEWLINE\u00e9"
    text = json.dumps(trace.document(), ensure_ascii=False).replace('"INFINITE"', "inf").replace("NEWLINE", "\n\t")
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    assert [row[1] for row in rows(examine(path)) if row[1].startswith("Memcpy")] == ["Memcpy   \ufffd"]


def awkward(seed: int) -> HandWritten:
    """Names and args that look like the borders of events, of all sizes."""
    pick = random.Random(seed)
    trace = HandWritten()
    for number in range(300):
        extra = {
            "shapes": [{"a": 1}, {"b": [{}, {}]}] * pick.randrange(8),
            "text": '}, {"traceEvents": [' * pick.randrange(60),
        }
        trace.launch(number, 10.0 * number, name=pick.choice(["cudaLaunchKernel", 'cudaLaunchKernel}, {"', "a]}"]))
        trace.events[-1]["args"].update(extra)
        trace.kernel(number, pick.choice(["k", '"},{"', "\\", '\\"}, {']), 10.0 * number + 5, 4.0, **extra)
    trace.metadata["module_classes"] = {f"blocks.{number}": '}, {"' for number in range(pick.randrange(300))}
    return trace


@pytest.mark.parametrize("piece_bytes", [100, 700, 5_000, 1 << 22])
@pytest.mark.parametrize("form", ["before", "behind", "list"])
def test_a_trace_is_the_same_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, form: str
) -> None:
    trace = awkward(piece_bytes)
    whole: Any = trace.document()
    # A list `traceEvents` that is not the document's own, before it.
    whole = {"other": {"traceEvents": [{}]}, **whole}
    if form == "behind":
        whole = {"traceEvents": whole.pop("traceEvents"), **whole}
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps(trace.events if form == "list" else whole, indent=random.Random(piece_bytes).choice([None, 1]))
    )
    monkeypatch.setattr(document, "_PIECE_BYTES", piece_bytes)
    found = find_trace(path)
    events = read_events(found)
    assert events.device.names == [one["name"] for one in trace.events if one["cat"] == "kernel"]
    assert events.device.correlation.tolist() == list(range(300))
    assert found.notes.module_classes == ({} if form == "list" else trace.metadata["module_classes"])


@pytest.mark.parametrize("at", ["event", "behind", "before"])
def test_what_is_larger_than_a_piece_may_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(document, "_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(document, "MAX_PIECE_BYTES", 1 << 14)
    trace, large = training_step(), "x" * (1 << 15)
    if at == "event":
        trace.events[3]["args"]["large"] = large
    whole = trace.document()
    whole = {"large": large, **whole} if at == "before" else {**whole, "large": large} if at == "behind" else whole
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(UsageError, match="0 MiB"):
        examine(path)


def test_damage_anywhere_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "_PIECE_BYTES", 1 << 10)
    whole = json.dumps(training_step().document()).encode()
    pick = random.Random(3)
    path = tmp_path / "t.json"
    told = []
    for _ in range(300):
        text = bytearray(whole)
        for _ in range(pick.randrange(1, 4)):
            text[pick.randrange(len(text))] = pick.randrange(256)
        path.write_bytes(text[: pick.randrange(len(text))] if pick.random() < 0.3 else text)
        try:
            examine(path)
        except UsageError as error:
            told.append(str(error))
    assert len(told) > 90
    assert not [text for text in told if "\n" in text or not (str(path) in text or "phase" in text)]


def test_more_events_than_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmbench.kernels.trace.events.MAX_KEPT_EVENTS", 4)
    with pytest.raises(UsageError, match="has more than 4 operators, calls and kernels, too much to read"):
        examine(training_step().write(tmp_path / "t.json"))
