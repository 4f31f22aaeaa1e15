"""What a sweep tells while it runs: on a terminal, and in a log file."""

from __future__ import annotations

import io

from lmbench.records.field import PerPhase
from lmbench.records.measured import PhaseSummary, RunError
from lmbench.records.run import SCHEMA_VERSION, Cost, RunRecord, SweepPlace
from lmbench.sweep.file import sweep_from
from lmbench.sweep.local import START_S
from lmbench.sweep.plan import make_plan
from lmbench.sweep.progress import Progress, announcement, least_s

GRID = {"matrix": {"model.num_layers": [1, 2]}, "repeats": 5, "timeout_s": 60}


def progress_on(stream):
    plan = make_plan("x", sweep_from(GRID))
    return Progress(plan, stream), list(plan.jobs())


def ended(outcome="ok", took_s=30.0, **more):
    return RunRecord(SCHEMA_VERSION, outcome, sweep=SweepPlace(cost=Cost(total_s=took_s)), **more)


def test_a_line_for_each_run_says_how_it_ended_what_is_left_and_a_reason_once():
    progress, jobs = progress_on(log := io.StringIO())
    for _ in jobs[:3]:
        progress.kept(ended())
    progress.ended(jobs[3], ended(phases=PerPhase(step=PhaseSummary(mean_s=0.01234))))
    error = RunError(phase="backward", message="CUDA out of memory. " * 20)
    for job in jobs[4:6]:
        progress.ended(job, ended("oom", error=error))
    fine, bad, *reason, again = log.getvalue().splitlines()
    assert fine == f"[ 4/10]   3 min left  ok 12.34 ms/step  {jobs[3].name}"
    assert bad == f"[ 5/10]   2 min left  oom in backward  {jobs[4].name}"
    assert 0 < len(reason) <= 3
    assert all(line.startswith("        ") and len(line) <= 80 for line in reason)
    assert again.endswith(jobs[5].name)


def test_the_least_time_and_what_runs_took_say_what_is_left():
    plan = make_plan("x", sweep_from({"base": {"measure.min_window_s": 5}, "matrix": {"a.b": [1, 2]}, "repeats": 2}))
    assert least_s(plan) == 5 + START_S
    assert announcement(plan) == (
        "cells: 2, repeats: 2, runs: 4; at least about 24 s (windows and starts), at most 40 min (time limits)"
    )
    progress, jobs = Progress(plan, log := io.StringIO()), list(plan.jobs())
    for job, took_s in zip(jobs, (30.0, 10.0, 20.0, 10.0), strict=True):
        progress.ended(job, ended(took_s=took_s))
    assert [line.split("]")[1].split("left")[0].strip() for line in log.getvalue().splitlines()] == [
        "90 s", "40 s", "20 s", "0.0 s",
    ]  # fmt: skip
