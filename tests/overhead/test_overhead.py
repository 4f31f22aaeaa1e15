"""`lmbench overhead`: the arms do the same work, hooks are clocked once, intervals and answers are right."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lmbench.commands.overhead import run
from lmbench.errors import ExitCode, UsageError
from lmbench.overhead import control as overhead_control
from lmbench.overhead.arms import ArmFailed, check_same_work, execute, harness_figures, measure_arm
from lmbench.overhead.bare_loop import LoopSettings
from lmbench.overhead.control import ARMS as CONTROL_ARMS
from lmbench.overhead.control import HookClock
from lmbench.overhead.result import (
    ARMS,
    HookFigures,
    Interval,
    Measurement,
    bottleneck,
    overhead_of,
    summarize_arms,
)
from lmbench.overhead.table import print_overhead
from lmbench.records.measured import Loss, Memory, Window
from lmbench.records.run import RunRecord

TINY = [
    *("fit", "--trainer.accelerator", "cpu", "--model.size", "tiny", "--model.d_model", "16"),
    *("--model.vocab_size", "64", "--data.batch_size", "2", "--data.context_length", "8"),
    *("--model.num_layers", "1", "--measure.warmup_steps", "1", "--measure.steps", "4"),
    *("--measure.min_window_s", "0", "--measure.probe_steps", "0"),
]


def control(arm, *options):
    """Run a control arm in this process; returns its figures and the trained weights."""
    cli = CONTROL_ARMS[arm]([*TINY, *options])
    return cli.figures, {name: weight.detach().clone() for name, weight in cli.model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--measure.zero_grad", "native"],
        ["--trainer.precision", "bf16-mixed"],
        ["--trainer.precision", "bf16-true"],
        ["--trainer.precision", "64-true"],
        ["--trainer.gradient_clip_val", "0.01", "--trainer.precision", "bf16-mixed"],
        ["--trainer.gradient_clip_val", "0.001", "--trainer.gradient_clip_algorithm", "value"],
        ["--trainer.accumulate_grad_batches", "3", "--trainer.gradient_clip_val", "0.01"],
        ["--measure.mode", "forward_backward"],
        ["--measure.mode", "forward"],
        ["--data.placement", "pinned"],
        ["--measure.warmup_steps", "0"],
        ["--trainer.compile.backend", "aot_eager"],
    ],
    ids=lambda options: " ".join(word.removeprefix("--") for word in options) or "defaults",
)
def test_the_bare_loop_trains_the_same_weights_as_the_trainer(options):
    bare, bare_weights = control("bare", *options)
    trainer, trainer_weights = control("trainer", *options)
    assert bare.steps == trainer.steps == 4
    assert bare.first_loss == pytest.approx(trainer.first_loss, rel=1e-6)
    assert bare.last_loss == pytest.approx(trainer.last_loss, rel=1e-6)
    assert bare_weights.keys() == trainer_weights.keys()
    for name, weight in bare_weights.items():
        assert torch.equal(weight, trainer_weights[name]), name
    assert torch.get_default_dtype() is torch.float32
    assert gc.isenabled()


def test_a_precision_without_a_bare_loop_is_refused():
    with pytest.raises(UsageError, match="no bare loop for precision transformer-engine"):
        LoopSettings("transformer-engine")


def test_the_harness_trains_the_same_as_the_bare_loop(tmp_path):
    bare, _ = control("bare")
    harness = measure_arm("harness", TINY[1:], tmp_path / "harness")
    hooks = measure_arm("hooks", TINY[1:], tmp_path / "hooks")
    for arm in (harness, hooks):
        assert arm.steps == 4
        assert arm.first_loss == pytest.approx(bare.first_loss, rel=1e-6)
        assert arm.last_loss == pytest.approx(bare.last_loss, rel=1e-6)
    found = hooks.hooks
    assert 0 < found.step_median_s < harness.wall_s / 4
    assert sum(each.step_mean_s for each in found.by_name.values()) <= found.step_mean_s * 1.001
    assert found.by_name["PhaseTimer.on_train_batch_end"].calls == pytest.approx(1.0, abs=0.3)
    assert 0 <= found.clocking_s < found.step_mean_s


@pytest.fixture
def passing(monkeypatch):
    """Lets the hook clock's time pass by so many nanoseconds, and by nothing else."""
    now = [0]
    monkeypatch.setattr(overhead_control, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def passes(nanoseconds):
        now[0] += nanoseconds

    return passes


def test_a_nested_hook_is_counted_once(passing):
    clock = HookClock()
    inner = clock.wrap("inner", lambda: passing(5))

    def body():
        passing(7)
        inner()

    outer = clock.wrap("outer", body)
    outer()
    passing(100)
    inner()
    assert (clock.calls, clock.nested_calls) == (2, 1)
    # The nested call is in the outer one's time and in no other.
    assert clock.spent_ns == 17
    assert clock.by_name == {"inner": [5, 1], "outer": [12, 1]}


def test_a_hook_that_raises_is_clocked_and_does_not_block_the_clock():
    clock = HookClock()
    failing = clock.wrap("failing", lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing()
    assert (clock.calls, clock.nested_calls) == (2, 0)


def test_counting_can_begin_and_be_read_inside_a_hook(passing):
    clock = HookClock()
    readings = []

    def body():
        passing(20)
        clock.restart()
        passing(5)
        readings.append(clock.read_ns())
        passing(1)

    clock.wrap("body", body)()
    assert (readings, clock.spent_ns) == ([5], 6)


def test_interval_is_students():
    # t of 0.975 with 4 degrees of freedom is 2.776; the standard error of 1..5 is sqrt(2.5 / 5).
    found = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.high - found.mean == pytest.approx(2.7764 * 0.5**0.5, rel=1e-4)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_an_answer_needs_the_whole_interval_on_one_side():
    assert Interval(0.5, 0.2, 0.9).against(1.0) == "yes"
    assert Interval(2.0, 1.1, 2.9).against(1.0) == "no"
    assert Interval(0.9, 0.7, 1.1).against(1.0) == "undecided"


def measurements(costs_s, peaks=None, rounds=4):
    """Every arm, with steps of the given time, on a machine that slows from round to round."""
    peaks = peaks or {}
    hooks = HookFigures(7e-5, 7e-5, 50.0, 0.0, 1e-5, {})
    return [
        Measurement(
            arm=arm, round=index, steps=10, wall_s=10 * (costs_s[arm] + 1e-3 * index),
            steady_peak_allocated_bytes=peaks.get(arm), run_peak_allocated_bytes=peaks.get(arm),
            host_peak_rss_bytes=10**9, first_loss=4.0, last_loss=3.0, hooks=hooks if arm == "hooks" else None,
        )
        for index in range(rounds) for arm in ARMS
    ]  # fmt: skip


COSTS_S = {"bare": 0.010, "trainer": 0.0104, "harness": 0.0105, "hooks": 0.0107}


def test_differences_are_paired_by_round():
    found = summarize_arms(measurements(COSTS_S))["harness"]
    # The drift of 1 ms a round is in both arms and cancels, so nothing of it is in the interval.
    assert found.over_bare_s.mean == pytest.approx(0.5e-3)
    assert found.over_bare_s.high - found.over_bare_s.low < 1e-9
    assert found.step_s.max - found.step_s.min == pytest.approx(3e-3)


def test_peaks_are_compared_with_bares():
    peaks = {"bare": 2**30, "trainer": 2**30 + 2**24, "harness": 2**30 + 512, "hooks": 2**30 + 512}
    found = summarize_arms(measurements(COSTS_S, peaks))
    assert found["harness"].over_bare_run_peak_allocated_bytes == 512
    assert found["trainer"].over_bare_steady_peak_allocated_bytes == 2**24
    assert summarize_arms(measurements(COSTS_S))["harness"].over_bare_run_peak_allocated_bytes is None


def test_arms_that_did_not_do_the_same_are_not_compared():
    found = measurements(COSTS_S)
    check_same_work(found)
    for loss in (4.1, None):
        found[2].first_loss = loss
        with pytest.raises(ArmFailed, match="first loss"):
            check_same_work(found)
    found = measurements(COSTS_S)
    found[1].steps = 9
    with pytest.raises(ArmFailed, match="took 9 steps where bare took 10"):
        check_same_work(found)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"forward": "queued", "backward": "queued"}, "device"),
        ({"forward": "host-bound", "optimizer": "mixed"}, "host"),
        ({"forward": "queued", "optimizer": "mixed"}, "mixed"),
        ({}, "unknown"),
    ],
)
def test_bottleneck_follows_the_lag_probes(verdicts, expected):
    assert bottleneck("cuda", verdicts) == expected


def test_a_pause_of_the_harness_is_part_of_its_cost():
    window = Window(steps=5, wall_s=1.0, excluded_s=0.25)
    memory, loss = Memory(host_peak_rss_bytes=7), Loss(first=2.0, last=1.0)
    assert harness_figures(RunRecord(1, "ok", window=window, memory=memory, loss=loss)).wall_s == 1.25


def test_a_failing_arm_is_one_line_with_the_end_of_its_standard_error():
    program = "import sys; print('first\\n\\nlast but one\\nlast', file=sys.stderr); sys.exit(7)"
    with pytest.raises(ArmFailed) as caught:
        execute("bare", ["-c", program])
    assert str(caught.value) == "bare: failed with exit code 7: first | last but one | last"
    assert caught.value.exit_code is ExitCode.INTERNAL


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rounds", "1"], "at least 2"),
        (["--rounds", "many"], "invalid int value"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(options, words, capsys):
    assert run(["overhead", *options]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith("lmbench: ")
    assert error.count("\n") == 1
    assert words in error


def test_a_mistake_in_an_option_of_fit_is_a_usage_error(capsys):
    assert run(["overhead", *TINY[1:], "--model.size", "gigantic"]) == ExitCode.USAGE
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("lmbench: ")
    assert "gigantic" in error[-1]


def test_no_memory_ends_without_a_table(capsys):
    options = [*TINY[1:], "--model.vocab_size", str(10**13)]
    assert run(["overhead", *options]) == ExitCode.OUT_OF_MEMORY
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("lmbench: overhead: harness: ")


def test_the_command_measures_every_arm_in_every_round(capsys):
    args = ["overhead", *TINY[1:], "--rounds", "2", "--json"]
    assert run(args) == ExitCode.OK
    result = json.loads(capsys.readouterr().out)
    order = [record["arm"] for record in result["measurements"]]
    assert order == [*ARMS, *ARMS[1:], ARMS[0]]
    assert result["steps"] == 4
    assert result["hooks"]["step_s"]["mean"] > 0
    assert len({round(record["first_loss"], 5) for record in result["measurements"]}) == 1


def test_what_complete_rounds_say_survives_a_signal(tmp_path):
    """In a process of its own, stopped at the first line of its third round."""
    words = [sys.executable, "-m", "lmbench", "overhead", *TINY[1:], "--rounds", "50"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    for line in process.stderr:
        if "round 3 of 50" in line:
            process.terminate()
            break
    output, error = process.communicate()
    assert process.returncode == ExitCode.TERMINATED
    assert "below is what 2 complete rounds say" in error
    assert "Traceback" not in error
    assert "2 rounds of" in output
    for arm in ARMS:
        # What it is, and its row.
        assert sum(line.startswith(f"{arm} ") for line in output.splitlines()) >= 2


def test_tables_of_a_slow_gpu_run_fit_80_columns():
    peaks = dict.fromkeys(ARMS, 70 * 2**30)
    found = measurements(dict.fromkeys(ARMS, 0.8), peaks, rounds=10)
    pilot = RunRecord(1, "ok", device_type="cuda", window=Window(warmup_steps=5))
    console = Console(width=80, record=True, file=sys.stderr)
    print_overhead(overhead_of(pilot, found, "lmbench overhead"), console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "71,680" in text
    assert "800.00 .. 809.00" in text
