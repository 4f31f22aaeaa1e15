"""A user's own code that fails: their own lines are shown, outcome `error`, exit code 5, what was measured is kept."""

from __future__ import annotations

import inspect
import math
import traceback
from pathlib import Path

import planted_faults
import pytest
from fit_process import fit_here, plant
from tables import rows

import lmbench
from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.records.measured import RunError

RAISING_LINE = inspect.getsourcelines(planted_faults.Planted._raise)[1] + 1
QUICK = ["--measure.steps=20", "--measure.min_window_s=0", "--measure.probe_steps=3"]
WINDOW = 3 + 20


def fit(tmp_path, capsys, *words):
    return fit_here(tmp_path / "results", capsys, *QUICK, *words)


HOOKS = {
    # hook: times it was called before, phase, steps kept, steps of the window
    "setup": (0, "setup", 0, None),
    "on_train_start": (0, "setup", 0, 0),
    "on_train_batch_start": (8, "other", 8, 5),
    "on_train_batch_end": (8, "other", 8, 5),
    "on_train_end": (0, "other", WINDOW, 20),
    "teardown": (0, "other", WINDOW, 20),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_that_raises_ends_the_run_as_an_error_at_its_line(hook, tmp_path, capsys):
    at, phase, steps, window = HOOKS[hook]
    code, run, printed = fit(tmp_path, capsys, *plant(hook, "raise", at))
    assert (code, run.outcome, run.record.exit_code, run.damage) == (5, "error", 5, None)
    error = RunError("ValueError", "planted in the user's own code", phase)
    error.location, error.traceback_file = f"planted_faults.py:{RAISING_LINE} in _raise", "traceback.txt"
    assert (run.record.error, len(run.steps), run.record.window.steps) == (error, steps, window)
    *frames, source, line = printed.err.splitlines()
    assert source.strip() == 'raise ValueError("planted in the user\'s own code")'
    assert line.startswith(f"lmbench: error in your code, in {phase}: ValueError: planted in the user's own code (all")
    assert not any("lightning" in frame or "/lmbench/" in frame for frame in frames)
    traceback_text = (run.path / "traceback.txt").read_text()
    assert "lightning/pytorch/" in traceback_text
    assert traceback_text.endswith("ValueError: planted in the user's own code\n")
    assert f"outcome      error in {phase}" in printed.out


@pytest.mark.parametrize(("deed", "at", "steps"), [("raise", WINDOW + 2, WINDOW), ("exit", 8, 8)])
def test_a_complete_window_keeps_its_summary_and_code_that_exits_is_no_success(deed, at, steps, tmp_path, capsys):
    code, run, printed = fit(tmp_path, capsys, *plant("on_train_batch_end", deed, at))
    assert (code, run.outcome, len(run.steps)) == (5, "error", steps)
    if deed == "exit":
        assert "exit with 0" in run.record.error.message
    else:
        assert run.record.phases.step.n == 20
        assert run.record.throughput.tokens_per_s > 0
        assert "tokens/s" in printed.out


def foreign(tmp_path, capsys, *words):
    """A run of a module and data of the user's own."""
    own = ["--model=planted_faults.Net", "--data=planted_faults.Data", "--trainer.accelerator=cpu"]
    own += ["--trainer.logger=false", "--measure.warmup_steps=3"]
    code = main(["fit", *own, *QUICK, "--measure.results_dir", str(tmp_path / "results"), *words])
    return code, load_run(next(tmp_path.glob("results/*"))), capsys.readouterr()


PLACES = rows("""
# words | phase | function | exception and its message
model.bad_step 9 | forward | training_step | ValueError: planted in training_step
model.bad_step -2 | setup | __init__ | RuntimeError: planted in the constructor
model.bad_hook configure_optimizers | setup | configure_optimizers | KeyError: 'lr'
data.bad_hook __init__ | setup | __init__ | KeyError: 'lr'
data.bad_hook collate | data | _collate | KeyError: 'lr'
# What happened in a loader's process came as text.
data.bad_item 24 --data.num_workers 1 | data | __getitem__ | ValueError: planted in the data
# A loss that no parameter is in: PyTorch raises, between two lines of the module.
model.bad_hook detach | backward | - | RuntimeError: element 0 of tensors does not require grad
trainer.callbacks+ planted_faults.Unbuildable | setup | __init__ | KeyError: 'lr'
""")


@pytest.mark.parametrize(("words", "phase", "function", "error"), PLACES)
def test_an_error_anywhere_in_own_code_is_told_with_its_line_and_its_phase(
    words, phase, function, error, tmp_path, capsys
):
    code, run, printed = foreign(tmp_path, capsys, *f"--{words}".split())
    assert (code, run.outcome, run.record.exit_code, run.record.error.phase) == (5, "error", 5, phase)
    assert f"error in your code, in {phase}" in printed.err
    assert error in printed.err
    assert error in (run.path / "traceback.txt").read_text()
    assert "site-packages" not in printed.err
    assert ("at no line of yours" if not function else f"in {function}\n") in printed.err
    assert (run.record.error.location is None) == (not function)
    # What was measured before is kept.
    assert "bad_step 9" not in words or len(run.steps) == 9
    assert "bad_item" not in words or len(run.steps) > 5


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
    code, run, _ = foreign(tmp_path, capsys, "--model.nan_step=9", "--measure.strict=true")
    assert (code, run.outcome, run.damage) == (4, "ok", None)
    assert [math.isnan(step.loss) for step in run.steps[8:10]] == [False, True]
