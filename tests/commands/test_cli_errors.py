"""Every mistake a user can make gets one line, exit code 2, no traceback and no half-made result folder."""

from __future__ import annotations

import pytest
from paths import ROOT

from lmbench.cli import main

SMOKE = str(ROOT / "configs" / "smoke.yaml")

MISTAKES = {
    "fp8 without its library": (["--trainer.precision", "transformer-engine"], "Requirement 'transformer_engine"),
    "no such precision": (["--trainer.precision", "bf8"], "trainer.precision is 'bf8'; allowed: "),
    "a variant for an optimizer": (["--model.optimizer", "fused"], "unknown optimizer 'fused'"),
    "a setting that follows": (["--model.context_length", "8"], "set that: --data.context_length 8"),
    "inference under fit": (["--measure.mode", "inference"], "use `lmbench validate`"),
    "two devices": (["--trainer.devices", "2"], "one is supported so far"),
    "no GPU": (["--trainer.accelerator", "gpu"], "the Trainer refuses its flags"),
    "vocabulary under bytes": (["--data.source", "text", "--model.vocab_size", "100"], "need at least 257"),
    "missing config": (["--config", "nope.yaml"], "is no file and no shipped configuration"),
    "steps no number": (["--measure.steps", "abc"], "measure.steps is 'abc'; allowed: a whole number"),
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
