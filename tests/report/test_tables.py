"""Tables of attention by itself (rates, the fastest way), choices of the model, and published figures."""

from __future__ import annotations

import re

import pytest
from report_golden import make_attention
from runs import make_sweep, section_of, table_of, table_rows
from tables import cases, csv_of, stored, texts_of

from lmbench.catalogue import make_catalogue
from lmbench.reference import FOLDER
from lmbench.report.facts import FACT
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.view import TableSpec

# attention by itself


def tables_of(home, view=None):
    return list(section_of(home, view=view).tables)


@cases("""
- [repeats, spread, forward, backward]
- [3, 0.0, "same: flex, eager; sdpa, eager [1]", "naive, compiled"]
- [3, 0.5, "same: flex, eager; sdpa, eager [1]", "undecided: naive, compiled; sdpa, eager [1]"]
- [2, 0.0, "flex, eager [1]", "naive, compiled [1]"]
""")
def test_a_difference_within_one_percent_is_the_same_and_a_wide_interval_or_few_processes_undecided(
    repeats, spread, forward, backward, tmp_path
):
    def widen(run, repeat):
        factor = 1 + spread * repeat if run["model"]["attention"] == "sdpa" else 1
        return {"phases.backward.mean_s": run["phases"]["backward"]["mean_s"] * factor}

    home = make_attention(tmp_path / "a", [16384], repeats=repeats, change=widen)
    tables = tables_of(home, "attention_backends")
    assert [table_rows(table)[0]["fastest"] for table in tables[:2]] == [forward, backward]


def test_a_sentence_on_the_fastest_has_one_verdict_with_its_count_first(tmp_path):
    home = make_attention(tmp_path / "a", [16384], repeats=2)
    words = "sdpa, eager (undecided: fewer than 3 processes)"
    told = f"In 1 of 1 the fastest by forward + backward is {words}."
    assert texts_of(section_of(home, view="attention").headline) == [told]


def test_a_row_links_to_its_run_once(swept):
    axes = {"model.size": ["small", "large"], "trainer.compile": [False, True], "mode": ["forward", "train_step"]}
    table, *_ = tables_of(swept(axes))
    assert [[cell.run_id != "" for cell in row[:4]] for row in table.cells] == [[True, False, False, False]] * 8


def test_a_sentence_on_the_parts_of_a_step_leaves_out_those_below_one_percent(swept):
    def change(run, repeat):
        return {"phases.forward.mean_s": 0.1, "phases.other.mean_s": 0.0009, "phases.transfer.mean_s": 0.002}

    home = swept({"mode": ["inference"]}, fixed={"model.size": "small"}, change=change)
    (answer,) = texts_of(section_of(home, view="step_times").headline)
    assert re.findall(r"(\w+) [\d.]+ (?:± [\d.]+ )?ms", answer.partition(":")[0]) == ["forward", "transfer"]


@cases("""
- [repeats, rates, answer]
- [3, [70, 90], "batch 8 is the best: tokens/s 90."]
- [3, [89.9, 90], "batch 8 is the best, undecided against batch 4: tokens/s 90."]
- [2, [70, 90], "batch 8 is the best (undecided: fewer than 3 processes): tokens/s 90."]
""")
def test_a_sentence_on_the_best_names_those_that_may_be_as_good(repeats, rates, answer, swept):
    def change(run, repeat):
        mean = dict(zip([4, 8], rates, strict=True))[run["config"]["data"]["batch_size"]]
        return {"throughput.tokens_per_s": mean * (1 + 0.001 * repeat)}

    view = table_of("step_s", answers=[{"kind": "best", "y": "tokens_per_s", "x": "batch"}])
    home = swept(view=view, repeats=repeats, change=change)
    assert texts_of(section_of(home).headline) == [answer]


# published figures

PUBLISHED = stored("published")
CELLS = PUBLISHED["cells"]


def published(column, *cells):
    """The published figures that stand beside the first of these cells, by source."""
    frame = Frame([MeasuredCell([], facts) for facts in cells])
    _, *others = make_catalogue("published").columns_of(TableSpec("T", (column,)))
    figures = {other.title.removeprefix("ref. ").partition(",")[0]: other.of(frame) for other in others}
    return {source: of_cell[frame.cells[0]] for source, of_cell in figures.items() if frame.cells[0] in of_cell}


@cases("column | cell | other | source | value", *PUBLISHED["beside"])
def test_a_published_figure_stands_only_beside_cells_that_it_can_be_compared_with(column, cell, other, source, value):
    figure = published(column, CELLS[cell] | other).get(source)
    assert figure is None if value is None else figure is not None and figure.value == pytest.approx(value)


def test_figures_of_a_report_stand_beside_the_same_configurations(tmp_path, printed, answered):
    mine = make_sweep(tmp_path / "mine", [{"trainer.precision": name} for name in ("32-true", "bf16-mixed")])
    theirs = tmp_path / "theirs.csv"
    printed("report", mine, "--format=csv", f"--output={theirs}")
    theirs.write_text(theirs.read_text().replace("bf16-mixed", "16-mixed"))
    same, other = answered("report", mine, "--reference", theirs)["tables"]["cells"]
    for name in ("step_s", "step_std_s", "tokens_per_s", "peak_bytes"):
        assert same[f"reference {same['gpu']}: {name}"] == same[name]
    assert other.get(f"reference {same['gpu']}: step_s") is None
    assert "it has no figure" not in printed("report", mine, "--reference", theirs)
    theirs.write_text(theirs.read_text().replace("32-true", "64-true"))
    assert "reference    it has no figure of these configurations" in printed("report", mine, "--reference", theirs)


@cases("page", "h200_flagship", "h200_precision")
def test_a_cards_name_stands_for_all_of_its_pages(page):
    row, *_ = csv_of((FOLDER / f"{page}.csv").read_text())
    cell = MeasuredCell([], {name: row[name] for name in FACT if row.get(name)})
    _, theirs = make_catalogue("h200").columns_of(TableSpec("T", ("step_s",)))
    assert theirs.of(Frame([cell]))[cell].value == float(row["step_s"])
