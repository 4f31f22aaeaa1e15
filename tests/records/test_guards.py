"""Every guard passes on a healthy run, finds a planted fault, and never passes where a fact is unknown."""

from __future__ import annotations

import copy
import math
import re

import msgspec
import pytest
import yaml
from runs import BASE, put
from tables import cases, stored

from lmbench.records.codec import as_dict
from lmbench.records.guards import evaluate_guards
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.summary import summarize_steps
from lmbench.records.vocabulary import Stage

TIMES = [0.1 * (1 + 0.001 * (step * 7 % 3)) for step in range(20)]
CASES = stored("guards")
FAULTS = CASES["faults"]


def guards_of(times=TIMES, step_s=None, skipped=(0, 0), losses=None, wall=1.0001, without_update=None, **changes):
    """Guards, by name, of a healthy run on a GPU with some changes.

    Args:
        times: step times of the window.
        step_s: a step time of all of them instead.
        skipped: the first step that the scaler skipped, and the first that it did not skip any more.
        losses: losses by step, instead of healthy ones.
        wall: wall time of the window, relative to the sum of its steps.
        without_update: a step without an optimizer's phase.
        changes: values by dotted name, instead of those of the healthy record.
    """
    times = [step_s] * 20 if step_s else times
    steps = [
        StepRecord(
            step=step,
            stage=Stage.WARMUP if step < 5 else Stage.WINDOW,
            micro_batches=1,
            step_s=time_s,
            optimizer_s=None if step == without_update else 0.01,
            loss=(losses or {}).get(step, 9.2 - 0.01 * step),
            is_skipped=step in range(*skipped),
        )
        for step, time_s in enumerate([0.1] * 5 + times)
    ]
    shares = {"other": {"share_fraction": 0.005}, "data": {"share_fraction": 0.01}}
    measured = {
        "window.wall_s": math.fsum(times) * wall,
        "window.steps_sum_s": math.fsum(times),
        "phases": as_dict(summarize_steps(steps)) | shares,
    }
    record = put(copy.deepcopy(BASE), copy.deepcopy(CASES["healthy"] | measured | changes))
    return {guard.name: guard for guard in evaluate_guards(msgspec.convert(record, RunRecord), steps)}


def test_a_run_whose_steps_are_lost_is_judged_by_the_losses_of_its_record():
    run = RunRecord(SCHEMA_VERSION, "ok")
    run.loss.last = math.nan
    guard = next(guard for guard in evaluate_guards(run, []) if guard.name == "finite_loss")
    assert (guard.status, guard.message) == ("fail", "1 losses are nan or infinite, the first at the end")


def test_a_healthy_run_passes_every_guard_without_advice():
    assert {(guard.status, guard.advice) for guard in guards_of().values()} == {("pass", "")}


@cases("path | value | name | status | figure", *FAULTS)
def test_a_planted_fault_is_judged_by_its_own_guard_alone(path, value, name, status, figure):
    guards = guards_of(**{"phases.step.trend_p": 0.001, path: value})
    (guard,) = (guard for guard in guards.values() if guard.status not in ("pass", "n/a"))
    assert (guard.name, guard.status, guard.limit is None) == (name, status, figure is None)
    assert guard.value == (figure and pytest.approx(figure, rel=0.01))
    assert guard.message
    assert guard.advice.endswith(".")


def test_every_guard_has_a_planted_fault():
    assert {fault[2] for fault in FAULTS} | {"finite_loss", "skipped_steps", "repeated_losses", "updates"} == {
        *guards_of()
    }


def test_nothing_passes_on_an_empty_run():
    guards = evaluate_guards(RunRecord(SCHEMA_VERSION, "running"), [])
    assert {guard.status for guard in guards} == {"n/a"}


def test_a_run_on_a_cpu_is_not_judged_by_facts_of_a_gpu():
    changes = {"device_state": {}, "memory": {}, "probe.hidden_syncs": None, "probe.verdicts": {}}
    guards = guards_of(device_type="cpu", **changes)
    assert {name for name, guard in guards.items() if guard.status == "n/a"} == {
        "other_share", "hidden_syncs", "launch_blocking", "power_cap", "thermal_cap", "sm_clock_drop",
        "other_processes", "allocator_growth", "allocator_retries", "memory_growth",
    }  # fmt: skip


@cases(
    "changes | expected",
    *CASES["texts"],
    *yaml.safe_load("""
- [{skipped: [5, 25]}, "skipped_steps fail all 20 steps of the window were skipped, and there is no step time"]
- [{skipped: [0, 25]}, "skipped_steps from the first step on: nothing was trained"]
- [{skipped: [5, 7], precision: bf16-mixed}, skipped_steps warn 2 of 20; skipped_steps no loss]
- [{precision: bf16-mixed}, skipped_steps n/a]
# What happens at its ends, such as synchronizations, may take a larger share of a short window.
- [{wall: 1.29, step_s: 1.0e-4}, window_identity pass]
- [{wall: 1.31, step_s: 1.0e-4}, window_identity fail]
- [{wall: 1.02, step_s: 0.01}, window_identity fail]
- [{wall: 1.02, step_s: 0.01, device_state.other_process_count: 4}, window_identity pass]
- [{wall: 1.06, step_s: 0.01, device_state.other_process_count: 5}, window_identity pass]
- [{wall: 1.06, step_s: 0.01, device_state.other_process_count: 1}, window_identity fail]
- [{wall: 1.005, step_s: 0.01, window.turn_steps_s: [0.01, 0.01]}, window_identity pass]
- [{wall: 1.02, step_s: 0.01, device_type: cpu}, window_identity pass]
- [{wall: 1.04, step_s: 0.01, device_type: cpu}, window_identity fail]
- [{wall: 1.006, step_s: 0.1, device_type: cpu}, window_identity fail]
# A profiler's own work is no fault of the run.
- [{wall: 1.02, step_s: 0.01, is_profiled: true}, window_identity n/a; trend n/a; spread n/a]
- [{host_state.page_fault_count: 9000000, is_profiled: true}, page_faults n/a]
"""),
    ({"device_type": "cpu", "times": [0.10] * 20 + [0.50] + [0.10] * 9}, "trend pass; spread outliers: 1"),
)
def test_a_guards_status_message_and_advice_fit_its_figures(changes, expected):
    guards = guards_of(**changes)
    for name, text in (line.split(" ", 1) for line in expected.split("; ")):
        # Whole words: time that "passed" is no "pass".
        said = f"{guards[name].status} {guards[name].message} {guards[name].advice}"
        assert re.search(rf"{re.escape(text)}(?!\w)", said), said
