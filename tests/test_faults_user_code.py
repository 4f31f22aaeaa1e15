"""A user's own code that fails: their traceback is shown, outcome `error`, exit code 1, what was measured is kept."""

from __future__ import annotations

import pytest
from fit_process import plant, start_fit

from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.records.measured import RunError

SMOKE = ["fit", "--config", "smoke", "--trainer.logger", "false"]
QUICK = ["--measure.steps", "20", "--measure.min_window_s", "0", "--measure.probe_steps", "3"]
SMALL = ["--model.num_layers", "1"]
WINDOW = 3 + 20


def fit(tmp_path, capsys, *words):
    """Exit code, result (None without one) and standard error of a run in this process."""
    results = tmp_path / "results"
    code = main([*SMOKE, *QUICK, *SMALL, "--measure.results_dir", str(results), *words])
    folders = list(results.glob("*"))
    return code, load_run(folders[0]) if folders else None, capsys.readouterr()


HOOKS = {
    # hook: times it was called before, phase, steps kept, steps of the window
    "setup": (0, "setup", 0, None),
    "on_fit_start": (0, "setup", 0, 0),
    "on_train_start": (0, "setup", 0, 0),
    "on_train_batch_start": (8, "other", 8, 5),
    "on_before_optimizer_step": (8, "other", 8, 5),
    "on_train_batch_end": (8, "other", 8, 5),
    "on_train_end": (0, "other", WINDOW, 20),
    "on_fit_end": (0, "other", WINDOW, 20),
    "teardown": (0, "other", WINDOW, 20),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_that_raises_ends_the_run_as_an_error_with_its_traceback(hook, tmp_path, capsys):
    at, phase, steps, window = HOOKS[hook]
    code, run, printed = fit(tmp_path, capsys, *plant(hook, "raise", at))
    assert code == 1
    assert (run.outcome, run.record.exit_code, run.damage) == ("error", 1, None)
    assert run.record.error == RunError("ValueError", "planted in the user's own code", phase)
    assert len(run.steps) == steps
    assert run.record.window.steps == window
    assert "planted_faults.py" in printed.err
    assert "ValueError: planted in the user's own code" in printed.err
    assert f"outcome      error in {phase}" in printed.out


def test_a_window_that_was_complete_before_the_failure_keeps_its_summary(tmp_path, capsys):
    _, run, printed = fit(tmp_path, capsys, *plant("on_train_batch_end", "raise", WINDOW + 2))
    assert run.record.phases.step.n == 20
    assert run.record.throughput.tokens_per_s > 0
    assert "tokens/s" in printed.out


def test_code_that_exits_is_an_error_and_not_a_success(tmp_path, capsys):
    code, run, _ = fit(tmp_path, capsys, *plant("on_train_batch_end", "exit", 8))
    assert (code, run.outcome, len(run.steps)) == (1, "error", 8)
    assert "exit with 0" in run.record.error.message


FOREIGN = ["--model", "planted_faults.Net", "--data", "planted_faults.Data"]


def foreign(tmp_path, capsys, *words):
    results = tmp_path / "results"
    own = ["--trainer.accelerator", "cpu", "--measure.warmup_steps", "3", "--measure.results_dir", str(results)]
    code = main(["fit", "--trainer.logger", "false", *FOREIGN, *QUICK, *own, *words])
    folders = list(results.glob("*"))
    return code, load_run(folders[0]) if folders else None, capsys.readouterr()


def test_a_training_step_that_raises_is_told_with_its_phase(tmp_path, capsys):
    code, run, printed = foreign(tmp_path, capsys, "--model.bad_step", "9")
    assert (code, run.outcome, run.record.error.phase, len(run.steps)) == (1, "error", "forward", 9)
    assert "ValueError: planted in training_step" in printed.err


def test_a_module_that_cannot_be_built_leaves_a_result_with_its_own_message(tmp_path, capsys):
    code, run, printed = foreign(tmp_path, capsys, "--model.bad_step", "-2")
    assert (code, run.outcome, run.record.error.phase) == (1, "error", "setup")
    assert run.record.error.message == "planted in the constructor"
    assert printed.err.rstrip().endswith("RuntimeError: planted in the constructor")


def test_an_exception_in_a_loader_process_is_told_with_what_happened_there(tmp_path, capsys):
    code, run, printed = foreign(tmp_path, capsys, "--data.bad_item", "24", "--data.num_workers", "1")
    assert (code, run.outcome, run.record.error.phase) == (1, "error", "data")
    assert run.record.error.message == (
        "Caught ValueError in DataLoader worker process 0. ValueError: planted in the data"
    )
    assert len(run.steps) > 5
    assert "planted in the data" in printed.err


def test_losses_that_are_not_finite_are_kept_as_such(tmp_path, capsys):
    code, run, _ = foreign(tmp_path, capsys, "--model.nan_step", "9", "--measure.strict", "true")
    assert code == 4
    assert run.outcome == "ok"
    losses = [step.loss for step in run.steps]
    assert losses[8] == losses[8]
    assert losses[9] != losses[9]
    assert run.damage is None


def test_a_process_that_dies_on_the_spot_is_read_as_killed(tmp_path):
    crash = start_fit(tmp_path, *SMALL, "--measure.steps", "1000", *plant("on_train_batch_end", "crash", 60))
    assert crash.wait() == 139
    (run,) = crash.results
    assert (run.outcome, run.damage) == ("killed", None)
    assert len(run.steps) >= 10
