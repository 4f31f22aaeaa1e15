"""`lmbench report --over commit` or `--over time`: the figures of each configuration over commits or over time, and the
points where their level changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from lmbench.configs import parse_yaml
from lmbench.errors import UsageError
from lmbench.programs import git_output
from lmbench.records.named import sweep_of
from lmbench.records.statistics import geometric_mean, have_logs, level_changes
from lmbench.records.vocabulary import Values
from lmbench.report import shipped
from lmbench.report.answer import Cell, listed
from lmbench.report.columns import Quantity
from lmbench.report.facts import ENVIRONMENT, environment_of, read_facts
from lmbench.report.frame import Expression, Frame, MeasuredCell, make_frame
from lmbench.report.groups import Group, ReportedRun
from lmbench.report.units import PERCENT, change_percent, change_range
from lmbench.report.view import Feature

Over = Literal["commit", "time"]

#: Fewer points show no change (`level_changes`).
_LEAST_POINTS = 4

_NOTE = (
    "a change point parts two levels at 5 % over all places, for noise that is independent from point to point; what a "
    "busy or warm machine does for days looks the same, and only both sides measured in turn can tell: "
    "lmbench compare --run CONFIG --revision A B"
)


def over_view(over: Over) -> Values:
    """The view for `--over`: step time and peak memory with their changes."""
    view: Values = parse_yaml(shipped("over.yaml").replace("OVER", over), "over.yaml")
    return view


def frame_over(group: Group, over: Over) -> Frame:
    """The ok runs of a group outside sweeps, by configuration and point; `course` lists the points in order.

    A point is a commit, or the start of a sweep or single run. A setting that only some runs of a size and GPU have
    does not separate configurations, since the code gained or lost it meanwhile. The environment of a sweep separates
    them, unless environments are revisions and the points are commits.

    Raises:
        UsageError: no configuration was measured at two points.
    """
    runs, starts, settings = list[tuple[str, Any, ReportedRun]](), dict[str, str](), dict[Any, set[str]]()
    environments = defaultdict[Any, set[Any]](set)
    for run in group.runs:
        facts, kind = run.facts, (run.facts.get("gpu"), run.facts.get("size"))
        home = sweep_of(run.path)
        point = str(facts.get("commit") or "") if over == "commit" else str(home or run.path)
        if run.outcome == "ok" and run.is_shown and point:
            start = (run.record.started_at or "")[:16].replace("T", " ")
            starts[point] = min(start, starts.get(point, start))
            environments[point, home].add(facts.get("environment"))
            names = facts.keys() - ENVIRONMENT - {"environment"}
            settings[kind] = settings.get(kind, names) & names
            runs.append((point, kind, run))
    history = _git_order(starts) if over == "commit" else {}
    points = sorted(starts, key=lambda point: (history.get(point.rstrip("+"), 0), starts[point]))
    label = {point: point if over == "commit" else starts[point] for point in points}
    are_revisions = over == "commit" and all(len(names) == 1 for names in environments.values())
    always = set[str]() if are_revisions else {"environment"}
    followed = []
    for point, kind, run in runs:
        names = settings[kind] | always
        facts = {name: fact for name, fact in run.facts.items() if name in names}
        followed.append(replace(run, facts=facts | {over: label[point]}))
    frame = replace(make_frame(replace(group, runs=followed)), course={over: list(dict.fromkeys(label.values()))})
    if all(len(part.cells) < 2 for part in _courses(frame)):
        raise UsageError(f"--over {over}: no configuration was measured at two of them; `lmbench list` shows what was")
    return frame


def _git_order(commits: Iterable[str]) -> dict[str, int]:
    """The positions of commits in the history of the repository here; empty if it lacks one, so that time decides."""
    hashes = filter(str.isalnum, (commit.rstrip("+") for commit in commits))
    ordered = git_output(Path.cwd(), "rev-list", "--topo-order", "--reverse", *hashes, "--") or ""
    return {commit[:9]: position for position, commit in enumerate(ordered.split())}


def _courses(frame: Frame) -> Iterator[Frame]:
    """The cells of each configuration, in the order of the course."""
    for part in frame.by(frame.differing(frame.course)):
        yield part.select(part.ordered(list(frame.course)))


@lru_cache(maxsize=8)
def _changes(frame: Frame, expression: Expression) -> dict[MeasuredCell, Cell]:
    """The level changes of a number as fractions with intervals, each at the first cell of the new level.

    Where the host, torch or another fact of the environment changed at this cell too, the text has both values: that
    may be the whole change.
    """
    changes = {}
    for part in _courses(frame):
        numbers = {cell: cell.numbers(expression) for cell in part.cells}
        means = {cell: geometric_mean(values) for cell, values in numbers.items() if have_logs(values)}
        for change in level_changes([*means.values()]) if means else ():
            low, high = change.low - 1, change.high - 1
            near = [*means][change.index - 1 : change.index + 1]
            old, new = (environment_of(read_facts(run.record) for run in cell.samples) for cell in near)
            moved = [
                f"{name} {listed(*before)} -> {listed(*new[name])}"
                for name, before in old.items()
                if before and new[name] and before != new[name] and name != "commit"
            ]
            so_far = change.index == len(means) - 1 and "one point so far"
            text = f"{change_percent(change.point - 1)} ({listed(change_range(low, high), *moved, so_far)})"
            changes[near[1]] = Cell(change.point - 1, low=low, high=high, text=text, notes=(_NOTE,))
    return changes


def _column(name: str, field: Expression) -> Quantity:
    title = f"{name} change"
    return Quantity(
        f"{name}_change_fraction", title, lambda frame, cell: _changes(frame, field).get(cell), PERCENT, None
    )


_COLUMNS = (
    _column("step", "phases.step.mean_s"),
    # On a CPU the host's peak is the only one.
    _column("peak", lambda run: run.memory.run_peak_allocated_bytes or run.memory.host_peak_rss_bytes),
)


def _headline(frame: Frame) -> Iterator[str]:
    """For each configuration its changes, or that it has none; a line for all those with too few points."""
    names, (over,) = frame.differing(frame.course), frame.course
    parts = [*_courses(frame)]
    judged = [part for part in parts if len(part.cells) >= _LEAST_POINTS]
    if short := len(parts) - len(judged):
        yield f"{short} of {len(parts)} configurations have fewer than the {_LEAST_POINTS} points that a change takes"
    for part in judged:
        changes = [
            f"{column.title} {change.text} at {cell.facts[over]}"
            for column in _COLUMNS
            for cell, change in column.of(part).items()
        ]
        text = ", ".join(changes) or f"no change over {len(part.cells)} points"
        yield listed(part.cells[0].describe(names), text, separator=": ")


OVER = Feature(columns=_COLUMNS, headline=_headline)
