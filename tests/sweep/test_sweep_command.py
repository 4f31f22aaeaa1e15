"""`lmbench sweep` from the command line: what it lists, what it refuses, and what it never imports."""

from __future__ import annotations

import re

import pytest
from tables import rows

from lmbench.cli import main

FILE = """
base: {config: smoke, measure.steps: 3}
matrix: {model.num_layers: [1, 2]}
modes: [inference, train_step]
repeats: 2
timeout_s: 60
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    (tmp_path / "view.yaml").write_text(f"view: step_time\n{FILE}")
    return str(path)


def test_a_dry_run_lists_what_a_user_would_type_and_writes_nothing(file, tmp_path, capsys):
    words = ["--results_dir", str(tmp_path / "r"), "--repeats=3", "--data.batch_size=2"]
    assert main(["sweep", file, "--dry_run", *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "    lmbench validate --config=smoke --measure.steps=3 --data.batch_size=2 --model.num_layers=1" in told
    assert told[-1].startswith("cells: 4, repeats: 3, runs: 12; at least about ")
    assert told[-1].endswith("at most 12 min (time limits)")
    assert not (tmp_path / "r").exists()


MISTAKES = """
nowhere | is no file, no sweep's folder and no study
FILE --model.size | --model.size has no value
FILE more | more
FILE --repeats=x | repeats
FILE --name=a/b | only letters, digits
view.yaml | did you mean step_times?
- | required: study
FILE --on=slurm | unknown option --on (`lmbench fit
FILE --model.sise=tiny | did you mean --model.size?
FILE --results_dir=other | holds x-r0, which is no cell of this sweep
FILE --results_dir=mine.yaml | cannot be written
"""


@pytest.mark.parametrize("more", [[], ["--dry_run"]])
@pytest.mark.parametrize(("words", "told"), rows(MISTAKES))
def test_a_mistake_gets_one_line_and_exit_code_2(words, told, more, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other" / "mine" / "runs" / "x-r0").mkdir(parents=True)
    (tmp_path / "other" / "mine" / "runs" / "x-r0" / "run.json").touch()
    assert main(["sweep", *[file if word == "FILE" else word for word in words.split()], *more]) == 2
    error = capsys.readouterr().err
    assert (told in error, error.startswith("lmbench: "), error.count("\n")) == (True, True, 1)


WRONG = {
    "sweep": (
        "matrxi:\n  data.batch_size: [1]\nrepeats: x\nenvironments:\n  a:\n    pyhton: x\n",
        {1: "`matrxi`", 3: "Expected `int`", 6: "`pyhton`"},
    ),
    "sweep of options": (
        "base:\n  config: smoke\n  model.sise: 1\nmatrix:\n  data.batch_sizes: [1]\n",
        {3: "--model.size?", 5: "--data.batch_size?"},
    ),
    "fit": (
        "model:\n  sise: small\n  num_layers: many\ntrainer:\n  accelerator: cpu\n  precision: bf17\n",
        {2: "--model.size?", 3: "model.num_layers is 'many'", 6: "trainer.precision is 'bf17'"},
    ),
    "fit what is no YAML": ("a: b\n  c: d\n", {}),
}


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
