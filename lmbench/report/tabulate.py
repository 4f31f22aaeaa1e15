"""Tables of a view from the cells of one device, and what a reader must know of a row beside its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmbench.report import units
from lmbench.report.cells import Cell, Pairing, in_order, mixed_outcomes, partly_known, shared_by_all
from lmbench.report.columns import BASELINE, Column, Measure
from lmbench.report.facts import FACT, Value, captioned, heading, is_consequence
from lmbench.report.fastest import fastest_table
from lmbench.report.feature import Catalogue
from lmbench.report.references import Published, References
from lmbench.report.table import Entry, Heading, Kind, Table
from lmbench.report.view import TableSpec

#: What a caption tells where all rows share it; others only when they are not what everybody has.
_CAPTIONED = (
    "size", "mode", "batch", "context", "precision", "matmul", "compile", "attention", "head_dim", "heads", "causal",
    "optimizer", "warmup", "environment",
)  # fmt: skip
_USUAL = {"checkpoint": "none", "micro_batches": 1, "ranks": 1, "zero_grad": "after_step"}
_UNDECIDED = "the difference to the baseline is not told from none: its 95 % interval between processes includes 1"


@dataclass(frozen=True)
class Setting:
    """What a table is made with: the cells of one device, the facts that differ over all devices, baselines, the
    columns that there are, and published figures if asked for."""

    cells: Sequence[Cell]
    differing: Sequence[str]
    pairing: Pairing
    catalogue: Catalogue
    references: References | None = None


def build_table(spec: TableSpec, setting: Setting) -> Table | None:
    """The table that a spec asks for; None if no cell has anything to show in it."""
    named = (*spec.rows, spec.across, *spec.among)
    partly = _partly_known(setting.cells)
    differing = [name for name in (*setting.differing, *partly) if name not in named]
    differing = [name for name in dict.fromkeys(differing) if name in partly or not is_consequence(name)]
    rows = [name for name in (*spec.rows, *differing) if name in setting.differing or name in partly]
    # A single row still says what it is.
    rows = rows or [name for name in spec.rows if name in shared_by_all(setting.cells, spec.rows)]
    cells = in_order(setting.cells, (*spec.rows, *differing, *([spec.across] if spec.across else [])))
    if spec.only_filled:
        columns = [setting.catalogue.column(name) for name in spec.columns]
        cells = [cell for cell in cells if not cell.ok or any(column.of(cell, setting.pairing) for column in columns)]
        if not any(cell.ok for cell in cells):
            return None
    if spec.among:
        return _fastest(spec, setting, cells, [name for name in rows if name not in spec.among])
    return _grid(spec, setting, cells, rows) if spec.across else _list(spec, setting, cells, rows)


def _fastest(spec: TableSpec, setting: Setting, cells: Sequence[Cell], rows: Sequence[str]) -> Table | None:
    column = setting.catalogue.column(spec.columns[0])
    if not _has_value(column, cells, setting.pairing):
        return None
    caption = _caption(cells, (*rows, *spec.among), [])
    return fastest_table(spec.title, caption, cells, rows, spec.among, column, _fact_headings(cells, rows))


def _partly_known(cells: Sequence[Cell]) -> list[str]:
    """Facts that captions tell and that some cells do not have: they have a column."""
    found = partly_known(cells)
    unusual = {name for name in _USUAL for cell in cells if cell.facts.get(name) not in (None, _USUAL[name])}
    return [name for name in FACT if name in found and (name in _CAPTIONED or name in unusual)]


def build_comparison(spec: TableSpec, setting: Setting) -> Table | None:
    """For a grid of step times, which has no room for them: the same cells one by one beside published figures."""
    if not spec.across or "step_s" not in spec.columns or setting.references is None:
        return None
    if not setting.references.match(setting.cells):
        return None
    rows = (*spec.rows, spec.across)
    return build_table(TableSpec("Step times beside published ones", ("step_s",), rows), setting)


def _list(spec: TableSpec, setting: Setting, cells: Sequence[Cell], rows: Sequence[str]) -> Table | None:
    named = [setting.catalogue.column(name) for name in spec.columns]
    columns = _shown(named, cells, setting.pairing)
    if not columns:
        return None
    has_counts = len({len(cell.ok) for cell in cells if cell.ok}) > 1
    table = Table(spec.title, _caption(cells, rows, columns), _fact_headings(cells, rows), [])
    table.headings += [Heading("runs")] * has_counts
    table.headings += [
        Heading(column.heading.replace(BASELINE, _name(setting)), not column.in_words) for column in columns
    ]
    published = setting.references.beside(named, cells) if setting.references else {}
    table.headings += [Heading(heading) for heading in published]
    for index, cell in enumerate(cells):
        row = [_fact(cell, name) for name in rows]
        row += [Entry(str(len(cell.ok)), "number")] * has_counts
        row += _values(cell, columns, setting.pairing)
        row += [_published(figures.get(index), table) for figures in published.values()]
        table.rows.append(row)
    usual = _usual_consequences(cells)
    _add_notes(table, [_row_notes(cell, columns, setting, usual) for cell in cells])
    return table


def _shown(named: Sequence[Column], cells: Sequence[Cell], pairing: Pairing) -> list[Column]:
    """The columns in which a cell has a value, the first in any case where no cell is ok: it holds the outcomes."""
    columns = [column for column in named if _has_value(column, cells, pairing)]
    if named[0] in columns or (not columns and any(cell.ok for cell in cells)):
        return columns
    return [named[0], *columns]


def _add_notes(table: Table, texts: Sequence[Sequence[str]]) -> None:
    """A last column with the notes of each row, where a row has any."""
    if not any(texts):
        return
    table.headings.append(Heading("notes", False))
    for row, own in zip(table.rows, texts, strict=True):
        row.append(Entry(" ".join(f"[{number}]" for number in sorted(map(table.note, own))), "fact"))


def _grid(spec: TableSpec, setting: Setting, cells: Sequence[Cell], rows: Sequence[str]) -> Table | None:
    across, column = str(spec.across), setting.catalogue.column(spec.columns[0])
    if not _has_value(column, cells, setting.pairing) and (any(cell.ok for cell in cells) or column.name != "step_s"):
        return None
    rows = [name for name in rows if name != across]
    values = list(dict.fromkeys(cell.facts.get(across) for cell in in_order(cells, [across])))
    table = Table(spec.title, _caption(cells, [*rows, across], [column]), [], [])
    table.headings = _fact_headings(cells, rows)
    table.headings += [Heading(captioned(across, value)) for value in values]
    lines: dict[tuple[object, ...], dict[object, Cell]] = {}
    for cell in cells:
        key: tuple[object, ...] = tuple(cell.facts.get(name) for name in rows)
        while cell.facts.get(across) in lines.get(key, {}):
            # Another cell that no known fact tells from this one has a line of its own.
            key = (*key, None)
        lines.setdefault(key, {})[cell.facts.get(across)] = cell
    for line in lines.values():
        some = next(iter(line.values()))
        row = [_fact(some, name) for name in rows]
        for value in values:
            row.append(_grid_entry(line.get(value), column, setting, table))
        table.rows.append(row)
    return table


def _grid_entry(cell: Cell | None, column: Column, setting: Setting, table: Table) -> Entry:
    if cell is None:
        return Entry(units.MISSING, "missing")
    entry = _values(cell, [column], setting.pairing)[0]
    usual = _usual_consequences(setting.cells)
    notes = tuple(table.note(text) for text in _row_notes(cell, [column], setting, usual))
    return Entry(entry.text, entry.kind, notes)


def _has_value(column: Column, cells: Iterable[Cell], pairing: Pairing) -> bool:
    return any(column.of(cell, pairing) is not None for cell in cells)


def _fact_headings(cells: Sequence[Cell], names: Sequence[str]) -> list[Heading]:
    """Headings of facts; one whose known values are all numbers is aligned like them."""
    values = {name: {cell.facts.get(name) for cell in cells} - {None} for name in names}
    return [Heading(heading(name), {type(v) for v in values[name]} in ({int}, {float}, {int, float})) for name in names]


def _fact(cell: Cell, name: str) -> Entry:
    value = cell.facts.get(name)
    return Entry(units.MISSING, "missing") if value is None else Entry(str(value), "fact")


def _values(cell: Cell, columns: Sequence[Column], pairing: Pairing) -> list[Entry]:
    """The cell's figures; where it has none, its outcome in the first column."""
    found = [column.of(cell, pairing) for column in columns]
    entries = [
        Entry(units.MISSING, "missing") if measure is None else Entry(column.show(measure), _kind(column, measure))
        for column, measure in zip(columns, found, strict=True)
    ]
    return entries if cell.ok else [Entry(cell.label, "outcome"), *entries[1:]]


def _kind(column: Column, measure: Measure) -> Kind:
    if not column.in_words:
        return "number"
    return "outcome" if measure.value == 0 else "fact"


def _published(figure: Published | None, table: Table) -> Entry:
    if figure is None:
        return Entry(units.MISSING, "missing")
    return Entry(figure.text, "number", tuple(table.note(caveat) for caveat in figure.caveats))


def _name(setting: Setting) -> str:
    return setting.pairing.baseline.name if setting.pairing.baseline else ""


def _caption(cells: Sequence[Cell], rows: Sequence[str], columns: Sequence[Column]) -> str:
    told = shared_by_all(cells, [name for name in FACT if name in _CAPTIONED or name in _USUAL])
    usual = _usual_consequences(cells)
    told = {name: {**told, **usual}[name] for name in FACT if name in told or name in usual}
    # One row's own facts are in the row.
    parts = [cells[0].gpu]
    parts += [captioned(n, v) for n, v in told.items() if n not in rows and v != _USUAL.get(n)]
    spread = spread_text(cells) if any(column.has_spread for column in columns) else ""
    return ", ".join(parts) + (f"; {spread}" if spread else "")


def _usual_consequences(cells: Iterable[Cell]) -> dict[str, Value]:
    """Of each fact that follows from others (the optimizer's variant), the value that most cells have; none of a fact
    that some cells do not have."""
    cells = list(cells)
    found: dict[str, Value] = {}
    missing = partly_known(cells)
    for name in (name for name in FACT if is_consequence(name) and name not in missing):
        counts = Counter(str(cell.facts[name]) for cell in cells if cell.facts.get(name) is not None)
        if counts:
            found[name] = min(counts, key=lambda value: (-counts[value], value))
    return found


def _row_notes(cell: Cell, columns: Sequence[Column], setting: Setting, usual: Mapping[str, Value]) -> list[str]:
    """Failed guards, runs left out, several hosts, a baseline without figures, what follows from the row's facts."""
    found = [f"{name} failed: {message}" for name, message in failed_guards(cell)]
    if (text := mixed_outcomes(cell)) is not None:
        found.append(text)
    environments = filter(None, (sample.record.environment for sample in cell.ok))
    hosts = {environment.host.hostname for environment in environments} - {None}
    if len(hosts) > 1:
        found.append(f"runs on {len(hosts)} hosts; the spread has their difference in it")
    skipped = sum(sample.record.window.skipped_count or 0 for sample in cell.ok)
    if skipped and not any(column.name == "skipped_count" for column in columns):
        found.append(f"the fp16 scaler skipped {skipped} steps, which are in no statistic")
    if any(sample.record.compile.is_attention_fused for sample in cell.ok):
        found.append(f"Inductor put PyTorch's fused attention in the place of {cell.facts.get('attention')}")
    if cell.ok and any(column.is_relative for column in columns):
        baseline = setting.pairing.of(cell)
        if baseline is not None and not baseline.ok:
            found.append(f"its baseline has no figure: {baseline.label}")
        if baseline is not cell and any(_includes_one(column.of(cell, setting.pairing)) for column in columns):
            found.append(_UNDECIDED)
    found += setting.catalogue.row_notes(cell, columns)
    own = {name: cell.facts.get(name) for name in usual}
    return found + [f"{own[name]} instead of {usual[name]}" for name in usual if own[name] not in (None, usual[name])]


def _includes_one(ratio: Measure | None) -> bool:
    return ratio is not None and ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high


def failed_guards(cell: Cell) -> list[tuple[str, str]]:
    """Guards that failed in one of the ok runs, each once, with the first message."""
    failed: dict[str, str] = {}
    for sample in cell.ok:
        for guard in sample.guards("fail"):
            failed.setdefault(f"guard {guard.name}", guard.message)
    return list(failed.items())


def spread_text(cells: Iterable[Cell]) -> str:
    """Which spread stands behind `±`."""
    counts = {len(cell.ok) for cell in cells if cell.ok}
    if not counts:
        return ""
    if counts == {1}:
        return "mean ± std of the steps within one run"
    if len(counts) == 1:
        return f"mean ± std between {counts.pop()} processes"
    if 1 in counts:
        return "mean ± std between processes, within the run where there is one"
    return "mean ± std between processes"
