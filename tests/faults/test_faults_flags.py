"""Trainer flags that change how a run ends: each works or is refused in one line, and leaves only what it should."""

from __future__ import annotations

import pytest
import torch
from fit_process import fit_here

QUICK = ["--measure.warmup_steps", "2", "--measure.steps", "6", "--measure.probe_steps", "2"]


@pytest.fixture
def fit(tmp_path, monkeypatch, capsys):
    """Runs in an empty folder; returns exit code, result (None without one), what was printed, what else is left."""

    def run(*words):
        monkeypatch.chdir(tmp_path)
        code, result, printed = fit_here(tmp_path / "results", capsys, *QUICK, *words)
        return code, result, printed, sorted({path.name for path in tmp_path.iterdir()} - {"results"})

    return run


@pytest.mark.parametrize(
    "words",
    [
        "max_epochs 1",
        "limit_train_batches 4",
        "overfit_batches 1",
        "barebones true",
        "enable_progress_bar true",
        "enable_model_summary true",
        "limit_val_batches 1 --trainer.val_check_interval 2",
        "num_sanity_val_steps 1 --trainer.limit_val_batches 1",
        "reload_dataloaders_every_n_epochs 1 --trainer.limit_train_batches 4",
    ],
)
def test_a_flag_that_leaves_the_window_whole_leaves_the_folder_clean_too(words, fit):
    code, run, _, left = fit(*f"--trainer.{words}".split())
    assert (code, run.outcome, len(run.steps), left) == (0, "ok", 8, [])


@pytest.mark.parametrize(("flag", "guard"), [("detect_anomaly", "anomaly_mode"), ("deterministic", "deterministic")])
def test_a_flag_that_slows_everything_fails_a_guard(flag, guard, fit, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        code, run, _, left = fit(f"--trainer.{flag}", "true")
    finally:
        # The Trainer sets it for the process.
        torch.use_deterministic_algorithms(False)
    assert (code, run.outcome, left) == (0, "ok", [])
    assert {g.name: g.status for g in run.record.guards}[guard] == "fail"


def test_a_profilers_report_is_shown_and_its_run_marked(fit):
    code, run, printed, left = fit("--trainer.profiler", "simple")
    assert (code, run.record.is_profiled, left) == (0, True, [])
    assert "training_step" in printed.err


@pytest.mark.parametrize("words", [["--trainer.max_steps", "2"], ["--trainer.fast_dev_run", "true"]])
def test_training_that_ends_before_the_window_is_a_mistake_of_usage_that_keeps_its_steps(words, fit):
    code, run, printed, left = fit(*words)
    assert (code, run.outcome, run.record.exit_code, left) == (2, "error", 2, [])
    assert (run.record.error.kind, len(run.steps) in (1, 2)) == ("EmptyWindow", True)
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "steps"),
    [("max_steps 5", 3), ("max_epochs 2 --trainer.limit_train_batches 3", 4), ("max_steps 10", 6)],
)
def test_a_window_or_probe_steps_that_training_cut_short_are_said_to_be_so(words, steps, fit):
    code, run, printed, _ = fit(*f"--trainer.{words}".split())
    assert (code, run.outcome, run.record.window.steps) == (0, "ok", steps)
    guards = {guard.name: guard.status for guard in run.record.guards}
    if steps == 6:
        assert run.record.probe.is_complete is False
    else:
        assert guards["window_complete"] == "warn"
        assert f"{steps} steps in the window, 6 asked for" in printed.out


def test_a_time_limit_ends_the_window(fit):
    code, run, _, left = fit("--trainer.max_time", "00:00:00:03", "--measure.steps", "100000")
    assert (code, run.outcome, left) == (0, "ok", [])
    assert 1 <= run.record.window.steps < 100_000


REFUSED = {
    "--ckpt_path /nope.ckpt": "ckpt_path '/nope.ckpt' is no file",
    "--trainer.min_steps 100": "ask for more with --measure.steps",
    "--trainer.accelerator tpu": "the Trainer refuses its flags",
    "--seed_everything -1": "seed_everything is -1; it must be from 0",
    "--measure.results_dir=": "measure.results_dir is empty",
    "--measure.results_dir /dev/null": "a file stands in the way",
    "--trainer.limit_train_batches 0": "nothing was measured",
    "--trainer.barebones true --trainer.enable_progress_bar true": "barebones",
}
CONFIGS = {
    b"measure:\n  old_key: 1\n": "unknown option --measure.old_key",
    b"future:\n  key: 1\n": "unknown option --future.key",
    b"trainer:\n  frobnicate: true\n": "unknown option --trainer.frobnicate",
    b"measure: null\n": "measure is null",
    b"": "a configuration is YAML",
    b"model:\n  size: [\n": "config 'mine.yaml' is no YAML: while parsing",
    b"\xff\xfe\x00": "config 'mine.yaml' cannot be read: 'utf-8' codec",
}


@pytest.mark.parametrize("mistake", [*REFUSED, *CONFIGS])
def test_what_cannot_be_measured_or_read_is_refused_in_one_line(mistake, fit, tmp_path):
    words = mistake.split() if mistake in REFUSED else ["--config", "mine.yaml"]
    if mistake in CONFIGS:
        (tmp_path / "mine.yaml").write_bytes(mistake)
    code, run, printed, _ = fit(*words)
    assert (code, run, printed.err.count("\n")) == (2, None, 1)
    assert {**REFUSED, **CONFIGS}[mistake] in printed.err


def test_a_checkpoint_is_continued_from_and_another_models_is_refused(tmp_path, fit):
    code, run, _, left = fit("--trainer.enable_checkpointing", "true", "--measure.results_dir", "first")
    assert (code, left) == (0, ["checkpoints", "first"])
    checkpoint = str(next(tmp_path.glob("checkpoints/*.ckpt")))
    code, run, _, _ = fit("--ckpt_path", checkpoint)
    assert (code, run.outcome, run.record.model.is_fresh, len(run.steps)) == (0, "ok", False, 8)
    code, _, printed, _ = fit("--ckpt_path", checkpoint, "--model.num_layers", "2", "--measure.results_dir", "other")
    assert (code, printed.err.count("\n")) == (2, 1)
    assert "the checkpoint is of another model" in printed.err
    assert list((tmp_path / "other").iterdir()) == []
