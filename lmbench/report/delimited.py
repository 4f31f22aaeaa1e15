"""The report as CSV: a row for each cell, every figure in SI units under its name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import islice
from typing import Any

from lmbench.report.cells import Cell
from lmbench.report.columns import Column
from lmbench.report.facts import FACT
from lmbench.report.references import Published
from lmbench.report.sections import Report, Section
from lmbench.report.tabulate import failed_guards, spread_text
from lmbench.text import shown

#: How a formula begins (https://owasp.org/www-community/attacks/CSV_Injection), the wide forms of East Asia included.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def cell_rows(report: Report) -> list[dict[str, Any]]:
    """Each cell as a flat row: where it belongs, its facts, outcome, figures with spread, baseline, published figures.

    All rows have the same keys in the same order; None where there is nothing.
    """
    rows = [row for section in report.sections for row in _rows(section)]
    empty = dict.fromkeys(_names(rows))
    return [empty | row for row in rows]


def to_csv(report: Report) -> str:
    """The cells as CSV (RFC 4180 but for plain line feeds); nothing in a field stands for None."""
    rows = cell_rows(report)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writerow({name: csv_field(name) for name in writer.fieldnames})
    for row in rows:
        writer.writerow({name: csv_field(value) for name, value in row.items()})
    return stream.getvalue()


def csv_field(value: Any) -> Any:
    """A value as a field of CSV. Text that a spreadsheet would take for a formula has an apostrophe before it, which
    makes it text there; a number that is written as text stays one."""
    if not isinstance(value, str):
        return value
    text = shown(value)
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _rows(section: Section) -> Iterable[dict[str, Any]]:
    published = section.references.match(section.cells) if section.references else {}
    others = _published_figures(section)
    for index, cell in enumerate(section.cells):
        row: dict[str, Any] = {"sweep": section.name, "view": section.view.name, "gpu": cell.gpu, **cell.facts}
        row |= _ending(cell)
        row |= _figures(cell, section)
        for label, figures in published.items():
            if (found := figures.get(index)) is not None:
                name = label.replace("ref. ", "reference ")
                row |= {f"{name}: step_s": found.value, f"{name}: caveat": "; ".join(found.caveats)}
        for name, figures in others.items():
            row |= {name: figures[index].value} if index in figures else {}
        yield row


def _published_figures(section: Section) -> dict[str, dict[int, Published]]:
    """Published figures that are no step times by the name of their CSV column."""
    if section.references is None:
        return {}
    found = {}
    for column in _shown(section):
        if column.name != "step_s":
            for heading, figures in section.references.beside([column], section.cells).items():
                source = heading.partition(": ")[0].replace("ref. ", "reference ")
                found[f"{source}: {column.name}"] = figures
    return found


def _shown(section: Section) -> list[Column]:
    """The columns of the view's tables."""
    names = dict.fromkeys(name for table in section.view.tables for name in table.columns)
    return [section.catalogue.column(name) for name in names]


def _ending(cell: Cell) -> dict[str, Any]:
    bad = [sample for sample in cell.samples if sample.outcome != "ok"]
    error = bad[0].record.error if bad else None
    warnings = {guard.name for sample in cell.ok for guard in sample.guards("warn")}
    return {
        "outcome": cell.outcome,
        "phase": bad[0].phase if bad and not cell.ok else None,
        "reason": (bad[0].damage or (error and error.message)) if bad and not cell.ok else None,
        "runs": len(cell.samples),
        "ok_runs": len(cell.ok),
        "passes": len(cell.passes),
        "window_steps": sum(sample.record.window.steps or 0 for sample in cell.ok),
        "spread": spread_text([cell]) or None,
        "failed_guards": "; ".join(name.removeprefix("guard ") for name, _ in failed_guards(cell)) or None,
        "warnings": "; ".join(sorted(warnings)) or None,
        "run_ids": " ".join(sample.run_id for sample in cell.samples),
    }


def _figures(cell: Cell, section: Section) -> dict[str, Any]:
    found: dict[str, Any] = {}
    shown_columns = {column.name: column for column in _shown(section)}
    columns = {**section.catalogue.columns, **shown_columns}
    for name, column in columns.items():
        if column.is_profiled and not section.view.is_profiled:
            continue
        if column.reads_steps and name not in shown_columns:
            continue
        measure = column.of(cell, section.pairing)
        found[name] = None if measure is None else measure.value
        if column.has_spread:
            found[f"{name.removesuffix('_s')}_std_s"] = None if measure is None else measure.std
        if name == "speedup":
            found |= {
                "speedup_low": measure.low if measure else None,
                "speedup_high": measure.high if measure else None,
            }
    found["baseline"] = section.pairing.baseline.name if section.pairing.baseline else None
    return found


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    """All keys: the group and device, facts in their order, then the rest as the rows have them."""
    seen = dict.fromkeys(name for row in rows for name in row)
    first = [name for name in ("sweep", "view", "gpu") if name in seen]
    facts = [name for name in FACT if name in seen]
    figures = list(dict.fromkeys(name for row in rows for name in islice(row, list(row).index("outcome"), None)))
    others = sorted(name for name in seen if name not in (*first, *facts, *figures))
    return [*first, *facts, *others, *figures]
