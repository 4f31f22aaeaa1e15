"""Trainer flags that change how a run ends: each works, and leaves only what it should."""

from __future__ import annotations

import pytest
import torch
from fit_process import SMALL, bench, statuses
from tables import cases


@pytest.fixture
def fit(here):
    """Runs in an empty folder; returns the result (None without one), and what else is left."""

    def run(*words, code=0):
        result = bench(here, "--measure.warmup_steps=2", *SMALL, *words, code=code)
        return result, sorted({path.name for path in here.iterdir()} - {"results"})

    return run


@cases("""
words
max_epochs 1 --trainer.enable_progress_bar true --trainer.enable_model_summary true
overfit_batches 1
barebones true
num_sanity_val_steps 1 --trainer.limit_val_batches 1 --trainer.val_check_interval 2
reload_dataloaders_every_n_epochs 1 --trainer.limit_train_batches 4
""")
def test_a_flag_that_leaves_the_window_whole_leaves_the_folder_clean_too(words, fit):
    run, left = fit(f"--trainer.{words}")
    assert (run.outcome, len(run.steps), left) == ("ok", 8, [])


def test_flags_that_slow_everything_fail_guards(fit, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        run, left = fit("--trainer.detect_anomaly=true --trainer.deterministic=true")
    finally:
        # The Trainer sets it for the process.
        torch.use_deterministic_algorithms(False)
    judged = statuses(run.record)
    assert (run.outcome, left, judged["anomaly_mode"], judged["deterministic"]) == ("ok", [], "fail", "fail")


@cases("words", "--trainer.max_steps=2", "--trainer.fast_dev_run=true")
def test_training_that_ends_before_the_window_is_a_mistake_of_usage_that_keeps_its_steps(words, fit, capsys):
    run, left = fit(words, code=2)
    assert (run.outcome, run.record.exit_code, left) == ("error", 2, [])
    assert (run.record.error.kind, len(run.steps) in (1, 2)) == ("EmptyWindow", True)
    assert run.record.error.brief.endswith("max_time, or lower warmup_steps")
    assert capsys.readouterr().err == ""


@cases("""
- [words, steps]
- [max_steps 5, 3]
- [max_epochs 2 --trainer.limit_train_batches 3, 4]
- [max_steps 10, 6]
""")
def test_a_window_or_probe_steps_that_training_cut_short_are_said_to_be_so(words, steps, fit, capsys):
    run, _ = fit(f"--trainer.{words}")
    assert (run.outcome, run.record.window.steps) == ("ok", steps)
    if steps == 6:
        assert run.record.probe.is_complete is False
    else:
        assert statuses(run.record)["window_complete"] == "warn"
        assert f"{steps} steps in the window, 6 asked for" in capsys.readouterr().out


def test_a_checkpoint_is_continued_from_and_another_models_is_refused(tmp_path, fit, capsys):
    assert fit("--trainer.enable_checkpointing=true")[1] == ["checkpoints"]
    (checkpoint,) = tmp_path.glob("checkpoints/*.ckpt")
    words = f"--ckpt_path={checkpoint}"
    run, _ = fit(words)
    assert (run.outcome, run.record.model.is_fresh, len(run.steps)) == ("ok", False, 8)
    for other in ("--model.num_layers=2", "--model.optimizer=Muon"):
        capsys.readouterr()
        assert fit(words, other, code=2)[0] is None
        (line,) = capsys.readouterr().err.splitlines()
        assert "the checkpoint is of another model" in line
