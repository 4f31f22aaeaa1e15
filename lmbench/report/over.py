"""What `lmbench report --over commit` (or `time`) shows: a configuration's figures along its revisions or results, and
where their level changes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from lmbench.configs import parse_yaml
from lmbench.errors import UsageError
from lmbench.records.named import sweep_of
from lmbench.records.statistics import geometric_mean, level_changes
from lmbench.report import shipped
from lmbench.report.answer import Cell, Chart
from lmbench.report.charts import picture, points_of
from lmbench.report.columns import Column
from lmbench.report.facts import ENVIRONMENT
from lmbench.report.frame import Frame, Group, RunRow, make_frame
from lmbench.report.units import PERCENT, change_percent, change_range
from lmbench.report.view import ChartKind, ChartSpec, ColumnOf, Feature

Over = Literal["commit", "time"]

_NOTE = (
    "a change point parts two levels at 5 % over all places, for noise that is independent from point to point; what a "
    "busy or warm machine does for days looks the same, and only both sides measured in turn can tell: "
    "lmbench compare --run CONFIG --revision A B"
)


def over_view(over: Over) -> dict[str, Any]:
    """The view of runs that are followed: the step's time and the peak with their changes."""
    view: dict[str, Any] = parse_yaml(shipped("over.yaml").replace("OVER", over), "over.yaml")
    return view


def frame_over(group: Group, over: Over) -> Frame:
    """The ok runs of a group that is no sweep, each a cell of its configuration and of its commit, or of the time when
    its sweep began; `course` has those in their order.

    A setting that only some runs of a size have tells no configurations apart: the code gained or lost it meanwhile.

    Raises:
        UsageError: no configuration was measured at two commits or times.
    """
    rows, began, told = list[tuple[str, Any, RunRow]](), dict[str, str](), dict[Any, set[str]]()
    for row in group.rows:
        run, facts, kind = row.run, row.facts, (row.facts.get("gpu"), row.facts.get("size"))
        point = str(facts.get("commit") or "") if over == "commit" else str(sweep_of(run.path) or run.path)
        if run.outcome == "ok" and row.is_shown and point:
            start = (run.record.started_at or "")[:16].replace("T", " ")
            began[point] = min(start, began.get(point, start))
            told[kind] = told.get(kind, {*facts}) & {*facts} - ENVIRONMENT
            rows.append((point, kind, row))
    history = _by_git(began) if over == "commit" else {}
    course = sorted(began, key=lambda point: (history.get(point.rstrip("+"), 0), began[point]))
    label = {point: point if over == "commit" else began[point] for point in course}
    placed = [
        row._replace(facts={name: row.facts[name] for name in row.facts if name in told[kind]} | {over: label[point]})
        for point, kind, row in rows
    ]
    frame = make_frame(replace(group, rows=placed)) if rows else None
    frame = frame and replace(frame, course={over: list(dict.fromkeys(label.values()))})
    if frame is None or all(len(part.known) < 2 for part in _courses(frame)):
        raise UsageError(f"--over {over}: no configuration was measured at two of them; `lmbench list` shows what was")
    return frame


def _by_git(commits: Iterable[str]) -> dict[str, int]:
    """The places of commits in the history, where the repository here has them all; else none, and time decides."""
    hashes = [commit.rstrip("+") for commit in commits]
    words = ["git", "rev-list", "--no-walk=sorted", "--reverse", *filter(str.isalnum, hashes), "--"]
    try:
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {commit[:9]: place for place, commit in enumerate(listed)}


def _courses(frame: Frame) -> Iterator[Frame]:
    """The cells of each configuration, in their order."""
    for part in frame.by([name for name in frame.differing() if name not in frame.course]):
        yield part.select(part.ordered(list(frame.course)))


@lru_cache(maxsize=8)
def _changes(frame: Frame, expression: str) -> dict[int, Cell]:
    """The changes of a number's level, each at the first cell of the new level, as a fraction with its interval."""
    changes = dict[int, Cell]()
    for part in _courses(frame):
        numbers = {cell: part.numbers(cell, expression) for cell in part.known}
        means = {cell: geometric_mean(values) for cell, values in numbers.items() if min(values, default=0) > 0}
        for change in level_changes([*means.values()]) if means else ():
            low, high = change.low - 1, change.high - 1
            text = f"{change_percent(change.point - 1)} ({change_range(low, high)})"
            changes[[*means][change.index]] = Cell(change.point - 1, low=low, high=high, text=text, notes=(_NOTE,))
    return changes


def _column(name: str, field: str) -> Column:
    title = f"{name} change"
    return Column(f"{name}_change_fraction", title, lambda frame, cell: _changes(frame, field).get(cell), PERCENT, None)


_COLUMNS = (_column("step", "phases.step.mean_s"), _column("peak", "memory.run_peak_allocated_bytes"))


def _headline(frame: Frame) -> Iterator[str]:
    """Each configuration's changes, or that it has none."""
    names, (over,) = [name for name in frame.differing() if name not in frame.course], frame.course
    for part in _courses(frame):
        changes = [
            f"{column.title} {cell.text} at {part.known[place][over]}"
            for column in _COLUMNS
            for place, cell in column.of(part).items()
        ]
        none = f"no change over {len(part.known)} points{', and it takes four' if len(part.known) < 4 else ''}"
        yield ": ".join(filter(None, [part.in_words(next(iter(part.known)), names), ", ".join(changes) or none]))


def _chart(spec: ChartSpec, frame: Frame, column_of: ColumnOf) -> Chart | None:
    """A number along the commits or times with its spread, and a line where its level changes."""
    column = column_of(spec.y)
    points, known = points_of(column, frame), frame.known
    marks = [{"series": "", "x": known[n].get(spec.x), **points[n]} for n in frame.ordered([spec.x]) if n in points]
    # Not `sort`, which Vega-Lite gives up where layers have data of their own.
    x = {"type": "nominal", "scale": {"domain": [mark["x"] for mark in marks]}, "title": spec.x,
         "axis": {"labelAngle": -45}}  # fmt: skip
    y = {"title": column.heading(frame).heading, "scale": {"zero": False}}
    changes = [{"change": known[cell][spec.x]} for cell in _changes(frame, column.expression)]
    rule = {"data": {"values": changes}, "mark": "rule", "encoding": {"x": {**x, "field": "change"}, "y": None}}
    return Chart("", picture("lines", marks, [rule], x=x, y=y)) if len(marks) > 1 else None


OVER = Feature(columns=_COLUMNS, chart_kinds={"levels": ChartKind(_chart)}, headline=_headline)
