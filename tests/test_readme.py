"""The README is true: its definitions are the registry's, its commands run, its Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lmbench.cli import COMMANDS, main
from lmbench.results.fields_table import field_table

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


@pytest.mark.parametrize("line", block("bash", "--model.attention naive").strip().splitlines())
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
