"""Tables of a view from the cells of one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmbench.report import units
from lmbench.report.cells import Cell, in_order, partly_known, shared_by_all
from lmbench.report.columns import BASELINE, Column
from lmbench.report.facts import FACT, captioned, heading, is_consequence
from lmbench.report.references import Published, References
from lmbench.report.relative import COLUMN, Pairing
from lmbench.report.row_notes import row_notes, spread_text, usual_consequences
from lmbench.report.table import Entry, Heading, Table
from lmbench.report.views.view import TableSpec

#: What a caption tells where all rows share it; others only when they are not what everybody has.
_CAPTIONED = (
    "size", "mode", "batch", "context", "precision", "matmul", "compile", "attention", "optimizer", "warmup",
    "environment",
)  # fmt: skip
_USUAL = {"micro_batches": 1, "ranks": 1, "zero_grad": "after_step"}


@dataclass(frozen=True)
class Setting:
    """What a table is made with: the cells of one device, the facts that differ over all devices, baselines, and
    published figures if asked for."""

    cells: Sequence[Cell]
    differing: Sequence[str]
    pairing: Pairing
    references: References | None = None


def build_table(spec: TableSpec, setting: Setting) -> Table | None:
    """The table that a spec asks for; None if no cell has anything to show in it."""
    named = (*spec.rows, spec.across)
    partly = _partly_known(setting.cells)
    differing = [name for name in (*setting.differing, *partly) if name not in named]
    differing = [name for name in dict.fromkeys(differing) if name in partly or not is_consequence(name)]
    rows = [name for name in (*spec.rows, *differing) if name in setting.differing or name in partly]
    # A single row still says what it is.
    rows = rows or [name for name in spec.rows if name in shared_by_all(setting.cells, spec.rows)]
    cells = in_order(setting.cells, (*spec.rows, *differing, *([spec.across] if spec.across else [])))
    if spec.only_filled:
        columns = [COLUMN[name] for name in spec.columns]
        cells = [cell for cell in cells if not cell.ok or any(column.read(cell, None) for column in columns)]
        if not any(cell.ok for cell in cells):
            return None
    return _grid(spec, setting, cells, rows) if spec.across else _list(spec, setting, cells, rows)


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
    return build_table(TableSpec("Step times beside published ones", rows, ("step_s",)), setting)


def _list(spec: TableSpec, setting: Setting, cells: Sequence[Cell], rows: Sequence[str]) -> Table | None:
    columns = _shown(spec, cells, setting.pairing)
    if not columns:
        return None
    has_counts = len({len(cell.ok) for cell in cells if cell.ok}) > 1
    table = Table(spec.title, _caption(cells, rows, columns), _fact_headings(cells, rows), [])
    table.headings += [Heading("runs")] * has_counts
    table.headings += [Heading(column.heading.replace(BASELINE, _name(setting))) for column in columns]
    published = setting.references.columns(spec.columns, cells) if setting.references else {}
    table.headings += [Heading(heading) for heading in published]
    for index, cell in enumerate(cells):
        row = [_fact(cell, name) for name in rows]
        row += [Entry(str(len(cell.ok)), "number")] * has_counts
        row += _values(cell, columns, setting.pairing)
        row += [_published(figures.get(index), table) for figures in published.values()]
        table.rows.append(row)
    usual = usual_consequences(cells)
    _add_notes(table, [row_notes(cell, columns, setting.pairing, usual) for cell in cells])
    return table


def _shown(spec: TableSpec, cells: Sequence[Cell], pairing: Pairing) -> list[Column]:
    """The columns in which a cell has a value, the first in any case where no cell is ok: it holds the outcomes."""
    columns = [column for name in spec.columns if _has_value(column := COLUMN[name], cells, pairing)]
    first = COLUMN[spec.columns[0]]
    if first in columns or (not columns and any(cell.ok for cell in cells)):
        return columns
    return [first, *columns]


def _add_notes(table: Table, texts: Sequence[Sequence[str]]) -> None:
    """A last column with the notes of each row, where a row has any."""
    if not any(texts):
        return
    table.headings.append(Heading("notes", False))
    for row, own in zip(table.rows, texts, strict=True):
        row.append(Entry(" ".join(f"[{number}]" for number in sorted(map(table.note, own))), "fact"))


def _grid(spec: TableSpec, setting: Setting, cells: Sequence[Cell], rows: Sequence[str]) -> Table | None:
    across, column = str(spec.across), COLUMN[spec.columns[0]]
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
    usual = usual_consequences(setting.cells)
    notes = tuple(table.note(text) for text in row_notes(cell, [column], setting.pairing, usual))
    return Entry(entry.text, entry.kind, notes)


def _has_value(column: Column, cells: Iterable[Cell], pairing: Pairing) -> bool:
    return any(cell.ok and column.read(cell, pairing.of(cell)) is not None for cell in cells)


def _fact_headings(cells: Sequence[Cell], names: Sequence[str]) -> list[Heading]:
    """Headings of facts; one whose known values are all numbers is aligned like them."""
    values = {name: {cell.facts.get(name) for cell in cells} - {None} for name in names}
    return [Heading(heading(name), {type(v) for v in values[name]} in ({int}, {float}, {int, float})) for name in names]


def _fact(cell: Cell, name: str) -> Entry:
    value = cell.facts.get(name)
    return Entry(units.MISSING, "missing") if value is None else Entry(str(value), "fact")


def _values(cell: Cell, columns: Sequence[Column], pairing: Pairing) -> list[Entry]:
    """The cell's figures; where it has none, its outcome in the first column."""
    if not cell.ok:
        return [Entry(cell.label, "outcome"), *[Entry(units.MISSING, "missing")] * (len(columns) - 1)]
    baseline = pairing.of(cell)
    found = [column.read(cell, baseline) for column in columns]
    return [
        Entry(units.MISSING, "missing") if measure is None else Entry(column.show(measure), "number")
        for column, measure in zip(columns, found, strict=True)
    ]


def _published(figure: Published | None, table: Table) -> Entry:
    if figure is None:
        return Entry(units.MISSING, "missing")
    return Entry(figure.text, "number", tuple(table.note(caveat) for caveat in figure.caveats))


def _name(setting: Setting) -> str:
    return setting.pairing.baseline.name if setting.pairing.baseline else ""


def _caption(cells: Sequence[Cell], rows: Sequence[str], columns: Sequence[Column]) -> str:
    told = shared_by_all(cells, [name for name in FACT if name in _CAPTIONED or name in _USUAL])
    usual = usual_consequences(cells)
    told = {name: {**told, **usual}[name] for name in FACT if name in told or name in usual}
    # One row's own facts are in the row.
    parts = [cells[0].gpu]
    parts += [captioned(n, v) for n, v in told.items() if n not in rows and v != _USUAL.get(n)]
    spread = spread_text(cells) if any(column.has_spread for column in columns) else ""
    return ", ".join(parts) + (f"; {spread}" if spread else "")
