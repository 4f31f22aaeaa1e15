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
#: Words after `lmbench memory`, and what they are refused with before PyTorch is imported.
IMPOSSIBLE = [
    ("small_bf16 --model.num_heads 7", "num_heads 7 does not divide d_model 768"),
    ("small_bf16 --data.batch_size=0", "batch_size is 0"),
    ("--model.size tiny --trainer.devices 3 --trainer.strategy tensor_parallel", "num_heads is 4, which 3 devices"),
    ("xl_bf16 --trainer.devices 4 --trainer.strategy.tensor_parallel_size 3", "3 does not divide 4 devices"),
    ("xl_bf16 --trainer.devcies 4", "did you mean --trainer.devices?"),
]


def test_sizes_that_cannot_be_are_refused_before_pytorch_is_imported():
    code = f"{WITHOUT_TORCH}print([int(main(['memory', *words.split()])) for words, _ in {IMPOSSIBLE}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == f"{[2] * len(IMPOSSIBLE)}\n"
    lines = zip(done.stderr.splitlines(), IMPOSSIBLE, strict=True)
    assert [told for line, (_, told) in lines if told not in line] == []


def test_json_and_csv_hold_every_figure_without_torch(snapshot, capsys):
    code = f"{WITHOUT_TORCH}raise SystemExit(main(['memory', {str(snapshot)!r}, '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["peak"]["phase"], answer["peak"]["allocated_bytes"]) == ("backward", 252 << 20)
    assert main(["memory", str(snapshot), "--format=csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(int(row["total_bytes"]) for row in rows) == 252 << 20
