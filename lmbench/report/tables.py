"""Tables of a view from the cells of one device: a row for each cell, a grid, or the fastest of several ways; with the
published figures that stand beside them, and what a reader must know of a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

import pandas as pd

from lmbench.records.statistics import ratio_of
from lmbench.reference.published import Figure, load_figures
from lmbench.report import answer, units
from lmbench.report.answer import Cell, Table
from lmbench.report.catalogue import Catalogue
from lmbench.report.columns import HOST_BOUND, STEP, Column, values_of
from lmbench.report.facts import EAGER, FACT, Value, captioned, heading, is_consequence
from lmbench.report.frame import Frame, outcome_label, outcome_word
from lmbench.report.units import Unit, change_percent, change_range
from lmbench.report.view import TableSpec, View

#: Facts that a caption tells where all rows share them; those of _USUAL only when they are not what everybody has.
_CAPTIONED = (
    "size", "mode", "batch", "context", "precision", "matmul", "compile", "attention", "head_dim", "heads", "causal",
    "optimizer", "warmup", "environment",
)  # fmt: skip
_USUAL = {"checkpoint": "none", "micro_batches": 1, "ranks": 1, "zero_grad": "after_step"}
_Row = list[Any]
_Parts = tuple[list[answer.Column], list[_Row]]
_MISSING = Cell(None, style="missing")
#: The unit of a fact whose known values are all numbers: it is aligned like them.
_FACT_NUMBER = Unit("", 1.0, str)
_CHANGE = Unit("", 100.0, change_percent)

_UNDECIDED_RATIO = (
    "the difference to the baseline is not told from none: its 95 % interval between processes includes 1"
)
#: A ratio whose 90 % interval lies within this is no difference, as `lmbench compare` has it by default.
_TOLERANCE_FRACTION = 0.01
UNDECIDED, SAME = "undecided", "same"
_VERDICT_NOTES = {
    UNDECIDED: "undecided: the 95 % interval of the ratio between processes includes 1, or a side has fewer than three",
    SAME: "same: the 90 % intervals of their ratios lie within 1 %",
}
_IS_HOSTS_TIME = "the device waited for the host in most of the fastest's step: it is the host's time that is compared"
_ONE_PAIR = "each interval is that of one pair, not corrected for the number of rows"


def view_tables(view: View, frame: Frame, catalogue: Catalogue, has_reference: bool) -> list[Table]:
    """Every table of a view that has anything to show, device by device.

    Args:
        frame: of cells that have a shown run, with their baselines.
        has_reference: whether published figures stand beside what they can be compared with.
    """
    tables = []
    for part in frame.by_device():
        for spec in view.tables:
            specs = [spec]
            if has_reference and spec.across and "step_s" in spec.columns and published(part, [STEP]):
                # A grid has no room for published step times: the same cells one by one.
                rows = (*spec.rows, spec.across)
                specs.append(TableSpec("Step times beside published ones", ("step_s",), rows))
            tables += [_Maker(each, part, frame.varying(), catalogue, has_reference).table() for each in specs]
    return [table for table in tables if table is not None]


class _Maker:
    """Makes one table: `frame` has its cells in their order, `values` its figures by column and cell."""

    def __init__(
        self, spec: TableSpec, frame: Frame, varying: Sequence[str], catalogue: Catalogue, has_reference: bool
    ) -> None:
        self.spec, self.catalogue, self.has_reference = spec, catalogue, has_reference
        self.columns = [catalogue.column(name) for name in spec.columns]
        self.values = {column.name: column.of(frame) for column in self.columns}
        partly = [name for name in frame.partly_known() if name in _CAPTIONED or _is_unusual(name, frame)]
        across = [spec.across] if spec.across else []
        others = [n for n in dict.fromkeys([*varying, *partly]) if n not in (*spec.rows, *across, *spec.among)]
        others = [name for name in others if name in partly or not is_consequence(name)]
        rows = [name for name in (*spec.rows, *others) if name in varying or name in partly]
        # A single row still says what it is.
        rows = rows or [name for name in spec.rows if name in frame.shared()]
        self.rows = [name for name in rows if name not in (*across, *spec.among)]
        cells = frame.ordered((*spec.rows, *others, *across))
        if spec.only_filled:
            filled = set(chain.from_iterable(self.values.values()))
            cells = [cell for cell in cells if cell in filled or cell not in frame.ok_cells]
        self.frame = frame.select(cells)
        self.usual = usual_consequences(self.frame)

    def table(self) -> Table | None:
        """The table; None if no cell has anything to show in it."""
        spec, is_empty = self.spec, not any(self.values.values())
        if is_empty and (self.frame.ok_cells or spec.among or (spec.across and spec.columns[0] != "step_s")):
            return None
        if spec.only_filled and not self.frame.ok_cells:
            return None
        headings, rows = self._fastest() if spec.among else self._grid() if spec.across else self._list()
        name = "_".join(re.findall(r"\w+", spec.title.lower()))
        return Table(name, spec.title, [*self._fact_columns(), *headings], rows, self._caption())

    def _list(self) -> _Parts:
        # The first column holds the outcomes.
        columns = [column for place, column in enumerate(self.columns) if self.values[column.name] or place == 0]
        counts = self.frame.ok.groupby("cell").size()
        has_counts = counts.nunique() > 1
        beside = published(self.frame, self.columns) if self.has_reference else []
        headings = [answer.Column("runs", units.COUNT)] * has_counts
        headings += [column.heading(self.frame) for column in columns] + [heading for heading, _ in beside]
        rows = []
        for cell in self.frame.facts.index:
            row: _Row = [*self._facts(cell), *[int(counts.get(cell, 0))] * has_counts, *self._entries(cell, columns)]
            rows.append([*row, *(figures.get(cell, _MISSING) for _, figures in beside)])
        return headings, rows

    def _grid(self) -> _Parts:
        across, frame = str(self.spec.across), self.frame
        places = list(dict.fromkeys(frame.known[cell].get(across) for cell in frame.ordered([across])))
        lines: dict[tuple[object, ...], dict[object, int]] = {}
        for cell in frame.facts.index:
            key: tuple[object, ...] = tuple(frame.known[cell].get(name) for name in self.rows)
            while frame.known[cell].get(across) in lines.get(key, {}):
                # Another cell that no known fact tells from this one has a line of its own.
                key = (*key, None)
            lines.setdefault(key, {})[frame.known[cell].get(across)] = cell
        rows: list[_Row] = []
        for line in lines.values():
            row = self._facts(next(iter(line.values())))
            for cell in map(line.get, places):
                row += [_MISSING] if cell is None else self._entries(cell, self.columns)
            rows.append(row)
        return [answer.Column(captioned(across, place), self.columns[0].unit) for place in places], rows

    def _fastest(self) -> _Parts:
        """A row for each combination of the row's facts: the fastest way, the next one, and how sure that is."""
        column, rows, has_bad, among = self.columns[0], list[_Row](), False, self.spec.among
        for part in self.frame.by(self.rows):
            found, bad = verdict(part, among, column), dict[str, list[str]]()
            for cell in part.ordered(among):
                if cell not in part.ok_cells:
                    bad.setdefault(outcome_word(part.runs_of(cell)[0].outcome), []).append(part.in_short(cell, among))
            has_bad = has_bad or bool(bad)
            missing = "; ".join(f"{word}: {', '.join(names)}" for word, names in bad.items())
            end = Cell(missing, style="outcome") if bad else _MISSING
            entries = [_MISSING] * 5 if found is None else found.entries()
            rows.append([*self._facts(part.facts.index[0]), *entries, end])
        headings = [
            answer.Column("fastest"), column.heading(self.frame), answer.Column("second"),
            answer.Column("second takes", _CHANGE), answer.Column("95 % interval", _CHANGE),
            answer.Column("no figure"),
        ]  # fmt: skip
        return (headings, rows) if has_bad else (headings[:-1], [row[:-1] for row in rows])

    def _fact_columns(self) -> list[answer.Column]:
        kinds = {name: {type(value) for value in self.frame.facts[name].dropna()} for name in self.rows}
        return [
            answer.Column(heading(name), _FACT_NUMBER if kinds[name] <= {int, float} else units.WORDS, name)
            for name in self.rows
        ]

    def _facts(self, cell: int) -> _Row:
        return [self.frame.known[cell].get(name, _MISSING) for name in self.rows]

    def _entries(self, cell: int, columns: Sequence[Column]) -> _Row:
        """The cell's figures, the first with the notes of the row; where the cell has none, its outcome."""
        entries = [self.values[column.name].get(cell, _MISSING) for column in columns]
        if cell not in self.frame.ok_cells:
            entries[0] = Cell(None, text=self.frame.label(cell), style="outcome")
        return [replace(entries[0], notes=tuple(self._notes(cell, columns))), *entries[1:]]

    def _caption(self) -> str:
        """The device, what all rows share, and which spread stands in the table."""
        told, rows = self.frame.shared() | self.usual, (*self.rows, self.spec.across)
        # One row's own facts are in the row.
        parts = [str(self.frame.facts.gpu.iloc[0])]
        parts += [
            captioned(name, told[name])
            for name in FACT
            if name in told and name not in rows and (name in _CAPTIONED or told[name] != _USUAL.get(name, told[name]))
        ]
        has_spread = not self.spec.among and any(column.within is not None for column in self.columns)
        return ", ".join(parts) + (
            f"; {text}" if has_spread and (text := spread_text(self.frame.ok.cell.value_counts())) else ""
        )

    def _notes(self, cell: int, columns: Sequence[Column]) -> list[str]:
        """Failed guards, runs left out, several hosts, a baseline without figures, what follows from the row's
        facts."""
        frame, known = self.frame, self.frame.known[cell]
        runs, base = frame.runs_of(cell, "ok"), frame.base.get(cell)
        notes = [f"guard {name} failed: {message}" for name, message in failed_guards(frame, cell).items()]
        bad = Counter(outcome_label(run) for run in frame.runs_of(cell) if run.outcome != "ok")
        if runs and bad:
            ends = ", ".join(f"{count} {label}" for label, count in sorted(bad.items()))
            notes.append(f"of {len(frame.runs_of(cell))} runs, not counted: {ends}")
        hosts = {run.record.environment.host.hostname for run in runs if run.record.environment} - {None}
        if len(hosts) > 1:
            notes.append(f"runs on {len(hosts)} hosts; the spread has their difference in it")
        skipped = sum(run.record.window.skipped_count or 0 for run in runs)
        if skipped and not any(column.name == "skipped_count" for column in columns):
            notes.append(f"the fp16 scaler skipped {skipped} steps, which are in no statistic")
        if any(run.record.compile.is_attention_fused for run in runs):
            notes.append(f"Inductor put PyTorch's fused attention in the place of {known.get('attention')}")
        relative = [column for column in columns if column.is_relative]
        if runs and relative and base is not None and frame.label(base) != "ok":
            notes.append(f"its baseline has no figure: {frame.label(base)}")
        ratios = [self.values[column.name].get(cell, _MISSING) for column in relative]
        if base != cell and any(x.low is not None and x.high is not None and x.low <= 1 <= x.high for x in ratios):
            notes.append(_UNDECIDED_RATIO)
        notes += self.catalogue.row_notes(frame, cell, columns)
        others = {name: known[name] for name, usual in self.usual.items() if known.get(name, usual) != usual}
        return notes + [f"{value} instead of {self.usual[name]}" for name, value in others.items()]


def _is_unusual(name: str, frame: Frame) -> bool:
    return name in _USUAL and any(value not in (None, _USUAL[name]) for value in frame.facts[name])


def usual_consequences(frame: Frame) -> dict[str, Value]:
    """Of each fact that follows from others (the optimizer's variant), the value that most cells have; none of a fact
    that some cells do not have."""
    partly = frame.partly_known()
    names = [name for name in frame.facts if is_consequence(name) and name not in partly]
    modes = {name: frame.facts[name].dropna().mode() for name in names}
    return {name: values.iloc[0] for name, values in modes.items() if len(values)}


def failed_guards(frame: Frame, cell: int) -> dict[str, str]:
    """Guards that failed in one of the ok runs, each once, with the first message."""
    guards = chain.from_iterable(run.record.guards for run in reversed(frame.runs_of(cell, "ok")))
    return {guard.name: guard.message for guard in guards if guard.status == "fail"}


def spread_text(runs: Iterable[int]) -> str:
    """Which spread stands behind `±`, by the numbers of ok runs of cells."""
    counts = set(runs) - {0}
    if not counts:
        return ""
    if counts == {1}:
        return "mean ± std of the steps within one run"
    if len(counts) == 1:
        return f"mean ± std between {counts.pop()} processes"
    return f"mean ± std between processes{', within the run where there is one' if 1 in counts else ''}"


# the fastest


@dataclass(frozen=True)
class Verdict:
    """The fastest of several ways, and how sure that is.

    One process is one sample: the fastest is told from each other one by Welch's t on the logarithms of the means of
    processes. It is the smallest of several means, and rows are many: the 95 % interval is that of one pair.

    `word` is empty where it is told from all others, else `undecided` or `same`; `untold` are those that it is not told
    from. `change` is how much more the second takes by the means, a fraction, with the interval of that.
    """

    fastest: str
    time: Cell
    is_host_bound: bool
    word: str = ""
    untold: tuple[str, ...] = ()
    second: str = ""
    change: Cell = _MISSING

    def entries(self) -> _Row:
        """Five cells of a table: the fastest, its time, the second, how much more that takes, and the interval."""
        notes = [_VERDICT_NOTES[self.word]] if self.word else []
        notes += [_IS_HOSTS_TIME] if self.is_host_bound else []
        name = f"{self.word}: {', '.join([self.fastest, *self.untold])}" if self.word else self.fastest
        low, high, interval = self.change.low, self.change.high, _MISSING
        if low is not None and high is not None:
            interval = Cell(None, low=low, high=high, text=change_range(low, high), notes=(_ONE_PAIR,))
        change = replace(self.change, low=None, high=None)
        return [Cell(name, notes=tuple(notes)), self.time, self.second or _MISSING, change, interval]


def verdict(frame: Frame, among: Sequence[str], column: Column) -> Verdict | None:
    """Judge cells that differ in the facts `among` alone, by a time that each process has one value of; None where no
    cell has it."""
    numbers = column.numbers(frame)
    values = {cell: values_of(numbers, cell) for cell in frame.facts.index}
    ways = sorted((fmean(own), cell) for cell, own in values.items() if own and min(own) > 0)
    if not ways:
        return None
    bound = HOST_BOUND.of(frame).get(ways[0][1], _MISSING).value
    names = [frame.in_short(cell, among) for _, cell in ways]
    first = Verdict(names[0], Cell(ways[0][0]), isinstance(bound, float) and bound > 0.5)
    if len(ways) == 1:
        return first
    ratios = [ratio_of(values[ways[0][1]], values[cell]) for _, cell in ways[1:]]
    verdicts = {name: ratio.verdict(_TOLERANCE_FRACTION) for name, ratio in zip(names[1:], ratios, strict=True)}
    words = {name: word for name, word in verdicts.items() if word in (UNDECIDED, SAME)}
    word = UNDECIDED if UNDECIDED in words.values() else SAME if words else ""
    low, high = (None if end is None else end - 1 for end in (ratios[0].low, ratios[0].high))
    change = Cell(ways[1][0] / ways[0][0] - 1, low=low, high=high)
    return replace(first, word=word, untold=tuple(words), second=names[1], change=change)


# published figures


def published(frame: Frame, columns: Sequence[Column]) -> list[tuple[answer.Column, dict[int, Cell]]]:
    """Published figures beside a table's columns, source by source, by the cells that they can be compared with.

    What a write-up states must be equal, and the cell must be as the figure is: eager or compiled, with attention
    written out, nothing recomputed. What it does not state is a caveat; a figure of unknown size or context stands
    beside a cell only where all cells have one.
    """
    several = [name for name in ("size", "context") if frame.facts.get(name, pd.Series()).nunique() > 1]
    found: dict[tuple[str, str], dict[int, Cell]] = {}
    for figure in load_figures():
        if not any(column.name == figure.column for column in columns):
            continue
        if any(getattr(figure, name) is None for name in several):
            continue
        notes = (f"ref. {figure.label}: {figure.caveats}",) if figure.caveats else ()
        entry = Cell(figure.value, figure.std, text=figure.text, notes=notes)
        for cell in frame.facts.index:
            if _fits(figure, frame.known[cell]):
                found.setdefault((figure.column, figure.label), {})[cell] = entry
    beside = []
    for column in columns:
        for (name, label), figures in sorted(found.items()):
            if name == column.name:
                title = f"ref. {label}" + (f": {column.title}" if column is not STEP else "")
                beside.append((answer.Column(title, column.unit, f"reference {label}: {name}"), figures))
    return beside


def _fits(figure: Figure, facts: Mapping[str, Value]) -> bool:
    return (
        figure.precision == facts.get("precision")
        and figure.head_dim == facts.get("head_dim")
        and figure.is_compiled == (facts.get("compile", EAGER) != EAGER)
        and facts.get("checkpoint", "none") == "none"
        and figure.attention in (None, facts.get("attention", "naive"))
        # Attention by itself was published of one head.
        and facts.get("heads", 1) == 1
        and all(
            getattr(figure, name) in (None, facts.get(name))
            for name in ("size", "mode", "batch", "context", "matmul", "warmup")
        )
    )
