"""Every command: help without PyTorch and at once, and one line with exit code 2 for words that make no sense."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from lmbench.cli import COMMANDS, main
from lmbench.commands.fit_help import OPTIONS
from lmbench.fit.run import Measurement

NONSENSE = [
    *([name, "--bogus"] for name in COMMANDS if name != "overhead"),
    *([name, "/nope/nope"] for name in COMMANDS if name not in ("overhead", "compare")),
    *([name] for name in ("show", "sweep", "report", "upload", "compare", "noise")),
    ["compare", "/nope/a", "/nope/b"],
    ["compare", "only-one"],
    ["show", "/nope", "-x"],
    ["selfcheck", "cpu", "cuda"],
    ["upload", "--timeout-s", "soon", "results"],
    ["upload", "--timeout-s"],
    ["noise", "--repeats", "some"],
    ["overhead", "--rounds", "1"],
    ["overhead", "--config", "nope"],
    ["report", "--format", "pdf", "results"],
    ["fit", "--config"],
    ["fit", "--config", "smoke", "--model.size"],
    ["--bogus"],
    ["fti"],
]


def exit_code(words):
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code or 0


@pytest.mark.parametrize("words", NONSENSE, ids=" ".join)
def test_nonsense_gets_one_line_and_exit_code_2(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"lmbench: .+\n", printed.err)
    assert list(tmp_path.iterdir()) == []


def test_nonsense_that_only_fit_can_tell_gets_one_line_from_overhead_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["overhead", "--bogus"]) == 2
    assert capsys.readouterr().err == "lmbench: unknown option --bogus (`lmbench fit --help` lists them all)\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_fits_the_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code([command, "-h"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"lmbench {command}" in printed.out
    assert max(len(line) for line in printed.out.splitlines()) <= 88
    assert printed.out.count("\n") <= 45


def test_help_needs_neither_torch_nor_lightning_nor_scipy():
    code = (
        "import contextlib, sys; from lmbench.cli import main, COMMANDS\n"
        "for name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit): main([name, '-h'])\n"
        "found = {'torch', 'lightning', 'scipy', 'matplotlib', 'wandb'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_short_help_names_real_options(capsys):
    with pytest.raises(SystemExit):
        Measurement(["fit", "--help"], announces=False)
    full = capsys.readouterr().out
    for name in (name for options in OPTIONS.values() for name, _, _ in options):
        # Taken before the parser sees the words.
        assert name in ("--json", "--quiet") or re.search(rf"{re.escape(name)}\b", full), name


def test_no_configuration_at_all_is_understood(capsys):
    assert main(["fit", "--print_config"]) == 0
    assert "size: small" in capsys.readouterr().out
