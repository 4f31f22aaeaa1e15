"""The tables of a view: a row for each cell with notes where a reader needs them, or the fastest of several ways."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from lmbench.records.load import guards_by_name
from lmbench.records.vocabulary import GATE_FRACTION
from lmbench.report.answer import Cell, Column, Table, listed
from lmbench.report.columns import Quantity
from lmbench.report.facts import FACT, describe, environment_of, heading, is_notable
from lmbench.report.fastest import Rows, fastest_rows
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.run import disputed_peak
from lmbench.report.units import SETTING, WORDS, percent, tally
from lmbench.report.view import Catalogue, TableSpec, View


def view_tables(view: View, frame: Frame, catalogue: Catalogue) -> list[Table]:
    """The tables of a view that are not empty.

    Args:
        frame: the cells that have a shown run, with their baselines.
    """
    tables = [_table(spec, frame, catalogue, is_first=spec is view.tables[0]) for spec in view.tables if frame.cells]
    return [*filter(None, tables)]


def _table(spec: TableSpec, frame: Frame, catalogue: Catalogue, is_first: bool) -> Table | None:
    """The table; None if it is empty. If no run ended well, the first table shows the outcomes."""
    columns = catalogue.columns_of(spec)
    values = {column: column.of(frame) for column in columns}
    if not any(values.values()) and (frame.samples or not is_first):
        return None
    # The fact `optimizer` repeats an axis `model.optimizer`.
    differing = [name for name in frame.varying() if name not in spec.among and f"model.{name}" not in frame.values]
    sorting, shared = list(dict.fromkeys([*spec.rows, *differing])), frame.shared()
    # If nothing differs, the rows have the view's own facts.
    names = [name for name in sorting if name in differing] or [name for name in spec.rows if name in shared]
    filled = {cell for figures in values.values() for cell in figures}
    frame = frame.select(cell for cell in frame.ordered(sorting) if cell in filled or not cell.ok)
    remarks = list[str]()
    if spec.among:
        headings, rows = fastest_rows(frame, names, spec.among, columns[0])
    else:
        headings, rows, remarks = _each_cell(frame, values, catalogue)
    fact_columns = []
    for name in names:
        is_number = all(isinstance(value, int | float) for value in frame.values.get(name, ()))
        fact_columns.append(Column(heading(name), SETTING if is_number else WORDS, name))
    cells = []
    for cell, row in rows:
        facts = [Cell(cell.facts.get(name)) for name in names]
        # A link in each cell of a row would be of one run, and hide the figures in blue.
        facts[:1] = [replace(fact, run_id=cell.shown[0].run_id) for fact in facts[:1]]
        cells.append([*facts, *row])
    in_caption = [name for name in FACT if name in shared and name not in names and is_notable(name, shared[name])]
    return Table(
        "_".join(re.findall(r"\w+", spec.title.lower())),
        spec.title,
        [*fact_columns, *headings],
        cells,
        listed(describe(shared, in_caption), *remarks, separator="; "),
    )


def _each_cell(
    frame: Frame, values: Mapping[Quantity, Mapping[MeasuredCell, Cell]], catalogue: Catalogue
) -> tuple[list[Column], Rows, list[str]]:
    """A row for each cell: the columns that have a value, the rows, and remarks for the caption.

    The first column holds the outcomes of cells that are not ok, and the notes on each row.
    """
    has_outcomes, first = not all(cell.ok for cell in frame.cells), next(iter(values))
    values = {column: of for column, of in values.items() if of or (has_outcomes and column is first)}
    remarks = list[str]()
    # The first column with a spread says whose it is.
    spreading = next((column for column in values if column.has_spread and values[column]), None)
    if spreading is not None:
        remarks.append(spread_text(len(cell.samples) for cell in frame.cells))
        values[spreading] = _with_spread_notes(values[spreading], frame)
    if any(column.name == "tokens_per_s" for column in values):
        remarks.append(_padding_text(frame))
    features, rows = catalogue.features_of(values), []
    for cell in frame.cells:
        figures = {column: of_column.get(cell) for column, of_column in values.items()}
        notes = [*_notes(cell, figures), *(note for feature in features for note in feature.row_notes(cell))]
        leading, *others = figures.values()
        leading = (leading or Cell(None)) if cell.ok else Cell(None, text=cell.outcome, style="outcome")
        rows.append((cell, [replace(leading, notes=(*leading.notes, *notes)), *others]))
    return [quantity.column(frame) for quantity in values], rows, remarks


def _notes(cell: MeasuredCell, figures: Mapping[Quantity, Cell | None]) -> list[str]:
    """Notes on failed guards, runs that are not counted, several hosts or commits, and fused attention."""
    failed, runs = guards_by_name(cell.ok, "fail"), cell.ok
    notes = [f"guard {name} failed: {guards[0].message}" for name, guards in failed.items()]
    not_ok = tally(run.outcome_label for run in cell.shown if run.outcome != "ok")
    if runs and not_ok:
        notes.append(f"of {len(cell.shown)} runs, not counted: {not_ok}")
    for name, known in environment_of(run.facts for run in runs).items():
        if len(known) > 1:
            notes.append(f"mean over runs that differ in {name}: {', '.join(known)}")
    if (processes := len(cell.samples)) < len(runs):
        notes.append(f"runs: {len(runs)}, processes: {processes}; one process is one sample, its first run")
    if skipped := sum(run.record.window.skipped_count or 0 for run in runs):
        notes.append(f"the fp16 scaler skipped {skipped} steps, which are in no statistic")
    if any(run.record.compile.is_attention_fused for run in runs):
        attention = cell.facts.get("attention")
        notes.append(f"Inductor put PyTorch's fused attention in the place of {attention}")
    if any(column.name.endswith("mfu_fraction") for column, figure in figures.items() if figure):
        notes += dict.fromkeys(f"MFU{peak}" for run in runs if (peak := disputed_peak(run.record.flops)))
    return notes


def _with_spread_notes(figures: Mapping[MeasuredCell, Cell], frame: Frame) -> dict[MeasuredCell, Cell]:
    """The figures of a column, with a note on a spread of fewer processes than other rows have."""
    most = max(len(cell.samples) for cell in frame.cells)
    return {
        cell: replace(figure, notes=(spread_text([count]).removeprefix("mean "),))
        if (count := len(cell.samples)) < most and figure.std is not None
        else figure
        for cell, figure in figures.items()
    }


def _padding_text(frame: Frame) -> str:
    """The share of padding in the tokens of the cells, from the least to the most; empty below 1 %."""
    shares = [run.record.data.padding_fraction or 0.0 for run in frame.samples]
    if max(shares, default=0.0) < GATE_FRACTION:
        return ""
    range_text = " to ".join(dict.fromkeys(map(percent, (min(shares), max(shares)))))
    return f"tokens/s counts padding, {range_text} of the tokens (data.padding_fraction)"


def spread_text(runs: Iterable[int]) -> str:
    """What the number behind `±` is, by the number of ok runs of each cell."""
    counts = {*runs} - {0}
    several = " or ".join(map(str, sorted(counts - {1})))
    if not several:
        return "mean ± std of the steps within one run"
    alone = ", or of the steps of a single one" if 1 in counts else ""
    return f"mean ± std between {several} processes{alone}"
