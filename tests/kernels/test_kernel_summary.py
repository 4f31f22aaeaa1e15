"""A profiled run keeps a summary of its trace in run.json, whatever the trace is like."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from paths import TRACES
from trace_events import HandWritten

from lmbench.callbacks import RunRecorder
from lmbench.cli import main
from lmbench.errors import ExitCode
from lmbench.fit.completion import complete_record
from lmbench.kernels.trace.findings import as_record, examine, examine_run, summarize
from lmbench.kernels.trace.kernels import load_trace
from lmbench.kernels.trace.step_timeline import TIMELINE_FILE, read_timeline, step_timeline
from lmbench.records.codec import DamagedRecord, as_dict
from lmbench.records.instruments import KernelSummary
from lmbench.records.load import find_runs, load_run
from lmbench.records.store import RunFolder

FOLDERS = ("small_fp32_inference", "small_bf16_compiled")


def recorder_of(folder: Path, strict: bool = False) -> RunRecorder:
    """A recorder that has just closed a run in this folder."""
    recorder = RunRecorder(str(folder.parent))
    recorder.folder, recorder.exit_code = RunFolder(folder), ExitCode.OK
    recorder.run = load_run(folder).record
    recorder.run.guards, recorder.run.outcome, recorder.run.exit_code, recorder.run.strict = [], "ok", 0, strict
    return recorder


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(TRACES / name, folder / name)
    return folder / name


def with_trace(folder: Path, trace: HandWritten) -> Path:
    """A run's folder with another trace in it."""
    (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace.document()).encode()))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_sums_add_up_and_are_those_of_the_tables_per_step(name: str) -> None:
    found = examine(TRACES / name)
    kernels, full = summarize(found), as_record(found)
    assert kernels.kernel_s * kernels.steps == pytest.approx(full["captured_s"])
    total = math.fsum(part.kernel_s for phase, part in kernels.phases.items() if phase != "step")
    assert total + kernels.outside_s == pytest.approx(kernels.kernel_s)
    assert kernels.phases.step.kernel_s == pytest.approx(kernels.kernel_s)
    for _, part in kernels.phases.items():
        for sums in (part.kinds, part.parts):
            assert math.fsum(sums.values()) == pytest.approx(part.kernel_s)
        if part.window_s:
            parts = (part.busy_s, part.queued_gap_s, part.host_wait_s, part.other_idle_s)
            assert math.fsum(parts) == pytest.approx(part.window_s, abs=1e-9)
    for phase in full["phases"]:
        own = kernels.phases.get(phase["phase"])
        assert own.kernel_count * found.steps == pytest.approx(phase["instances"])
        assert own.matmul_fraction == phase["matmul_fraction"]
        assert [top.name for top in own.top] == [row["short_name"] for row in phase["kernels"][:5]]


@pytest.mark.parametrize("name", FOLDERS)
def test_every_number_names_its_unit(name: str) -> None:
    def numbers(record: dict[str, Any]) -> Iterator[str]:
        for field, value in record.items():
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    yield from numbers(inner)
                elif isinstance(inner, int | float):
                    yield field

    names = set(numbers(as_dict(summarize(examine(TRACES / name)))))
    assert len(names) > 20
    assert {name for name in names if not name.endswith(("_s", "_count", "_fraction", "_ratio", "steps"))} == set()


def test_the_summary_is_small() -> None:
    assert len(msgspec.json.encode(summarize(examine(TRACES / "small_bf16_compiled")))) < 12_000


def test_a_closed_run_gets_summary_guards_and_timeline(tmp_path: Path) -> None:
    folder = copied("small_bf16_compiled", tmp_path)
    complete_record(recorder_of(folder))
    run = load_run(folder).record
    assert run.kernels.phases.step.kernel_s == pytest.approx(6.713e-3, rel=1e-3)
    assert run.kernels.reason is None
    assert {guard.name: guard.status for guard in run.guards}["unclassified_part"] == "pass"
    assert run.outcome == "ok"
    assert read_timeline(folder).names


def test_the_timeline_holds_one_whole_step(tmp_path: Path) -> None:
    folder = copied("small_bf16_compiled", tmp_path)
    examine_run(folder)
    timeline = read_timeline(folder)
    kernels = timeline.kernels
    assert sum(kernels.is_own) == 759
    own_ns = sum(d for d, own in zip(kernels.duration_ns, kernels.is_own, strict=True) if own)
    assert own_ns / 1e9 == pytest.approx(6.713e-3, rel=0.01)
    assert timeline.end_ns == max(s + d for s, d in zip(kernels.start_ns, kernels.duration_ns, strict=True))
    for start, launch, own in zip(kernels.start_ns, kernels.launch_ns, kernels.is_own, strict=True):
        assert (launch is not None and 0 <= launch <= start + 1_000) if own else launch is None
    assert (folder / TIMELINE_FILE).stat().st_size < 40_000


def unclassified(share: float, launches: int = 1) -> HandWritten:
    """A step in which a kernel of no known kind or part takes this share; `launches` of a further one lack kernels."""
    trace = HandWritten()
    trace.step(1, 0, 1_000)
    trace.phase("forward", 0, 1_000)
    trace.module("blocks.0.ffn", 10, 100)
    trace.op("aten::mm", 20, 30)
    trace.launch(1, 25)
    trace.kernel(1, "nvjet_sm90_tst_128x128", 200, 100 * (1 - share))
    trace.launch(2, 400)
    trace.kernel(2, "no_such_thing", 420, 100 * share)
    for number in range(launches - 1):
        trace.launch(3 + number, 500 + 10 * number)
    return trace


@pytest.mark.parametrize(("share", "status"), [(0.04, "pass"), (0.06, "warn")])
def test_more_than_5_percent_without_a_part_warns(share: float, status: str, tmp_path: Path) -> None:
    folder = with_trace(copied("small_fp32_inference", tmp_path), unclassified(share))
    complete_record(recorder_of(folder))
    run = load_run(folder).record
    assert {guard.name: guard.status for guard in run.guards}["unclassified_part"] == status
    assert run.kernels.unclassified_part_fraction == pytest.approx(share)


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 4)])
def test_a_guard_of_the_trace_that_fails_counts_under_strict(strict: bool, code: int, tmp_path: Path) -> None:
    folder = with_trace(copied("small_fp32_inference", tmp_path), unclassified(0.0, launches=5))
    recorder = recorder_of(folder, strict)
    complete_record(recorder)
    run = load_run(folder).record
    assert {guard.name: guard.status for guard in run.guards}["launches_without_kernel"] == "fail"
    assert (recorder.exit_code, run.exit_code, run.outcome) == (code, code, "ok")


@pytest.mark.parametrize(
    "content", [b"", b"\x1f\x8b broken", gzip.compress(b'{"traceEvents": [{"ph": "X", "na'), gzip.compress(b"[1, 2]")],
    ids=["empty", "broken", "torn", "no trace"],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_never_loses_the_run(content: bytes, tmp_path: Path, capsys: Any) -> None:
    folder = copied("small_fp32_inference", tmp_path)
    (folder / "trace.json.gz").write_bytes(content)
    recorder = recorder_of(folder)
    complete_record(recorder)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "the run is complete" in lines[0]
    run = load_run(folder).record
    assert (run.outcome, recorder.exit_code) == ("ok", ExitCode.OK)
    assert run.kernels.reason.startswith("the trace could not be examined: ")


def test_a_run_that_did_not_end_well_is_left_alone(tmp_path: Path) -> None:
    recorder = recorder_of(copied("small_fp32_inference", tmp_path))
    recorder.run.outcome = "interrupted"
    complete_record(recorder)
    assert recorder.run.kernels is None


def test_a_run_on_a_cpu_says_why_it_has_none_and_where_to_look(tmp_path: Path, capsys: Any) -> None:
    words = ["fit", "--config", "smoke", "--trainer.logger", "false", "--trainer.profiler", "kernels"]
    assert main([*words, "--measure.results_dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    (folder,) = find_runs([tmp_path])
    run = load_run(folder).record
    operators = run.kernels.operators
    assert run.kernels == KernelSummary(
        reason="a trace of a CPU has operators and no kernels", steps=3, operators=operators
    )
    assert {"forward", "backward", "optimizer"} <= {row.phase for row in operators}
    assert all(0 < row.share_fraction <= 1 and row.self_s > 0 for row in operators)
    assert f"next         lmbench kernels {folder}" in out
    assert not (folder / TIMELINE_FILE).exists()


def test_a_timeline_needs_kernels_and_steps(tmp_path: Path) -> None:
    on_cpu, foreign = HandWritten(), HandWritten()
    on_cpu.step(1, 0, 100)
    on_cpu.op("aten::mm", 0, 10)
    foreign.op("aten::mm", 0, 10)
    foreign.launch(1, 5)
    foreign.kernel(1, "nvjet_sm90_tst_128x128", 20, 10)
    for place, trace in enumerate((on_cpu, foreign)):
        assert step_timeline(load_trace(trace.write(tmp_path / f"{place}.json"))) is None


@pytest.mark.parametrize("content", [b"", b"no gzip", b"\x1f\x8b torn", b"[]", b'{"schema_version": 99}', b"[" * 9_000])
def test_a_file_that_is_no_timeline_is_said_in_one_line(content: bytes, tmp_path: Path) -> None:
    for written in (content, gzip.compress(content)):
        (tmp_path / TIMELINE_FILE).write_bytes(written)
        with pytest.raises(DamagedRecord) as caught:
            read_timeline(tmp_path)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(DamagedRecord, match="is not read: it is missing"):
        read_timeline(tmp_path / "nowhere")


def columns(**changes: Any) -> dict[str, Any]:
    """A timeline of four kernels, of which something is not as lmbench writes it."""
    kernels = {
        "start_ns": [0, 1_000, 2_000, 3_000], "duration_ns": [900] * 4, "name": [0] * 4, "kind": [0] * 4,
        "part": [0] * 4, "phase": [0] * 4, "stream": [7] * 4, "launch_ns": [0, 10, 20, None],
        "launch_duration_ns": [3, 3, 3, None], "is_own": [1, 1, 1, 0],
    }  # fmt: skip
    whole = {
        "schema_version": 1, "end_ns": 4_000, "host_phases": [["forward", 0, 4_000]], "names": ["a"],
        "kinds": ["gemm"], "parts": ["ffn"], "phases": ["forward"],
    }  # fmt: skip
    inner = {name: value for name, value in changes.items() if name in kernels}
    return {**whole, **{k: v for k, v in changes.items() if k not in kernels}, "kernels": {**kernels, **inner}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"end_ns": 0}, "end_ns"),
        ({"end_ns": "x"}, "got str - at end_ns"),
        ({"end_ns": 1e300}, "end_ns"),
        ({"name": [9, 0, 0, 0]}, "none of its names"),
        ({"phases": []}, "none of its phases"),
        ({"part": [-1, 0, 0, 0]}, "part"),
        ({"kind": ["x", 0, 0, 0]}, "kind"),
        ({"duration_ns": [-900, 1, 1, 1]}, "duration_ns"),
        ({"start_ns": []}, "empty, or not of one length"),
        ({"stream": [7]}, "not of one length"),
        ({"host_phases": None}, "got null - at host_phases"),
    ],
    ids=str,
)
def test_a_timeline_with_values_that_do_not_fit_is_refused_with_a_reason(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / TIMELINE_FILE).write_bytes(gzip.compress(json.dumps(columns()).encode()))
    assert read_timeline(tmp_path).kernels.launch_ns[-1] is None
    (tmp_path / TIMELINE_FILE).write_bytes(gzip.compress(json.dumps(columns(**change)).encode()))
    with pytest.raises(DamagedRecord, match=reason):
        read_timeline(tmp_path)
