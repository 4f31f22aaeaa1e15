"""The tables of a view and the sentences that answer its question.

A table has a row for each cell, with notes where a reader needs them, or the fastest of several ways in each row.
Sentences are about the cells that decide: usually the largest ones, by the order in which tables sort them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lmbench.records.load import guards_by_name
from lmbench.records.statistics import have_logs, ratio_of
from lmbench.records.vocabulary import GATE_FRACTION, MIN_REPEATS
from lmbench.report.answer import Cell, Column, Table, listed, text_of
from lmbench.report.columns import BASELINE, CHANGE, Quantity
from lmbench.report.facts import FACT, describe, environment_of, heading, is_notable
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.run import disputed_peak
from lmbench.report.units import SETTING, TIMES, WORDS, Unit, change_percent, change_range, percent, tally
from lmbench.report.view import AnswerSpec, Catalogue, ColumnOf, TableSpec, View

#: The rows of a table: each a cell of the frame with its figures, the facts left out.
_Rows = list[tuple[MeasuredCell, list[Cell | None]]]
_CHANGE = Unit(change_percent, scale=100.0)

_VERDICT_NOTES = {
    "undecided": "undecided: the ratio between processes may be 1 (5 % over all rows)",
    "same": "same: the 90 % intervals of their ratios lie within 1 %",
}
_TOO_FEW = f"undecided: fewer than {MIN_REPEATS} processes"


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
    # The fact `optimizer` repeats an axis `model.optimizer`.
    differing = [name for name in frame.varying() if name not in spec.among and f"model.{name}" not in frame.values]
    sorting = list(dict.fromkeys([*spec.rows, *differing]))
    shared = frame.shared()
    # If nothing differs, the rows have the view's own facts.
    names = [name for name in sorting if name in differing] or [name for name in spec.rows if name in shared]
    if not any(values.values()) and (frame.samples or not is_first):
        return None
    filled = {cell for figures in values.values() for cell in figures}
    frame = frame.select(cell for cell in frame.ordered(sorting) if cell in filled or not cell.ok)
    spread = padding = ""
    if spec.among:
        headings, rows = _fastest(frame, names, spec.among, columns[0])
    else:
        # The first column holds the outcomes of cells that are not ok.
        has_outcomes = not all(cell.ok for cell in frame.cells)
        columns = [column for column in columns if values[column] or (has_outcomes and column is columns[0])]
        # The first column with a spread says whose it is.
        spreading = next((column for column in columns if column.has_spread and values[column]), None)
        if spreading is not None:
            spread = spread_text(len(cell.samples) for cell in frame.cells)
            values[spreading] = _with_spread_notes(values[spreading], frame)
        if any(column.name == "tokens_per_s" for column in columns):
            padding = _padding_text(frame)
        headings, features = [column.heading(frame) for column in columns], catalogue.features_of(columns)
        rows = []
        for cell in frame.cells:
            figures = {column: values[column].get(cell) for column in columns}
            feature_notes = [note for feature in features for note in feature.row_notes(cell)]
            notes = [*_notes(cell, figures), *feature_notes]
            first, *others = figures.values()
            if not cell.ok:
                first = Cell(None, text=cell.outcome, style="outcome")
            first = first or Cell(None)
            rows.append((cell, [replace(first, notes=(*first.notes, *notes)), *others]))
    fact_columns = []
    for name in names:
        is_number = all(isinstance(value, int | float) for value in frame.values.get(name, ()))
        fact_columns.append(Column(heading(name), SETTING if is_number else WORDS, name))
    cells = []
    for cell, row in rows:
        run_id = cell.shown[0].run_id
        facts = [Cell(cell.facts.get(name)) for name in names]
        # A link in each cell of a row would be of one run, and hide the figures in blue.
        facts[:1] = [replace(fact, run_id=run_id) for fact in facts[:1]]
        cells.append([*facts, *row])
    in_caption = [name for name in FACT if name in shared and name not in names and is_notable(name, shared[name])]
    return Table(
        "_".join(re.findall(r"\w+", spec.title.lower())),
        spec.title,
        [*fact_columns, *headings],
        cells,
        listed(describe(shared, in_caption), spread, padding, separator="; "),
    )


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


# the fastest


def _fastest(frame: Frame, names: Sequence[str], among: Sequence[str], column: Quantity) -> tuple[list[Column], _Rows]:
    """A row for each combination of the row facts: the fastest way, the second, and how certain the difference is."""
    headings = [
        Column("fastest"), column.heading(frame), Column("second"),
        Column("second takes", _CHANGE), Column("95 % interval", _CHANGE),
    ]  # fmt: skip
    parts = [*frame.by(names)]
    return headings, [(part.cells[0], fastest(part, among, column, len(parts))) for part in parts]


def fastest(frame: Frame, among: Sequence[str], column: Quantity, row_count: int) -> list[Cell | None]:
    """Judge which of the cells, which differ in the facts `among` alone, takes the least time.

    One process is one sample. Welch's t on the logarithms of process means compares the fastest cell with each other
    one, at 5 % over all rows (Bonferroni). The 95 % interval is that of one pair. It allows neither for the choice of
    the smallest of several means nor for the number of rows.

    Returns:
        Five cells: the fastest, its time in s, the second, the further time of the second as a fraction, and the
        interval of this fraction. The first cell says `same` or `undecided` with all ways that may be as fast, or has a
        note that there are too few processes to tell. Cells without a value are None.
    """
    samples = {cell: cell.numbers(column.expression) for cell in frame.cells}
    samples = {cell: numbers for cell, numbers in samples.items() if have_logs(numbers)}
    ways = sorted(samples, key=lambda cell: fmean(samples[cell]))
    if not ways:
        return [None] * 5
    first, *others = ways
    name, time_s = first.describe(among), fmean(samples[first])
    if not others:
        return [Cell(name), Cell(time_s), None, None, None]
    rivals = _rivals(first, samples, row_count)
    if rivals is None:
        verdict = Cell(f"{name} ({_TOO_FEW})", text=name, notes=(_TOO_FEW,))
    elif rivals:
        word = "undecided" if "undecided" in rivals.values() else "same"
        names = [cell.describe(among) for cell in ways if cell in rivals]
        verdict = Cell(f"{word}: {'; '.join([name, *names])}", notes=(_VERDICT_NOTES[word],))
    else:
        verdict = Cell(name)
    second, interval = others[0], None
    ratio = ratio_of(samples[first], samples[second])
    if ratio.low is not None and ratio.high is not None:
        low, high = ratio.low - 1, ratio.high - 1
        interval = Cell(None, low=low, high=high, text=change_range(low, high))
    further = fmean(samples[second]) / time_s - 1
    return [verdict, Cell(time_s), Cell(second.describe(among)), Cell(further), interval]


def _rivals(
    best: MeasuredCell, samples: Mapping[MeasuredCell, Sequence[float]], row_count: int
) -> dict[MeasuredCell, str] | None:
    """The cells that may be as good as the best one, each with `same` or `undecided`; None with too few processes.

    Welch's t compares the best cell with each other one, at 5 % over all rows (Bonferroni). Samples that are not
    positive and finite are not tested.
    """
    if min(map(len, samples.values())) < MIN_REPEATS:
        return None
    if not all(map(have_logs, samples.values())):
        return {}
    verdicts = {
        cell: ratio_of(samples[best], numbers).verdict(GATE_FRACTION, row_count)
        for cell, numbers in samples.items()
        if cell != best
    }
    return {cell: verdict for cell, verdict in verdicts.items() if verdict in _VERDICT_NOTES}


# sentences

#: Most parts that are named, and most cells that have a sentence.
_MOST_PARTS, _MOST_CELLS = 3, 6
#: The figures of `y` by cell, and a sentence's statement on a cell with the facts that tell where that is.
_Measured = Mapping[MeasuredCell, Any]
_Statements = Iterator[tuple[str, MeasuredCell, Sequence[str]]]


def sentences(specs: Sequence[AnswerSpec], frame: Frame, column_of: ColumnOf) -> list[str]:
    """The sentences by which cells answer: `In small, TF32 is 4.50x as fast as fp32 eager: step 72.91 ± 0.12 ms.`"""
    makers = {"against": _against, "best": _best, "parts": _parts}
    texts = list[str]()
    for spec in specs:
        figures = {quantity: quantity.of(frame) for quantity in map(column_of, (spec.y, *spec.also))}
        if spec.kind == "fastest":
            texts += _fastest_ways(spec, frame, column_of)
            continue
        for statement, cell, others in makers[spec.kind](spec, frame, column_of, figures[column_of(spec.y)]):
            place, stated = cell.describe(others), list[str]()
            for quantity, cells in figures.items():
                if cell in cells:
                    title = quantity.heading(frame).title
                    if quantity.unit is CHANGE:
                        title = f"{quantity.title.removesuffix(f' vs {BASELINE}')} changed by"
                    stated.append(f"{title} {quantity.text(cells[cell])}")
            texts.append(f"{f'In {place}, ' if place else ''}{statement}: {', '.join(stated)}.")
    return texts


def _against(spec: AnswerSpec, frame: Frame, column_of: ColumnOf, measured: _Measured) -> _Statements:
    """How fast each way is compared with the baseline, for the largest cell that both have."""
    speedups, others = column_of("speedup").of(frame), frame.differing(frame.baseline)
    comparable = {cell for cell, base in frame.compared if {cell, base} <= measured.keys()}
    for cell in _largest(frame, others, comparable):
        if (speedup := speedups.get(cell)) is not None:
            way = cell.describe(frame.differing(others))
            interval = (
                speedup.p is not None and f"95 % interval {TIMES.text(speedup.low)} .. {TIMES.text(speedup.high)}"
            )
            certainty = listed(*speedup.notes, interval, separator="; ")
            yield f"{way} is {text_of(speedup, TIMES)} as fast as {frame.base_name} ({certainty})", cell, others


def _best(spec: AnswerSpec, frame: Frame, column_of: ColumnOf, measured: _Measured) -> _Statements:
    """The value of `x` with the largest `y`, for each combination of the other facts, and those that may be as good."""
    others, quantity = frame.differing((spec.x,)), column_of(spec.y)
    for part in list(frame.by(others))[-_MOST_CELLS:]:
        if cells := [cell for cell in part.cells if cell in measured]:
            best = max(cells, key=lambda cell: measured[cell].value)
            doubt = ""
            if quantity.is_process_mean and len(cells) > 1:
                rivals = _rivals(best, {cell: cell.numbers(quantity.expression) for cell in cells}, len(cells) - 1)
                if rivals is None:
                    doubt = f" ({_TOO_FEW})"
                elif rivals:
                    doubt = f", undecided against {listed(*(cell.describe([spec.x]) for cell in rivals))}"
            yield f"{best.describe([spec.x])} is the best{doubt}", best, others


def _parts(spec: AnswerSpec, frame: Frame, column_of: ColumnOf, measured: _Measured) -> _Statements:
    """The largest cell, with the largest of the quantities that make up its `y`, those below 1 % left out."""
    parts = {part: part.of(frame) for part in map(column_of, spec.of)}
    others = frame.differing()
    for cell in _largest(frame, others, measured):
        sizes = {part: cells[cell].value for part, cells in parts.items() if cell in cells and cells[cell].value}
        notable = [part for part in sizes if sizes[part] >= GATE_FRACTION * sum(sizes.values())]
        largest = sorted(notable, key=sizes.__getitem__, reverse=True)[:_MOST_PARTS]
        mostly = ", ".join(f"{part.title} {part.text(parts[part][cell])}" for part in largest)
        statement = f"{column_of(spec.y).title} is mostly {mostly}" if mostly else "the largest cell has"
        yield statement, cell, others


def _fastest_ways(spec: AnswerSpec, frame: Frame, column_of: ColumnOf) -> Iterator[str]:
    """For each way the number of shapes in which it is the fastest."""
    quantity = column_of(spec.y)
    _, rows = _fastest(frame, frame.differing(spec.among), spec.among, quantity)
    wins = Counter(first.value for _, (first, _, second, *_) in rows if first and second)
    if wins:
        for name, count in wins.most_common():
            yield f"In {count} of {wins.total()} the fastest by {quantity.title} is {name}."


def _largest(frame: Frame, others: Sequence[str], measured: Container[MeasuredCell]) -> list[MeasuredCell]:
    """The largest measured cell of each way, by the order in which tables sort the facts `others`; the ways differ in
    the rest of the facts."""
    parts = frame.by(frame.differing(others))
    groups = [[cell for cell in part.ordered(others) if cell in measured] for part in parts]
    return [group[-1] for group in groups if group]
