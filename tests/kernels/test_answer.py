"""The output of `lmbench kernels` in its formats, and its width."""

from __future__ import annotations

import csv
import io
import json
import shutil

import pytest
import torch
from paths import GOLDEN, TRACES
from plain_sums import plain_sums
from torch import nn
from trace_events import HandWritten, record_steps

from lmbench.cli import main
from lmbench.instruments.ranges import ModuleRanges
from lmbench.kernels.answer import without_hidden
from lmbench.kernels.findings import examine, summarize
from lmbench.report.run import details

COMPILED = str(TRACES / "small_bf16_compiled")


def shown(capsys, *words):
    assert main(["kernels", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("path", sorted(TRACES.glob("*/trace.json.gz")), ids=lambda path: path.parent.name)
def test_the_first_screen_has_24_lines_and_every_line_80_columns(capsys, path):
    first, every = shown(capsys, str(path)).splitlines(), shown(capsys, str(path), "--all").splitlines()
    # Paths are never cut, so that they can be copied.
    assert max(len(line) for line in every if str(TRACES) not in line) <= 80
    assert len(first) <= 24
    assert [line for line in first[:-2] if line not in every] == []


def test_the_first_screen_is_the_golden_file(capsys):
    assert shown(capsys, COMPILED) == (GOLDEN / "kernels_answer.txt").read_text(encoding="utf-8")


MADE_UP = sorted((TRACES / "made_up").glob("*.json.gz"))


@pytest.mark.parametrize("path", MADE_UP, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_first_screen_of_each_kind_of_trace_is_the_golden_file(path, capsys, monkeypatch):
    monkeypatch.chdir(path.parent)
    name = path.name.removesuffix(".json.gz")
    assert shown(capsys, path.name) == (GOLDEN / f"kernels_{name}.txt").read_text(encoding="utf-8")


def test_a_foreign_trace_shows_its_slowest_step_and_exposed_communication(tmp_path, capsys):
    trace = HandWritten()
    for number, (begin, duration) in enumerate(((0, 900), (1_000, 1_900), (3_000, 950))):
        trace.add("user_annotation", f"ProfilerStep#{number}", begin, duration)
    trace.launched(10, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 15, 600)
    trace.launched(620, "sgemm", 3_300, 600)
    text = " ".join(shown(capsys, str(trace.write(tmp_path / "t.json"))).split())
    assert "steps 1.250 ms each on the host, the slowest 1.900 ms, number 2 of 3" in text
    assert "stalled: busy 0.400 of 1.317 ms, idle" in text
    assert "communication: 0.200 ms exposed, 0.000 ms beside computing" in text
    for event in trace.events[:3]:
        event["name"] = "Optimizer.step#SGD.step"
    text = " ".join(shown(capsys, str(trace.write(tmp_path / "t.json"))).split())
    assert "steps 1.525 ms each on the host, the slowest 2.000 ms, number 1 of 2; each ends with Optimizer.step" in text


def test_communication_beside_computing_is_told_apart_so_that_kernels_fit_into_the_step(tmp_path, capsys):
    folder = shutil.copytree(TRACES / "small_bf16_compiled", tmp_path / "run")
    shutil.copy(TRACES / "two_gpus" / "trace.json.gz", folder)
    (plain,) = plain_sums(folder / "trace.json.gz").values()
    findings = examine(folder)
    hidden_s = plain["overlapped"]
    for axis in ("kind", "part"):
        rows = without_hidden(findings.work.by(axis), axis, hidden_s)
        # Beside communication and computing, a few us of copies run beside either.
        assert rows.kernel_s.sum() == pytest.approx(plain["busy"], rel=2e-3)
        assert rows.share_fraction.sum() == pytest.approx(1.0)
    record = findings.trace.record
    record.kernels = summarize(findings)
    lines = {line.label: line.text for line in details(record)}
    assert lines["kernels"] == "busy 2.434 of 6.418 ms per step, 1.013 ms of it matmul"
    assert lines[""] == "communication: 0.489 ms exposed, 0.383 ms beside computing"


def test_csv_and_json_have_the_figures_of_the_screen_in_si_units(capsys):
    rows = list(csv.DictReader(io.StringIO(shown(capsys, COMPILED, "--format", "csv"))))
    record = json.loads(shown(capsys, COMPILED, "--json"))
    assert sum(float(row["kernel_s"]) for row in rows) == pytest.approx(record["kernel_s"])
    assert len(rows) == len(record["tables"]["all_kernels"])
    assert {"phase", "name", "kind", "part"} < rows[0].keys()
    assert (record["steps"], record["completeness"]["captured_kernel_count"]) == (2, 1518)
    assert [phase["verdict"] for phase in record["phases"]].count("host-bound") == 4
    gemm_s = {row["kind"]: row["step_s"] for row in record["tables"]["kinds"]}["gemm"]
    assert gemm_s == pytest.approx(3.421e-3, rel=1e-3)


def test_a_trace_of_a_cpu_has_the_longest_operators_of_each_phase(tmp_path, capsys):
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    ModuleRanges(net, None)
    # Much work after a warm-up call, so that operators fill their phases.
    x = torch.randn(16_384, 64)
    net(x)
    path = record_steps(tmp_path / "t.json", lambda: net(x).sum(), torch.optim.SGD(net.parameters(), 0.1))
    assert "no kernels in this trace" in shown(capsys, str(path))
    record = json.loads(shown(capsys, str(path), "--json"))
    rows = record["tables"]["all_operators"]
    assert {("forward", "aten::addmm"), ("backward", "aten::mm"), ("optimizer", "aten::add_")} <= {
        (row["phase"], row["name"]) for row in rows
    }
    # Self times of all operators add up to no more than the phase's range.
    events = json.loads(path.read_text())["traceEvents"]
    span_us = sum(event["dur"] for event in events if event.get("name") == "lmbench.phase:forward")
    self_us = sum(row["self_s"] for row in rows if row["phase"] == "forward") * record["steps"] * 1e6
    assert 0.3 * span_us < self_us < span_us
