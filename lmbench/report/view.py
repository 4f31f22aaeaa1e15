"""A view: which tables and charts show a study, in which rows and columns, against which baseline; read from YAML. And
what it may name: columns and kinds of charts of the report itself, and what features (kernels, ...) add."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from lmbench.configs import lines_of, parse_yaml, placed, read_yaml, shipped_studies
from lmbench.errors import UsageError, suggest, unknown
from lmbench.records.schema import fields
from lmbench.report import shipped
from lmbench.report.answer import Chart
from lmbench.report.columns import Column, schema_column
from lmbench.report.facts import FACT, Value, fact_of, plain
from lmbench.report.frame import Frame

ColumnOf = Callable[[str], Column]


class TableSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A table with a row for each cell; `rows` are facts, in the order of sorting.

    `columns` are names of columns, fields of a run's record by their dotted names, or patterns such as
    `forward_*_fraction`. Facts that differ between cells and are not named become rows too, and those that all cells
    share go to the caption. Cells that have none of the columns are left out. With `among`, a row for each combination
    of the other facts, and by which of those named the only one of `columns` is the smallest, and how surely.
    """

    title: str
    columns: Annotated[tuple[str, ...], Meta(min_length=1)]
    rows: tuple[str, ...] = ()
    among: tuple[str, ...] = ()


class ChartSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A chart for each combination of the facts that it does not name.

    `bars`: `y` by the values of `x`, side by side for each of `series`; `rows`: the same lying, a bar for each cell,
    labelled with what differs; `lines`: `y` over the number `x`, both log, a line for each of `series`; `stack`: the
    columns `of` on top of each other, for each cell. Features add kinds of their own.
    """

    title: str
    kind: str
    y: str = "step_s"
    x: str = "size"
    series: tuple[str, ...] = ()
    of: tuple[str, ...] = ()


class AnswerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A sentence that answers the question by `y`, and the columns `also`, of the cells that decide it.

    `against`: every way but the baseline, with its speed-up; `best`: the `x` that has the most `y`; `fastest`: which
    of the ways that the facts `among` tell apart has the least `y`, a time, and for how many of the others; `parts`:
    the largest cell, and which of the columns `of` its `y` is mostly.
    """

    kind: Literal["against", "best", "fastest", "parts"]
    y: str = "step_s"
    x: str = ""
    among: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


class View(Struct, frozen=True, forbid_unknown_fields=True):
    """A study's view. `question` is what it answers, in a sentence, and `answers` are how; `baseline` are the
    facts that rows are compared with; `is_profiled` says that it shows profiled runs; `name` is its study's."""

    title: str
    tables: Annotated[tuple[TableSpec, ...], Meta(min_length=1)]
    charts: tuple[ChartSpec, ...] = ()
    question: str = ""
    answers: tuple[AnswerSpec, ...] = ()
    baseline: dict[str, Value] = {}
    is_profiled: bool = False
    name: str = ""


#: For a sweep that names no view, and for runs that have nothing to do with each other: a row for whatever differs.
GENERIC = msgspec.convert(parse_yaml(shipped("sweep.yaml"), "sweep.yaml"), View)


@dataclass(frozen=True)
class ChartKind:
    """A kind of charts. `build` makes one of cells that share all facts that the spec does not name.

    `has_rows` says that it has a row for each cell, labelled with whatever differs; `by_baseline` that it has those of
    one baseline.
    """

    build: Callable[[ChartSpec, Frame, ColumnOf], Chart | None]
    has_rows: bool = False
    by_baseline: bool = False


@dataclass(frozen=True)
class Feature:
    """What one feature adds.

    `row_notes` are said of a cell in a table that has one of the feature's columns; `headline` are sentences that
    answer the question of a view with such a table, from the cells of one device. `beside` gives columns that
    stand in every table that has a column.
    """

    columns: tuple[Column, ...] = ()
    chart_kinds: Mapping[str, ChartKind] = field(default_factory=dict)
    row_notes: Callable[[Frame, int], list[str]] = lambda frame, cell: []
    headline: Callable[[Frame], Iterable[str]] = lambda frame: ()
    beside: Callable[[Column], Iterable[Column]] = lambda column: ()


class Catalogue:
    """Columns and kinds of charts by name."""

    def __init__(self, *features: Feature) -> None:
        self.features = features
        self.columns = {column.name: column for feature in features for column in feature.columns}
        self.chart_kinds = {name: kind for feature in features for name, kind in feature.chart_kinds.items()}

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

    def features_of(self, columns: Iterable[Column]) -> list[Feature]:
        """The features that one of the columns is of."""
        shown = {*columns}
        return [feature for feature in self.features if shown & {*feature.columns}]

    def view(self, named: Any, axes: Iterable[str] = (), places: Mapping[str, str] = {}) -> View:
        """A view by its study's name, by the path of a study's file, or from the mapping under `view:` of one, with its
        patterns of columns written out.

        Args:
            named: any of these; what somebody wrote into a file may be anything.
            axes: the study's axes, which rows may name beside the facts.
            places: where the settings of its file stand.

        Raises:
            UsageError: it is none of these, a mapping with mistakes, or names columns, facts or kinds of charts that
                do not exist.
        """
        if named == GENERIC.name:
            return GENERIC
        name, content = "", named
        if isinstance(named, str):
            name, content, axes, places = _view_of_study(named)
        try:
            view = msgspec.convert(content, View)
            wrong = [*self._mistakes(view, axes)]
        except msgspec.ValidationError as error:
            wrong = [str(error)]
        if wrong:
            raise UsageError("; ".join(placed(line, places, "view") for line in dict.fromkeys(wrong)))
        tables = tuple(replace(table, columns=self._names(table.columns)) for table in view.tables)
        return replace(
            view,
            tables=tables,
            answers=tuple(replace(answer, of=self._names(answer.of)) for answer in view.answers),
            charts=tuple(replace(chart, of=self._names(chart.of)) for chart in view.charts),
            # `matmul: highest` is `highest (fp32)`.
            baseline={name: FACT[name].labelled(v) if name in FACT else plain(v) for name, v in view.baseline.items()},
            name=view.name or name,
        )

    def _mistakes(self, view: View, axes: Iterable[str]) -> Iterator[str]:
        """What is said of each name in a view that stands for nothing."""
        known = [*FACT, *(axis for axis in map(str, axes) if fact_of(axis) == axis)]

        def named(*keys: str) -> list[str]:
            parts = view, *view.tables, *view.answers, *view.charts
            values = (getattr(part, key, ()) for part in parts for key in keys)
            return [name for value in values for name in ([value] if isinstance(value, str) else value) if name]

        for option in named("baseline", "rows", "among", "x", "series"):
            fact = fact_of(option)
            if option not in known and (fact != option or "." not in option):
                yield f"fact {option!r} is unknown; choose among {', '.join(known)}{suggest(fact, known)}"
        for chart in view.charts:
            if chart.kind not in self.chart_kinds:
                yield str(unknown("chart kind", chart.kind, self.chart_kinds))
        for table in view.tables:
            if table.among and table.columns[1:]:
                yield f"{table.title!r} has {len(table.columns)} columns; with `among` it takes one"
        compared = [table.columns[0] for table in view.tables if table.among]
        compared += [answer.y for answer in view.answers if answer.kind in ("fastest", "against")]
        for pattern in named("columns", "y", "of", "also"):
            try:
                (name, *_) = self._names([pattern])
                if pattern in compared and not self.column(name).is_of_one_process:
                    yield f"column {name!r} is no number of one process, which can be compared"
            except UsageError as error:
                yield str(error)

    def _names(self, patterns: Iterable[str]) -> tuple[str, ...]:
        names: list[str] = []
        for pattern in patterns:
            matching = fnmatch.filter(self.columns, pattern) if "*" in pattern else [pattern]
            names += [self.column(name).name for name in matching]
            if not matching:
                raise UsageError(f"no column is like {pattern!r}")
        return tuple(names)


def _view_of_study(name: str) -> tuple[str, Any, Iterable[str], Mapping[str, str]]:
    """The name of a study, its view as it was written, its axes, and where its settings stand."""
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else shipped_studies().get(name)
    if path is None:
        names = [GENERIC.name, *(study for study in shipped_studies() if not study.startswith("tiny_"))]
        raise unknown("view", name, names, ", or give a study's file")
    text, content = read_yaml(path, f"study {str(path)!r}")
    view = content.get("view") if isinstance(content, Mapping) else None
    if view is None or view == name:
        raise UsageError(f"{path}: the study has no `view:`; give one with title and tables, or another study's name")
    if isinstance(view, str):
        return _view_of_study(view)
    matrix = content.get("matrix")
    return path.stem, view, matrix if isinstance(matrix, Mapping) else (), lines_of(text, str(path))
