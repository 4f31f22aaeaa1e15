"""A profiled run keeps a summary of its trace in run.json, and guards say whether the trace can be believed."""

from __future__ import annotations

import json
import math
import shutil

import msgspec
import pytest
from fit_process import SMALL, bench, statuses
from paths import TRACES
from tables import cases
from test_verdicts import run_folder, twice
from trace_events import HandWritten, examined

from lmbench.callbacks import RunRecorder
from lmbench.fit.measurement import complete_record
from lmbench.kernels.findings import examine, summarize
from lmbench.records.examined import KernelSummary
from lmbench.records.load import load_run
from lmbench.records.store import RunFolder


def completed(folder, trace, strict=False):
    """The record and the exit code of a run that has just closed, and has this text for a trace."""
    shutil.copytree(TRACES / "small_fp32_inference", folder / "run")
    (folder / "run" / "trace.json.gz").write_text(trace)
    recorder = RunRecorder(str(folder))
    recorder.folder = RunFolder(folder / "run")
    recorder.run = load_run(folder / "run").record
    recorder.run.guards, recorder.run.outcome, recorder.run.exit_code, recorder.run.strict = [], "ok", 0, strict
    complete_record(recorder)
    return load_run(folder / "run").record, recorder.exit_code


def test_a_real_traces_summary_adds_up_and_is_small_and_its_guards_pass():
    findings = examined("small_bf16_compiled")
    kernels = summarize(findings)
    assert set(statuses(findings).values()) <= {"pass", "n/a"}
    total = math.fsum(part.kernel_s for phase, part in kernels.phases.items() if phase != "step")
    assert total + kernels.outside_s == pytest.approx(kernels.kernel_s)
    assert kernels.phases.step.kernel_s == pytest.approx(kernels.kernel_s)
    for _, part in kernels.phases.items():
        for sums in (part.kinds, part.parts):
            assert math.fsum(sums.values()) == pytest.approx(part.kernel_s)
        if part.window_s:
            parts = (part.busy_s, part.queued_gap_s, part.host_wait_s, part.other_idle_s)
            assert math.fsum(parts) == pytest.approx(part.window_s, abs=1e-9)
    assert len(msgspec.json.encode(kernels)) < 12_000


@cases("""
- [strict, code]
- [false, 0]
- [true, 4]
""")
def test_a_failed_guard_of_the_trace_counts_under_strict(strict, code, tmp_path):
    # One of two launches has a kernel.
    trace = HandWritten().read([["launch", 1, 10], ["launched", 20, "k", 30, 5]])
    run, exit_code = completed(tmp_path, json.dumps(trace.document()), strict)
    assert statuses(run)["launches_without_kernel"] == "fail"
    assert (exit_code, run.exit_code, run.outcome) == (code, code, "ok")
    assert (run.kernels.reason, run.kernels.phases.step.kernel_s) == (None, pytest.approx(5e-6))


def test_a_trace_that_cannot_be_read_never_loses_the_run(tmp_path, capsys):
    run, exit_code = completed(tmp_path, '{"traceEvents": [{"ph": "X", "na')
    assert "the run is complete" in capsys.readouterr().err
    assert (run.outcome, exit_code) == ("ok", 0)
    assert run.kernels.reason.startswith("the trace could not be examined: ")


def test_a_run_on_a_cpu_says_why_it_has_no_kernels_and_which_command_shows_it(tmp_path, capsys):
    run = bench(tmp_path, "--trainer.profiler=kernels", *SMALL)
    assert f"lmbench kernels {run.path}" in capsys.readouterr().out
    kernels = run.record.kernels
    reason = "a trace of a CPU has operators and no kernels"
    path = {"path_s": kernels.path_s, "path": kernels.path, "what_if": kernels.what_if}
    assert kernels == KernelSummary(reason=reason, steps=3, **path)
    assert sum(kernels.path.values()) == pytest.approx(kernels.path_s)
    assert -kernels.path_s < kernels.what_if["phase:optimizer=0"] < 0


def test_a_trace_with_launches_but_no_kernels_is_not_taken_for_a_cpus():
    trace = HandWritten()
    trace.op("aten::mm", 0, 50)
    for status, reason in (("n/a", "a trace of a CPU has operators and no kernels"), ("fail", "was not recorded")):
        findings = trace.examined()
        assert reason in findings.why_no_kernels
        assert statuses(findings) == {"device_recorded": status}
        trace.launch(1, 10)


def test_faults_of_a_run_or_trace_have_guards(tmp_path):
    folder = run_folder(tmp_path, twice({"forward": [40, 0.0, 100.0]}, "k"))
    assert statuses(examine(folder))["unclassified_part"] == "warn"
    (folder / "run.json").write_text("{")
    assert examine(folder).run is None
    assert statuses(examine(folder))["run_record"] == "warn"


@cases("""
- [early_us, status]
- [1000.0, fail]
- [4.0, pass]
""")
def test_a_kernel_before_its_launch_is_too_much_from_a_share_of_the_window_on(early_us, status):
    trace = HandWritten()
    trace.launched(7_000.0, "k", 7_000.0 - early_us, 7_000.0)
    trace.launched(7_010.0, "k", 14_000.0, 7_000.0)
    assert statuses(trace.examined())["kernels_before_launch"] == status
