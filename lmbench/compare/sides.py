"""The two sides of a comparison: from what was given to runs, to samples, and to the cells where they meet; and what of
each run is compared, step time first, then phases and memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from lmbench.errors import UsageError, suggest
from lmbench.records.load import Run, find_runs, load_known
from lmbench.records.measured import PhaseSummary
from lmbench.records.passes import pass_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.settings import as_text, settings
from lmbench.records.store import RUNS_FOLDER
from lmbench.records.vocabulary import DAMAGED, PHASES, SIDE

#: What a change up or down is called: of times, and of anything else.
TIME_WORDS = ("slower", "faster")
SIZE_WORDS = ("larger", "smaller")


class Metric(NamedTuple):
    """A figure of one run: its name in a comparison, its title in tables, and the record's field that it is."""

    name: str
    title: str
    field: str

    @property
    def unit(self) -> str:
        return fields("run")[self.field].unit

    def of(self, record: RunRecord) -> float | None:
        """The run's value, None where it has none or none above 0 (whose logarithm a ratio takes)."""
        value = _SAMPLES[self.name](record) if self.name in _SAMPLES else value_at(record, self.field)
        return value if value is not None and 0 < value < math.inf else None

    def of_all(self, runs: Sequence[Run]) -> list[float]:
        """The values of all runs, none where one has none."""
        values = [value for run in runs if (value := self.of(run.record)) is not None]
        return values if len(values) == len(runs) else []


STEP = Metric("step_s", "step", "phases.step.median_s")
MEAN_STEP = Metric("mean_step_s", "mean step", "window.wall_s")
METRICS = (
    STEP,
    MEAN_STEP,
    *(Metric(f"{phase}_s", phase, f"phases.{phase}.mean_s") for phase in PHASES),
    Metric("steady_peak_allocated_bytes", "steady peak", "memory.steady_peak_allocated_bytes"),
    Metric("run_peak_allocated_bytes", "run peak", "memory.run_peak_allocated_bytes"),
    Metric("run_peak_reserved_bytes", "peak reserved", "memory.run_peak_reserved_bytes"),
    Metric("host_peak_rss_bytes", "host peak", "memory.host_peak_rss_bytes"),
)

SAMPLE = (
    "one process is one sample: the trimean of its steps, (lower quartile + 2 medians + upper quartile) / 4, which a "
    "few disturbed steps do not move; A and B are geometric means of these. `mean step` is the window's wall time "
    "divided by its steps: where it alone changed, some steps take longer"
)


def typical_step_s(record: RunRecord) -> float | None:
    """Seconds of a typical step of this process: the trimean (Tukey, Exploratory Data Analysis, 1977) of the window's
    steps, their mean where the quartiles were not recorded. None for a window without steps."""
    step = record.phases.step or PhaseSummary()
    if step.p25_s is None or step.median_s is None or step.p75_s is None:
        return mean_step_s(record)
    return (step.p25_s + 2 * step.median_s + step.p75_s) / 4


def mean_step_s(record: RunRecord) -> float | None:
    """Seconds a step of this process: `window.wall_s / window.steps`, no step trimmed or dropped.

    Skipped and short steps take another time and are in no statistic; where the window has some it is the mean of the
    others. None for a window without steps.
    """
    window, step = record.window, record.phases.step or PhaseSummary()
    if not window.wall_s or not window.steps or min(window.wall_s, window.steps) < 0:
        return None
    if window.skipped_count or window.short_count:
        return step.mean_s
    return window.wall_s / window.steps


_SAMPLES = {STEP.name: typical_step_s, MEAN_STEP.name: mean_step_s}


class LeftOut(Struct):
    """A run that is no sample: how it ended and, in one line, why it does not count."""

    path: str
    outcome: str
    reason: str


class Side(NamedTuple):
    """What was found: `runs` with a readable record of the step's own speed, whatever their outcome; `left_out` the
    others."""

    given: str
    runs: list[Run]
    left_out: list[LeftOut]

    def figures(self) -> dict[str, object]:
        return {"given": self.given, "run_count": len(self.runs) + len(self.left_out), "left_out": self.left_out}


def leave_out(run: Run, reason: str) -> LeftOut:
    return LeftOut(str(run.path), run.outcome, reason)


def read_side(given: str) -> Side:
    """Read what `given` names: a run, a folder of runs, or a sweep, each with `@AXIS=VALUE[,AXIS=VALUE...]` to take
    only those cells.

    Raises:
        UsageError: it names nothing, or no result that can be compared.
    """
    name, mark, selector = given.rpartition("@")
    if not mark or Path(given).exists():
        name, selector = given, ""
    pairs = [pair.partition("=") for pair in selector.split(",") if selector]
    if not all(name and axis and equals for axis, equals, _ in pairs):
        raise UsageError(f"{given!r}: after '@' comes AXIS=VALUE, more of them with commas between")
    side = Side(given, [], [])
    for run in map(load_known, find_runs([Path(name)])):
        look = pass_of(run.record)
        if run.outcome == DAMAGED:
            side.left_out.append(leave_out(run, str(run.damage)))
        elif not look.has_timing:
            side.left_out.append(leave_out(run, f"{look.label}: its step times are in no comparison"))
        else:
            side.runs.append(run)
    if not side.runs:
        raise UsageError(f"{given!r} has nothing to compare: {side.left_out[0].reason}")
    for axis, _, value in pairs:
        values = sorted({_on_axis(run, axis) for run in side.runs})
        known = set[str]().union(*map(_places, side.runs))
        side.runs[:] = [run for run in side.runs if _on_axis(run, axis) == value]
        if not side.runs:
            near = "" if axis in known else suggest(axis, known)
            raise UsageError(f"no run of {name!r} is {selector}: {axis} has {', '.join(values)}{near}")
    return side


def _axes(record: RunRecord) -> dict[str, Any] | None:
    """The run's place in its sweep, its environment with it; None for a run of no sweep."""
    sweep = record.sweep
    if sweep is None or sweep.axes is None:
        return None
    return sweep.axes if sweep.environment is None else {**sweep.axes, "environment": sweep.environment}


def _places(run: Run) -> dict[str, Any]:
    return settings(run.record) | (_axes(run.record) or {})


def _on_axis(run: Run, name: str) -> str:
    """A run's value on an axis: of its sweep, else of its settings or its record."""
    return as_text(_places(run).get(name, value_at(run.record, name)))


def home_of(runs: Sequence[Run]) -> Path:
    """The closest folder above all of these runs, a sweep's where they are of one."""
    shared = Path(os.path.commonpath([run.path.parent for run in runs]))
    return shared.parent if shared.name == RUNS_FOLDER else shared


def process_of(run: Run) -> tuple[object, ...]:
    """Which process made a run; a copy of a result has the same one."""
    record = run.record
    process = (record.boot_id, record.pid, record.process_start_s)
    return process if None not in process else (record.run_id, record.started_at, *process)


def split_usable(runs: Iterable[Run], takes_failed: bool = True) -> tuple[list[Run], list[LeftOut]]:
    """The runs that are samples, each of a process of its own, and why the others are not; without `takes_failed` a
    run whose guard failed is none."""
    usable: dict[tuple[object, ...], Run] = {}
    left_out = []
    for run in sorted(runs, key=_start):
        error, same = run.record.error, usable.get(process_of(run))
        failed = next((guard for guard in run.record.guards if guard.status == "fail"), None)
        if run.outcome != "ok":
            reason = f"outcome {run.outcome}" + (f" in {error.phase}" if error and error.phase else "")
        elif STEP.of(run.record) is None:
            reason = "empty window: no step was measured"
        elif same is not None:
            reason = f"the same process as {same.run_id}: one process is one sample"
        elif failed and not takes_failed:
            reason = f"guard {failed.name} failed: {failed.message}"
        else:
            usable[process_of(run)] = run
            continue
        left_out.append(leave_out(run, reason))
    return list(usable.values()), left_out


def _start(run: Run) -> tuple[str, str]:
    return run.record.started_at or "", str(run.path)


def by_round(runs: Iterable[Run]) -> dict[tuple[int, str], Run]:
    """Runs by round and host: a round that was gone on with elsewhere makes no pair."""
    return {
        (
            value_at(run.record, "sweep.repeat") or 0,
            value_at(run.record, "environment.host.hostname") or "",
        ): run
        for run in runs
    }


def are_rounds(a: Sequence[Run], b: Sequence[Run]) -> bool:
    """Whether both sides are those of one sweep of two sides (`compare --run`), measured in rounds.

    Repeats of other sweeps are not paired: with few of them the degrees of freedom that pairing takes are worth more.
    """
    places = [
        {(run.path.parent, as_text(value_at(run.record, f"sweep.axes.{SIDE}"))) for run in side} for side in (a, b)
    ]
    folder = a[0].path.parent
    return len(places[0]) == len(places[1]) == 1 and places[0] | places[1] == {(folder, "A"), (folder, "B")}


def join_cells(a: Sequence[Run], b: Sequence[Run]) -> dict[str, tuple[list[Run], list[Run]]]:
    """Runs of both sides by cell, in the order in which the cells were first measured; a cell is named by what differs
    between cells, "" where there is one.

    A cell's identity are the axes of its sweep (with its environment) where every run has some, else its settings.
    What is constant on each side and differs between them is the thing compared, and separates no cells: so two
    single runs, two sweeps over the same grid, or two columns of one grid meet.
    """
    runs, first_b = [*a, *b], len(a)
    places = [_axes(run.record) for run in runs]
    identities = [place or {} for place in places] if None not in places else [settings(run.record) for run in runs]
    columns = {
        name: [as_text(known.get(name, "(none)")) for known in identities] for known in identities for name in known
    }
    varying = {}
    for name, values in columns.items():
        sides = {*values[:first_b]}, {*values[first_b:]}
        if len(sides[0] | sides[1]) > 1 and [*map(len, sides)] != [1, 1]:
            varying[name] = values
    lasts = [name.rpartition(".")[2] for name in varying]
    titles = {name: last if lasts.count(last) == 1 else name for name, last in zip(varying, lasts, strict=True)}
    cells: dict[str, tuple[list[Run], list[Run]]] = {}
    for index, run in sorted(enumerate(runs), key=lambda member: _start(member[1])):
        name = ", ".join(f"{titles[axis]} {values[index]}" for axis, values in varying.items())
        cells.setdefault(name, ([], []))[index >= first_b].append(run)
    return cells
