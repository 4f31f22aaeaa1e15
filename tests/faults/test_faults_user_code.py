"""A user's own code that fails: their own lines are shown, outcome `error`, exit code 5, what was measured is kept."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import planted_faults
import pytest
from fit_process import plant, start_fit

import lmbench
from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.records.measured import RunError

RAISING_LINE = inspect.getsourcelines(planted_faults.Planted._raise)[1] + 1
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
def test_a_callback_that_raises_ends_the_run_as_an_error_at_its_line(hook, tmp_path, capsys):
    at, phase, steps, window = HOOKS[hook]
    code, run, printed = fit(tmp_path, capsys, *plant(hook, "raise", at))
    assert code == 5
    assert (run.outcome, run.record.exit_code, run.damage) == ("error", 5, None)
    error = RunError("ValueError", "planted in the user's own code", phase)
    error.location, error.traceback_file = f"planted_faults.py:{RAISING_LINE} in _raise", "traceback.txt"
    assert run.record.error == error
    assert len(run.steps) == steps
    assert run.record.window.steps == window
    told = printed.err.splitlines()
    assert told[-2].strip() == 'raise ValueError("planted in the user\'s own code")'
    assert told[-1].startswith(
        f"lmbench: error in your code, in {phase}: ValueError: planted in the user's own code (all frames: "
    )
    assert not any("lightning" in line or "/lmbench/" in line for line in told[:-1])
    whole = (run.path / "traceback.txt").read_text()
    assert "lightning/pytorch/" in whole
    assert whole.endswith("ValueError: planted in the user's own code\n")
    assert f"outcome      error in {phase}" in printed.out


def test_a_window_that_was_complete_before_the_failure_keeps_its_summary(tmp_path, capsys):
    _, run, printed = fit(tmp_path, capsys, *plant("on_train_batch_end", "raise", WINDOW + 2))
    assert run.record.phases.step.n == 20
    assert run.record.throughput.tokens_per_s > 0
    assert "tokens/s" in printed.out


def test_code_that_exits_is_an_error_and_not_a_success(tmp_path, capsys):
    code, run, _ = fit(tmp_path, capsys, *plant("on_train_batch_end", "exit", 8))
    assert (code, run.outcome, len(run.steps)) == (5, "error", 8)
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
    assert (code, run.outcome, run.record.error.phase, len(run.steps)) == (5, "error", "forward", 9)
    assert "in forward: ValueError: planted in training_step (all frames: " in printed.err
    assert run.record.error.location.endswith("in training_step")


def test_a_module_that_cannot_be_built_leaves_a_result_with_its_own_message(tmp_path, capsys):
    code, run, printed = foreign(tmp_path, capsys, "--model.bad_step", "-2")
    assert (code, run.outcome, run.record.error.phase) == (5, "error", "setup")
    assert run.record.error.message == "planted in the constructor"
    assert "error in your code, in setup: RuntimeError: planted in the constructor (" in printed.err
    assert run.record.error.location.endswith("in __init__")


def test_an_exception_in_a_loader_process_is_told_with_what_happened_there(tmp_path, capsys):
    code, run, printed = foreign(tmp_path, capsys, "--data.bad_item", "24", "--data.num_workers", "1")
    assert (code, run.outcome, run.record.error.phase) == (5, "error", "data")
    assert run.record.error.message == (
        "Caught ValueError in DataLoader worker process 0. ValueError: planted in the data"
    )
    assert len(run.steps) > 5
    # The worker's own lines, which came as text.
    assert run.record.error.location.endswith("in __getitem__")
    first, second = printed.err.splitlines()[-3:-1]
    assert "planted_faults.py" in first
    assert second.strip() == 'raise ValueError("planted in the data")'


PLACES = {
    # class, option, value: phase, function, message
    ("Net", "bad_hook", "configure_optimizers"): ("setup", "configure_optimizers", "KeyError: 'lr'"),
    ("Data", "bad_hook", "__init__"): ("setup", "__init__", "KeyError: 'lr'"),
    ("Data", "bad_hook", "collate"): ("data", "_collate", "KeyError: 'lr'"),
    # A loss that no parameter is in: PyTorch raises, between two lines of the module.
    ("Net", "bad_hook", "detach"): ("backward", None, "RuntimeError: element 0 of tensors does not require grad"),
}


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_an_error_anywhere_in_own_code_is_told_as_that(place, tmp_path, capsys):
    (owner, option, value), (phase, function, message) = place, PLACES[place]
    words = [f"--{'model' if owner == 'Net' else 'data'}.{option}", value]
    code, run, printed = foreign(tmp_path, capsys, *words)
    assert (code, run.outcome, run.record.exit_code) == (5, "error", 5)
    assert run.record.error.phase == phase
    nowhere = "" if function else ", at no line of yours"
    assert f"error in your code, in {phase}{nowhere}: {message}" in printed.err
    assert "site-packages" not in printed.err
    assert (run.record.error.location is None) == (function is None)
    assert function is None or f"in {function}\n" in printed.err
    assert message in (run.path / "traceback.txt").read_text()


def test_a_callback_that_cannot_be_built_is_own_code(tmp_path, capsys):
    code, run, printed = fit(tmp_path, capsys, "--trainer.callbacks+=planted_faults.Unbuildable")
    assert (code, run.outcome) == (5, "error")
    assert "error in your code, in setup: KeyError: 'lr'" in printed.err


def test_what_the_api_raises_is_the_users_own_exception_without_lightnings_frames(tmp_path):
    module, data = planted_faults.Net(bad_hook="forward"), planted_faults.Data()
    with pytest.raises(KeyError) as raised:
        lmbench.measure(module, data, trainer={"accelerator": "cpu"}, results_dir=tmp_path)
    (run,) = lmbench.load(tmp_path)
    assert raised.value.__notes__ == [f"lmbench keeps the result so far: {run.path}"]
    assert (run.record.exit_code, run.record.error.traceback_file) == (5, "traceback.txt")
    files = [Path(each.filename).name for each in traceback.extract_tb(raised.value.__traceback__)]
    assert files == ["test_faults_user_code.py", "in_process.py", *["planted_faults.py"] * 3]


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
