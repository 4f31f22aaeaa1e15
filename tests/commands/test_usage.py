"""Every command: help without PyTorch and at once, and one line with exit code 2 for words that make no sense."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from lmbench.cli import COMMANDS, main
from lmbench.commands.fit import daily_options
from lmbench.fit.command_line import CommandLine


def exit_code(words):
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code or 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_fits_the_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code([command, "-h"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"lmbench {command}" in printed.out
    # Options are spelt in one way, though understood in both.
    assert not re.findall(r"--[a-z_.]+-[a-z]", printed.out)
    assert max(len(line) for line in printed.out.splitlines()) <= 88
    assert printed.out.count("\n") <= 62


def test_help_needs_neither_torch_nor_what_else_is_slow():
    code = (
        "import contextlib, sys; from lmbench.cli import main, COMMANDS\n"
        "for name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit): main([name, '-h'])\n"
        "found = {'torch', 'lightning', 'scipy.stats', 'pandas', 'wandb'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_short_help_names_real_options(capsys):
    with pytest.raises(SystemExit):
        CommandLine("fit", ["--help"])
    full = capsys.readouterr().out
    for name in daily_options():
        # Taken before the parser sees the words.
        assert name in ("--json", "--quiet", "--repeats", "--compare") or re.search(rf"{re.escape(name)}\b", full), name


def test_a_dash_in_an_option_is_an_underscore(monkeypatch, capsys):
    monkeypatch.setattr("lmbench.commands.sweep.check_cells", lambda *_: None)
    assert main(["sweep", "tiny_warmup", "--dry-run", "--data.batch-size=3"]) == 0
    assert "--data.batch_size=3" in capsys.readouterr().out
