"""`lmbench sweep` from the command line: what it lists, what it refuses, and what it never imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmbench.cli import main
from lmbench.records.load import find_runs, load_run

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
    return str(path)


def test_a_dry_run_lists_what_a_user_would_type_and_writes_nothing(file, tmp_path, capsys):
    words = ["--results_dir", str(tmp_path / "r"), "--repeats", "3", "--data.batch_size", "2"]
    assert main(["sweep", file, "--dry-run", *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "    lmbench validate --config=smoke --measure.steps=3 --data.batch_size=2 --model.num_layers=1" in told
    assert told[-2] == "4 cells, 3 repeats each: 12 runs"
    assert told[-1].startswith("at least about ")
    assert told[-1].endswith("at most 12 min (time limits)")
    assert not (tmp_path / "r").exists()


MISTAKES = {
    "no such file": (["nowhere"], "is no file, no sweep's folder and no study"),
    "an axis for every cell": (["FILE", "--model.num_layers=1"], "is an axis of this sweep"),
    "an option without a value": (["FILE", "--model.size"], "--model.size has no value"),
    "a stray word": (["FILE", "more"], "'more' was not understood"),
    "no repeats": (["FILE", "--repeats", "0"], "at least 1"),
    "repeats a text": (["FILE", "--repeats", "x"], "invalid int value: 'x'"),
    "no end": (["FILE", "--timeout", "inf"], "a number of seconds above 0"),
    "a mode for every cell": (["FILE", "--measure.mode", "forward"], "list modes under `modes`"),
    "a name with a slash": (["FILE", "--name", "a/b"], "only letters, digits"),
    "nothing": ([], "sweep needs a SWEEP"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(mistake, file, capsys):
    words, told = MISTAKES[mistake]
    assert main(["sweep", *[file if word == "FILE" else word for word in words]]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.startswith("lmbench: ")
    assert error.count("\n") == 1


def test_a_view_that_is_none_is_refused(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(f"view: step_time\n{FILE}")
    assert main(["sweep", str(path), "--dry-run"]) == 2
    assert "did you mean step_times?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-h"], ["step_times", "--dry-run"]])
def test_help_and_dry_runs_answer_without_torch(words):
    code = (
        "import sys; from lmbench.cli import main; main(['sweep', *sys.argv[1:]]);"
        "assert not {'torch', 'lightning'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, timeout=20)


MISSPELT = {
    "an option": ("base: {config: smoke}\nmatrix: {model.sizee: [tiny]}\n", "did you mean --model.size?"),
    "a value": ("base: {config: smoke}\nmatrix: {measure.steps: [3, many]}\n", "measure.steps is 'many'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MISSPELT)
def test_what_the_command_line_rejects_is_told_before_anything_runs(what, tmp_path, capsys):
    text, told = MISSPELT[what]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert main(["sweep", str(path), "--results_dir", str(tmp_path / "r")]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("lmbench: sweep: ")]
    assert told in error
    assert error.startswith("lmbench: cell ")
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_cells_run_the_lmbench_of_the_sweep_whatever_lies_in_the_working_directory(tmp_path):
    """A checkout's root, say: another `lmbench` there is not what was asked to measure."""
    (tmp_path / "lmbench").mkdir()
    (tmp_path / "lmbench" / "__init__.py").write_text("raise ImportError('the wrong lmbench')\n")
    program = "import sys; from lmbench.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-P", "-c", program, "sweep", "tiny_custom", "--repeats", "1", "--results_dir", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {run.outcome for run in map(load_run, find_runs([str(tmp_path / "out")]))} == {"ok"}
