"""Trainer flags that change how a run ends: each works or is refused in one line, and leaves only what it should."""

from __future__ import annotations

import pytest
import torch

from lmbench.cli import main
from lmbench.records.load import load_run

QUICK = ["--model.num_layers", "1", "--measure.warmup_steps", "2", "--measure.steps", "6", "--measure.probe_steps", "2"]
SMOKE = ["--config", "smoke", "--trainer.logger", "false", "--measure.min_window_s", "0", *QUICK]


@pytest.fixture
def fit(tmp_path, monkeypatch, capsys):
    """Runs in an empty folder; returns exit code, result (None without one), what was printed, what else is left."""

    def run(*words):
        monkeypatch.chdir(tmp_path)
        code = main(["fit", *SMOKE, *words])
        folders = list((tmp_path / "results").glob("*"))
        left = sorted({path.name for path in tmp_path.iterdir()} - {"results"})
        return code, load_run(folders[0]) if folders else None, capsys.readouterr(), left

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.max_epochs", "1"],
        ["--trainer.limit_train_batches", "4"],
        ["--trainer.overfit_batches", "1"],
        ["--trainer.barebones", "true"],
        ["--trainer.enable_progress_bar", "true"],
        ["--trainer.enable_model_summary", "true"],
        ["--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2"],
        ["--trainer.num_sanity_val_steps", "1", "--trainer.limit_val_batches", "1"],
        ["--trainer.reload_dataloaders_every_n_epochs", "1", "--trainer.limit_train_batches", "4"],
    ],
    ids=lambda words: words[0].removeprefix("--trainer."),
)
def test_a_flag_that_leaves_the_window_whole_leaves_the_folder_clean_too(words, fit):
    code, run, _, left = fit(*words)
    assert (code, run.outcome, len(run.steps), left) == (0, "ok", 8, [])


def test_checkpoints_are_written_where_they_were_asked_for(fit):
    code, run, _, left = fit("--trainer.enable_checkpointing", "true")
    assert (code, run.outcome, left) == (0, "ok", ["checkpoints"])


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
    assert "Profiler Report" in printed.err
    assert "training_step" in printed.err


@pytest.mark.parametrize("words", [["--trainer.max_steps", "2"], ["--trainer.fast_dev_run", "true"]])
def test_training_that_ends_before_the_window_is_a_mistake_of_usage_that_keeps_its_steps(words, fit):
    code, run, printed, left = fit(*words)
    assert (code, run.outcome, run.record.exit_code, left) == (2, "error", 2, [])
    assert run.record.error.kind == "EmptyWindow"
    assert len(run.steps) in (1, 2)
    assert "nothing was measured: training ended at step" in " ".join(printed.out.split())
    assert printed.err == ""


@pytest.mark.parametrize(("words", "steps"), [(["--trainer.max_steps", "5"], 3), (["--trainer.max_epochs", "2"], None)])
def test_a_window_that_is_shorter_than_asked_for_is_said_to_be_so(words, steps, fit):
    if steps is None:
        words, steps = [*words, "--trainer.limit_train_batches", "3"], 4
    code, run, printed, _ = fit(*words)
    assert (code, run.outcome, run.record.window.steps) == (0, "ok", steps)
    guards = {guard.name: guard for guard in run.record.guards}
    assert guards["window_complete"].status == "warn"
    assert f"{steps} steps in the window, 6 asked for" in printed.out


def test_a_time_limit_ends_the_window(fit):
    code, run, _, left = fit("--trainer.max_time", "00:00:00:03", "--measure.steps", "100000")
    assert (code, run.outcome, left) == (0, "ok", [])
    assert 1 <= run.record.window.steps < 100_000


def test_training_that_ends_within_the_probe_steps_is_said(fit):
    code, run, printed, _ = fit("--trainer.max_steps", "10")
    assert (code, run.outcome, run.record.window.steps) == (0, "ok", 6)
    assert run.record.probe.is_complete is False
    assert "the run ended before its probe steps did" in printed.out


REFUSED = {
    "no checkpoint": (["--ckpt_path", "/nope.ckpt"], "ckpt_path '/nope.ckpt' is no file"),
    "best of nothing": (["--ckpt_path", "best"], "ckpt_path 'best' is no file"),
    "min_steps": (["--trainer.min_steps", "100"], "ask for more with --measure.steps"),
    "min_epochs": (["--trainer.min_epochs", "2"], "ask for more with --measure.steps"),
    "no TPU": (["--trainer.accelerator", "tpu"], "the Trainer refuses its flags"),
    "negative seed": (["--seed_everything", "-1"], "seed_everything is -1; it must be from 0"),
    "no folder": (["--measure.results_dir", ""], "measure.results_dir is empty"),
    "a file for a folder": (["--measure.results_dir", "/dev/null"], "a file stands in the way"),
    "no batch": (["--trainer.limit_train_batches", "0"], "nothing was measured"),
    "two progress bars": (["--trainer.barebones", "true", "--trainer.enable_progress_bar", "true"], "barebones"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_be_measured_is_refused_in_one_line(mistake, fit):
    words, told = REFUSED[mistake]
    code, run, printed, left = fit(*words)
    assert (code, run, left) == (2, None, [])
    assert told in printed.err
    assert printed.err.count("\n") == 1


CONFIGS = {
    "older": ("measure:\n  old_key: 1\n", "unknown option --measure.old_key"),
    "newer": ("future:\n  key: 1\n", "unknown option --future.key"),
    "nested": ("trainer:\n  frobnicate: true\n", "unknown option --trainer.frobnicate"),
    "null": ("measure: null\n", "measure is null"),
    "empty": ("", "a configuration is YAML"),
    "torn": ("model:\n  size: [\n", "config 'mine.yaml' is no YAML: while parsing"),
    "list": ("- a\n", "a configuration is YAML"),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_of_another_version_is_refused_with_the_key_named(config, tmp_path, fit):
    text, told = CONFIGS[config]
    (tmp_path / "mine.yaml").write_text(text)
    code, run, printed, _ = fit("--config", "mine.yaml")
    assert (code, run) == (2, None)
    assert told in printed.err
    assert printed.err.count("\n") == 1


def test_a_configuration_that_is_no_text_is_refused(tmp_path, fit):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    code, _, printed, _ = fit("--config", "mine.yaml")
    assert (code, printed.err.count("\n")) == (2, 1)
    assert "config 'mine.yaml' cannot be read: 'utf-8' codec" in printed.err


def test_a_checkpoint_is_continued_from_and_another_models_is_refused(tmp_path, fit):
    fit("--trainer.enable_checkpointing", "true", "--measure.results_dir", "first")
    checkpoint = str(next(tmp_path.glob("checkpoints/*.ckpt")))
    code, run, _, _ = fit("--ckpt_path", checkpoint)
    assert (code, run.outcome, run.record.model.is_fresh, len(run.steps)) == (0, "ok", False, 8)
    code, run, printed, _ = fit("--ckpt_path", checkpoint, "--model.num_layers", "2", "--measure.results_dir", "other")
    assert code == 2
    assert "the checkpoint is of another model" in printed.err
    assert printed.err.count("\n") == 1
    assert list((tmp_path / "other").iterdir()) == []
