"""Views and the catalogue of what they may name.

A view says, in YAML, which tables and charts show a study, in which rows and columns, against which baseline. The
catalogue has the columns and kinds of charts of the report itself and of its features (kernels, memory, ...).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from lmbench.configs import converted, is_yaml, lines_of, parse_yaml, placed, read_yaml, shipped_studies
from lmbench.errors import UsageError, suggest, unknown
from lmbench.records.schema import fields
from lmbench.report import shipped
from lmbench.report.answer import Chart, Value
from lmbench.report.columns import Quantity, schema_column
from lmbench.report.facts import FACT, fact_of, plain
from lmbench.report.frame import Frame, MeasuredCell

ColumnOf = Callable[[str], Quantity]
#: Names of facts, or of columns.
Names = tuple[str, ...]


class TableSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A table with a row for each cell, sorted by the facts `rows`.

    `columns` are names of columns, dotted names of fields of a run's record, or patterns such as `forward_*_fraction`.
    Other facts that differ between cells are added to the row facts; facts that all cells share go to the caption.
    Cells without a value in any column are left out.

    With `among`, a row stands for a combination of the other facts. It says which values of the facts `among` have the
    smallest value of the only column, and how certain that is.
    """

    title: str
    columns: Annotated[Names, Meta(min_length=1)]
    rows: Names = ()
    among: Names = ()


class ChartSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A chart for each combination of the facts that the spec does not name.

    Kinds of charts, beside those of features:

    - `bars`: `y` by the values of `x`, side by side for each combination of the facts `series`;
    - `lines`: `y` over the number `x` on logarithmic axes, with a line for each combination of `series`;
    - `rows`: a horizontal bar of `y` for each cell, labelled with the facts that differ;
    - `stack`: a horizontal bar for each cell, made of the columns `of`.
    """

    title: str
    kind: str
    y: str = "step_s"
    x: str = "size"
    series: Names = ()
    of: Names = ()


class AnswerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A sentence that answers a view's question by the column `y`, and the columns `also`, of the cells that decide.

    Kinds of sentences:

    - `against`: every way but the baseline, with its speed-up;
    - `best`: the `x` with the largest `y`;
    - `fastest`: how often each combination of the facts `among` takes the least time `y`;
    - `parts`: the largest cell, with the largest of the columns `of` that make up its `y`.
    """

    kind: Literal["against", "best", "fastest", "parts"]
    y: str = "step_s"
    x: str = ""
    among: Names = ()
    of: Names = ()
    also: Names = ()


class View(Struct, frozen=True, forbid_unknown_fields=True):
    """The view of a study, whose name is `name`. `question` is a sentence that `answers` answer; `baseline` are the
    facts with which rows are compared; `is_profiled` shows profiled runs instead of timed ones."""

    title: str
    tables: Annotated[tuple[TableSpec, ...], Meta(min_length=1)]
    charts: tuple[ChartSpec, ...] = ()
    question: str = ""
    answers: tuple[AnswerSpec, ...] = ()
    baseline: dict[str, Value] = {}
    is_profiled: bool = False
    name: str = ""


#: The view of sweeps without one and of runs outside sweeps: a row for whatever differs.
GENERIC = msgspec.convert(parse_yaml(shipped("sweep.yaml"), "sweep.yaml"), View)

_COLUMNS = "give one such as step_s, or a field of a run; `lmbench guide columns` has all"
#: The setting without which a kind of charts or of sentences says nothing.
_NEEDED = {"stack": "of", "best": "x", "fastest": "among"}


@dataclass(frozen=True)
class ChartKind:
    """A kind of charts. `build` makes one chart of cells that share all facts that the spec does not name.

    With `has_rows` a chart has a row for each cell, whatever differs. With `by_baseline` it has the cells of one
    baseline.
    """

    build: Callable[[ChartSpec, Frame, ColumnOf], Chart | None]
    has_rows: bool = False
    by_baseline: bool = False


@dataclass(frozen=True)
class Feature:
    """The additions of one feature to a report.

    `row_notes` are notes on a cell in tables that have one of the feature's columns. `headline` are sentences that
    answer the question of a view with such a table. `beside` gives, for any column of a table, further columns to show
    beside it.
    """

    columns: tuple[Quantity, ...] = ()
    chart_kinds: Mapping[str, ChartKind] = field(default_factory=dict)
    row_notes: Callable[[MeasuredCell], list[str]] = lambda cell: []
    headline: Callable[[Frame], Iterable[str]] = lambda frame: ()
    beside: Callable[[Quantity], Iterable[Quantity]] = lambda column: ()


class Catalogue:
    """The columns and kinds of charts of all features, by name."""

    def __init__(self, *features: Feature) -> None:
        self.features = features
        self.columns = {column.name: column for feature in features for column in feature.columns}
        self.chart_kinds = {name: kind for feature in features for name, kind in feature.chart_kinds.items()}

    def column(self, name: str) -> Quantity:
        """The column of this name, or of the field of a run's record with this dotted name.

        Raises:
            UsageError: there is neither, or the field is not a number.
        """
        column = self.columns.get(name) or schema_column(name)
        if column is None:
            near = suggest(name, self.columns) or suggest(name, fields("run"))
            raise UsageError(f"column {name!r} is unknown; {_COLUMNS}{near}")
        return column

    def columns_of(self, spec: TableSpec) -> list[Quantity]:
        """The columns of a table, and those that features put beside them; a table with `among` has one column."""
        columns = list(map(self.column, spec.columns))
        features = () if spec.among else self.features
        return [*columns, *(other for column in columns for feature in features for other in feature.beside(column))]

    def features_of(self, columns: Iterable[Quantity]) -> list[Feature]:
        """The features to which one of the columns belongs."""
        used = {*columns}
        return [feature for feature in self.features if used & {*feature.columns}]

    def view(self, named: Any, axes: Iterable[str] = (), places: Mapping[str, str] = {}) -> View:
        """A view with its patterns of columns expanded.

        Args:
            named: the name of a study, the path of its file, or the mapping under `view:` in such a file. From a file
                it may be anything.
            axes: the study's axes, which rows may name beside the facts.
            places: the place of each setting in the study's file, for messages.

        Raises:
            UsageError: there is no such study, the mapping has mistakes, or it names columns, facts or kinds of charts
                that do not exist.
        """
        if named == GENERIC.name:
            return GENERIC
        name, content = "", named
        if isinstance(named, str):
            name, content, axes, places = _view_of_study(named)
        try:
            view = converted(content, View)
            mistakes = [*self._mistakes(view, axes)]
        except UsageError as error:
            mistakes = [str(error)]
        if mistakes:
            raise UsageError("; ".join(placed(mistake, places, "view") for mistake in dict.fromkeys(mistakes)))
        return replace(
            view,
            tables=tuple(replace(table, columns=self._names(table.columns)) for table in view.tables),
            answers=tuple(replace(answer, of=self._names(answer.of)) for answer in view.answers),
            charts=tuple(replace(chart, of=self._names(chart.of)) for chart in view.charts),
            # `matmul: highest` becomes `highest (fp32)`.
            baseline={name: FACT[name].labelled(v) if name in FACT else plain(v) for name, v in view.baseline.items()},
            name=view.name or name,
        )

    def _mistakes(self, view: View, axes: Iterable[str]) -> Iterator[str]:
        """A message for each name in a view that does not exist or cannot be used there."""
        facts = [*FACT, *(axis for axis in map(str, axes) if fact_of(axis) == axis)]

        def named(*keys: str) -> list[str]:
            parts = view, *view.tables, *view.answers, *view.charts
            values = (getattr(part, key, ()) for part in parts for key in keys)
            return [name for value in values for name in ([value] if isinstance(value, str) else value) if name]

        for option in named("baseline", "rows", "among", "x", "series"):
            fact = fact_of(option)
            if option not in facts and (fact != option or "." not in option):
                yield f"fact {option!r} is unknown; choose among {', '.join(facts)}{suggest(fact, facts)}"
        for chart in view.charts:
            if chart.kind not in self.chart_kinds:
                yield str(unknown("chart kind", chart.kind, self.chart_kinds))
        parts: list[ChartSpec | AnswerSpec] = [*view.charts, *view.answers]
        for part in parts:
            if (key := _NEEDED.get(part.kind)) and not getattr(part, key):
                yield f"{part.kind!r} lacks `{key}`; give it {'one fact' if key == 'x' else 'a list'}"
        for table in view.tables:
            if table.among and table.columns[1:]:
                yield f"{table.title!r} has {len(table.columns)} columns; with `among` it takes one"
        compared = [table.columns[0] for table in view.tables if table.among]
        compared += [answer.y for answer in view.answers if answer.kind in ("fastest", "against")]
        for pattern in named("columns", "y", "of", "also"):
            try:
                (name, *_) = self._names([pattern])
                if pattern in compared and not self.column(name).is_process_mean:
                    yield f"column {name!r} is no number of one process and cannot be compared; give one such as step_s"
            except UsageError as error:
                yield str(error)

    def _names(self, patterns: Iterable[str]) -> Names:
        """The names of columns that match the patterns.

        Raises:
            UsageError: a column does not exist, or a pattern matches none.
        """
        names = []
        for pattern in patterns:
            matching = fnmatch.filter(self.columns, pattern) if "*" in pattern else [pattern]
            names += [self.column(name).name for name in matching]
            if not matching:
                raise UsageError(f"no column is like {pattern!r}; {_COLUMNS}")
        return tuple(names)


def _view_of_study(name: str, *referring: str) -> tuple[str, Any, Iterable[str], Mapping[str, str]]:
    """The name of a study, its view as its file has it, its axes, and the places of its settings in the file.

    `referring` are the studies that refer to this one for their view.
    """
    path = Path(name) if is_yaml(name) else shipped_studies().get(name)
    if path is None:
        names = [GENERIC.name, *(study for study in shipped_studies() if not study.startswith("tiny_"))]
        raise unknown("view", name, names, ", or give a study's file")
    text, content = read_yaml(path, f"study {str(path)!r}")
    view = content.get("view") if isinstance(content, Mapping) else None
    if view is None or view in (name, *referring):
        raise UsageError(f"{path}: the study has no `view:`; give one with title and tables, or another study's name")
    if isinstance(view, str):
        return _view_of_study(view, name, *referring)
    matrix = content.get("matrix")
    return path.stem, view, matrix if isinstance(matrix, Mapping) else (), lines_of(text, str(path))
