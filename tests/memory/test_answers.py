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
    for words, said in (
        ([], ("0.25 GiB in backward of step 7", "optimizer state  0.078       31.7", "--table NAME or --all")),
        (["--all"], ("train.py:21 forward",)),
        (["--table", "largest"], ("Largest at the peak",)),
        (["--format", "markdown"], ("| optimizer state | 0.078 |",)),
    ):
        assert main(["memory", str(snapshot), *words]) == 0
        text = capsys.readouterr().out
        assert all(each in text or each in " ".join(text.split()) for each in said)
        assert words or len(text.splitlines()) <= 26


@pytest.mark.parametrize(("operator", "is_said"), [("MmBackward0", False), ("CompiledFunctionBackward", True)])
def test_of_a_compiled_region_it_says_that_it_is_one_operator(
    snapshot: Path, capsys: pytest.CaptureFixture[str], operator: str, is_said: bool
) -> None:
    notes = snapshot.parent / "memory_notes.json"
    notes.write_text(notes.read_text().replace("MmBackward0", operator))
    assert main(["memory", str(snapshot)]) == 0
    assert ("each compiled region is one operator" in capsys.readouterr().out) is is_said


def test_a_cut_history_is_said_before_any_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = planted_run(max_entries=40)
    (tmp_path / "memory_notes.json").write_bytes(notes_of(step, max_entries=40))
    assert main(["memory", str(write(tmp_path / "memory_snapshot.pickle", step.memory))]) == 0
    assert capsys.readouterr().out.startswith("INCOMPLETE")


def test_json_and_csv_hold_every_figure_without_torch(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['lightning'] = None\n"
        f"from lmbench.cli import main; raise SystemExit(main(['memory', {str(snapshot)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["peak"]["phase"], told["peak"]["allocated_bytes"]) == ("backward", 252 << 20)
    assert {row["category"]: row["size_bytes"] >> 20 for row in told["tables"]["peak"]}["peak"] == 252
    assert main(["memory", str(snapshot), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(int(row["total_bytes"]) for row in rows) == 252 << 20


@pytest.mark.parametrize("words", [["nowhere.pickle"], ["."], ["x", "--top", "0"], ["x", "--table", "a", "--all"], []])
def test_mistakes_are_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["memory", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
