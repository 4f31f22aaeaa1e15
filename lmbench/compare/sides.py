"""The two sides of a comparison: from what was given to runs, to samples, and to the cells where they meet; and what of
each run is compared, step time first, then phases and memory."""

from __future__ import annotations

import glob
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.records.load import Run, find_runs, load_run
from lmbench.records.passes import pass_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.settings import as_text, settings
from lmbench.records.store import RUNS_FOLDER
from lmbench.records.vocabulary import DAMAGED, PHASES, SIDE

#: What a change up or down is called: of times, and of anything else.
TIME_WORDS = ("slower", "faster")
SIZE_WORDS = ("larger", "smaller")


@dataclass(frozen=True)
class Metric:
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
    step = record.phases.step
    if step is None or step.p25_s is None or step.median_s is None or step.p75_s is None:
        return mean_step_s(record)
    return (step.p25_s + 2 * step.median_s + step.p75_s) / 4


def mean_step_s(record: RunRecord) -> float | None:
    """Seconds a step of this process: `window.wall_s / window.steps`, no step trimmed or dropped.

    Skipped and short steps take another time and are in no statistic; where the window has some it is the mean of the
    others. None for a window without steps.
    """
    window, step = record.window, record.phases.step
    if not window.wall_s or not window.steps or min(window.wall_s, window.steps) < 0:
        return None
    if window.skipped_count or window.short_count:
        return step.mean_s if step else None
    return window.wall_s / window.steps


_SAMPLES = {STEP.name: typical_step_s, MEAN_STEP.name: mean_step_s}


@dataclass(frozen=True)
class LeftOut:
    """A run that is no sample: how it ended and, in one line, why it does not count."""

    path: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class Side:
    """What was found: `runs` with a readable record of the step's own speed, whatever their outcome; `left_out` the
    others."""

    given: str
    runs: Sequence[Run]
    left_out: Sequence[LeftOut]


@dataclass
class Cell:
    """Runs of A and of B at one point: `name` tells it by what differs between cells, empty where there is one."""

    name: str
    runs: tuple[list[Run], list[Run]] = field(default_factory=lambda: ([], []))


def read_side(given: str) -> Side:
    """Read what `given` names: a run, a folder of runs, a sweep, or a sweep's cell (`SWEEP/CELL`, which stands for its
    repeats `SWEEP/runs/CELL-r*`), each with `@AXIS=VALUE[,AXIS=VALUE...]` to take only those cells.

    Raises:
        UsageError: it names nothing, no result, or only results of another schema version.
    """
    path, mark, selector = given.rpartition("@")
    if not mark or Path(given).exists():
        path, selector = given, ""
    pairs = [pair.partition("=") for pair in selector.split(",") if selector]
    if not all(path and name and equals for name, equals, _ in pairs):
        raise UsageError(f"{given!r}: after '@' comes AXIS=VALUE, more of them with commas between")
    readable, left_out, refused = list[Run](), list[LeftOut](), None
    for folder in _folders(Path(path)):
        try:
            run = load_run(folder, with_steps=False)
        except UsageError as error:
            refused = error
            left_out.append(LeftOut(str(folder), "unread", str(error)))
            continue
        look = pass_of(run.record)
        if run.outcome == DAMAGED:
            left_out.append(LeftOut(str(run.path), DAMAGED, f"damaged: {run.damage}"))
        elif not look.has_timing:
            reason = f"{look.label}: its step times are in no comparison"
            left_out.append(LeftOut(str(run.path), run.outcome, reason))
        else:
            readable.append(run)
    if not readable and refused is not None:
        raise refused
    runs = [run for run in readable if all(_on_axis(run, name) == value for name, _, value in pairs)]
    if readable and not runs:
        known = [(name, sorted({_on_axis(run, name) for run in readable})) for name, _, _ in pairs]
        axes = "; ".join(f"{name} has {', '.join(values)}" for name, values in known)
        raise UsageError(f"no run of {path!r} is {selector}: {axes}")
    return Side(given, runs, left_out)


def _folders(path: Path) -> list[Path]:
    parents = () if path.exists() else (path.parent, path.parent / RUNS_FOLDER)
    repeats = [folder for parent in parents for folder in parent.glob(f"{glob.escape(path.name)}-r[0-9]*")]
    return find_runs(repeats or [path])


def _axes(record: RunRecord) -> dict[str, Any] | None:
    """The run's place in its sweep, its environment with it; None for a run of no sweep."""
    sweep = record.sweep
    if sweep is None or sweep.axes is None:
        return None
    return sweep.axes if sweep.environment is None else {**sweep.axes, "environment": sweep.environment}


def _on_axis(run: Run, name: str) -> str:
    """A run's value on an axis: of its sweep, else of its settings or its record."""
    known = {**settings(run.record), **(_axes(run.record) or {})}
    return as_text(known.get(name, value_at(run.record, name)))


def home_of(runs: Sequence[Run]) -> Path:
    """The closest folder above all of these runs, a sweep's where they are of one."""
    shared = Path(os.path.commonpath([run.path.parent for run in runs]))
    return shared.parent if shared.name == RUNS_FOLDER else shared


def refuse_overlap(a: Side, b: Side) -> None:
    """Raises UsageError where both sides hold the same run, or copies of it."""
    others = {_process_of(run) for run in b.runs}
    if same := [str(run.path) for run in a.runs if _process_of(run) in others]:
        raise UsageError(
            f"A ({a.given}) and B ({b.given}) hold the same results, {len(same)} runs such as {same[0]!r}; give two "
            "that were measured apart"
        )


def _process_of(run: Run) -> tuple[object, ...]:
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
        process, error = _process_of(run), run.record.error
        failed = next((guard for guard in run.record.guards if guard.status == "fail"), None)
        if run.outcome != "ok":
            reason = f"outcome {run.outcome}" + (f" in {error.phase}" if error and error.phase else "")
        elif STEP.of(run.record) is None:
            reason = "empty window: no step was measured"
        elif process in usable:
            reason = f"the same process as {usable[process].run_id}: one process is one sample"
        elif failed and not takes_failed:
            reason = f"guard {failed.name} failed: {failed.message}"
        else:
            usable[process] = run
            continue
        left_out.append(LeftOut(str(run.path), run.outcome, reason))
    return list(usable.values()), left_out


def _start(run: Run) -> tuple[str, str]:
    return run.record.started_at or "", str(run.path)


def pair_rounds(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[Run, Run]] | None:
    """The runs of both sides that were measured in one round of one sweep of two sides (`compare --run`), in order;
    None where they are not of one.

    Repeats of other sweeps are not paired: with few of them the degrees of freedom that pairing takes are worth more.
    """
    sides = [{as_text(value_at(run.record, f"sweep.axes.{SIDE}")) for run in runs} for runs in (a, b)]
    is_one_sweep = len({run.path.parent for run in (*a, *b)}) == 1
    if not is_one_sweep or [*map(len, sides)] != [1, 1] or len(sides[0] | sides[1] | {as_text(None)}) != 3:
        return None
    rounds_a, rounds_b = ({value_at(run.record, "sweep.repeat") or 0: run for run in runs} for runs in (a, b))
    return [(rounds_a[number], rounds_b[number]) for number in sorted(rounds_a.keys() & rounds_b.keys())]


def join_cells(a: Sequence[Run], b: Sequence[Run]) -> list[Cell]:
    """Runs of both sides by cell, in the order in which the cells were first measured.

    A cell's identity are the axes of its sweep (with its environment) where every run has some, else its settings.
    What is constant on each side and differs between them is the thing compared, and separates no cells: so two
    single runs, two sweeps over the same grid, or two columns of one grid meet.
    """
    runs, first_b = [*a, *b], len(a)
    places = [_axes(run.record) for run in runs]
    identities = [place or {} for place in places] if None not in places else [settings(run.record) for run in runs]
    varying: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for identity in identities for name in identity):
        values = [as_text(identity[name]) if name in identity else "(none)" for identity in identities]
        counts = [len(set(side)) for side in (values, values[:first_b], values[first_b:])]
        if counts[0] > 1 and counts[1:] != [1, 1]:
            varying[name] = values
    lasts = Counter(name.rpartition(".")[2] for name in varying)
    titles = {name: last if lasts[last := name.rpartition(".")[2]] == 1 else name for name in varying}
    cells: dict[str, Cell] = {}
    for index, run in sorted(enumerate(runs), key=lambda member: _start(member[1])):
        name = ", ".join(f"{titles[axis]} {values[index]}" for axis, values in varying.items())
        cells.setdefault(name, Cell(name)).runs[index >= first_b].append(run)
    return list(cells.values())
