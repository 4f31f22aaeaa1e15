"""`lmbench memory` as it is typed."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from planted_memory import notes_of, planted_run, write

from lmbench.cli import main


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    step = planted_run()
    (tmp_path / "memory_notes.json").write_bytes(notes_of(step))
    return write(tmp_path / "memory_snapshot.pickle", step.memory)


def test_it_prints_what_the_peak_is_made_of(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(snapshot)]) == 0
    answer = capsys.readouterr().out
    assert "0.25 GiB in backward of step 7" in answer
    assert "optimizer state  0.078   31.7 %" in answer
    assert len(answer.splitlines()) <= 24
    assert "tables     peak, phases, parts, largest, saved, operators; --table" in answer
    assert main(["memory", str(snapshot), "--all"]) == 0
    assert "train.py:21 forward" in capsys.readouterr().out
    assert main(["memory", str(snapshot), "--table", "largest"]) == 0
    assert capsys.readouterr().out.startswith("\nLargest at the peak: ")


def test_of_a_compiled_region_it_says_that_it_is_one_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = planted_run()
    path = write(tmp_path / "memory_snapshot.pickle", step.memory)
    notes = notes_of(step).decode()
    for operator, is_said in (("MmBackward0", False), ("CompiledFunctionBackward", True)):
        (tmp_path / "memory_notes.json").write_text(notes.replace("MmBackward0", operator))
        assert main(["memory", str(path)]) == 0
        assert ("each compiled region is one operator" in capsys.readouterr().out) is is_said


def test_a_cut_history_is_said_before_any_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = planted_run(max_entries=40)
    (tmp_path / "memory_notes.json").write_bytes(notes_of(step, max_entries=40))
    assert main(["memory", str(write(tmp_path / "memory_snapshot.pickle", step.memory))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("INCOMPLETE")


def test_json_csv_and_markdown(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(snapshot), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"]["phase"] == "backward"
    assert main(["memory", str(snapshot), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(int(row["total_bytes"]) for row in rows) == 252 << 20
    assert main(["memory", str(snapshot), "--format", "markdown"]) == 0
    assert "| optimizer state | 0.078 |" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["nowhere.pickle"], ["."], ["x", "--top", "0"], ["x", "--table", "a", "--json"], []])
def test_mistakes_are_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["memory", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_needs_no_torch(snapshot: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['lightning'] = None\n"
        f"from lmbench.cli import main; raise SystemExit(main(['memory', {str(snapshot)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
