"""A configuration's figures over revisions or over time, with their change points, as tables and pictures."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from lmbench.errors import UsageError
from lmbench.records.levels import LevelChange, level_changes
from lmbench.records.load import Run, find_runs, load_run
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

#: Figures of a point, the first two with their change points.
_FIGURES = (
    (Column("step", MS, "step_s"), "phases.step.mean_s"),
    (Column("peak", GIB, "run_peak_allocated_bytes"), "memory.run_peak_allocated_bytes"),
    (Column("tokens/s", COUNT, "tokens_per_s"), "throughput.tokens_per_s"),
)
_WORDS = ("size", "mode", "batch", "context", "precision", "matmul", "compile", "attention", "optimizer")
_NOTE = (
    "a change point parts two levels at 5 % over all places, for noise that is independent from point to point; what a "
    "busy or warm machine does for days looks the same, and only both sides measured in turn can tell: "
    "lmbench compare --run CONFIG --revision A B"
)


class _Point(NamedTuple):
    """What was measured at one revision, or in one result: its name, when it began, and its runs."""

    name: str
    began: str
    records: Sequence[RunRecord]

    def values(self, field: str) -> list[float]:
        return [value for record in self.records if (value := value_at(record, field)) is not None and value > 0]


def over_answer(paths: Iterable[str | Path], over: Over) -> Answer:
    """A section for each configuration that was measured at two revisions (or times) or more.

    Raises:
        UsageError: there is none.
    """
    runs = [run for folder in find_runs(paths) if (run := _timing_run(folder)) is not None]
    sections = []
    for title, members in _configurations(runs):
        points = _points(members, over)
        if len(points) > 1:
            sections.append(_section(title, points, over))
    if not sections:
        what = "revisions" if over == "commit" else "times"
        raise UsageError(f"--over {over}: no configuration was measured at two {what}; give results of several")
    data = [[section.title, *row] for section in sections for row in section.tables[0].rows]
    columns = [Column("configuration"), *sections[0].tables[0].columns]
    return Answer(
        sections=[*sections, Answer(notes=[Line("note", _NOTE)])], data=lambda: Table("over", "Over", columns, data)
    )


def _timing_run(folder: Path) -> Run | None:
    try:
        run = load_run(folder, with_steps=False)
    except UsageError:
        return None
    return run if run.outcome == "ok" and pass_of(run.record).has_timing else None


def _configurations(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs by configuration: what device, which model, and every setting that all runs of that model have.

    A setting that only some have is one that the code has gained or lost meanwhile.
    """
    kinds: dict[tuple[str | None, str | None], list[tuple[Run, dict[str, Any]]]] = {}
    for run in runs:
        environment = run.record.environment
        device = environment.gpu.name or environment.host.cpu_model if environment else None
        kinds.setdefault((device, run.record.model.name), []).append((run, settings(run.record)))
    configurations = []
    devices = {device for device, _ in kinds}
    for (device, _), members in kinds.items():
        shared = [name for name in members[0][1] if all(name in known for _, known in members)]
        by_values: dict[tuple[str, ...], list[Run]] = {}
        for run, known in members:
            by_values.setdefault(tuple(as_text(known[name]) for name in shared), []).append(run)
        for values, group in by_values.items():
            axes = list(zip(*by_values, strict=True))
            differing = [
                f"{name.rpartition('.')[2]} {value}"
                for name, value, axis in zip(shared, values, axes, strict=True)
                if len(set(axis)) > 1
            ]
            record = group[0].record
            words = in_words(read_facts(record, ({}, {}, record.config)), _WORDS)
            where = [str(device)] if len(devices) > 1 else []
            configurations.append((", ".join([*where, *(differing or [words])]), group))
    return configurations


def _points(runs: Sequence[Run], over: Over) -> list[_Point]:
    """Runs by revision in the order of their commits, or by result in the order of time."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_commit(run.record) if over == "commit" else str(sweep_of(run.path) or run.path), []).append(
            run
        )
    points = []
    for key, members in groups.items():
        began = min(run.record.started_at or "" for run in members)
        name = key[:9] + "+" * key.endswith("+") if over == "commit" else began[:16].replace("T", " ")
        if key:
            points.append((key, _Point(name, began, [run.record for run in members])))
    order = _by_git([key.removesuffix("+") for key, _ in points]) if over == "commit" else {}
    points.sort(key=lambda item: (order.get(item[0].removesuffix("+"), 0), item[1].began))
    return [point for _, point in points]


def _commit(record: RunRecord) -> str:
    """The commit of the user's code, else of lmbench; with a plus where the tree had changes."""
    code = record.environment and record.environment.code
    revision = code and next((part for part in (code.project, code.lmbench) if part.commit), None)
    return f"{revision.commit}{'+' if revision.is_dirty else ''}" if revision else ""


def _by_git(commits: Sequence[str]) -> dict[str, int]:
    """The places of commits in the history, where the repository here has them all; else none, and time decides."""
    words = ["git", "rev-list", "--no-walk=sorted", "--reverse", *commits, "--"]
    if not all(commit.isalnum() for commit in commits):
        return {}
    try:
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {commit: place for place, commit in enumerate(listed)}


def _section(title: str, points: Sequence[_Point], over: Over) -> Answer:
    (step, _), (peak, _), (rate, _) = _FIGURES
    columns = [
        Column(over, name=over),
        *([Column("began", is_extra=True)] if over == "commit" else []),
        Column("processes", COUNT, is_extra=True),
        step,
        Column("change", PERCENT, "step_change_fraction"),
        peak,
        Column("peak change", PERCENT, "peak_change_fraction", is_extra=True),
        rate,
    ]
    headline, changes = [], []
    for column, field in _FIGURES[:2]:
        known = [(place, point.values(field)) for place, point in enumerate(points) if point.values(field)]
        found = level_changes([geometric_mean(values) for _, values in known])
        changes.append({known[change.index][0]: change for change in found})
        for change in found:
            point = points[known[change.index][0]]
            headline.append(Line("change", f"{column.title}: {_in_words(change)} at {point.name} ({point.began[:10]})"))
        if known and not found:
            headline.append(Line("change", f"{column.title}: none over {len(known)} points"))
    rows = list[list[Value | Cell]]()
    for place, point in enumerate(points):
        step_s, peak_bytes, tokens_per_s = (_cell(column, point.values(field)) for column, field in _FIGURES)
        step_change, peak_change = (_change(at.get(place)) for at in changes)
        began = [point.began[:10]] if over == "commit" else []
        figures = [step_s, step_change, peak_bytes, peak_change, tokens_per_s]
        rows.append([point.name, *began, len(point.records), *figures])
    table = Table(
        "over", f"Over {over}", columns, rows, caption="mean ± std between processes; change to the level before"
    )
    return Answer(headline, [table], title=title, charts=lambda: [_chart(points, changes[0], over)])


def _in_words(change: LevelChange) -> str:
    return f"{change_percent(change.point - 1)} ({change_range(change.low - 1, change.high - 1)})"


def _change(change: LevelChange | None) -> Cell:
    if change is None:
        return Cell(None, text=" ")
    return Cell(change.point - 1, low=change.low - 1, high=change.high - 1, text=_in_words(change))


def _cell(column: Column, values: Sequence[float]) -> Cell:
    if not values:
        return Cell(None)
    mean = fmean(values)
    return Cell(mean, std=sample_std(values, mean) if column.unit is MS else None)


def _chart(points: Sequence[_Point], changes: dict[int, LevelChange], over: Over) -> Chart:
    """The step time of each point with its spread, and the levels that the change points part."""
    column, field = _FIGURES[0]
    marks = []
    for place, point in enumerate(points):
        if values := point.values(field):
            mean, std = fmean(values) * 1e3, (sample_std(values, fmean(values)) or 0.0) * 1e3
            tip = f"{point.name}: {mean:.4g} ms, {len(values)} processes"
            tip += f"; {_in_words(changes[place])}" if place in changes else ""
            marks.append({"series": "step", "x": point.name, "y": mean, "tip": tip})
            marks[-1] |= {"low": mean - std, "high": mean + std} if std else {}
    for start, end in pairwise([0, *sorted(changes), len(points)]):
        level = [value for point in points[start:end] for value in point.values(field)]
        marks += [
            {"series": "level", "x": point.name, "y": geometric_mean(level) * 1e3, "tip": "the level"}
            for point in points[start:end]
            if level
        ]
    places = {"type": "nominal", "sort": [point.name for point in points], "title": over, "axis": {"labelAngle": -45}}
    spec = line_chart(marks, places, {"title": column.heading, "scale": {"zero": False}})
    return Chart(f"Step time over {over}", spec, "Whiskers: standard deviation between processes.")
