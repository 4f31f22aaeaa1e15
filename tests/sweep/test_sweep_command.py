"""`lmbench sweep` from the command line: what it lists, what it refuses, and what it never imports."""

from __future__ import annotations

import re

import pytest
import yaml

from lmbench.cli import main

FILE = """
base: {config: smoke, measure.steps: 3}
matrix: {model.num_layers: [1, 2]}
modes: [inference, train_step]
repeats: 2
timeout_s: 60
"""


def test_a_dry_run_lists_what_a_user_would_type_and_writes_nothing(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(FILE)
    words = ["--results_dir", str(tmp_path / "r"), "--repeats=3", "--data.batch_size=2"]
    assert main(["sweep", str(file), "--dry_run", *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "    lmbench validate --config=smoke --measure.steps=3 --data.batch_size=2 --model.num_layers=1" in told
    assert told[-1] == "cells: 4, repeats: 3, runs: 12; at most 12 min (time limits)"
    assert not (tmp_path / "r").exists()


#: By the command, the text of its file, and what is said of each line.
WRONG = yaml.safe_load(r"""
sweep:
  - "matrxi:\n  data.batch_size: [1]\nrepeats: x\nenvironments:\n  a:\n    pyhton: x\n"
  - {1: "`matrxi`", 3: "Expected `int`", 6: "`pyhton`"}
sweep of options:
  - "base:\n  config: smoke\n  model.sise: 1\nmatrix:\n  data.batch_sizes: [1]\n"
  - {3: "--model.size?", 5: "--data.batch_size?"}
fit:
  - "model:\n  sise: small\n  num_layers: many\ntrainer:\n  accelerator: cpu\n  precision: bf17\n"
  - {2: "--model.size?", 3: "model.num_layers is 'many'", 6: "trainer.precision is 'bf17'"}
fit what is no YAML: ["a: b\n  c: d\n", {}]
""")


@pytest.mark.parametrize("what", WRONG)
def test_all_mistakes_of_a_file_are_told_with_their_lines(what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, lines = WRONG[what]
    (tmp_path / "mine.yaml").write_text(text)
    assert main([what.split()[0], "mine.yaml"]) == 2
    error = capsys.readouterr().err
    told = dict(re.findall(r"mine.yaml:(\d+): (.*?)(?=; mine|\n)", error))
    assert {int(number) for number in told} == set(lines)
    assert all(part in told[str(number)] for number, part in lines.items())
    assert error.count("\n") == 1
    assert lines or "no YAML: mapping values are not allowed in this context, line 2" in error
