"""A configuration's figures over revisions or over time, with their change points, as tables and pictures."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import pandas as pd

from lmbench.errors import UsageError
from lmbench.records.levels import LevelChange, level_changes
from lmbench.records.load import Run, find_runs, load_known
from lmbench.records.named import sweep_of
from lmbench.records.passes import pass_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.settings import as_text, settings
from lmbench.records.statistics import geometric_mean, sample_std
from lmbench.report.answer import Answer, Cell, Chart, Column, Line, Table, Value
from lmbench.report.charts import line_chart
from lmbench.report.facts import in_words, read_facts
from lmbench.report.units import COUNT, GIB, MS, PERCENT, change_percent, change_range

Over = Literal["commit", "time"]

_FIGURES = (
    (Column("step", MS, "step_s"), "phases.step.mean_s"),
    (Column("peak", GIB, "run_peak_allocated_bytes"), "memory.run_peak_allocated_bytes"),
)
#: Settings that make no other configuration.
_HOW_LONG = ("measure.steps", "measure.min_window_s", "measure.probe_steps")
_WORDS = ("size", "mode", "batch", "context", "precision", "matmul", "compile", "attention", "optimizer")
_NOTE = (
    "a change point parts two levels at 5 % over all places, for noise that is independent from point to point; what a "
    "busy or warm machine does for days looks the same, and only both sides measured in turn can tell: "
    "lmbench compare --run CONFIG --revision A B"
)


class _Point(NamedTuple):
    """What was measured at one revision, or in one result."""

    name: str
    began: str
    records: Sequence[RunRecord]

    def values(self, field: str) -> list[float]:
        """A figure of each process that has it."""
        return [value for record in self.records if (value := value_at(record, field))]


def over_answer(paths: Iterable[str | Path], over: Over) -> Answer:
    """A section for each configuration that was measured at two revisions (or times) or more.

    Raises:
        UsageError: there is none.
    """
    loaded = (load_known(folder) for folder in find_runs(paths))
    runs = [run for run in loaded if run.outcome == "ok" and pass_of(run.record).has_timing]
    courses = [(title, _points(members, over)) for title, members in _configurations(runs)]
    sections = [_section(title, points, over) for title, points in courses if len(points) > 1]
    if not sections:
        titles = "; ".join(title for title, _ in courses) or "none"
        raise UsageError(f"--over {over}: no configuration was measured at two of them; configurations: {titles}")
    data = [[section.title, *row] for section in sections for row in section.tables[0].rows]
    columns = [Column("configuration"), *sections[0].tables[0].columns]
    note = Answer(notes=[Line("note", _NOTE)])
    return Answer(sections=[*sections, note], data=lambda: Table("over", "Over", columns, data))


def _configurations(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Runs by configuration: the device, the model's class, and every setting that all runs of that class have.

    A setting that only some have is one that the code has gained or lost meanwhile.
    """
    rows = []
    for run in runs:
        environment = run.record.environment
        device = environment.gpu.name or environment.host.cpu_model if environment else None
        rows.append({name: as_text(value) for name, value in settings(run.record).items() if name not in _HOW_LONG})
        rows[-1] |= {"device": str(device), "class": str(run.record.model.name)}
    table = pd.DataFrame(rows)
    devices = ["device"] if rows and table["device"].nunique() > 1 else []
    for _, kind in table.groupby(["device", "class"]) if rows else ():
        known = kind.dropna(axis="columns")
        differing = [*devices, *known.columns[known.nunique() > 1]]
        for _, same in known.groupby(list(known.columns)):
            record = runs[same.index[0]].record
            words = [f"{name.rpartition('.')[2]} {same[name].iloc[0]}" for name in differing]
            facts = in_words(read_facts(record, ({}, {}, record.config)), _WORDS)
            yield ", ".join(words) or facts, [runs[place] for place in same.index]


def _points(runs: Sequence[Run], over: Over) -> list[_Point]:
    """Runs by revision in the order of their commits, or by result in the order of time."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = _commit(run.record) if over == "commit" else str(sweep_of(run.path) or run.path)
        groups.setdefault(key, []).append(run)
    groups.pop("", None)
    order = _by_git([key.removesuffix("+") for key in groups]) if over == "commit" else {}
    points = []
    for key, members in groups.items():
        began = min(run.record.started_at or "" for run in members)[:16].replace("T", " ")
        name = f"{key[:9]}{'+' if key.endswith('+') else ''}" if over == "commit" else began
        place = order.get(key.removesuffix("+"), 0)
        points.append((place, began, _Point(name, began, [run.record for run in members])))
    return [point for _, _, point in sorted(points, key=lambda placed: placed[:2])]


def _commit(record: RunRecord) -> str:
    """The commit of the user's code, else of lmbench; with a plus where the tree had changes."""
    code = record.environment and record.environment.code
    revision = code and next((part for part in (code.project, code.lmbench) if part.commit), None)
    return f"{revision.commit}{'+' if revision.is_dirty else ''}" if revision else ""


def _by_git(commits: Sequence[str]) -> dict[str, int]:
    """The places of commits in the history, where the repository here has them all; else none, and time decides."""
    words = ["git", "rev-list", "--no-walk=sorted", "--reverse", *filter(str.isalnum, commits), "--"]
    try:
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {commit: place for place, commit in enumerate(listed)}


def _section(title: str, points: Sequence[_Point], over: Over) -> Answer:
    columns = [Column(over), Column("began", is_extra=True), Column("processes", COUNT, is_extra=True)]
    rows: list[list[Value | Cell]] = [[point.name, point.began, len(point.records)] for point in points]
    headline, changes = list[Line](), list[dict[int, LevelChange]]()
    for column, field in _FIGURES:
        known = [place for place, point in enumerate(points) if point.values(field)]
        found = level_changes([geometric_mean(points[place].values(field)) for place in known]) if known else []
        changes.append({known[change.index]: change for change in found})
        lines = [f"{_in_words(change)} at {points[place].name}" for place, change in changes[-1].items()]
        none = f"none over {len(known)} points{', and it takes four' if len(known) < 4 else ''}"
        headline += [Line("change", f"{column.title}: {line}") for line in lines or [none] if known]
        columns += [column, Column(f"{column.title} change", PERCENT, f"{column.title}_change_fraction")]
        for place, row in enumerate(rows):
            row += [_mean(points[place].values(field), column), _change(changes[-1].get(place))]
    caption = "mean ± std between processes; change to the level before"
    table = Table("over", f"Over {over}", columns, rows, caption)
    return Answer(headline, [table], title=title, charts=lambda: [_chart(points, changes[0], over)])


def _in_words(change: LevelChange) -> str:
    return f"{change_percent(change.point - 1)} ({change_range(change.low - 1, change.high - 1)})"


def _change(change: LevelChange | None) -> Cell:
    if change is None:
        return Cell(None, text=" ")
    return Cell(change.point - 1, low=change.low - 1, high=change.high - 1, text=_in_words(change))


def _mean(values: Sequence[float], column: Column) -> Cell:
    mean = fmean(values) if values else None
    return Cell(mean, std=sample_std(values, mean) if mean is not None and column.unit is MS else None)


def _chart(points: Sequence[_Point], changes: dict[int, LevelChange], over: Over) -> Chart:
    """The step time of each point with its spread, and the levels that the change points part."""
    column, field = _FIGURES[0]
    marks, borders = list[dict[str, Any]](), [0, *changes, len(points)]
    for place, point in enumerate(points):
        values = [value * 1e3 for value in point.values(field)]
        start = max(border for border in borders if border <= place)
        level = [value for each in points[start : borders[borders.index(start) + 1]] for value in each.values(field)]
        if values:
            mean, std = fmean(values), sample_std(values, fmean(values))
            tip = f"{point.name}: {mean:.4g} ms, {len(values)} processes"
            tip += f"; {_in_words(changes[place])}" if place in changes else ""
            whiskers = {"low": mean - std, "high": mean + std} if std else {}
            marks.append({"series": "step", "x": point.name, "y": mean, "tip": tip, **whiskers})
            marks.append({"series": "level", "x": point.name, "y": geometric_mean(level) * 1e3, "tip": tip})
    places = {"type": "nominal", "sort": [point.name for point in points], "title": over, "axis": {"labelAngle": -45}}
    spec = line_chart(marks, places, {"title": column.heading, "scale": {"zero": False}})
    return Chart(f"Step time over {over}", spec, "Whiskers: standard deviation between processes.")
