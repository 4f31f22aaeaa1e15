"""What a view may name: columns and kinds of charts of the report itself, and what features (kernels, ...) add."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from lmbench.errors import UsageError, suggest, unknown
from lmbench.records.schema import fields
from lmbench.report.answer import Chart
from lmbench.report.charts import CHART_KINDS, ChartKind
from lmbench.report.columns import MEASURED, RELATIVE, Column, schema_column
from lmbench.report.frame import Frame
from lmbench.report.view import TableSpec, View, read_view


@dataclass(frozen=True)
class Feature:
    """What one feature adds.

    `row_notes` are said of a cell in a table that has one of the feature's columns; `headline` are sentences that
    answer the question of a view with such a table, from the cells of one device. `charts` are pictures of runs, shown
    on every page. `beside` gives columns that stand in every table that has a column.
    """

    columns: tuple[Column, ...] = ()
    chart_kinds: Mapping[str, ChartKind] = field(default_factory=dict)
    row_notes: Callable[[Frame, int], list[str]] = lambda frame, cell: []
    headline: Callable[[Frame], list[str]] = lambda frame: []
    charts: Callable[[Frame], list[Chart]] = lambda frame: []
    beside: Callable[[Column], Iterable[Column]] = lambda column: ()


class Catalogue:
    """Columns and kinds of charts by name."""

    def __init__(self, features: Iterable[Feature] = ()) -> None:
        self.features = tuple(features)
        columns = [*MEASURED, *RELATIVE, *(column for feature in self.features for column in feature.columns)]
        self.columns: Mapping[str, Column] = {column.name: column for column in columns}
        self.chart_kinds: dict[str, ChartKind] = dict(CHART_KINDS)
        for feature in self.features:
            self.chart_kinds.update(feature.chart_kinds)

    def column(self, name: str) -> Column:
        """The column of that name, or of the field of a run's record with that dotted name.

        Raises:
            UsageError: there is none, or the field is no number.
        """
        column = self.columns.get(name) or schema_column(name)
        if column is None:
            near = suggest(name, [*self.columns, *fields("run")])
            raise UsageError(f"column {name!r} is unknown; give one such as step_s, or a field of a run{near}")
        return column

    def columns_of(self, spec: TableSpec) -> list[Column]:
        """The columns of a table, and what stands beside them; that of the fastest has but one."""
        columns = list(map(self.column, spec.columns))
        features = () if spec.among else self.features
        return [*columns, *(other for column in columns for feature in features for other in feature.beside(column))]

    def view(self, named: Any, axes: Iterable[str] = ()) -> View:
        """A view (see read_view) with its patterns of columns written out.

        Raises:
            UsageError: it is none, or names a column or a kind of chart that does not exist.
        """
        try:
            view = read_view(named, axes)
            tables = tuple(replace(table, columns=self._names(table.columns)) for table in view.tables)
            answers = tuple(replace(answer, of=self._names(answer.of)) for answer in view.answers)
            charts = tuple(replace(chart, of=self._names(chart.of)) for chart in view.charts)
            self._names(name for answer in answers for name in (answer.y, *answer.also))
            self._names(chart.y for chart in charts)
            compared = [table.columns[0] for table in tables if table.among]
            for name in (*compared, *(answer.y for answer in answers if answer.kind in ("fastest", "against"))):
                if not self.column(name).is_of_one_process:
                    raise UsageError(f"column {name!r} is no number of one process, which can be compared")
            for chart in charts:
                if chart.kind not in self.chart_kinds:
                    raise unknown("chart kind", chart.kind, self.chart_kinds)
        except UsageError as error:
            raise UsageError(f"view{f' {named}' if isinstance(named, str) else ''}: {error}") from None
        return replace(view, tables=tables, answers=answers, charts=charts)

    def _names(self, patterns: Iterable[str]) -> tuple[str, ...]:
        names: list[str] = []
        for pattern in patterns:
            numbers = [field.name for field in fields("run").values() if "." in pattern and field.about.is_number]
            matching = fnmatch.filter([*self.columns, *numbers], pattern) if "*" in pattern else [pattern]
            names += [self.column(name).name for name in matching]
            if not matching:
                raise UsageError(f"no column is like {pattern!r}")
        return tuple(names)

    def features_of(self, columns: Iterable[Column]) -> list[Feature]:
        """The features that one of the columns is of."""
        names = {column.name for column in columns}
        return [feature for feature in self.features if any(column.name in names for column in feature.columns)]
