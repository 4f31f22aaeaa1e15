"""Every mistake a user can make gets one line, exit code 2, no traceback and no half-made result folder."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT

from lmbench.cli import main

SMOKE = str(ROOT / "configs" / "smoke.yaml")

MISTAKES = {
    "unknown size": (["--model.size", "huge"], "unknown model size 'huge'"),
    "heads do not divide": (["--model.num_heads", "5"], "does not divide d_model"),
    "odd head_dim": (["--model.d_model", "60", "--model.num_heads", "4"], "head_dim is 15"),
    "fp8 without its library": (["--trainer.precision", "transformer-engine"], "Requirement 'transformer_engine"),
    "no such precision": (["--trainer.precision", "bf8"], "trainer.precision is 'bf8'; allowed: "),
    "no such attention": (["--model.attention", "foo"], "unknown attention 'foo'"),
    "no such optimizer": (["--model.optimizer", "sgd"], "choose one of AdamW, SGD; did you mean SGD?"),
    "a variant for an optimizer": (["--model.optimizer", "fused"], "but a variant: --model.optimizer_variant fused"),
    "a setting that follows": (["--model.context_length", "8"], "set that: --data.context_length 8"),
    "the end of an option": (["--batch_size", "4"], "did you mean --data.batch_size?"),
    "the end of two": (["--steps", "3"], "did you mean --measure.steps or --memory.steps?"),
    "the end of an option, misspelt": (["--precison", "bf16"], "did you mean --trainer.precision?"),
    "misspelt option": (["--model.sizee", "tiny"], "did you mean --model.size?"),
    "inference under fit": (["--measure.mode", "inference"], "use `lmbench validate`"),
    "two devices": (["--trainer.devices", "2"], "one is supported so far"),
    "no GPU": (["--trainer.accelerator", "gpu"], "the Trainer refuses its flags"),
    "missing text": (["--data.source", "text", "--data.text_files", '["/nope"]'], "/nope does not exist"),
    "vocabulary under bytes": (["--data.source", "text", "--model.vocab_size", "100"], "need at least 257"),
    "missing config": (["--config", "nope.yaml"], "is no file and no shipped configuration"),
    "no steps": (["--measure.steps", "0"], "must be at least 1"),
    "steps no number": (["--measure.steps", "abc"], "measure.steps is 'abc'; allowed: a whole number"),
    "no batch": (["--data.batch_size", "0"], "batch_size is 0"),
    "no such clock": (["--timer.clock", "foo"], "allowed: events, sync"),
    "no accumulation": (["--trainer.accumulate_grad_batches", "0"], "must be at least 1"),
    "no such profiler": (["--trainer.profiler", "foo"], "trainer.profiler is 'foo'; allowed: kernels"),
    "unwritable folder": (["--measure.results_dir", "/proc/x"], "cannot be written"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(mistake, tmp_path, capsys):
    words, told = MISTAKES[mistake]
    results = tmp_path / "results"
    code = main(["fit", "--config", SMOKE, "--measure.results_dir", str(results), *words])
    error = capsys.readouterr().err
    assert code == 2
    assert told in error
    assert error.startswith("lmbench: ")
    assert error.count("\n") == 1
    assert not results.exists() or not list(results.iterdir())


def test_a_misspelt_key_in_a_file_is_named(tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text("model:\n  sizee: tiny\n")
    assert main(["fit", "--config", str(config)]) == 2
    assert "unknown option --model.sizee; did you mean --model.size?" in capsys.readouterr().err


def test_an_empty_text_file_is_refused(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.touch()
    words = ["--data.source", "text", "--data.text_files", f'["{empty}"]']
    assert main(["fit", "--config", SMOKE, "--measure.results_dir", str(tmp_path / "r"), *words]) == 2
    assert "empty" in capsys.readouterr().err


def test_an_unknown_command_is_named(capsys):
    assert main(["fitt"]) == 2
    assert "did you mean fit?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-h"], ["--version"], ["show", "-h"]])
def test_help_answers_without_torch(words):
    code = (
        "import sys; from lmbench.cli import main; main(sys.argv[1:]);"
        "assert not {'torch', 'lightning'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, timeout=20)
