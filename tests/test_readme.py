"""The README is true: its definitions are the registry's, its commands run, its Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lmbench.cli import COMMANDS, main
from lmbench.errors import ExitCode
from lmbench.measure.subject import OWN_SOURCE
from lmbench.records.load import load_run
from lmbench.records.schema import field_table

from conftest import Sleeper, SlowBatches

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text()
QUICK = ["--measure.steps", "3", "--measure.min_window_s", "0", "--measure.probe_steps", "1"]


def block(language: str, holding: str) -> str:
    found = [text for lang, text in re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL) if lang == language]
    (match,) = [text for text in found if holding in text]
    return match


def test_definitions_are_the_registrys():
    written = TEXT.split("<!-- fields -->")[1].split("<!-- /fields -->")[0].strip()
    assert written == field_table().strip(), "run: python tests/update_readme.py"


@pytest.mark.parametrize("line", block("bash", "lmbench validate").strip().splitlines())
def test_every_example_command_runs(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    if words[0] == "show":
        assert main(["fit", "--config", "smoke", *QUICK]) == 0
        assert main(words) == 0
        return
    own_steps = [] if "--measure.steps" in words else QUICK[:2]
    assert main([*words, *own_steps, *QUICK[2:]]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_the_example_of_an_own_module_is_measured_as_the_readme_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_module.py").write_text(block("python", "class MyModule"))
    first, second = block("bash", "--model my_module.MyModule").strip().splitlines()
    assert main([*shlex.split(first)[1:], *QUICK]) == 0
    assert "tokens/s" in capsys.readouterr().out
    (folder,) = (tmp_path / "results").iterdir()
    run = load_run(folder).record
    assert (run.window.tokens, run.zero_grad) == (3 * 2 * 32, "native")
    assert (run.flops.per_token_flops, run.flops.source) == (3 * 2 * 64 * 10_000, OWN_SOURCE)
    assert main([*shlex.split(second)[1:], *QUICK]) == 0
    assert "forward_backward" in capsys.readouterr().out


def test_a_module_that_tells_neither_tokens_nor_flops_is_counted_as_the_readme_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data.batch_size", "2", "--data.context_length", "8", *QUICK]
    assert main(["fit", "--model", "strangers.TokenModel", *words]) == 0
    assert main(["fit", "--model", "strangers.TokensByHand", *words]) == 0
    runs = [load_run(path).record for path in (tmp_path / "results").iterdir()]
    told, by_hand = sorted(runs, key=lambda run: run.unseen_phases)
    # The batches are lmbench's, which count their own tokens.
    assert told.window.tokens == by_hand.window.tokens == 3 * 2 * 8
    assert "counter" in told.flops.source
    assert told.unseen_phases == []
    assert (by_hand.unseen_phases, by_hand.flops.per_token_flops) == (["forward", "clip", "zero_grad"], None)
    assert "flops_per_token()" in by_hand.flops.reason


def test_the_commands_for_grids_run_one_after_the_other(tmp_path):
    verdicts = (ExitCode.OK, ExitCode.SLOWER, ExitCode.UNDECIDED, ExitCode.INVALID)
    for line in block("bash", "lmbench sweep").strip().splitlines():
        words = shlex.split(line, comments=True)[1:]
        quick = ["--measure.steps", "10", "--measure.min_window_s", "0"] if words[0] == "noise" else []
        command = [sys.executable, "-P", "-m", "lmbench", *words, *quick]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode in (verdicts if words[0] == "compare" else (ExitCode.OK,)), (line, done.stderr)
        assert done.stdout


def test_the_kernels_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit, kernels = block("bash", "lmbench kernels").strip().splitlines()
    assert main([*shlex.split(fit, comments=True)[1:], *QUICK]) == 0
    capsys.readouterr()
    assert main(shlex.split(kernels, comments=True)[1:]) == 0
    assert "no kernels in this trace" in capsys.readouterr().out


def test_the_callbacks_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec(block("python", "PhaseTimer()").replace("max_steps=20,", "max_steps=20, accelerator='cpu',"), namespace)
    namespace["trainer"].fit(Sleeper(), SlowBatches())
    assert len(namespace["timer"].records) == 20
    assert len(list((tmp_path / "results").glob("*/steps.jsonl"))) == 1


def test_exit_codes_and_commands_are_named():
    for code in ("0 fine", "2 usage", "3 out of memory", "130 interrupted"):
        assert code in TEXT
    for command in COMMANDS:
        assert f"lmbench {command}" in TEXT or f"`{command}`" in TEXT, command
