"""`lmbench fit` and `validate` from the command line to the result folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from fit_process import SMOKE, bench

from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.records.vocabulary import PHASES


def test_a_run_leaves_a_complete_result(tmp_path):
    result = bench(tmp_path)
    assert result.outcome == "ok"
    assert sorted(p.name for p in result.path.iterdir()) == ["config.yaml", "run.json", "steps.jsonl"]
    assert len(result.steps) == 9
    assert result.record.window.steps == 6
    assert result.record.model.parameter_count == 1_362_240
    assert result.record.throughput.tokens_per_s > 0
    assert abs(result.record.window.identity_error_fraction) < 5e-3


def test_the_summary_follows_from_the_raw_steps(tmp_path):
    result = bench(tmp_path)
    window = [step for step in result.steps if step.stage == "window"]
    mean = math.fsum(step.forward_s for step in window) / len(window)
    assert result.record.phases.forward.mean_s == pytest.approx(mean)
    tokens = sum(step.tokens for step in window)
    assert result.record.throughput.tokens_per_s == pytest.approx(tokens / result.record.window.wall_s)


def test_the_replay_command_measures_the_same_configuration(tmp_path):
    first = bench(tmp_path, "--model.num_layers", "1")
    words = first.record.replay_command.split()[1:]
    assert main(words) == 0
    second = load_run(max((tmp_path / "results").iterdir(), key=lambda p: p.stat().st_mtime_ns))
    assert second.path != first.path
    assert second.record.config == first.record.config


def test_the_same_seed_gives_the_same_losses(tmp_path):
    first, second = bench(tmp_path), bench(tmp_path)
    assert [s.loss for s in first.steps] == [s.loss for s in second.steps]


@pytest.mark.parametrize(
    ("mode", "seen"),
    [
        ("train_step", {"forward", "backward", "optimizer", "zero_grad"}),
        ("forward_backward", {"forward", "backward", "zero_grad"}),
        ("forward", {"forward"}),
    ],
)
def test_a_mode_does_its_part_of_the_step_only(tmp_path, mode, seen):
    result = bench(tmp_path, "--measure.mode", mode, "--data.num_batches", "8")
    step = result.steps[-1]
    timed = {phase for phase in PHASES if (step.span_s(phase) or 0) > 1e-4}
    assert seen <= {phase for phase in PHASES if step.span_s(phase) is not None}
    assert ("backward" in timed) == ("backward" in seen)
    assert (step.optimizer_s is not None) == ("optimizer" in seen)
    losses = [s.loss for s in result.steps]
    # Eight batches come round again: with frozen weights the loss does too.
    assert (losses[0] == losses[8]) == (mode != "train_step")


def test_modes_do_the_flops_they_say(tmp_path):
    forward = bench(tmp_path, "--measure.mode", "forward").record.flops.per_token_flops
    training = bench(tmp_path).record.flops.per_token_flops
    assert training == 3 * forward


def test_validate_measures_inference(tmp_path):
    result = bench(tmp_path, command="validate")
    assert result.record.mode == "inference"
    assert result.record.flops.multiplier == 1
    assert result.record.window.steps == 6
    assert all(step.backward_s is None for step in result.steps)


def test_accumulation_and_clipping_are_trainer_flags(tmp_path):
    words = ["--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "1.0"]
    result = bench(tmp_path, *words, "--trainer.precision", "bf16-mixed")
    assert {step.micro_batches for step in result.steps} == {2}
    assert all(step.clip_s > 0 for step in result.steps)
    assert result.steps[0].tokens == 2 * 4 * 64


def test_nothing_trained_fails_a_guard_and_strict_makes_it_exit_4(tmp_path):
    words = ["--model.learning_rate", "1e-30", "--model.weight_decay", "0"]
    loose = bench(tmp_path, *words)
    assert {g.name: g.status for g in loose.record.guards}["trained"] == "fail"
    assert bench(tmp_path, *words, "--measure.strict", "true", code=4).record.exit_code == 4


def test_a_diverged_run_fails_the_loss_guard(tmp_path):
    result = bench(tmp_path, "--model.learning_rate", "1e30", "--measure.strict", "true", code=4)
    assert {g.name: g.status for g in result.record.guards}["finite_loss"] == "fail"


def test_native_zero_grad_order_is_an_option(tmp_path):
    result = bench(tmp_path, "--measure.zero_grad", "native")
    assert result.record.zero_grad == "native"
    assert result.steps[-1].zero_grad_s is not None


def test_shipped_configurations_all_parse():
    folder = Path(SMOKE).parent
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    sizes = ("small", "medium", "large", "xl", "2_7b")
    assert names == sorted(["smoke", "toy_fp16", *(f"{size}_{p}" for size in sizes for p in ("fp32", "bf16"))])
    for name in names:
        assert main(["fit", "--config", str(folder / f"{name}.yaml"), "--print_config"]) == 0


def test_no_secret_reaches_a_result(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret-key")
    result = bench(tmp_path)
    for path in result.path.iterdir():
        assert "planted-secret-key" not in path.read_text()


def test_records_are_plain_json_and_the_config_plain_yaml(tmp_path):
    result = bench(tmp_path)
    json.loads((result.path / "run.json").read_text())
    assert yaml.safe_load((result.path / "config.yaml").read_text())["model"]["size"] == "tiny"
