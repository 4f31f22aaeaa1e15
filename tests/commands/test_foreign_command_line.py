"""`lmbench fit --model my_package.MyModule`: somebody's code from the command line or a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from paths import SUPPORT

from lmbench.cli import main
from lmbench.fit.choice import choose
from lmbench.fit.command_line import CommandLine
from lmbench.records.load import load_run
from lmbench.records.vocabulary import PHASES

QUICK = [
    *(
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
        "--measure.steps",
        "4",
        "--measure.warmup_steps",
        "1",
    ),
    *("--measure.min_window_s", "0", "--measure.probe_steps", "0"),
]
OWN = ["--model.size", "tiny", "--model.num_layers", "1", "--data.batch_size", "2", "--data.context_length", "8"]


def fit(tmp_path, *words, code=0, command="fit"):
    results = tmp_path / "results"
    before = set(results.glob("*"))
    assert main([command, *words, *QUICK, "--measure.results_dir", str(results)]) == code
    new = set(results.glob("*")) - before
    return load_run(new.pop()) if new else None


def settings(*words):
    """What a command line is understood as, without measuring it."""
    line = CommandLine("fit", list(words))
    line.write()
    return line.content


def seen(result):
    return {phase for phase in PHASES if (result.steps[-1].span_s(phase) or 0) > 0}


def write(tmp_path, name, **content):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


# which classes


def test_a_module_and_its_data_are_measured_from_the_command_line(tmp_path):
    words = ["--model", "strangers.Regression", "--model.width", "8", "--data=strangers.Data", "--data.width=8"]
    result = fit(tmp_path, *words)
    assert (result.outcome, len(result.steps), result.record.zero_grad) == ("ok", 5, "native")
    assert (result.record.model.name, result.record.data.name) == ("strangers.Regression", "strangers.Data")
    assert result.record.config["model"]["init_args"]["width"] == 8


def test_a_module_brings_its_own_data(tmp_path):
    result = fit(tmp_path, "--model", "strangers.OwnLoaders")
    assert result.record.config["data"] is None
    assert result.record.data.source == "loaders without a data module"
    assert settings("--model", "strangers.OwnLoaders", "--data", "null")["data"] is None
    assert fit(tmp_path, "--model", "strangers.OwnLoaders", command="validate").record.mode == "inference"


def test_a_module_takes_lmbenchs_tokens_where_they_are_asked_for(tmp_path):
    result = fit(tmp_path, "--model", "strangers.TokenModel", "--data.batch_size", "2", "--data.context_length", "8")
    # Both sides have these, so that one follows from the other.
    assert result.record.config["model"]["init_args"]["context_length"] == 8
    assert result.record.config["data"]["vocab_size"] == 50
    # The data counts its tokens, and the module's FLOPs are counted on a fake copy.
    assert result.steps[-1].tokens == 16
    assert result.record.throughput.tokens_per_s > 0
    assert result.record.flops.per_token_flops == 3 * 2 * 8 * 50
    assert "on a fake copy" in result.record.flops.source


def test_a_setting_of_its_own_does_not_follow():
    words = ["--model", "strangers.TokenModel", "--model.context_length", "16", "--data.context_length", "8"]
    assert settings(*words)["model"]["init_args"]["context_length"] == 16


def test_lmbenchs_own_model_takes_its_own_options_also_by_its_name_and_foreign_data():
    own = settings(*OWN)
    assert own == settings("--model", "lmbench.model.language_model.LanguageModel", *OWN)
    assert (own["model"]["context_length"], own["model"]["size"]) == (8, "tiny")
    foreign = settings(*OWN[:4], "--data", "strangers.TokenPairs", "--data.context_length", "8")
    assert foreign["model"]["context_length"] == 8
    assert foreign["data"]["class_path"] == "strangers.TokenPairs"
    variation = settings("--model", "strangers.Variation", *OWN)
    assert (variation["model"]["class_path"], variation["data"]["batch_size"]) == ("strangers.Variation", 2)


# where they are named


def test_files_name_classes_and_words_override_them(tmp_path):
    first = write(
        tmp_path,
        "first.yaml",
        model={"class_path": "strangers.Regression", "init_args": {"width": 8}},
        data={"class_path": "strangers.Data", "init_args": {"width": 8}},
    )
    second = write(tmp_path, "second.yaml", model={"init_args": {"answer": "dict"}})
    content = settings("--config", first, f"--config={second}", "--data.batch_size", "6")
    assert content["model"]["init_args"] == {"width": 8, "answer": "dict"}
    assert content["data"]["init_args"]["batch_size"] == 6
    part = write(tmp_path, "model.yaml", class_path="strangers.OwnLoaders", init_args={"width": 8})
    assert settings("--model", part)["model"]["init_args"]["width"] == 8


IGNORED = {
    # words: what is ignored of the smoke configuration, and what is kept of its data
    "model": (["--model", "strangers.TokenModel"], ["model.size"], {"batch_size", "context_length"}),
    "data of its own": (
        ["--model", "strangers.OwnLoaders"],
        ["model.size", "data.batch_size, data.context_length of the shipped configuration: OwnLoaders brings its data"],
        set(),
    ),
    "tokens asked for": (
        ["--model", "strangers.OwnLoaders", "--data.batch_size", "2"],
        ["model.size"],
        {"batch_size", "context_length"},
    ),
    "data named": (
        ["--data", "strangers.TokenPairs"],
        ["data.batch_size of the shipped configuration: TokenPairs has no such option"],
        {"context_length"},
    ),
    "a variation": (["--model", "strangers.Variation"], [], {"batch_size", "context_length"}),
    "nobody's": (["--model.num_layers", "1"], [], {"batch_size", "context_length"}),
}


@pytest.mark.parametrize("is_named_first", [False, True])
@pytest.mark.parametrize("case", IGNORED)
def test_of_a_shipped_configuration_what_others_cannot_use_is_ignored_and_named(case, is_named_first):
    words, ignored, data = IGNORED[case]
    config = ["--config", "smoke"]
    choice = choose("fit", [*words, *config] if is_named_first else [*config, *words])
    assert len(choice.ignored) == len(ignored)
    assert all(f"ignored {name}" in line for name, line in zip(ignored, choice.ignored, strict=True))
    assert set(choice.settings["data"]) == data
    assert bool(choice.settings["model"]) == ("model.size" not in ignored)


def test_ones_own_configuration_is_never_cut(tmp_path):
    mine = write(tmp_path, "mine.yaml", model={"width": 4}, data={"batch_size": 3})
    choice = choose("fit", ["--config", mine, "--model", "strangers.OwnLoaders"])
    assert (choice.settings["model"], choice.settings["data"], choice.ignored) == ({"width": 4}, {"batch_size": 3}, [])


def test_a_module_of_ones_own_is_measured_with_a_shipped_configuration(tmp_path, capsys):
    result = fit(tmp_path, "--model", "strangers.OwnLoaders", "--config", "smoke")
    assert result.record.config["data"] is None
    assert "lmbench: ignored model.size of the shipped configuration" in capsys.readouterr().err


def test_a_command_line_is_understood_alike_whatever_the_process_understood_before():
    others = (
        ["--model", "lmbench.AttentionLayer", "--model.heads", "2", "--data.context_length", "8"],
        ["--model", "strangers.OwnLoaders", "--trainer.callbacks+", "lightning.pytorch.callbacks.DeviceStatsMonitor"],
        ["--config", "smoke", "--data", "strangers.Data", "--data.width", "4"],
    )
    own = settings("--model.num_layers", "1", "--data.num_batches", "2")
    for words in others:
        first = settings(*words)
        assert settings("--model.num_layers", "1", "--data.num_batches", "2") == own
        assert settings(*words) == first


def test_a_printed_configuration_and_a_replay_measure_the_same(tmp_path, capsys):
    words = ["--model", "strangers.TokenModel", "--model.vocab_size", "20", "--data.context_length", "8"]
    # Its default interval is a member of an enumeration.
    words += ["--trainer.callbacks+", "lightning.pytorch.callbacks.Timer"]
    assert main(["fit", *words, *QUICK, "--print_config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    first = fit(tmp_path, "--config", str(printed))
    assert first.record.model.name == "strangers.TokenModel"
    assert first.record.config["trainer"]["callbacks"][0]["init_args"]["interval"] == "step"
    assert main(first.record.replay_command.split()[1:]) == 0
    second = load_run(max((tmp_path / "results").iterdir(), key=lambda path: path.stat().st_mtime_ns))
    assert second.path != first.path
    assert second.record.config == first.record.config


def test_a_module_in_the_current_folder_is_found(tmp_path):
    source = (SUPPORT / "strangers.py").read_text()
    (tmp_path / "my_file.py").write_text(source)
    command = str(Path(sys.executable).with_name("lmbench"))
    words = [command, "fit", "--model", "my_file.OwnLoaders", *QUICK, "--quiet"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert load_run(done.stdout.strip()).record.model.name == "my_file.OwnLoaders"


# mistakes

BROKEN = {
    "raises.py": "import torch\n1 / 0\n",
    "lacks.py": "import a_package_that_is_not_there\n",
    "garbled.py": "x = = 1\n",
    "leaves.py": "raise SystemExit(3)\n",
}
DATA = ["--data", "strangers.Data"]
MISTAKES = {
    "no such module": (["--model", "no_file.Mine"], "there is no module no_file"),
    "no such class": (["--model", "strangers.Regresion"], "did you mean strangers.Regression?"),
    "no module named": (["--model", "Nobodys"], "name the class with its module, as in my_file.Nobodys"),
    "a module that raises": (["--model", "raises.Mine"], "raises.py:2: ZeroDivisionError: division by zero"),
    "a module that lacks a package": (["--model", "lacks.Mine"], "imports a_package_that_is_not_there, which is not"),
    "a module that is garbled": (["--model", "garbled.Mine"], "garbled.py:1: SyntaxError"),
    "a module that exits": (["--model", "leaves.Mine"], "leaves.py:1: SystemExit: 3"),
    "no LightningModule": (["--model", "strangers.Rows"], "is no lightning.pytorch.LightningModule"),
    "no data module": (["--model", "strangers.Regression", "--data", "strangers.Rows"], "no lightning.pytorch.Light"),
    "no data": (["--model", "strangers.Regression"], "has no train_dataloader(); name its data with --data"),
    "no batches": (["--model", "strangers.Regression", *DATA, "--data.batches", "0"], "no batch was taken (empty data"),
    "a file": (["--model", "strangers.py"], "with its module, as in strangers.Regression or strangers.OwnLoaders"),
    "a plain module": (["--model", "torch.nn.Linear"], "but a torch.nn.Module; wrap it in one: training_step returns"),
    "lacking": (["--model", "strangers.Needy", *DATA], "arguments are required: model.width, model.depth"),
    "misspelt": (["--model", "strangers.Regression", *DATA, "--model.widht", "3"], "did you mean --model.width?"),
    "another's option": (["--model", "strangers.Regression", *DATA, "--model.size", "big"], "option --model.size"),
    "another's option, first": (["--model.size", "big", "--model", "strangers.OwnLoaders"], "option --model.size"),
    "wrong type": (["--model", "strangers.Regression", *DATA, "--model.width", "x"], "is 'x'; allowed: a whole number"),
    "by hand, forward": (["--model", "strangers.ByHand", *DATA, "--measure.mode", "forward"], "allowed: train_step"),
    "by hand, zeroing": (
        ["--model", "strangers.ByHand", *DATA, "--measure.zero_grad", "after_step"],
        "allowed: native",
    ),
    "tokens no number": (["--model", "strangers.Miscounting"], "tokens_per_batch(batch) returned 1.5; it must return"),
    "FLOPs no number": (["--model", "strangers.Misjudging"], "flops_per_token() returned 'many'; it must return"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(mistake, tmp_path, capsys, monkeypatch):
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words, told = MISTAKES[mistake]
    assert fit(tmp_path, *words, code=2) is None
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("lmbench: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"class_path": "strangers.Regression", "init_args": {"widht": 3}}, "did you mean --model.width?"),
        ({"class_path": "strangers.Regression", "width": 3}, "given both as a class and by arguments of lmbench's own"),
    ],
)
def test_a_mistake_in_a_file_is_named(content, told, tmp_path, capsys):
    assert fit(tmp_path, "--config", write(tmp_path, "mine.yaml", model=content), *DATA, code=2) is None
    assert told in capsys.readouterr().err


def test_a_step_that_expects_another_batch_is_told_what_lmbenchs_is(tmp_path, capsys):
    fit(tmp_path, "--model", "strangers.OwnLoaders", "--data.batch_size", "2", code=5)
    assert (
        "(the batch is lmbench's: a tuple of tokens and targets, int64 of batch x context)" in capsys.readouterr().err
    )


# what is done with them


@pytest.mark.parametrize(
    ("mode", "answer", "phases"),
    [
        ("train_step", "loss", {"forward", "backward", "optimizer", "zero_grad"}),
        ("train_step", "dict", {"forward", "backward", "optimizer", "zero_grad"}),
        ("train_step", "none", {"forward", "optimizer", "zero_grad"}),
        ("forward_backward", "none", {"forward", "zero_grad"}),
        ("forward", "dict", {"forward"}),
    ],
)
def test_modes_do_their_part_whatever_training_step_returns(mode, phases, answer, tmp_path):
    words = ["--model", "strangers.Regression", *DATA, "--model.answer", answer, "--measure.mode", mode]
    result = fit(tmp_path, *words, "--trainer.gradient_clip_val", "1.0")
    assert result.outcome == "ok"
    assert phases <= seen(result)
    assert ("optimizer" in seen(result)) == (mode == "train_step")
    losses = [step.loss for step in result.steps]
    assert [loss is None for loss in losses] == [answer == "none" and step % 2 == 1 for step in range(5)]


def test_accumulated_losses_are_the_modules_own(tmp_path):
    words = ["--model", "strangers.OneBatch", "--measure.mode", "forward"]
    plain = fit(tmp_path, *words).steps[0].loss
    accumulated = fit(tmp_path, *words, "--trainer.accumulate_grad_batches", "3").steps[0].loss
    assert accumulated == pytest.approx(plain)


def test_validation_and_checkpoints_within_training_are_not_the_steps_time(tmp_path):
    words = [
        "--model",
        "strangers.SlowToValidate",
        "--trainer.limit_val_batches",
        "2",
        "--trainer.val_check_interval",
        "2",
    ]
    window = fit(tmp_path, *words).record.window
    assert window.excluded_count >= 1
    slept_s = 0.2 * window.excluded_count
    assert window.excluded_s >= slept_s
    # A busy machine holds the process up between two steps: by far less than what validation slept.
    assert window.steps_sum_s == pytest.approx(window.wall_s, abs=slept_s / 2)


# tokens and FLOPs


def test_a_module_tells_its_own_tokens_and_flops(tmp_path):
    result = fit(tmp_path, "--model", "strangers.Telling", "--data.batch_size", "2", "--data.context_length", "8")
    assert result.steps[-1].tokens == 15
    assert result.record.flops.per_token_flops == 3000
    assert result.record.flops.source == "the module's own flops_per_token()"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Regression", "neither Regression nor Data has tokens_per_batch(batch), and its batches hold no input_ids"),
        ("OwnLoaders", "OwnLoaders has no tokens_per_batch(batch), and its batches hold no input_ids"),
    ],
)
def test_nobody_guesses_what_a_token_is(name, reason, tmp_path):
    result = fit(tmp_path, "--model", f"strangers.{name}", *(DATA if name == "Regression" else []))
    assert result.record.window.tokens is None
    assert result.record.window.tokens_reason == reason
    assert result.record.throughput.tokens_per_s is None
    assert result.record.flops.reason == f"{name} has no flops_per_token()"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Reading", "not countable on fake tensors"),
        ("HalfFrozen", "with frozen parameters a training step is not three forward passes"),
        ("TokensByHand", "a training_step that optimizes by hand is more than a forward pass"),
    ],
)
def test_flops_that_cannot_be_counted_are_blank_with_the_reason(name, reason, tmp_path):
    result = fit(tmp_path, "--model", f"strangers.{name}", "--data.batch_size", "2", "--data.context_length", "8")
    assert result.record.throughput.tokens_per_s > 0
    assert result.record.flops.per_token_flops is None
    assert reason in result.record.flops.reason
    assert f"give {name} a flops_per_token()" in result.record.flops.reason
