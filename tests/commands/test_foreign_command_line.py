"""`lmbench fit --model my_package.MyModule`: a user's code from the command line or a file."""

from __future__ import annotations

import inspect
import re
import shlex
import sys

import pytest
import strangers
import yaml
from fit_process import run_here
from tables import cases

from lmbench.cli import main
from lmbench.fit.choice import choose
from lmbench.fit.command_line import CommandLine

QUICK = (
    "--trainer.accelerator cpu --trainer.logger false --measure.steps 4 --measure.warmup_steps 1 "
    "--measure.min_window_s 0 --measure.probe_steps 0"
)
TOKENS = "--data.batch_size 2 --data.context_length 8"


def fit(tmp_path, line, code=0, command="fit"):
    return run_here(tmp_path / "results", command, *shlex.split(f"{line} {QUICK}"), code=code)


def settings(line):
    """The settings that a command line stands for, without measuring."""
    command_line = CommandLine("fit", shlex.split(line))
    command_line.write()
    return command_line.content


def write(tmp_path, name, **content):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    line = "--model strangers.Regression --model.width 8 --data=strangers.Data --data.width=8"
    return fit(tmp_path_factory.mktemp("regression"), line)


def test_a_module_and_its_data_are_measured_from_the_command_line(regression):
    record = regression.record
    assert (record.outcome, len(regression.steps), record.zero_grad) == ("ok", 5, "native")
    assert (record.model.name, record.data.name) == ("strangers.Regression", "strangers.Data")
    assert record.config["model"]["init_args"]["width"] == 8
    assert (record.model.optimizer, "optimizer" in record.config) == ("SGD", False)


def test_tokens_are_not_guessed(regression):
    record = regression.record
    assert (record.window.tokens, record.throughput.tokens_per_s) == (None, None)
    assert record.window.tokens_reason.startswith("neither the module nor its data has tokens_per_batch(batch)")
    assert record.flops.reason == "Regression has no flops_per_token()"


REGRESSION = "--model strangers.Regression --data strangers.Data"
RMSPROP = "--optimizer torch.optim.RMSprop --optimizer.lr 0.25 --lr_scheduler StepLR --lr_scheduler.step_size 1"


def test_a_module_is_trained_with_another_optimizer_and_scheduler_the_lightning_cli_way(tmp_path):
    run = fit(tmp_path, f"{REGRESSION} {RMSPROP}")
    assert (run.outcome, run.record.model.optimizer) == ("ok", "RMSprop")
    # The run's configuration file gives the same settings.
    replay = settings(f"--config {run.path}/config.yaml --optimizer.lr 0.125")
    assert (replay["optimizer"]["init_args"]["lr"], replay["lr_scheduler"]["init_args"]["step_size"]) == (0.125, 1)
    model = CommandLine("fit", shlex.split(f"--model.size tiny {RMSPROP}")).build("model")
    model.configure_model()
    (optimizer,), (scheduler,) = model.configure_optimizers()
    assert (type(optimizer).__name__, optimizer.defaults["lr"]) == ("RMSprop", 0.25)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_module_brings_its_own_data_also_beside_a_shipped_configuration(tmp_path, capsys):
    record = fit(tmp_path, "--model strangers.OwnLoaders --config smoke").record
    assert (record.config["data"], record.data.source) == (None, "loaders without a data module")
    assert "lmbench: ignored model.size of the shipped configuration" in capsys.readouterr().err
    assert settings("--model strangers.OwnLoaders --data null")["data"] is None
    assert fit(tmp_path, "--model strangers.OwnLoaders", command="validate").record.mode == "inference"


def test_a_module_takes_lmbenchs_tokens_where_they_are_asked_for():
    content = settings(f"--model strangers.TokenModel {TOKENS}")
    # Model and data both have these settings, so one follows the other.
    assert (content["model"]["init_args"]["context_length"], content["data"]["vocab_size"]) == (8, 50)
    content = settings("--model strangers.TokenModel --model.context_length 16 --data.context_length 8")
    assert content["model"]["init_args"]["context_length"] == 16


def test_lmbenchs_own_model_takes_its_own_options_also_by_its_name_and_foreign_data():
    model = "--model.size tiny --model.num_layers 1"
    own = settings(f"{model} {TOKENS}")
    assert own == settings(f"--model lmbench.model.language_model.LanguageModel {model} {TOKENS}")
    assert (own["model"]["context_length"], own["model"]["size"]) == (8, "tiny")
    foreign = settings(f"{model} --data strangers.TokenPairs --data.context_length 8")
    assert (foreign["model"]["context_length"], foreign["data"]["class_path"]) == (8, "strangers.TokenPairs")
    variation = settings(f"--model strangers.Variation {model} {TOKENS}")
    assert (variation["model"]["class_path"], variation["data"]["batch_size"]) == ("strangers.Variation", 2)


def test_files_name_classes_and_words_override_them(tmp_path):
    model = {"class_path": "strangers.Regression", "init_args": {"width": 8}}
    first = write(tmp_path, "first.yaml", model=model, data={"class_path": "strangers.Data", "init_args": {"width": 8}})
    second = write(tmp_path, "second.yaml", model={"init_args": {"answer": "dict"}})
    content = settings(f"--config {first} --config={second} --data.batch_size 6")
    assert content["model"]["init_args"] == {"width": 8, "answer": "dict"}
    assert content["data"]["init_args"]["batch_size"] == 6


def test_another_class_over_a_file_keeps_the_arguments_that_it_takes_and_names_the_others(tmp_path):
    arguments = {"width": 8, "depth": 2, "answer": "dict"}
    file = write(tmp_path, "mine.yaml", model={"class_path": "strangers.Needy", "init_args": arguments})
    choice = choose("fit", ["--config", file, "--model", "strangers.OwnLoaders"])
    assert choice.ignored == ["ignored model.depth of strangers.Needy: OwnLoaders has no such argument"]
    assert (choice.is_set("model", "width"), choice.is_set("model", "depth")) == (True, False)


@cases("""
line | ignored
--model strangers.TokenModel | model.size
--model strangers.OwnLoaders | model.size data.batch_size,
--model strangers.OwnLoaders --data.batch_size 2 | model.size
--data strangers.TokenPairs | data.batch_size,
--model strangers.Variation | -
--model.num_layers 1 | -
""")
def test_settings_of_a_shipped_configuration_that_a_users_class_lacks_are_ignored_and_named(line, ignored):
    words, shipped = line.split(), ["--config", "smoke"]
    choice = choose("fit", [*words, *shipped])
    assert choice == choose("fit", [*shipped, *words])
    assert [sentence.split()[1] for sentence in choice.ignored] == ignored.split()
    assert choice.is_set("model", "size") == ("model.size" not in ignored)
    # Settings that the user gives are never ignored.
    choice = choose("fit", [*words, "--model={width: 4}", "--data={batch_size: 3}"])
    assert (choice.is_set("model", "width"), choice.is_set("data", "batch_size"), choice.ignored) == (True, True, [])


def test_a_command_line_is_understood_alike_whatever_the_process_understood_before():
    line = "--model.num_layers 1 --data.num_batches 2"
    own = settings(line)
    for other in (
        "--model lmbench.AttentionLayer --model.heads 2 --data.context_length 8",
        "--model strangers.OwnLoaders --trainer.callbacks+ lightning.pytorch.callbacks.DeviceStatsMonitor",
        "--config smoke --data strangers.Data --data.width 4",
    ):
        first = settings(other)
        assert (settings(line), settings(other)) == (own, first)


def test_a_printed_configuration_is_measured(tmp_path, printed):
    # The Timer's default interval is a member of an enumeration.
    line = "--model strangers.TokenModel --model.vocab_size 20 --data.context_length 8 --trainer.callbacks+ "
    line += f"lightning.pytorch.callbacks.Timer {QUICK} --print_config"
    config = tmp_path / "printed.yaml"
    config.write_text(printed("fit", *line.split()))
    first = fit(tmp_path, f"--config {config}").record
    assert first.model.name == "strangers.TokenModel"
    assert first.config["trainer"]["callbacks"][0]["init_args"]["interval"] == "step"


OWN = "--model strangers.OwnLoaders"


# LightningCLI's habits: words, the exit code, and a pattern of what is printed.
@cases(rf"""
words | code | pattern
smoke --print_config=skip_null | 0 | ^seed_everything: 0\n(?!.*: null)
smoke --print_config=skip_null,skip_default | 0 | ^trainer:\n  accelerator: cpu\nmeasure:
smoke --print_config=comments | 2 | unknown flag of --print_config 'comments'; choose one of skip_null, skip_default
--model.help strangers.Regression | 0 | ^options of strangers.Regression:.*--model.answer
--data.help=strangers.Data | 0 | ^options of strangers.Data:.*--data.batches
{OWN} --model.help | 0 | ^options of strangers.OwnLoaders:
{OWN} --data.help | 2 | there is no data class; name it, as in --data.help my_file.MyClass
--model.help strangers.Nobody | 2 | module strangers has no Nobody
--config smoke --config toy_fp16 --print_config | 0 | precision: 16-mixed
{OWN} --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=x --trainer.callbacks+=Timer --print_config | 0 | r
{OWN} --trainer.callbacks EarlyStoping | 2 | there is no class 'EarlyStoping'; .* did you mean EarlyStopping
{OWN} --trainer.callbacks '[{{class_path: strangers.Mine}}]' | 2 | callbacks: module strangers has no Mine
{OWN} --trainer.callbacks torch.nn.Linear | 2 | callbacks: Import path does not correspond to a subclass of Callback
{OWN} --trainer.callbacks EarlyStopping | 2 | EarlyStopping': the following arguments are required: monitor
{OWN} --trainer.callbacks Timer --trainer.callbacks.verbose x | 2 | callbacks.verbose is 'x'; allowed: true or false
{OWN} --trainer.callbacks Timer --trainer.callbacks.span 3 | 2 | unknown option --trainer.callbacks.span of .*Timer
{OWN} --trainer.callbacks LearningRateMonitor | 2 | Cannot use `LearningRateMonitor`
{OWN} --trainer.callbacks '[3]' | 2 | callbacks: Not a valid subclass of Callback
{OWN} --trainer.logger CSVLoger | 2 | logger: there is no class 'CSVLoger'; .* did you mean CSVLogger
{OWN} --trainer.recompute true | 2 | recompute is true; give its options, as --trainer.recompute.OPTION
{OWN} --model.dict_kwargs.x 3 | 2 | unknown option --model.dict_kwargs.x
{OWN} --trainer.fast_dev_run 2 --trainer.limit_train_batches 3 --print_config | 0 | run: 2.*limit_train_batches: 3
{OWN} --ckpt_path none.ckpt | 2 | none.ckpt
""")
def test_the_command_line_has_lightning_clis_habits_or_says_so(words, code, pattern, capfd, tmp_path):
    assert main(["fit", *shlex.split(words), f"--measure.results_dir={tmp_path}"]) == int(code)
    printed = capfd.readouterr()
    assert re.search(pattern, printed.err if code == "2" else printed.out, re.DOTALL)
    assert code == "0" or not printed.out


BROKEN = {
    "raises.py": "import torch\n1 / 0\n",
    "lacks.py": "import a_package_that_is_not_there\n",
    "garbled.py": "x = = 1\n",
    "leaves.py": "raise SystemExit(3)\n",
}
BY_HAND = "--model strangers.ByHand --data strangers.Data"


@cases(f"""
mistake | message
--model no_file.Mine | there is no module no_file
--model strangers.Regresion | did you mean strangers.Regression?
--model strangers.py | name it with its module, as in my_file.MyClass
--model raises.Mine | raises.py:2: ZeroDivisionError: division by zero
--model lacks.Mine | imports a_package_that_is_not_there, which is not
--model garbled.Mine | garbled.py:1: SyntaxError
--model leaves.Mine | leaves.py:1: SystemExit: 3
--model torch.nn.Linear | is no lightning.pytorch.LightningModule
{REGRESSION} --data strangers.SlowBatches | no lightning.pytorch.LightningDataModule
--model strangers.Regression | has no train_dataloader(); name its data with --data
{REGRESSION} --data.batches 0 | no batch was taken (empty data
--model strangers.Needy --data strangers.Data | arguments are required: model.width, model.depth
--model strangers.Untyped --data strangers.Data | arguments are required: model.width
{REGRESSION} --model.widht 3 | did you mean --model.width?
--model '{{init_args: {{widht: 3}}}}' {REGRESSION} | did you mean --model.width?
--model.size big --model strangers.OwnLoaders | option --model.size
{REGRESSION} --model.width x | is 'x'; allowed: a whole number
{BY_HAND} --measure.mode forward | allowed: train_step
{BY_HAND} --measure.zero_grad after_step | allowed: native
{REGRESSION} --trainer.compile.mode reduce-overhead --trainer.accumulate_grad_batches 2 | CUDA graphs lose gradients
{REGRESSION} --lr_scheduler StepLR --lr_scheduler.step_size 2 | lr_scheduler needs an optimizer
{REGRESSION} --optimizer torch.optim.SDG | optimizer: module torch.optim has no SDG; did you mean torch.optim.SGD
{REGRESSION} --optimizer.lr 0.1 | name the class before it, as in --optimizer CLASS
{REGRESSION} --optimizer SGD --optimizer.lrr 1 | unknown option --optimizer.lrr of torch.optim.SGD
{REGRESSION} --optimizer SGD --optimizer.lr=-1 | cannot be made for Regression: Invalid learning rate
--model strangers.Miscounting | tokens_per_batch(batch) returned 1.5; it must return
--model strangers.Misjudging | flops_per_token() returned 'many'; it must return
""")
def test_a_mistake_gets_one_line_and_exit_code_2(mistake, message, here, capsys, monkeypatch):
    for name, text in BROKEN.items():
        (here / name).write_text(text)
    # The current folder is not among them.
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path)])
    assert fit(here, mistake, code=2) is None
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lmbench: ")]
    assert message in line


def test_a_step_may_return_no_loss(tmp_path):
    run = fit(tmp_path, f"{REGRESSION} --model.answer none --trainer.gradient_clip_val 1.0")
    assert run.outcome == "ok"
    assert [step.loss is None for step in run.steps] == [step % 2 == 1 for step in range(5)]


@cases("answer", *strangers.WRONG_ANSWERS)
def test_a_step_that_never_returns_a_loss_is_an_error_in_the_users_code_with_its_line(answer, tmp_path):
    run = fit(tmp_path, f"{REGRESSION} --model.answer '{answer}'", code=5)
    assert (run.outcome, run.record.throughput.tokens_per_s) == ("error", None)
    line = inspect.getsourcelines(strangers.Regression.training_step)[1]
    assert run.record.error.location == f"strangers.py:{line} in training_step"
    assert re.search("loss|return a Tensor", run.record.error.message)


def test_accumulated_losses_are_the_modules_own(tmp_path):
    line = "--model strangers.OneBatch --measure.mode forward"
    runs = [fit(tmp_path, line), fit(tmp_path, f"{line} --trainer.accumulate_grad_batches 3")]
    assert runs[0].steps[0].loss == pytest.approx(runs[1].steps[0].loss)


@cases("""
- [name, tokens, flops, source]
- [Telling, 15, 3000, the module's own flops_per_token()]
- [Reading, 16, 2400, a number that the step reads taken as 1]
- [Choosing, 16, null, not countable on fake tensors]
- [Scoring, 16, 2400, on a fake copy]
- [HalfFrozen, 16, 1600, on a fake copy]
- [TokensByHand, 16, null, a training_step that optimizes by hand is more than a forward pass]
""")
def test_tokens_and_flops_come_from_the_module_or_are_counted_or_blank(name, tokens, flops, source, tmp_path):
    run = fit(tmp_path, f"--model strangers.{name} {TOKENS}")
    assert (run.steps[-1].tokens, run.record.flops.per_token_flops) == (tokens, flops)
    assert source in (run.record.flops.source or run.record.flops.reason)
    assert run.record.throughput.tokens_per_s > 0
    assert run.record.unseen_phases == (["forward", "clip", "zero_grad"] if name == "TokensByHand" else [])
