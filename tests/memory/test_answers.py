"""The command `lmbench memory`."""

from __future__ import annotations

from planted_memory import planted_run, write, write_recording

from lmbench.memory.blocks import CATEGORIES
from lmbench.memory.difference import difference_answer, predicted_peak, recorded_peak
from lmbench.memory.findings import examine
from lmbench.memory.forecast import Forecast, PhasePeak


def test_a_cut_history_and_compiled_regions_are_noted_before_any_table(tmp_path, printed):
    path = write_recording(tmp_path, planted_run(max_entries=40), max_entries=40)
    notes = path.with_name("memory_notes.json")
    notes.write_text(notes.read_text().replace("MmBackward0", "CompiledFunctionBackward"))
    text = printed("memory", path)
    assert text.startswith("WARN         the history is not complete: ")
    assert text.index("each compiled region is one operator") < text.index("At the peak")


def test_two_peaks_are_compared_by_category_line_and_phase(tmp_path, answered, refused):
    paths = [write(tmp_path / "a.pickle", planted_run().memory)]
    larger = planted_run()
    # At the end of the recording more is held than at its peak: by another line, in no phase.
    added = ("forward", "/home/someone/new.py", 7)
    larger.memory.alloc(400 << 20, (added,))
    paths.append(write(tmp_path / "b.pickle", larger.memory))
    answer = answered("memory", *paths)
    tables = answer["tables"]
    changes = {row["line"]: row["change_bytes"] for row in tables["changed_lines"]}
    assert changes["new.py:7"] == 400 << 20
    assert answer["change_bytes"] == sum(row["b_bytes"] - row["a_bytes"] for row in tables["changed_lines"])
    assert tables["changed_categories"][-1]["change_bytes"] == answer["change_bytes"]
    assert "two to compare; 3 given" in refused("memory", *paths, paths[0])


def test_a_recording_and_a_prediction_have_their_categories_in_common(tmp_path):
    recorded = recorded_peak("a", examine(write(tmp_path / "a.pickle", planted_run().memory)))
    sizes = {**dict.fromkeys(CATEGORIES, 0), "activations": 1 << 30}
    forecast = Forecast(
        4, 512, "32-true", "train_step", "native", False, [PhasePeak("backward", sizes, "")], 2 << 30, ""
    )
    answer = difference_answer(recorded, predicted_peak("b", forecast))
    assert answer.figures["change_bytes"] == (1 << 30) - (252 << 20)
    assert "B holds 0.75 GiB more" in answer.headline[0].text
    (phases,) = (table for table in answer.tables if table.name == "changed_phases")
    assert ["backward", 252 << 20, 1 << 30, (1 << 30) - (252 << 20)] in phases.rows
