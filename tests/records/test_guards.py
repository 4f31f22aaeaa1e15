"""Every guard: passes on a healthy run, judges a planted fault, and never passes on what it cannot know."""

from __future__ import annotations

import copy
import math

import msgspec
import pytest
from runs import BASE, put

from lmbench.records.codec import as_dict
from lmbench.records.guards import evaluate_guards
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.summary import summarize_steps
from lmbench.records.vocabulary import Stage

TIMES = [0.1 * (1 + 0.001 * (step * 7 % 3)) for step in range(20)]
READING = {"sm_clock_hz": 1.98e9, "temperature_c": 60, "other_process_pids": [], "other_process_count": 0}
CAPPED = {"power_capped_fraction": 0.0, "thermal_capped_fraction": 0.0, "sm_clock_drop_fraction": 0.0}


def guards_of(times=TIMES, skipped=(), losses=None, **changes):
    """Guards, by name, of a run on a GPU with nothing wrong with it but these step times of its window, steps that were
    skipped, losses of steps, and changes of its record."""
    steps = [
        StepRecord(
            step=step,
            stage=Stage.WARMUP if step < 5 else Stage.WINDOW,
            micro_batches=1,
            step_s=step_s,
            loss=(losses or {}).get(step, 9.2 - 0.01 * step),
            is_skipped=step in skipped,
        )
        for step, step_s in enumerate([0.1] * 5 + times)
    ]
    total_s = math.fsum(times)
    healthy = {
        "precision": "16-mixed",
        "compile": {"is_enabled": True, "window_recompile_count": 0},
        "window": {"steps": len(times), "requested_steps": 20, "wall_s": total_s * 1.0001, "steps_sum_s": total_s},
        "phases": {**as_dict(summarize_steps(steps)), "other": {"share_fraction": 0.005}},
        "device_state": {"open": READING, "close": READING, **CAPPED, "other_process_count": 0},
        "host_state": {"other_cpu_fraction": 0.02, "steal_fraction": 0.0, "waited_fraction": 0.001},
        "probe.is_complete": True,
        "probe.training.parameters": 4,
    }
    record = put(copy.deepcopy(BASE), copy.deepcopy(healthy | changes))
    return {guard.name: guard for guard in evaluate_guards(msgspec.convert(record, RunRecord), steps)}


def test_a_healthy_run_passes_every_guard_without_advice():
    assert {(guard.status, guard.advice) for guard in guards_of().values()} == {("pass", "")}


FAULTS = [
    ("compile.window_recompile_count", 2, "recompiles", "fail", 2),
    ("environment.variables", {"CUDA_LAUNCH_BLOCKING": "1"}, "launch_blocking", "fail", None),
    ("environment.flags.anomaly_mode", True, "anomaly_mode", "fail", None),
    ("environment.flags.deterministic_algorithms", True, "deterministic", "fail", None),
    ("environment.flags.cudnn_deterministic", True, "deterministic", "fail", None),
    ("host_state.waited_fraction", 0.3, "busy_machine", "warn", 0.3),
    ("throughput.mfu_fraction", 1.01, "mfu", "fail", 1.01),
    ("loss.first", 12.0, "first_loss", "warn", 12.0 - math.log(10_000)),
    ("probe.training.missing_gradients", [*"abcd"], "gradients", "fail", 4),
    ("probe.training.zero_gradients", [*"abcd"], "gradients", "fail", 4),
    ("probe.training.zero_gradients", ["a"], "gradients", "warn", 1),
    ("probe.training.nonfinite_gradients", ["a"], "gradients", "fail", 1),
    ("probe.training.unmoved_parameters", [*"abcd"], "trained", "fail", 4),
    ("probe.training.unmoved_parameters", ["a"], "trained", "warn", 1),
    ("window.requested_steps", 25, "window_complete", "warn", 0.2),
    ("window.requested_s", 4.004, "window_complete", "warn", 0.5),
    ("probe.is_complete", False, "probe_steps", "warn", None),
    ("window.wall_s", 2.02, "window_identity", "fail", 0.009),
    ("phases.step.trend_fraction", 0.03, "trend", "warn", 0.03),
    ("phases.step.cv_fraction", 0.11, "spread", "warn", 0.11),
    ("phases.other.share_fraction", 0.021, "other_share", "warn", 0.021),
    ("probe.hidden_syncs", [{"location": "x.py:1", "count": 1, "stack": ""}], "hidden_syncs", "warn", 1),
    ("device_state.power_capped_fraction", 0.4, "power_cap", "warn", 0.4),
    ("device_state.thermal_capped_fraction", 0.4, "thermal_cap", "warn", 0.4),
    ("device_state.sm_clock_drop_fraction", 0.06, "sm_clock_drop", "warn", 0.06),
    ("device_state.other_process_count", 2, "other_processes", "warn", 2),
    ("memory.window_reserved_growth_bytes", 2**21, "allocator_growth", "warn", 2**21),
    ("memory.window_alloc_retry_count", 1, "allocator_retries", "warn", 1),
]


@pytest.mark.parametrize(("path", "value", "name", "status", "figure"), FAULTS)
def test_a_planted_fault_is_judged_by_its_own_guard_alone(path, value, name, status, figure):
    guards = guards_of(**{"phases.step.trend_p": 0.001, path: value})
    (guard,) = (guard for guard in guards.values() if guard.status not in ("pass", "n/a"))
    assert (guard.name, guard.status, guard.limit is None) == (name, status, figure is None)
    assert guard.value == (figure and pytest.approx(figure, rel=0.01))
    assert guard.message
    assert guard.advice.endswith(".")


def test_every_guard_has_a_planted_fault():
    assert {fault[2] for fault in FAULTS} | {"finite_loss", "skipped_steps"} == {*guards_of()}


def test_nothing_passes_on_an_empty_run():
    guards = evaluate_guards(RunRecord(SCHEMA_VERSION, "running"), [])
    assert {(guard.status, guard.message != "") for guard in guards} == {("n/a", True)}


def test_a_cpu_run_is_not_judged_on_what_only_a_gpu_has():
    changes = {"device_state": {}, "memory": {}, "probe.hidden_syncs": None, "probe.verdicts": {}}
    guards = guards_of(device_type="cpu", **changes)
    assert {name for name, guard in guards.items() if guard.status == "n/a"} == {
        "other_share", "hidden_syncs", "launch_blocking", "power_cap", "thermal_cap", "sm_clock_drop",
        "other_processes", "allocator_growth", "allocator_retries",
    }  # fmt: skip


#: Every third step waits for another process; the first ones, for longer. Mean 0.333 s, std 0.280, r = 0.252: as good
#: as 17.9 independent steps, whose t is 2.11.
BUSY_TIMES = [0.1 + (0.4 if step % 3 == 0 else 0.0) + (0.5 if step < 6 else 0.0) for step in range(30)]
UNMOVED = "probe.training.unmoved_parameters"
CAUSAL = {"throughput.mfu_fraction": 1.2, "throughput.mfu_causal_fraction": 0.6}


def wall(ratio, device="cuda", **more):
    return {"device_type": device, "window.wall_s": math.fsum(more.get("times", TIMES)) * ratio, **more}


def host(device, others=0.09, waited=0.01, **state):
    return {"device_type": device, "host_state": {"other_cpu_fraction": others, "waited_fraction": waited, **state}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": {0: math.nan}}, "finite_loss fail 1 losses are nan or infinite, the first at step 0"),
        ({"losses": {12: math.inf}}, "finite_loss fail 1 losses are nan or infinite, the first at step 12"),
        ({"skipped": (0, 1, 10, 11, 12)}, "skipped_steps warn the scaler skipped 3 of 20 steps of the window"),
        (
            {"skipped": range(5, 25)},
            "skipped_steps fail fp16 gradients overflowed in all 20 steps of the window",
        ),
        ({"skipped": range(25)}, "skipped_steps from the first step on: nothing was trained"),
        ({"skipped": range(25)}, "skipped_steps halved 25 times"),
        ({"skipped": range(25), "precision": "bf16-mixed"}, "skipped_steps n/a"),
        (wall(1.0009), "window_identity pass"),
        (wall(0.9989), "window_identity fail"),
        (wall(1.0045, "cpu"), "window_identity pass"),
        (wall(0.9945, "cpu"), "window_identity fail"),
        # Synchronizing at its ends is left out of a short window.
        (wall(1.07, times=[1e-4] * 20), "window_identity pass"),
        (wall(1.08, times=[1e-4] * 20), "window_identity fail"),
        (wall(1.07, "cpu", times=[1e-4] * 20), "window_identity fail"),
        ({"window.steps": 0}, "window_complete fail"),
        (
            {"device_type": "cpu", "times": BUSY_TIMES},
            "busy_machine busy: figures are good to about ±40 %; trend n/a; spread n/a",
        ),
        (
            {"device_type": "cpu", "times": [0.01, 0.2, 0.02, 0.9] * 2},
            "busy_machine not usable: within a factor of",
        ),
        # A device has no such neighbours, and a quiet CPU has drifts and outliers: its steps are told of as ever.
        ({"times": BUSY_TIMES}, "spread warn"),
        (
            {"device_type": "cpu", "times": [0.10 + 0.01 * step for step in range(30)]},
            "trend slower; spread Steps vary throughout",
        ),
        ({"device_type": "cpu", "times": [0.20] * 15 + [0.10] * 15}, "trend faster; spread warn"),
        (
            {"device_type": "cpu", "times": [0.10] * 20 + [0.50] + [0.10] * 9},
            "trend pass; spread outliers: 1",
        ),
        ({"phases.step.trend_fraction": -0.04, "phases.step.trend_p": 0.4}, "trend pass"),
        (
            host("cpu", 0.48, load_per_core=3.07),
            "busy_machine other processes took 48% of its cores, load 3.1 a core",
        ),
        (
            host("cpu", waited=0.3),
            "busy_machine busy: this process waited 30% of the time for a core",
        ),
        (host("cuda", steal_fraction=0.05), "busy_machine : the hypervisor took 5% of the cores away"),
        (host("cuda", 0.9), "busy_machine pass other processes left it its cores"),
        (host("cpu", load_per_core=9.0), "busy_machine pass"),
        (
            {"device_state.power_capped_fraction": 0.83},
            "power_cap its power limit of 700 W held the clock down for 83.0% of the window",
        ),
        (
            {"device_state.close": {"other_process_pids": [41, 7]}, "device_state.other_process_count": 2},
            "other_processes 2 other processes on the GPU: pid 7, 41",
        ),
        # Where there is nothing to train, nothing moves either.
        ({"probe.training.parameters": 0}, "gradients fail none of 0; trained fail"),
        ({"mode": "inference", UNMOVED: None}, "gradients n/a; trained n/a"),
        ({"mode": "forward_backward", UNMOVED: None}, "gradients pass; trained n/a"),
        (
            {"probe.training.is_skipped": True, "probe.training.nonfinite_gradients": ["a"], UNMOVED: [*"abcd"]},
            "gradients pass; trained n/a",
        ),
        (
            {"phases.other.share_fraction": 0.3, "probe.verdicts.backward.verdict": "mixed"},
            "other_share n/a",
        ),
        (CAUSAL, "mfu fail"),
        (CAUSAL | {"model.is_causal": True}, "mfu pass"),
        ({"throughput.mfu_fraction": None}, "mfu n/a"),
        ({"model.is_fresh": False, "loss.first": 2.0}, "first_loss n/a"),
        ({"environment.variables": {"CUDA_LAUNCH_BLOCKING": "0"}}, "launch_blocking pass"),
        ({"device_state.sm_clock_drop_fraction": -0.2}, "sm_clock_drop pass"),
    ],
)
def test_a_guard_says_what_it_knows(changes, said):
    guards = guards_of(**changes)
    for name, text in (line.split(" ", 1) for line in said.split("; ")):
        assert text in f"{guards[name].status} {guards[name].message} {guards[name].advice}"
