"""The output of `lmbench kernels` in its formats, and its width."""

from __future__ import annotations

import shutil

import pytest
from paths import TRACES
from plain_sums import plain_sums
from tables import cases, csv_of
from trace_events import HandWritten

from lmbench.kernels.answer import without_hidden
from lmbench.kernels.findings import examine, summarize
from lmbench.report.run import details

from conftest import check_golden

COMPILED = str(TRACES / "small_bf16_compiled")


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_the_first_screen_has_24_lines_and_every_line_80_columns(printed):
    path = str(TRACES / "two_gpus" / "trace.json.gz")
    first, every = printed("kernels", path).splitlines(), printed("kernels", path, "--all").splitlines()
    # Paths are never cut, so that they can be copied.
    assert max(len(line) for line in every if str(TRACES) not in line) <= 80
    assert len(first) <= 24
    assert [line for line in first[:-2] if line not in every] == []


GOLDENS = {"answer": COMPILED, **{path.name.partition(".")[0]: path.name for path in TRACES.glob("made_up/*")}}


@cases("name", *GOLDENS)
def test_the_first_screen_of_each_kind_of_trace_is_the_golden_file(name, printed, monkeypatch):
    monkeypatch.chdir(TRACES / "made_up")
    check_golden(f"kernels_{name}.txt", printed("kernels", GOLDENS[name]))


def test_communication_beside_computing_is_told_apart_so_that_kernels_fit_into_the_step(tmp_path):
    folder = shutil.copytree(TRACES / "small_bf16_compiled", tmp_path / "run")
    shutil.copy(TRACES / "two_gpus" / "trace.json.gz", folder)
    plain = plain_sums(folder / "trace.json.gz")
    findings = examine(folder)
    for axis in ("kind", "part"):
        rows = without_hidden(findings, axis)
        # Beside communication and computing, a few us of copies run beside either.
        assert rows.kernel_s.sum() == pytest.approx(plain["busy"], rel=2e-3)
        assert rows.share_fraction.sum() == pytest.approx(1.0)
    record = findings.trace.record
    record.kernels = summarize(findings)
    lines = {line.label: line.text for line in details(record)}
    assert lines["kernels"] == "busy 2.434 of 6.418 ms per step, 1.013 ms of it matmul"
    assert lines[""] == "communication: 0.489 ms exposed, 0.383 ms beside computing"


def test_a_device_that_never_idles_has_an_answer(tmp_path, printed):
    trace = HandWritten()
    trace.launched(20, "sgemm", 30, 5)
    assert "queued, busy 0.005 of 0.005 ms" in printed("kernels", trace.write(tmp_path / "t.json"))


def test_csv_and_json_have_the_figures_of_the_screen_in_si_units(printed, answered):
    rows = csv_of(printed("kernels", COMPILED, "--format", "csv"))
    record = answered("kernels", COMPILED)
    assert sum(float(row["kernel_s"]) for row in rows) == pytest.approx(record["kernel_s"])
    assert {"phase", "name", "kind", "part"} < rows[0].keys()
    assert (record["steps"], record["completeness"]["captured_kernel_count"]) == (2, 1518)
