"""A user's own code that fails: their own lines are shown, outcome `error`, exit code 5, what was measured is kept."""

from __future__ import annotations

import inspect
import math
import re
import traceback
from pathlib import Path

import planted_faults
import psutil
import pytest
from fit_process import SMALL, bench, plant, sound_result, start_fit
from tables import cases
from waiting import wait_for

import lmbench
from lmbench.records.measured import RunError

RAISING_LINE = inspect.getsourcelines(planted_faults.Planted._raise)[1] + 1
QUICK = "--measure.steps=20 --measure.probe_steps=3"


@cases("""
- [hook, at, phase, steps, window]


# `at` is how often the hook was called before; steps are those that are kept, and those of the window.
- [setup, 0, setup, 0, null]
- [on_train_start, 0, setup, 0, 0]
- [on_train_batch_start, 8, other, 8, 5]
- [on_train_batch_end, 8, other, 8, 5]
- [on_train_batch_end, 25, other, 23, 20]
- [on_train_end, 0, other, 23, 20]
- [teardown, 0, other, 23, 20]
""")
def test_a_callback_that_raises_ends_the_run_as_an_error_at_its_line(hook, at, phase, steps, window, tmp_path, capsys):
    run, printed = bench(tmp_path, QUICK, *SMALL, *plant(hook, "raise", at), code=5), capsys.readouterr()
    assert (run.outcome, run.record.exit_code, run.damage) == ("error", 5, None)
    error = RunError("ValueError", "planted in the user's own code", phase)
    error.location, error.traceback_file = f"planted_faults.py:{RAISING_LINE} in _raise", "traceback.txt"
    assert (run.record.error, len(run.steps), run.record.window.steps) == (error, steps, window)
    *frames, source, line = printed.err.splitlines()
    assert source.strip() == 'raise ValueError("planted in the user\'s own code")'
    assert line.startswith(f"lmbench: error in your code, in {phase}: ValueError: planted in the user's own code (all")
    assert set(re.findall('File "(.+?)"', "".join(frames))) == {planted_faults.__file__}
    traceback_text = (run.path / "traceback.txt").read_text()
    assert "lightning/pytorch/" in traceback_text
    assert traceback_text.endswith("ValueError: planted in the user's own code\n")
    assert f"outcome      error in {phase}" in printed.out
    # A complete window keeps its summary.
    assert ("\nthroughput " in printed.out) == (window == 20)


@cases("""
    deed | message
    exit | exit with 0
    leave | exit with 0
    speechless | cannot be read: SystemExit in __str__
    """)
def test_code_that_exits_or_says_nothing_is_an_error(deed, message, tmp_path):
    run = bench(tmp_path, QUICK, *SMALL, *plant("on_train_batch_end", deed, 8), code=5)
    assert (run.outcome, len(run.steps), message in run.record.error.message) == ("error", 8, True)


@cases("""
- [end, code]
- [null, 0]
- [sigterm, 143]
- [sigkill, 137]
""")
def test_no_process_of_a_step_outlives_the_run(end, code, tmp_path):
    ending = plant("on_train_batch_end", end, 9) if end else []
    process = start_fit(tmp_path, *QUICK.split(), *plant("on_train_batch_end", "daemons", 8), *ending)
    assert process.wait() == code, process.err
    pids = [int(pid) for pid in (tmp_path / "daemons").read_text().split()]
    assert len(pids) == 3
    # A process that has ended stays a zombie where nobody waits for it.
    wait_for(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids))


def test_a_fork_of_a_step_neither_trains_on_nor_writes(tmp_path):
    process = start_fit(tmp_path, *QUICK.split(), *plant("on_train_batch_end", "fork", 8))
    assert process.wait() == 0
    run = sound_result(process)
    assert (run.outcome, len(run.steps)) == ("ok", 3 + 20)
    assert "came back to the training; it was ended" in process.err


OWN = f"--model=planted_faults.Net --data=planted_faults.Data {QUICK}"


@cases("""
words | phase | function | error
# words | phase | function | exception and its message
model.bad_step 9 | forward | training_step | ValueError: planted in training_step
model.bad_hook __init__ | setup | __init__ | KeyError: 'lr'
model.bad_hook configure_optimizers | setup | configure_optimizers | KeyError: 'lr'
data.bad_hook __init__ | setup | __init__ | KeyError: 'lr'
data.bad_hook collate | data | _collate | KeyError: 'lr'
# What happened in a loader's process came as text.
data.bad_item 24 --data.num_workers 1 | data | __getitem__ | ValueError: planted in the data
# A loss that no parameter is in: PyTorch raises, between two lines of the module.
model.bad_hook detach | backward | - | RuntimeError: element 0 of tensors does not require grad
""")
def test_an_error_anywhere_in_own_code_is_told_with_its_line_and_its_phase(
    words, phase, function, error, tmp_path, capsys
):
    run, told = bench(tmp_path, OWN, f"--{words}", code=5), capsys.readouterr().err
    assert (run.outcome, run.record.exit_code, run.record.error.phase) == ("error", 5, phase)
    assert f"error in your code, in {phase}" in told
    assert error in told
    assert error in (run.path / "traceback.txt").read_text()
    assert "site-packages" not in told
    assert ("at no line of yours" if not function else f"in {function}\n") in told
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


def test_losses_that_are_not_finite_are_kept_as_such(tmp_path):
    run = bench(tmp_path, OWN, "--model.nan_step=9", "--measure.strict=true", code=4)
    assert (run.outcome, run.damage) == ("ok", None)
    assert [math.isnan(step.loss) for step in run.steps[8:10]] == [False, True]
