"""Every guard: passes on a healthy run, judges a planted fault, and never passes on what it cannot know."""

from __future__ import annotations

import copy
import math

import msgspec
import pytest
from runs import BASE, put

from lmbench.records.codec import as_dict
from lmbench.records.guards import evaluate_guards as _evaluate
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.summary import summarize_steps

STEP_S = 0.1


def _typed(steps):
    return [msgspec.convert(step, StepRecord) for step in steps]


def evaluate_guards(run, steps):
    """Guards of a record and steps that are written here as the plain content of their files."""
    return _evaluate(
        msgspec.convert({"schema_version": SCHEMA_VERSION, "outcome": "ok", **run}, RunRecord), _typed(steps)
    )


def _steps(count=25, warmup=5):
    return [
        {
            "step": step,
            "rank": 0,
            "stage": "warmup" if step < warmup else "window",
            "is_warmup": step < warmup,
            "micro_batches": 1,
            "step_s": STEP_S * (1 + 0.001 * (step * 7 % 3)),
            "other_s": 0.0005,
            "loss": 9.2 - 0.01 * step,
            "is_skipped": False,
        }
        for step in range(count)
    ]


def _healthy():
    """A run on a GPU with nothing wrong with it, and its steps."""
    steps = _steps()
    window = [step for step in steps if step["stage"] == "window"]
    total = math.fsum(step["step_s"] for step in window)
    reading = {"sm_clock_hz": 1.98e9, "temperature_c": 60, "other_process_pids": [], "other_process_count": 0}
    capped = {"power_capped_fraction": 0.0, "thermal_capped_fraction": 0.0, "sm_clock_drop_fraction": 0.0}
    changes = {
        "precision": "16-mixed",
        "compile": {"is_enabled": True, "window_recompile_count": 0},
        "window": {"steps": len(window), "requested_steps": 20, "wall_s": total * 1.0001, "steps_sum_s": total},
        "phases": as_dict(summarize_steps(_typed(steps))),
        "device_state": {"open": reading, "close": reading, **capped, "other_process_count": 0},
        "host_state": {"other_cpu_fraction": 0.02, "steal_fraction": 0.0, "waited_fraction": 0.001},
        "probe.is_complete": True,
        "probe.training.parameters": 4,
    }
    return put(copy.deepcopy(BASE), changes), steps


def _plant(run, path, value):
    return put(copy.deepcopy(run), {path: value})


def _judge(run, steps, name):
    return next(guard for guard in evaluate_guards(run, steps) if guard.name == name)


def test_a_healthy_run_passes_every_guard_without_advice():
    guards = evaluate_guards(*_healthy())
    assert {guard.status for guard in guards} == {"pass"}
    assert {guard.advice for guard in guards} == {""}


FAULTS = [
    ("compile.window_recompile_count", 2, "recompiles", "fail", 2),
    ("environment.variables", {"CUDA_LAUNCH_BLOCKING": "1"}, "launch_blocking", "fail", None),
    ("environment.flags.anomaly_mode", True, "anomaly_mode", "fail", None),
    ("environment.flags.deterministic_algorithms", True, "deterministic", "fail", None),
    ("environment.flags.cudnn_deterministic", True, "deterministic", "fail", None),
    ("host_state.waited_fraction", 0.3, "busy_machine", "warn", 0.3),
    ("throughput.mfu_fraction", 1.01, "mfu", "fail", 1.01),
    ("loss.first", 12.0, "first_loss", "warn", 12.0 - math.log(10_000)),
    ("loss.mean", math.nan, "finite_loss", "fail", 1),
    ("probe.training.missing_gradients", ["a", "b", "c", "d"], "gradients", "fail", 4),
    ("probe.training.zero_gradients", ["a", "b", "c", "d"], "gradients", "fail", 4),
    ("probe.training.zero_gradients", ["a"], "gradients", "warn", 1),
    ("probe.training.nonfinite_gradients", ["a"], "gradients", "fail", 1),
    ("probe.training.parameters", 0, "gradients", "fail", 0),
    ("probe.training.unmoved_parameters", ["a", "b", "c", "d"], "trained", "fail", 4),
    ("probe.training.unmoved_parameters", ["a"], "trained", "warn", 1),
    ("window.requested_steps", 30, "window_complete", "warn", 20),
    ("probe.is_complete", False, "probe_steps", "warn", None),
    ("window.wall_s", 2.02, "window_identity", "fail", None),
    ("phases.step.trend_fraction", 0.03, "trend", None, None),
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
    run, steps = _healthy()
    if name == "trend":
        run, status = _plant(run, "phases.step.trend_p", 0.001), "warn"
    guards = evaluate_guards(_plant(run, path, value), steps)
    found = {guard.name: guard for guard in guards if guard.status not in ("pass", "n/a")}
    if path == "probe.training.parameters":
        # Where there is nothing to train, nothing moves either.
        assert found.pop("trained").status == "fail"
    assert set(found) == {name}
    guard = found[name]
    assert guard.status == status
    assert guard.advice.endswith(".")
    assert guard.message
    if figure is not None:
        assert guard.value == pytest.approx(figure)
        assert guard.limit is not None


def test_every_guard_has_a_planted_fault():
    assert {fault[2] for fault in FAULTS} | {"skipped_steps"} == {guard.name for guard in evaluate_guards(*_healthy())}


def test_nothing_passes_on_an_empty_run():
    guards = _evaluate(RunRecord(SCHEMA_VERSION, "running"), [])
    assert {guard.status for guard in guards} == {"n/a"}
    assert all(guard.message for guard in guards)


def test_a_cpu_run_is_not_judged_on_what_only_a_gpu_has():
    run, steps = _healthy()
    run |= {
        "device_type": "cpu",
        "device_state": {"open": {}, "close": {}},
        "memory": {"host_peak_rss_bytes": 1},
    }
    run["probe"] |= {"hidden_syncs": None, "verdicts": {}}
    status = {guard.name: guard.status for guard in evaluate_guards(run, steps)}
    absent = {name for name, value in status.items() if value == "n/a"}
    assert absent == {
        "other_share", "hidden_syncs", "launch_blocking", "power_cap", "thermal_cap", "sm_clock_drop",
        "other_processes", "allocator_growth", "allocator_retries",
    }  # fmt: skip


@pytest.mark.parametrize(("bad", "where"), [(math.nan, 0), (math.inf, 12)])
def test_a_non_finite_loss_in_any_step_fails_and_names_the_first(bad, where):
    run, steps = _healthy()
    steps[where]["loss"] = bad
    guard = _judge(run, steps, "finite_loss")
    assert (guard.status, guard.value) == ("fail", 1)
    assert guard.message.endswith(f"the first at step {where}")


def test_skipped_steps_are_counted_in_the_window_only():
    run, steps = _healthy()
    for index in (0, 1, 10, 11, 12):
        steps[index]["is_skipped"] = True
    guard = _judge(run, steps, "skipped_steps")
    assert (guard.status, guard.value) == ("warn", 3)
    assert guard.message == "the scaler skipped 3 of 20 steps of the window"
    assert _judge(_plant(run, "precision", "bf16-mixed"), steps, "skipped_steps").status == "n/a"


def test_a_window_in_which_fp16_always_overflowed_fails_and_says_since_when():
    run, steps = _healthy()
    in_window = [step for step in steps if step["stage"] == "window"]
    for step in in_window:
        step["is_skipped"] = True
    guard = _judge(run, steps, "skipped_steps")
    assert (guard.status, guard.value) == ("fail", 20)
    assert guard.message == "fp16 gradients overflowed in all 20 steps of the window, and there is no step time"
    for step in steps:
        step["is_skipped"] = True
    guard = _judge(run, steps, "skipped_steps")
    assert "from the first step on: nothing was trained" in guard.message
    assert f"halved {len(steps)} times" in guard.advice


@pytest.mark.parametrize(
    ("device", "error", "status"),
    [("cuda", 0.0009, "pass"), ("cuda", -0.0011, "fail"), ("cpu", 0.0045, "pass"), ("cpu", -0.0055, "fail")],
)
def test_the_windows_identity_has_a_limit_for_each_device(device, error, status):
    run, steps = _healthy()
    run = _plant(_plant(run, "device_type", device), "window.wall_s", run["window"]["steps_sum_s"] * (1 + error))
    assert _judge(run, steps, "window_identity").status == status


@pytest.mark.parametrize(("device", "status"), [("cuda", "pass"), ("cpu", "fail")])
def test_a_short_windows_identity_leaves_out_the_synchronizing_at_its_ends(device, status):
    run, steps = _healthy()
    for step in steps:
        step["step_s"] = 1e-4
    total_s = run["window"]["steps"] * 1e-4
    run = _plant(_plant(run, "device_type", device), "window.wall_s", total_s + 1.4e-4)
    assert _judge(run, steps, "window_identity").status == status
    run = _plant(run, "window.wall_s", total_s + 1.6e-4)
    assert _judge(run, steps, "window_identity").status == "fail"


def _on_cpu(times):
    """A run on a CPU with these step times in its window."""
    run, steps = _healthy()
    steps = _steps(count=len(times) + 5)
    for step, time_s in zip(steps[5:], times, strict=True):
        step["step_s"] = time_s
    return {**run, "device_type": "cpu", "phases": as_dict(summarize_steps(_typed(steps)))}, steps


def test_a_busy_machine_is_told_in_one_sentence():
    # Every third step waits for another process; the first ones, for longer.
    times = [0.1 + (0.4 if step % 3 == 0 else 0.0) + (0.5 if step < 6 else 0.0) for step in range(30)]
    run, steps = _on_cpu(times)
    guards = [guard for guard in evaluate_guards(run, steps) if guard.name in ("busy_machine", "trend", "spread")]
    assert [guard.status for guard in guards] == ["warn", "n/a", "n/a"]
    # Mean 0.333 s, std 0.280, r = 0.252: as good as 17.9 independent steps, whose t is 2.11.
    assert guards[0].message == "this machine is busy: figures are good to about ±40 %"
    # A device has no such neighbours: its steps are told of as ever.
    assert _judge({**run, "device_type": "cuda"}, steps, "spread").advice.startswith("S")


@pytest.mark.parametrize(
    ("device", "state", "message"),
    [
        ("cpu", {"other_cpu_fraction": 0.48, "load_per_core": 3.07},
         "other processes took 48 % of its cores, load 3.1 a core"),
        ("cpu", {"other_cpu_fraction": 0.09, "waited_fraction": 0.3},
         "this process waited 30 % of the time for a core"),
        ("cuda", {"steal_fraction": 0.05}, "the hypervisor took 5 % of the cores away"),
        ("cuda", {"other_cpu_fraction": 0.9, "waited_fraction": 0.01}, None),
        ("cpu", {"other_cpu_fraction": 0.09, "waited_fraction": 0.01, "load_per_core": 9.0}, None),
    ],
)  # fmt: skip
def test_a_steady_load_that_spreads_no_steps_is_seen(device, state, message):
    run, steps = _healthy()
    guard = _judge({**run, "device_type": device, "host_state": state}, steps, "busy_machine")
    assert guard.status == ("warn" if message else "pass")
    assert guard.message == (f"this machine is busy: {message}" if message else "other processes left it its cores")


@pytest.mark.parametrize(
    ("times", "status"),
    [
        ([0.10 + 0.01 * step for step in range(30)], "warn"),
        ([0.20] * 15 + [0.10] * 15, "warn"),
        ([0.10] * 20 + [0.50] + [0.10] * 9, "pass"),
    ],
    ids=["drift", "fall", "outlier"],
)
def test_what_a_quiet_cpu_does_is_still_said(times, status):
    run, steps = _on_cpu(times)
    assert _judge(run, steps, "trend").status == status
    spread = _judge(run, steps, "spread")
    assert spread.status == "warn"
    assert "busy" not in spread.message


def test_advice_names_the_run_it_is_about():
    run, steps = _healthy()
    power = _judge(_plant(run, "device_state.power_capped_fraction", 0.83), steps, "power_cap")
    assert "83.0%" in power.message
    assert "700 W" in power.advice
    run["device_state"]["close"] = {"other_process_pids": [41, 7], "other_process_count": 2}
    others = _judge(_plant(run, "device_state.other_process_count", 2), steps, "other_processes")
    assert others.message.endswith("pid 7, 41")


_UNMOVED = "probe.training.unmoved_parameters"
_SKIPPED = {"probe.training.is_skipped": True, "probe.training.nonfinite_gradients": ["a"], _UNMOVED: list("abcd")}
_CAUSAL = {"throughput.mfu_fraction": 1.2, "throughput.mfu_causal_fraction": 0.6}


@pytest.mark.parametrize(
    ("changes", "name", "status"),
    [
        ({"mode": "inference", _UNMOVED: None}, "gradients", "n/a"),
        ({"mode": "inference", _UNMOVED: None}, "trained", "n/a"),
        ({"mode": "forward_backward", _UNMOVED: None}, "trained", "n/a"),
        (_SKIPPED, "trained", "n/a"),
        (_SKIPPED, "gradients", "pass"),
        ({"phases.step.trend_fraction": -0.04, "phases.step.trend_p": 0.4}, "trend", "pass"),
        ({"phases.step.trend_fraction": -0.04, "phases.step.trend_p": 0.001}, "trend", "warn"),
        ({"phases.other.share_fraction": 0.3, "probe.verdicts.backward.verdict": "mixed"}, "other_share", "n/a"),
        (_CAUSAL, "mfu", "fail"),
        ({**_CAUSAL, "model.is_causal": True}, "mfu", "pass"),
        ({"throughput.mfu_fraction": None}, "mfu", "n/a"),
        ({"model.is_fresh": False, "loss.first": 2.0}, "first_loss", "n/a"),
        ({"environment.variables": {"CUDA_LAUNCH_BLOCKING": "0"}}, "launch_blocking", "pass"),
        ({"device_state.sm_clock_drop_fraction": -0.2}, "sm_clock_drop", "pass"),
    ],
)
def test_what_is_known_not_to_be_a_fault_passes_and_what_cannot_be_known_does_not(changes, name, status):
    run, steps = _healthy()
    for path, value in changes.items():
        run = _plant(run, path, value)
    assert _judge(run, steps, name).status == status
