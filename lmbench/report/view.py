"""A view: which tables and charts show a study, in which rows and columns, against which baseline; read from YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from lmbench.configs import read_yaml, shipped_studies
from lmbench.errors import UsageError, suggest
from lmbench.report.facts import FACT, Value, captioned, fact_of, plain


class TableSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A table with a row for each cell; `rows` are facts, in the order of sorting.

    `columns` are names of columns, fields of a run's record by their dotted names, or patterns such as
    `forward_*_fraction`. Facts that differ between cells and are not named become rows too, and those that all cells
    share go to the caption. With `only_filled`, cells that have none of the columns are left out. With `across`, one
    column for each value of that fact, and the only one of `columns` in each. With `among`, a row for each combination
    of the other facts, and by which of those named the only one of `columns` is the smallest, and how surely.
    """

    title: str
    columns: Annotated[tuple[str, ...], Meta(min_length=1)]
    rows: tuple[str, ...] = ()
    across: str | None = None
    only_filled: bool = False
    among: tuple[str, ...] = ()


class ChartSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A chart for each combination of the facts that it does not name.

    `bars`: `y` by the values of `x`, side by side for each of `series`; `rows`: the same lying, a bar for each cell,
    labelled with what differs; `lines`: `y` over the number `x`, a line for each of `series`; `phases`: the step's
    phases on top of each other by `x`; `steps`: time of each of the first steps, a line for each of `series`. Features
    add kinds of their own. Among `lines` on a log axis, `power` draws what grows with that power of `x`, through the
    last point of the first of `series`.
    """

    title: str
    kind: str
    y: str = "step_s"
    x: str = "size"
    series: tuple[str, ...] = ()
    is_log: bool = False
    power: Annotated[float, Meta(gt=0)] | None = None


class AnswerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A sentence that answers the question, from the largest cells that can.

    `against`: `y` of every way beside the baseline's; `along`: how `y` grows from the least to the largest of `x`, and
    what ran out of memory; `best`: which `x` has the most `y`; `fastest`: which of the ways that the facts `among` tell
    apart has the least `y`, a time, and for how many of the others; `parts`: `y`, and which of the columns `of` it is
    mostly. `also` are columns told with it, where the kind is `against` or `parts`.
    """

    kind: Literal["against", "along", "best", "fastest", "parts"]
    y: str = "step_s"
    x: str = ""
    among: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


class Baseline(Struct, frozen=True, forbid_unknown_fields=True):
    """What a row is compared with: the row whose facts are the same but for these. `name` is what headings call it."""

    facts: Annotated[dict[str, Value], Meta(min_length=1)]
    name: str = ""

    @classmethod
    def of(cls, facts: dict[str, Value], name: str = "") -> Baseline:
        """The baseline with these facts, called by them where it has no name."""
        return cls(facts, name or ", ".join(captioned(fact, value) for fact, value in facts.items()))

    def is_met_by(self, facts: Mapping[str, Value]) -> bool:
        return all(facts.get(name) == value for name, value in self.facts.items())


class View(Struct, frozen=True, forbid_unknown_fields=True):
    """A study's view. `question` is what it answers, in a sentence, and `answers` are how; `is_profiled` says that it
    shows profiled runs; `name` is its study's."""

    title: str
    tables: Annotated[tuple[TableSpec, ...], Meta(min_length=1)]
    charts: tuple[ChartSpec, ...] = ()
    question: str = ""
    answers: tuple[AnswerSpec, ...] = ()
    baseline: Baseline | None = None
    is_profiled: bool = False
    name: str = ""


_Spec = TypeVar("_Spec", TableSpec, ChartSpec, AnswerSpec)
_FIELDS = {field for kind in (View, TableSpec, ChartSpec, AnswerSpec, Baseline) for field in kind.__struct_fields__}

#: For a sweep that names no view, and for runs that have nothing to do with each other: a row for whatever differs.
GENERIC = View(
    name="sweep",
    title="Runs",
    tables=(
        TableSpec(
            "Step times",
            (
                "step_s", "speedup", "forward_s", "backward_s", "optimizer_s", "tokens_per_s", "mfu_fraction",
                "host_bound_fraction", "peak_bytes", "host_peak_bytes", "memory_saved_fraction",
            ),
        ),
    ),
    charts=(
        ChartSpec("Step time", "rows", "step_s"),
        ChartSpec("Throughput", "rows", "tokens_per_s"),
        ChartSpec("Peak memory", "rows", "peak_bytes"),
    ),
)  # fmt: skip


def read_view(given: Any, axes: Iterable[str] = ()) -> View:
    """A view by its study's name, by the path of a study's file, or from the mapping under `view:` of one.

    Args:
        given: any of these; what somebody wrote into a file may be anything.
        axes: the study's axes, which rows may name beside the facts.

    Raises:
        UsageError: it is none of these, or a mapping with a mistake. Columns and kinds of charts are not looked at.
    """
    if isinstance(given, str):
        return GENERIC if given == GENERIC.name else _of_study(given)
    if not isinstance(given, Mapping):
        raise UsageError(f"view is {given!r}; it must be a study's name, or a mapping with title and tables")
    try:
        view = msgspec.convert(given, View)
    except msgspec.ValidationError as error:
        raise UsageError(f"view: {_in_words(str(error))}") from None
    known = set(map(str, axes))
    for table in view.tables:
        key = "across" if table.across is not None else "among"
        if (table.across is not None or table.among) and len(table.columns) > 1:
            raise UsageError(f"view: table {table.title!r} has {len(table.columns)} columns; with `{key}` it takes one")
        if table.across is not None and table.among:
            raise UsageError(f"view: table {table.title!r} has `across` and `among`; leave one of them out")
    for answer in view.answers:
        needed = {"best": "x", "along": "x", "fastest": "among"}.get(answer.kind)
        if needed is not None and not getattr(answer, needed):
            raise UsageError(f"view: an answer of kind {answer.kind!r} has no {needed!r}; give it")
    baseline = view.baseline
    if baseline is not None:
        # `matmul: highest` is `highest (fp32)`.
        facts = {_fact(name, known): value for name, value in baseline.facts.items()}
        labelled = {name: FACT[name].labelled(v) if name in FACT else plain(v) for name, v in facts.items()}
        baseline = Baseline.of(labelled, baseline.name)
    return replace(
        view,
        tables=tuple(_with_facts(table, known) for table in view.tables),
        answers=tuple(_with_facts(answer, known) for answer in view.answers),
        charts=tuple(_with_facts(chart, known) for chart in view.charts),
        baseline=baseline,
    )


def _of_study(given: str, before: tuple[str, ...] = ()) -> View:
    is_file = Path(given).suffix in (".yaml", ".yml")
    path = Path(given) if is_file else shipped_studies().get(given)
    if path is None:
        names = [GENERIC.name, *(name for name in shipped_studies() if not name.startswith("tiny_"))]
        raise UsageError(
            f"view {given!r} is unknown; choose among {', '.join(names)}, or give a study's file"
            + suggest(given, names)
        )
    content = _read(path)
    view = content.get("view")
    if isinstance(view, str) and view != GENERIC.name:
        if view in before:
            raise UsageError(f"{path}: view {view!r} names only itself; give the mapping of a view")
        return _of_study(view, (*before, view))
    matrix = content.get("matrix")
    try:
        if view is None:
            raise UsageError("the study has no `view:`; give one with title and tables, or the name of another study")
        found = read_view(view, matrix if isinstance(matrix, Mapping) else ())
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return found if found.name else replace(found, name=path.stem)


def _read(path: Path) -> Mapping[str, Any]:
    _, content = read_yaml(path, f"study {str(path)!r}")
    if not isinstance(content, Mapping):
        raise UsageError(f"{str(path)!r} is no study; it must be a mapping with `matrix`, `view` and so on")
    return content


def _in_words(complaint: str) -> str:
    """msgspec's complaint as a line: `tables[...].colums is unknown; did you mean columns?`."""
    text, _, place = complaint.replace("`", "").partition(" - at $")
    where = place.removeprefix(".")
    unknown = re.fullmatch(r"Object contains unknown field (.*)", text)
    if unknown is not None:
        name = f"{where}.{unknown[1]}" if where else unknown[1]
        return f"{name} is unknown" + (suggest(unknown[1], _FIELDS) or f"; known are {', '.join(sorted(_FIELDS))}")
    missing = re.fullmatch(r"Object missing required field (.*)", text)
    if missing is not None:
        return f"{where or 'it'} has no {missing[1]}"
    return f"{where or 'it'}: {text[:1].lower()}{text[1:]}"


def _with_facts(spec: _Spec, axes: set[str]) -> _Spec:
    """A part of a view whose facts have their own names: an option stands for the fact that it sets."""
    names = {key: getattr(spec, key, None) for key in ("rows", "across", "among", "x", "series")}
    facts = {
        key: _fact(value, axes) if isinstance(value, str) else tuple(_fact(name, axes) for name in value)
        for key, value in names.items()
        if value
    }
    return replace(spec, **facts)


def _fact(name: str, axes: set[str]) -> str:
    """The fact that is meant: one of FACTS, the one that an option sets, or an axis without a fact of its own."""
    name = fact_of(name)
    if name not in FACT and name not in axes and "." not in name:
        raise UsageError(
            f"view: fact {name!r} is unknown; choose among {', '.join((*FACT, *sorted(axes)))}, or an option by its "
            f"dotted name{suggest(name, (*FACT, *axes))}"
        )
    return name
