"""What a sweep tells while it runs."""

from __future__ import annotations

from lmbench.records.field import PerPhase
from lmbench.records.measured import PhaseSummary, RunError
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.sweep.file import sweep_from
from lmbench.sweep.plan import make_plan
from lmbench.sweep.progress import Progress, announcement

GRID = {"matrix": {"a.b": [1, 2]}, "repeats": 2}


def test_a_line_for_each_run_says_how_it_ended_and_a_reason_once(capsys):
    plan = make_plan("x", sweep_from(GRID))
    assert announcement(plan) == "cells: 2, repeats: 2, runs: 4; at most 40 min (time limits)"
    progress, jobs = Progress(plan), list(plan.jobs())
    progress.kept(RunRecord(SCHEMA_VERSION, "ok"))
    step = PerPhase(step=PhaseSummary(mean_s=0.01234))
    progress.ended(jobs[1], RunRecord(SCHEMA_VERSION, "ok", phases=step))
    for job in jobs[2:]:
        progress.ended(job, RunRecord(SCHEMA_VERSION, "oom", error=RunError(phase="backward", message="none " * 40)))
    fine, bad, again = capsys.readouterr().err.splitlines()
    assert fine == f"lmbench: sweep: 2 of 4: {jobs[1].name}: ok 12.34 ms/step"
    assert bad.startswith(f"lmbench: sweep: 3 of 4: {jobs[2].name}: oom in backward: none none ")
    assert bad.endswith(" ...")
    assert again == f"lmbench: sweep: 4 of 4: {jobs[3].name}: oom in backward"
