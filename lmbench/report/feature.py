"""What a feature (kernels, ...) adds to reports, and the catalogue of everything that a view may name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

from msgspec.structs import replace

from lmbench.errors import UsageError, suggest
from lmbench.records.schema import fields
from lmbench.report.answers import answer_lines
from lmbench.report.cells import Cell, Pairing
from lmbench.report.charts import CHART_KINDS, ChartKind
from lmbench.report.columns import MEASURED, RELATIVE, Column, schema_column
from lmbench.report.view import View, read_view


class PagePart(Protocol):
    """What a feature adds to each section of a page, below the charts; made anew for every page."""

    #: Set into the page; empty where no section has needed them.
    script: str
    style: str

    def markup(self, cells: Sequence[Cell]) -> str:
        """The part of a section with these cells as HTML; empty where there is nothing to show."""


@dataclass(frozen=True)
class Feature:
    """What one feature adds. `row_notes` are said of a row in a table that has one of its columns; `answer` are
    sentences that answer the question of a view with such a table, from the cells of one device."""

    columns: tuple[Column, ...] = ()
    chart_kinds: Mapping[str, ChartKind] = field(default_factory=dict)
    row_notes: Callable[[Cell], list[str]] | None = None
    page_part: Callable[[], PagePart] | None = None
    answer: Callable[[Sequence[Cell], Pairing], list[str]] | None = None


class Catalogue:
    """Columns and kinds of charts of the report itself and of features, by name."""

    def __init__(self, features: Iterable[Feature] = ()) -> None:
        self.features = tuple(features)
        own = [*MEASURED, *RELATIVE, *(column for feature in self.features for column in feature.columns)]
        self.columns: Mapping[str, Column] = {column.name: column for column in own}
        self.chart_kinds: dict[str, ChartKind] = dict(CHART_KINDS)
        for feature in self.features:
            self.chart_kinds.update(feature.chart_kinds)

    def column(self, name: str) -> Column:
        """The column of that name, or of the field of a run's record with that dotted name.

        Raises:
            UsageError: there is none, or the field is no number.
        """
        found = self.columns.get(name) or schema_column(name)
        if found is None:
            near = suggest(name, [*self.columns, *fields("run")])
            raise UsageError(f"column {name!r} is unknown; give one of {', '.join(_FIRST)} ..., or a field{near}")
        return found

    def view(self, given: Any, axes: Iterable[str] = ()) -> View:
        """The view that is given (see read_view), its patterns of columns written out.

        Raises:
            UsageError: it is none, or names a column or a kind of chart that does not exist.
        """
        view = read_view(given, axes)
        try:
            tables = tuple(replace(table, columns=tuple(self._names(table.columns))) for table in view.tables)
            compared = [table.columns[0] for table in tables if table.among]
            compared += [each.y for each in view.answers if each.kind == "fastest"]
            for name in compared:
                if self.column(name).of_run is None:
                    raise UsageError(
                        f"column {name!r} is no number of one process, which `among` compares; give another"
                    )
            for each in view.answers:
                needed = {"best": "x", "along": "x", "fastest": "among"}.get(each.kind)
                if needed is not None and not getattr(each, needed):
                    raise UsageError(f"an answer of kind {each.kind!r} has no {needed!r}; give it")
            answers = tuple(replace(each, of=tuple(self._names(each.of))) for each in view.answers)
            for name in (name for each in view.answers for name in (each.y, *each.also)):
                self.column(name)
            for chart in view.charts:
                self._check_chart(chart.kind, chart.y)
        except UsageError as error:
            raise UsageError(f"view{f' {view.name}' if view.name else ''}: {error}") from None
        return replace(view, tables=tables, answers=answers)

    def _names(self, given: Iterable[str]) -> Iterable[str]:
        for name in given:
            if "*" not in name:
                yield self.column(name).name
                continue
            known = [found.name for found in fields("run").values() if found.about.is_number] if "." in name else []
            matching = [each for each in [*self.columns, *known] if fnmatchcase(each, name)]
            if not matching:
                raise UsageError(f"no column is like {name!r}")
            yield from matching

    def _check_chart(self, name: str, y: str) -> None:
        kind = self.chart_kinds.get(name)
        if kind is None:
            known = ", ".join(self.chart_kinds)
            raise UsageError(f"chart kind {name!r} is unknown; choose among {known}{suggest(name, self.chart_kinds)}")
        if not kind.spans:
            self.column(y)
        elif y not in kind.spans:
            raise UsageError(f"y of a {name} chart is {y!r}; choose among {', '.join(kind.spans)}")

    def row_notes(self, cell: Cell, columns: Sequence[Column]) -> list[str]:
        """What features say of a row with these columns."""
        found: list[str] = []
        for feature in self.features:
            if feature.row_notes is not None and any(column in feature.columns for column in columns):
                found += feature.row_notes(cell)
        return found

    def answers(self, view: View, cells: Sequence[Cell], pairing: Pairing) -> list[str]:
        """What answers a view's question, of the cells of one device: the view's own sentences, then features'."""
        named = {column for table in view.tables for column in table.columns}
        found = answer_lines(view.answers, cells, pairing, self.column)
        for feature in self.features:
            if feature.answer is not None and any(column.name in named for column in feature.columns):
                found += feature.answer(cells, pairing)
        return found


_FIRST = [column.name for column in MEASURED[:3]]
