"""The two sides of a comparison: their runs, the samples among these, and the cells that both have.

`METRICS` are the figures of a run that are compared: step times first, then phases and memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from lmbench.errors import UsageError, suggest
from lmbench.records.load import StoredRun, find_runs, load_known, process_of
from lmbench.records.passes import pass_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.settings import as_text, settings
from lmbench.records.statistics import Floats, logs_of, trimean
from lmbench.records.store import RUNS_FOLDER
from lmbench.records.vocabulary import DAMAGED, PHASES, SIDE, Values
from lmbench.report.frame import Expression, number_of

Runs = Sequence[StoredRun]
#: The runs of A, and those of B.
BothRuns = tuple[list[StoredRun], list[StoredRun]]

#: The words for a change up and a change down, of a time and of any other figure.
TIME_WORDS = ("slower", "faster")
SIZE_WORDS = ("larger", "smaller")


def typical_step_s(record: RunRecord) -> float | None:
    """Seconds of a typical step of this process: the trimean of the window's steps, or their mean where no quartiles
    were recorded. None for a window without steps."""
    step = record.step
    if step.p25_s is None or step.median_s is None or step.p75_s is None:
        return mean_step_s(record)
    return trimean(step.p25_s, step.median_s, step.p75_s)


def mean_step_s(record: RunRecord) -> float | None:
    """Seconds of the mean step of this process: `window.wall_s / window.steps`, no step trimmed or dropped.

    Where the window has skipped or short steps, which no statistic includes, it is the mean of the other steps. None
    for a window without steps.
    """
    window, step = record.window, record.step
    if not window.wall_s or not window.steps or min(window.wall_s, window.steps) < 0:
        return None
    if window.skipped_count or window.short_count:
        return step.mean_s
    return window.wall_s / window.steps


class Metric(NamedTuple):
    """A figure of one run: its name in a comparison, which ends in its unit, its title in tables, and its number."""

    name: str
    title: str
    expression: Expression

    @property
    def unit(self) -> str:
        return self.name.rpartition("_")[2]

    def of(self, record: RunRecord) -> float | None:
        """The run's value; None where it has none, or one that is infinite or not above 0 and so has no logarithm."""
        value = number_of(record, self.expression)
        return value if value is not None and 0 < value < math.inf else None

    def difference(self, a: StoredRun, b: StoredRun) -> float:
        """log(B / A) of the runs of a round; the median over turns where both processes took turns."""
        if self.name == STEP.name and (turns := turn_differences(a, b)).size:
            return float(np.median(turns))
        values = [self.of(run.record) or math.nan for run in (b, a)]
        return float(np.subtract(*logs_of(values)))

    def of_all(self, runs: Runs) -> list[float]:
        """The values of all runs; empty where any run has no value."""
        values = [value for run in runs if (value := self.of(run.record)) is not None]
        return values if len(values) == len(runs) else []


STEP = Metric("step_s", "step", typical_step_s)
MEAN_STEP = Metric("mean_step_s", "mean step", mean_step_s)
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


class LeftOut(Struct):
    """A run that does not count as a sample: its outcome, and the reason in one line."""

    path: str
    outcome: str
    reason: str


class Side(NamedTuple):
    """One side of a comparison.

    `runs` have a readable record with undisturbed step times, whatever their outcome; `left_out` are all others.
    `given` is the name of the side on the command line.
    """

    given: str
    runs: list[StoredRun]
    left_out: list[LeftOut]

    def figures(self) -> dict[str, object]:
        return {"given": self.given, "run_count": len(self.runs) + len(self.left_out), "left_out": self.left_out}


def read_side(text: str) -> Side:
    """Read the runs of a side from a run, a folder of runs or a sweep. `@AXIS=VALUE[,AXIS=VALUE...]` selects cells.

    Raises:
        UsageError: the name is that of no result, or of none that can be compared.
    """
    name, mark, selector = text.rpartition("@")
    if not mark or os.path.exists(text):  # noqa: PTH110 (Path.exists raises on a name that is too long)
        name, selector = text, ""
    pairs = [pair.partition("=") for pair in selector.split(",") if selector]
    if not all(name and axis and equals for axis, equals, _ in pairs):
        raise UsageError(f"{text!r}: after '@' comes AXIS=VALUE, more of them with commas between")
    side = Side(text, [], [])
    for run in map(load_known, find_runs([Path(name)])):
        recording = pass_of(run.record)
        if run.outcome == DAMAGED:
            reason = str(run.damage)
        elif not recording.has_timing:
            reason = f"{recording.label}: its step times are in no comparison"
        else:
            side.runs.append(run)
            continue
        side.left_out.append(LeftOut(str(run.path), run.outcome, reason))
    if not side.runs:
        raise UsageError(f"{text!r} has nothing to compare: {side.left_out[0].reason}")
    for axis, _, value in pairs:
        values = sorted({_on_axis(run, axis) for run in side.runs})
        axes = set[str]().union(*map(_settings_and_axes, side.runs))
        side.runs[:] = [run for run in side.runs if _on_axis(run, axis) == value]
        if not side.runs:
            suggestion = "" if axis in axes else suggest(axis, axes)
            raise UsageError(f"no run of {name!r} is {selector}: {axis} has {', '.join(values)}{suggestion}")
    return side


def _settings_and_axes(run: StoredRun) -> Values:
    return settings(run.record) | run.record.axes


def _on_axis(run: StoredRun, name: str) -> str:
    """A run's value on an axis of its sweep, else of a setting or a field of its record with this name."""
    return as_text(_settings_and_axes(run).get(name, value_at(run.record, name)))


def home_of(runs: Runs) -> Path:
    """The closest folder above all of these runs; the folder of the sweep for runs of one sweep."""
    shared = Path(os.path.commonpath([run.path.parent for run in runs]))
    return shared.parent if shared.name == RUNS_FOLDER else shared


def split_usable(runs: Runs, takes_failed: bool = True) -> tuple[list[StoredRun], list[LeftOut]]:
    """Split runs into samples, one for each process, and the others with their reasons.

    Without `takes_failed`, a run with a failed guard is not a sample.
    """
    usable: dict[tuple[object, ...], StoredRun] = {}
    left_out = []
    for run in sorted(runs, key=_start):
        same = usable.get(process_of(run))
        failed = next((guard for guard in run.record.guards if guard.status == "fail"), None)
        if run.outcome != "ok":
            reason = f"outcome {run.record.failure.ending(run.outcome)}"
        elif STEP.of(run.record) is None:
            reason = "empty window: no step was measured"
        elif same is not None:
            reason = f"the same process as {same.run_id}: one process is one sample"
        elif failed and not takes_failed:
            reason = f"guard {failed.name} failed: {failed.message}"
        else:
            usable[process_of(run)] = run
            continue
        left_out.append(LeftOut(str(run.path), run.outcome, reason))
    return list(usable.values()), left_out


def _start(run: StoredRun) -> tuple[str, str]:
    return run.record.started_at or "", str(run.path)


def by_round(runs: Runs) -> dict[tuple[int, str], StoredRun]:
    """Runs by round and host: two runs of a round that was continued on another host are no pair."""
    rounds = {}
    for run in runs:
        rounds[run.record.place.repeat or 0, run.record.environment.host.hostname or ""] = run
    return rounds


def paired(a: Runs, b: Runs) -> BothRuns:
    """The runs of both sides that have a partner in their round, in the order of rounds."""
    rounds_a, rounds_b = by_round(a), by_round(b)
    shared = sorted(rounds_a.keys() & rounds_b.keys())
    return [rounds_a[key] for key in shared], [rounds_b[key] for key in shared]


def turn_differences(a: StoredRun, b: StoredRun) -> Floats:
    """log(B / A) of each turn of a round, empty where its processes took no turns."""
    turns_a, turns_b = (run.record.window.turn_steps_s or [] for run in (a, b))
    count = min(len(turns_a), len(turns_b))
    return logs_of(turns_b[:count]) - logs_of(turns_a[:count]) if count else np.array([])


def share_servers(runs: Runs) -> bool:
    """Whether one server forked runs of several rounds, so that its address layout may outlive a round."""
    pids = [run.record.place.server_pid for run in runs]
    return None not in pids and len({*pids}) < len(pids)


def are_rounds(a: Runs, b: Runs) -> bool:
    """Whether A and B are the two sides of one `compare --run`, measured in rounds whose order was drawn by coin.

    Repeats of other sweeps are not paired: pairing halves the degrees of freedom, which few repeats cannot spare.
    """
    folders = {run.path.parent for run in (*a, *b)}
    names = [{as_text(run.record.axes.get(SIDE)) for run in side} for side in (a, b)]
    has_order = all(run.record.place.position is not None for run in (*a, *b))
    return has_order and len(folders) == 1 and names in ([{"A"}, {"B"}], [{"B"}, {"A"}])


def join_cells(a: Runs, b: Runs) -> dict[str, BothRuns]:
    """Runs of both sides by the name of their cell, in the order in which cells were first measured.

    A cell is named by the values in which cells differ; a single cell is named "". The axes of the sweep, with its
    environment, identify a cell where every run has axes; else all settings do. A value that is constant on each side
    and differs between the sides is what is compared, and does not separate cells: so two single runs, two sweeps over
    one grid, and two columns of a grid all have cells in common.
    """
    runs, first_b = [*a, *b], len(a)
    axes = [run.record.place.axes for run in runs]
    identities = [settings(run.record) for run in runs] if None in axes else [values or {} for values in axes]
    names = dict.fromkeys(name for identity in identities for name in identity)
    varying = {}
    for name in names:
        values = [as_text(identity.get(name, "(none)")) for identity in identities]
        values_a, values_b = {*values[:first_b]}, {*values[first_b:]}
        is_constant_on_each = len(values_a) == len(values_b) == 1
        if len(values_a | values_b) > 1 and not is_constant_on_each:
            varying[name] = values
    last_parts = [name.rpartition(".")[2] for name in varying]
    titles = {
        name: last if last_parts.count(last) == 1 else name for name, last in zip(varying, last_parts, strict=True)
    }
    cells: dict[str, BothRuns] = {}
    for index, run in sorted(enumerate(runs), key=lambda item: _start(item[1])):
        name = ", ".join(f"{titles[axis]} {values[index]}" for axis, values in varying.items())
        cells.setdefault(name, ([], []))[index >= first_b].append(run)
    return cells
