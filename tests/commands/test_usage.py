"""Every command: its help fits the screen, comes without slow imports, and names real options."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from planted_memory import planted_run, write
from runs import make_run
from tables import cases

from lmbench.cli import COMMANDS, main
from lmbench.commands.fit import daily_options
from lmbench.fit.command_line import CommandLine


@cases("command", "", *COMMANDS)
def test_help_of_every_command_fits_the_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "-h"]) == 0
    text, err = capsys.readouterr()
    assert (f"lmbench {command}".strip() in text, err) == (True, "")
    # Help spells options with underscores, though dashes are understood too.
    assert not re.findall(r"--[a-z_.]+-[a-z]", text)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("\n") <= 72


def test_what_needs_torch_says_so_in_one_line_where_there_is_none(refused, monkeypatch):
    monkeypatch.delitem(sys.modules, "lmbench.numerics", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert re.fullmatch("lmbench: `lmbench numerics` needs torch, which .+ lacks; .+\n", refused("numerics"))


PROGRAM = """
import contextlib, sys
from lmbench.cli import main
needless, lines, code = *sys.argv[1:], 0
for line in lines.split(";"):
    with contextlib.suppress(SystemExit):
        code = max(code, main(line.split()))
print(*[int(code), *{*needless.split()} & {*sys.modules}], file=sys.stderr)
"""


# Modules that are not imported, the highest exit code, and the command lines of a process.
@cases(f"""
needless | code | lines
torch lightning scipy.stats pandas wandb | 0 | {";".join(f"{name} -h" for name in COMMANDS)}
torch lightning jsonargparse numpy pandas rich | 0 | completion --words fit --trainer.prec
torch lightning jsonargparse numpy pandas rich | 2 | fit smoke --trainer.precison x; memory smoke --trainer.devcies 4
torch lightning scipy.special scipy.stats pandas | 0 | list; show results
torch lightning vl_convert jinja2 | 0 | report results; memory snapshot.pickle
torch lightning | 0 | report results --output=page.html; guide columns; guide python
""")
def test_a_command_imports_nothing_slow_that_it_does_not_need(needless, code, lines, tmp_path):
    make_run(tmp_path / "results" / "a", {"data.batch_size": 4})
    write(tmp_path / "snapshot.pickle", planted_run().memory)
    words = [sys.executable, "-c", PROGRAM, needless, lines]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == code


@cases("command", "fit", "sweep", "tune", "memory", "kernels", "judge")
def test_a_word_too_long_for_a_file_is_refused_in_one_line(command, refused):
    (line,) = refused(command, *["a" * 300] * (2 if command == "judge" else 1)).splitlines()
    assert line.startswith("lmbench: ")


def test_the_short_help_names_real_options(capsys):
    with pytest.raises(SystemExit):
        CommandLine("fit", ["--help"])
    full = capsys.readouterr().out
    for name in daily_options():
        # These options are handled before the parser sees the words.
        assert name in ("--json", "--quiet", "--repeats", "--compare") or re.search(rf"{re.escape(name)}\b", full), name


def test_a_dash_in_an_option_is_an_underscore(monkeypatch, printed):
    monkeypatch.setattr("lmbench.sweep.execute.Execution.check", lambda *_: None)
    assert "--data.batch_size=3" in printed("sweep", "tiny_warmup", "--dry-run", "--data.batch-size=3")
