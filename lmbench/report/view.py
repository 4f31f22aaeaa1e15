"""A view: which tables and charts show a study, in which rows and columns, against which baseline; read from YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from lmbench.configs import parse_yaml, read_yaml, shipped_studies
from lmbench.errors import UsageError, suggest, unknown
from lmbench.report.facts import FACT, Value, fact_of, plain
from lmbench.report.shipped import shipped


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

    def __post_init__(self) -> None:
        if self.among and len(self.columns) > 1:
            raise ValueError(f"{self.title!r} has {len(self.columns)} columns; with `among` it takes one")


class ChartSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A chart for each combination of the facts that it does not name.

    `bars`: `y` by the values of `x`, side by side for each of `series`; `rows`: the same lying, a bar for each cell,
    labelled with what differs; `lines`: `y` over the number `x`, a line for each of `series`; `stack`: the columns `of`
    on top of each other, for each cell; `steps`: time of each of the first steps, a line for each of `series`. Features
    add kinds of their own.
    """

    title: str
    kind: str
    y: str = "step_s"
    x: str = "size"
    series: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    is_log: bool = False


class AnswerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A sentence that answers the question by `y`, and the columns `also`, of the cells that decide it.

    `against`: every way but the baseline, with its speed-up; `along`: the least and the largest of `x`, and what ran
    out of memory; `best`: the `x` that has the most `y`; `fastest`: which of the ways that the facts `among` tell apart
    has the least `y`, a time, and for how many of the others; `parts`: the largest cell, and which of the columns `of`
    its `y` is mostly.
    """

    kind: Literal["against", "along", "best", "fastest", "parts"]
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


def read_view(view: Any, axes: Iterable[str] = ()) -> View:
    """A view by its study's name, by the path of a study's file, or from the mapping under `view:` of one.

    Args:
        view: any of these; what somebody wrote into a file may be anything.
        axes: the study's axes, which rows may name beside the facts.

    Raises:
        UsageError: it is none of these, or a mapping with a mistake. Columns and kinds of charts are not looked at.
    """
    if isinstance(view, str):
        return GENERIC if view == GENERIC.name else _view_of_study(view)
    try:
        spec = msgspec.convert(view, View)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None
    known = [*FACT, *(axis for axis in map(str, axes) if fact_of(axis) == axis)]
    named = [
        *spec.baseline,
        *(name for table in spec.tables for name in (*table.rows, *table.among)),
        *(name for part in spec.answers for name in (part.x, *part.among)),
        *(name for chart in spec.charts for name in (chart.x, *chart.series)),
    ]
    for name in filter(None, named):
        fact = fact_of(name)
        if name not in known and (fact != name or "." not in name):
            hint = suggest(fact, known)
            raise UsageError(f"fact {name!r} is unknown; choose among {', '.join(known)}{hint}")
    # `matmul: highest` is `highest (fp32)`.
    baseline = {name: FACT[name].labelled(v) if name in FACT else plain(v) for name, v in spec.baseline.items()}
    return replace(spec, baseline=baseline)


def _view_of_study(name: str) -> View:
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else shipped_studies().get(name)
    if path is None:
        names = [GENERIC.name, *(study for study in shipped_studies() if not study.startswith("tiny_"))]
        raise unknown("view", name, names, ", or give a study's file")
    _, content = read_yaml(path, f"study {str(path)!r}")
    if not isinstance(content, Mapping) or content.get("view") in (None, name):
        raise UsageError(f"{path}: the study has no `view:`; give one with title and tables, or another study's name")
    matrix = content.get("matrix")
    view = read_view(content["view"], matrix if isinstance(matrix, Mapping) else ())
    return view if view.name else replace(view, name=path.stem)
