"""The tables of a view and the sentences that answer its question.

A table has a row for each cell, with notes where a reader needs them, or the fastest of several ways in each row.
Sentences are about the cells that decide: usually the largest ones, by the order in which tables sort them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lmbench.records.statistics import ratio_of
from lmbench.records.vocabulary import GATE_FRACTION
from lmbench.report import answer, units
from lmbench.report.answer import Cell, Table
from lmbench.report.columns import Column
from lmbench.report.facts import FACT, describe, heading, is_notable
from lmbench.report.frame import Frame, outcome_label
from lmbench.report.units import TIMES, Unit, change_percent, change_range
from lmbench.report.view import AnswerSpec, Catalogue, ColumnOf, TableSpec, View

#: The rows of a table: each a cell of the frame with its figures, the facts left out.
_Rows = list[tuple[int, list[Cell | None]]]
_CHANGE = Unit("", 100.0, change_percent)

_UNDECIDED_RATIO = (
    "the difference to the baseline is not told from none: its 95 % interval between processes includes 1"
)
_VERDICT_NOTES = {
    "undecided": (
        "undecided: the 95 % interval of the ratio between processes includes 1, or a side has fewer than three"
    ),
    "same": "same: the 90 % intervals of their ratios lie within 1 %",
}


def view_tables(view: View, frame: Frame, catalogue: Catalogue) -> list[Table]:
    """The tables of a view that are not empty.

    Args:
        frame: the cells that have a shown run, with their baselines.
    """
    tables = [_table(spec, frame, catalogue, is_first=spec is view.tables[0]) for spec in view.tables if frame.facts]
    return [table for table in tables if table is not None]


def _table(spec: TableSpec, frame: Frame, catalogue: Catalogue, is_first: bool) -> Table | None:
    """The table; None if it is empty. If no run ended well, the first table shows the outcomes."""
    columns = catalogue.columns_of(spec)
    values = {column.name: column.of(frame) for column in columns}
    # The fact `optimizer` repeats an axis `model.optimizer`.
    differing = [name for name in frame.varying() if name not in spec.among and f"model.{name}" not in frame.values]
    sorting = list(dict.fromkeys([*spec.rows, *differing]))
    shared = frame.shared()
    # If nothing differs, the rows have the view's own facts.
    names = [name for name in sorting if name in differing] or [name for name in spec.rows if name in shared]
    if not any(values.values()) and (frame.ok or not is_first):
        return None
    filled = {cell for figures in values.values() for cell in figures} | frame.facts.keys() - frame.ok.keys()
    frame = frame.select(cell for cell in frame.ordered(sorting) if cell in filled)
    if spec.among:
        headings, rows = _fastest(frame, names, spec.among, columns[0])
    else:
        # The first column stays, as it holds the outcomes.
        columns = [column for column in columns if values[column.name] or column is columns[0]]
        headings, features = [column.heading(frame) for column in columns], catalogue.features_of(columns)
        rows = []
        for cell in frame.facts:
            figures = [values[column.name].get(cell) for column in columns]
            feature_notes = [note for feature in features for note in feature.row_notes(frame, cell)]
            notes = [*_notes(frame, cell, columns, figures), *feature_notes]
            first = figures[0] if cell in frame.ok else Cell(None, text=frame.outcome(cell), style="outcome")
            rows.append((cell, [replace(first or Cell(None), notes=tuple(notes)), *figures[1:]]))
    fact_columns = []
    for name in names:
        is_number = all(isinstance(value, int | float) for value in frame.values.get(name, ()))
        fact_columns.append(answer.Column(heading(name), units.SETTING if is_number else units.WORDS, name))
    for cell, figures in rows:
        run_id = frame.runs_of(cell)[0].run_id
        figures[:0] = [Cell(frame.facts[cell].get(name), run_id=run_id) for name in names]
    in_caption = [name for name in FACT if name in shared and name not in names and is_notable(name, shared[name])]
    has_spread = not spec.among and any(column.has_spread for column in columns)
    spread = spread_text(map(len, frame.ok.values())) if has_spread else ""
    return Table(
        "_".join(re.findall(r"\w+", spec.title.lower())),
        spec.title,
        [*fact_columns, *headings],
        [figures for _, figures in rows],
        "; ".join(filter(None, [describe(shared, in_caption), spread])),
    )


def _notes(frame: Frame, cell: int, columns: Sequence[Column], figures: Sequence[Cell | None]) -> list[str]:
    """Notes on failed guards, runs that are not counted, attention that was fused, and ratios that may be 1."""
    runs, base = frame.runs_of(cell, "ok"), frame.base.get(cell)
    not_ok = Counter(outcome_label(run) for run in frame.runs_of(cell) if run.outcome != "ok")
    outcomes = ", ".join(f"{count} {label}" for label, count in sorted(not_ok.items()))
    skipped = sum(run.record.window.skipped_count or 0 for run in runs)
    is_fused = any(run.record.compile.is_attention_fused for run in runs)
    ratios = [figure for column, figure in zip(columns, figures, strict=True) if figure and column.is_relative]
    is_undecided = any(r.low is not None and r.high is not None and r.low <= 1 <= r.high for r in ratios)
    notes = {
        f"of {len(frame.runs_of(cell))} runs, not counted: {outcomes}": runs and not_ok,
        f"the fp16 scaler skipped {skipped} steps, which are in no statistic": skipped,
        f"Inductor put PyTorch's fused attention in the place of {frame.facts[cell].get('attention')}": is_fused,
        _UNDECIDED_RATIO: base != cell and is_undecided,
    }
    guards = [f"guard {name} failed: {message}" for name, message in failed_guards(frame, cell).items()]
    return [*guards, *(note for note, applies in notes.items() if applies)]


def failed_guards(frame: Frame, cell: int) -> dict[str, str]:
    """The guards that failed in the cell's ok runs, by name, each with its first message."""
    guards = [guard for run in reversed(frame.runs_of(cell, "ok")) for guard in run.record.guards]
    return {guard.name: guard.message for guard in guards if guard.status == "fail"}


def spread_text(runs: Iterable[int]) -> str:
    """What the number behind `±` is, by the number of ok runs of each cell."""
    counts = sorted({*runs} - {0})
    if counts == [1]:
        return "mean ± std of the steps within one run"
    numbers = " or ".join(str(count) for count in counts if count > 1)
    single = ", within the run where there is one" if 1 in counts else ""
    return f"mean ± std between {numbers} processes{single}" if counts else ""


# the fastest


def _fastest(
    frame: Frame, names: Sequence[str], among: Sequence[str], column: Column
) -> tuple[list[answer.Column], _Rows]:
    """A row for each combination of the row facts: the fastest way, the second, and how certain the difference is."""
    headings = [
        answer.Column("fastest"), column.heading(frame), answer.Column("second"),
        answer.Column("second takes", _CHANGE), answer.Column("95 % interval", _CHANGE),
    ]  # fmt: skip
    return headings, [(next(iter(part.facts)), fastest(part, among, column)) for part in frame.by(names)]


def fastest(frame: Frame, among: Sequence[str], column: Column) -> list[Cell | None]:
    """Judge which of the cells, which differ in the facts `among` alone, takes the least time.

    One process is one sample. Welch's t on the logarithms of process means compares the fastest cell with each other
    one. The 95 % interval is that of one pair. It allows neither for the choice of the smallest of several means nor
    for the number of rows.

    Returns:
        Five cells: the fastest, its time in s, the second, the further time of the second as a fraction, and the
        interval of this fraction. The first cell says `same` or `undecided` with all ways that may be as fast. Cells
        without a value are None.
    """
    samples = {cell: frame.numbers(cell, column.expression) for cell in frame.facts}
    ways = sorted((fmean(values), cell) for cell, values in samples.items() if min(values, default=0) > 0)
    if not ways:
        return [None, None, None, None, None]
    (time_s, first), *others = ways
    name, notes = frame.describe(first, among), tuple[str, ...]()
    if not others:
        return [Cell(name), Cell(time_s), None, None, None]
    ratios = {frame.describe(cell, among): ratio_of(samples[first], samples[cell]) for _, cell in others}
    verdicts = {way: ratio.verdict(GATE_FRACTION) for way, ratio in ratios.items()}
    unresolved = [way for way, verdict in verdicts.items() if verdict in _VERDICT_NOTES]
    if unresolved:
        verdict = "undecided" if "undecided" in verdicts.values() else "same"
        name, notes = f"{verdict}: {'; '.join([name, *unresolved])}", (_VERDICT_NOTES[verdict],)
    second, ratio = next(iter(ratios.items()))
    interval = None
    if ratio.low is not None and ratio.high is not None:
        low, high = ratio.low - 1, ratio.high - 1
        interval = Cell(None, low=low, high=high, text=change_range(low, high))
    return [Cell(name, notes=notes), Cell(time_s), Cell(second), Cell(others[0][0] / time_s - 1), interval]


# sentences

#: Most parts that are named, and most cells that have a clause.
_MOST_PARTS, _MOST_CLAUSES = 3, 6


def sentences(specs: Sequence[AnswerSpec], frame: Frame, column_of: ColumnOf) -> list[str]:
    """A sentence for each spec to which the cells have an answer: `small, TF32: speed-up vs fp32 eager 4.50x, step
    72.91 ± 0.12 ms; ...`."""
    texts = []
    for spec in specs:
        column = column_of(spec.y)
        if spec.kind == "fastest":
            clauses = _wins(spec, frame, column)
        else:
            names = (*(["speedup"] if spec.kind == "against" else []), spec.y, *spec.also)
            figures = {figure_column: figure_column.of(frame) for figure_column in map(column_of, names)}
            values = {cell: figure.value for cell, figure in figures[column].items() if figure.value is not None}
            cells = _deciding(spec, frame, values)
            if spec.kind == "parts" and cells:
                parts = {part: part.of(frame) for part in map(column_of, spec.of)}
                sizes = {part: of[cells[0]].value for part, of in parts.items() if cells[0] in of}
                largest = sorted(filter(sizes.get, sizes), key=sizes.__getitem__, reverse=True)[:_MOST_PARTS]
                figures |= {part: parts[part] for part in largest}
            clauses = []
            for cell in cells:
                # The name of a single cell is empty, since nothing differs.
                name = frame.describe(cell, frame.differing())
                clauses.append(": ".join(filter(None, [name, _figures_text(cell, frame, figures)])))
        if clauses:
            texts.append(f"{'; '.join(clauses)}.")
    return texts


def _deciding(spec: AnswerSpec, frame: Frame, values: Mapping[int, Any]) -> list[int]:
    """The cells that decide: the best of each group (`best`), else the largest of each way; `against` leaves the
    baseline out."""
    compared = frame.baseline if spec.kind == "against" else (spec.x,)
    ways = [name for name in frame.differing() if name in compared]
    others = [name for name in frame.differing() if name not in compared]
    if spec.kind == "best":
        groups = [[cell for cell in part.facts if cell in values] for part in frame.by(others)]
        return [max(group, key=values.__getitem__) for group in groups if group][-_MOST_CLAUSES:]
    comparable = {cell for cell, base in frame.base.items() if cell != base and {cell, base} <= values.keys()}
    cells = comparable if spec.kind == "against" else values
    groups = [[cell for cell in part.ordered(others) if cell in cells] for part in frame.by(ways)]
    return [group[-1] for group in groups if group]


def _figures_text(cell: int, frame: Frame, figures: Mapping[Column, Mapping[int, Any]]) -> str:
    """The cell's figures in words. A speed-up that is no verdict says why: one process on each side, or an interval
    that includes 1."""
    texts = []
    for column, cells in figures.items():
        if (figure := cells.get(cell)) is not None:
            texts.append(f"{column.heading(frame).title} {column.text(figure)} {column.unit.word}".rstrip())
            if column.is_relative and column.unit is TIMES and figure.low is None:
                texts[-1] += " (not decided: one process each; --repeats 3)"
            elif column.is_relative and column.unit is TIMES and figure.low <= 1 <= figure.high:
                texts[-1] += " (undecided)"
    return ", ".join(texts)


def _wins(spec: AnswerSpec, frame: Frame, column: Column) -> list[str]:
    """For each way the number of shapes in which it is the fastest."""
    others = [name for name in frame.differing() if name not in spec.among]
    rows = [fastest(part, spec.among, column) for part in frame.by(others)]
    wins = Counter(row[0].value for row in rows if row[0] and row[2])
    return [f"fastest by {column.title}: {name} in {count} of {wins.total()}" for name, count in wins.most_common()]
