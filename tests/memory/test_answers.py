"""The command `lmbench memory`."""

from __future__ import annotations

import csv
import io
import json

from planted_memory import notes_of, planted_run, write

from lmbench.cli import main


def test_a_cut_history_and_compiled_regions_are_noted_before_any_table(tmp_path, capsys):
    step = planted_run(max_entries=40)
    notes = notes_of(step, max_entries=40).replace(b"MmBackward0", b"CompiledFunctionBackward")
    (tmp_path / "memory_notes.json").write_bytes(notes)
    assert main(["memory", str(write(tmp_path / "memory_snapshot.pickle", step.memory))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("WARN         the history is not complete: ")
    assert text.index("each compiled region is one operator") < text.index("At the peak")


def test_json_and_csv_hold_every_figure(tmp_path, capsys):
    snapshot = str(write(tmp_path / "memory_snapshot.pickle", planted_run().memory))
    assert main(["memory", snapshot, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["peak"]["phase"], answer["peak"]["allocated_bytes"]) == ("backward", 252 << 20)
    assert main(["memory", snapshot, "--format=csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(int(row["total_bytes"]) for row in rows) == 252 << 20
