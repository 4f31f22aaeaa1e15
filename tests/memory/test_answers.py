"""`lmbench memory` as it is typed."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
from planted_memory import notes_of, planted_run, write

from lmbench.cli import main


@pytest.fixture
def snapshot(tmp_path):
    step = planted_run()
    (tmp_path / "memory_notes.json").write_bytes(notes_of(step))
    return write(tmp_path / "memory_snapshot.pickle", step.memory)


def test_a_cut_history_and_compiled_regions_are_said_before_any_table(tmp_path, capsys):
    step = planted_run(max_entries=40)
    notes = notes_of(step, max_entries=40).replace(b"MmBackward0", b"CompiledFunctionBackward")
    (tmp_path / "memory_notes.json").write_bytes(notes)
    assert main(["memory", str(write(tmp_path / "memory_snapshot.pickle", step.memory))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("INCOMPLETE")
    assert text.index("each compiled region is one operator") < text.index("At the peak")


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from lmbench.cli import main; "


def test_a_typo_is_told_before_pytorch_is_imported():
    code = f"{WITHOUT_TORCH}raise SystemExit(main('memory xl_bf16 --trainer.devcies 4'.split()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert (done.returncode, "did you mean --trainer.devices?" in done.stderr) == (2, True)


def test_json_and_csv_hold_every_figure_without_torch(snapshot, capsys):
    code = f"{WITHOUT_TORCH}raise SystemExit(main(['memory', {str(snapshot)!r}, '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["peak"]["phase"], answer["peak"]["allocated_bytes"]) == ("backward", 252 << 20)
    assert main(["memory", str(snapshot), "--format=csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(int(row["total_bytes"]) for row in rows) == 252 << 20
