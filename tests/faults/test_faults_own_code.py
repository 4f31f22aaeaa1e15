"""Faults planted in lmbench's own code: the recorded steps are never lost to them."""

from __future__ import annotations

import pytest
from fit_process import plant

from lmbench.callbacks import MemoryRecorder
from lmbench.cli import main
from lmbench.fit import run as run_module
from lmbench.records import summary
from lmbench.records.load import load_run

QUICK = ["--model.num_layers", "1", "--measure.warmup_steps", "2", "--measure.steps", "6", "--measure.probe_steps", "2"]
RUN = ["fit", "--config", "smoke", "--trainer.logger", "false", "--measure.min_window_s", "0", *QUICK]


def planted(*_, **__):
    raise ZeroDivisionError("planted in lmbench")


@pytest.fixture
def fit(tmp_path, capsys):
    def run(*words):
        code = main([*RUN, "--measure.results_dir", str(tmp_path), *words])
        return code, load_run(next(tmp_path.iterdir())), capsys.readouterr()

    return run


def test_a_fault_in_the_summary_keeps_the_steps_and_says_error(fit, monkeypatch):
    monkeypatch.setattr(summary, "evaluate_guards", planted)
    code, run, printed = fit()
    assert (code, run.outcome, run.record.exit_code, len(run.steps)) == (1, "error", 1, 8)
    assert run.record.error.phase == "summary"
    assert "planted in lmbench" in run.record.error.message
    # What was done before the fault is there.
    assert run.record.phases.step.n == 6
    assert "ZeroDivisionError" in printed.err
    assert "step " in printed.out


def test_a_fault_in_the_summary_of_a_failed_run_does_not_hide_the_failure(fit, monkeypatch):
    monkeypatch.setattr(summary, "summarize_steps", planted)
    code, run, _ = fit(*plant("on_train_batch_end", "raise", 5))
    assert (code, run.outcome, len(run.steps)) == (5, "error", 5)
    assert run.record.error.message == "planted in the user's own code"


def test_a_fault_in_the_printing_names_the_folder_that_has_it_all(fit, monkeypatch):
    monkeypatch.setattr(run_module, "give", planted)
    code, run, printed = fit()
    assert (code, run.outcome) == (1, "ok")
    assert "the result could not be printed (planted in lmbench)" in printed.err
    assert str(run.path) in printed.err


def test_an_observer_that_cannot_leave_its_facts_hinders_no_other(fit, monkeypatch):
    monkeypatch.setattr(MemoryRecorder, "run_closing", planted)
    code, run, printed = fit(*plant("on_train_batch_end", "raise", 5))
    assert (code, run.outcome, len(run.steps)) == (5, "error", 5)
    assert "MemoryRecorder could not leave its facts: ZeroDivisionError" in printed.err
