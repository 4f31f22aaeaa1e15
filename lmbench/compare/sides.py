"""The two sides of a comparison: from what was given to runs, to samples, and to the cells where they meet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmbench.compare.metrics import STEP
from lmbench.errors import UsageError
from lmbench.records.load import Run, find_runs, load_run
from lmbench.records.passes import pass_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.settings import as_text, settings
from lmbench.records.vocabulary import DAMAGED, RUNNING, SIDE


@dataclass(frozen=True)
class LeftOut:
    """A run that is no sample: how it ended and, in one line, why it does not count."""

    path: str
    outcome: str
    reason: str

    @classmethod
    def of(cls, run: Run, reason: str) -> LeftOut:
        return cls(str(run.path), run.outcome, reason)


@dataclass(frozen=True)
class Side:
    """What was found: `runs` with a readable record of the step's own speed, whatever their outcome; `left_out` the
    others."""

    given: str
    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]


@dataclass
class Cell:
    """Runs of both sides at one point: `name` tells it by what differs between cells, empty where there is one."""

    name: str
    a: list[Run] = field(default_factory=list)
    b: list[Run] = field(default_factory=list)


def read_side(given: str) -> Side:
    """Read what `given` names: a run, a folder of runs, a sweep, or a sweep's cell (`SWEEP/CELL`, which stands for its
    repeats `SWEEP/runs/CELL-r*`), each with `@AXIS=VALUE[,AXIS=VALUE...]` to take only those cells.

    Raises:
        UsageError: it names nothing, no result, or only results of another schema version.
    """
    path, wanted = _split(given)
    found: list[Run] = []
    left_out, refused = [], None
    for folder in _folders(path):
        try:
            run = load_run(folder, with_steps=False)
        except UsageError as error:
            refused = error
            left_out.append(LeftOut(str(folder), "unread", str(error)))
            continue
        reason = _not_its_own_speed(run)
        if reason is None:
            found.append(run)
        else:
            left_out.append(LeftOut.of(run, reason))
    if not found and refused is not None:
        raise refused
    runs = [run for run in found if all(_on_axis(run, name) == value for name, value in wanted.items())]
    if found and not runs:
        known = [f"{name} has {', '.join(sorted({_on_axis(run, name) for run in found}))}" for name in wanted]
        raise UsageError(f"no run of {str(path)!r} is {given.rpartition('@')[2]}: {'; '.join(known)}")
    return Side(given, tuple(runs), tuple(left_out))


def _split(given: str) -> tuple[Path, dict[str, str]]:
    path, mark, selector = given.rpartition("@")
    if not mark or Path(given).exists():
        return Path(given), {}
    pairs = [pair.partition("=") for pair in selector.split(",")]
    if not path or not all(name and equals for name, equals, _ in pairs):
        raise UsageError(f"{given!r}: after '@' comes AXIS=VALUE, more of them with commas between")
    return Path(path), {name: value for name, _, value in pairs}


def _folders(path: Path) -> list[Path]:
    if path.exists():
        return find_runs([path])
    repeat = re.compile(re.escape(path.name) + r"-r\d+")
    for parent in (path.parent, path.parent / "runs"):
        repeats = [folder for folder in parent.glob("*-r*") if repeat.fullmatch(folder.name)]
        if repeats:
            return find_runs(repeats)
    return find_runs([path])


def _not_its_own_speed(run: Run) -> str | None:
    """Why no step times can be read, or why they are not the step's own speed."""
    if run.outcome == DAMAGED:
        return f"damaged: {run.damage}"
    look = pass_of(run.record)
    return None if look.has_timing else f"{look.label}: its step times are in no comparison"


def _on_axis(run: Run, name: str) -> str:
    """A run's value on an axis: of its sweep, else of its configuration or its record."""
    axes = _axes(run.record) or {}
    names = (f"sweep.{name}", f"config.{name}", name)
    values: list[Any] = [axes[name]] if name in axes else [value_at(run.record, path) for path in names]
    return as_text(next((value for value in values if value is not None), None))


def _axes(record: RunRecord) -> dict[str, Any] | None:
    return record.sweep.axes if record.sweep else None


def refuse_overlap(a: Side, b: Side) -> None:
    """Raises UsageError where both sides hold the same run, or copies of it."""
    theirs = {_process_of(run): run for run in b.runs}
    same = [run for run in a.runs if _process_of(run) in theirs]
    if not same:
        return
    if len(same) == len(a.runs) == len(b.runs):
        raise UsageError(f"A ({a.given}) and B ({b.given}) are the same results; give two that were measured apart")
    other = theirs[_process_of(same[0])]
    raise UsageError(
        f"{len(same)} runs are on both sides, {str(same[0].path)!r} of A and {str(other.path)!r} of B among them; "
        "give sides without a run in common"
    )


def _process_of(run: Run) -> tuple[object, ...]:
    """Which process made a run; a copy of a result has the same one."""
    record = run.record
    process = (record.boot_id, record.pid, record.process_start_s)
    return process if None not in process else (record.run_id, record.started_at, *process)


def split_usable(runs: Iterable[Run]) -> tuple[list[Run], list[LeftOut]]:
    """The runs that are samples, each of a process of its own, and why the others are not."""
    usable: list[Run] = []
    left_out = []
    seen: dict[tuple[object, ...], str] = {}
    for run in sorted(runs, key=_start):
        reason = _unusable(run)
        process = _process_of(run)
        if reason is None and process in seen:
            reason = f"the same process as {seen[process]}: one process is one sample"
        if reason is not None:
            left_out.append(LeftOut.of(run, reason))
            continue
        seen[process] = run.run_id
        usable.append(run)
    return usable, left_out


def _start(run: Run) -> tuple[str, str]:
    return run.record.started_at or "", str(run.path)


def _unusable(run: Run) -> str | None:
    if run.outcome == RUNNING:
        return "still running"
    if run.outcome != "ok":
        error = run.record.error
        return f"outcome {run.outcome}" + (f" in {error.phase}" if error and error.phase else "")
    if STEP.of(run.record) is None:
        return "empty window: no step was measured"
    return None


_Identity = Mapping[str, str]
_ABSENT = "(none)"


def pair_rounds(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[Run, Run]] | None:
    """The runs of both sides that were measured in one round of one sweep of two sides (`compare --run`), in order;
    None where they are not of one.

    Repeats of other sweeps are not paired: with few of them the degrees of freedom that pairing takes are worth more.
    """
    homes = {(run.path.parent, run.record.sweep.name if run.record.sweep else None) for run in (*a, *b)}
    axes = [[_axes(run.record) or {} for run in runs] for runs in (a, b)]
    sides = [{as_text(each[SIDE]) for each in found if SIDE in each} for found in axes]
    is_whole = all(SIDE in each for found in axes for each in found)
    if not is_whole or len(homes) != 1 or [len(names) for names in sides] != [1, 1] or sides[0] == sides[1]:
        return None
    mine, theirs = ({run.record.sweep.repeat: run for run in runs if run.record.sweep} for runs in (a, b))
    return [(mine[repeat], theirs[repeat]) for repeat in sorted({*mine} & {*theirs}, key=lambda at: at or 0)]


def join_cells(a: Sequence[Run], b: Sequence[Run]) -> list[Cell]:
    """Runs of both sides by cell, in the order in which the cells were first measured.

    A cell's identity are the axes of its sweep (with its environment) where every run has some, else its settings.
    What is constant on each side and differs between them is the thing compared, and separates no cells: so two
    single runs, two sweeps over the same grid, or two columns of one grid meet.
    """
    in_sweeps = all(_axes(run.record) is not None for run in (*a, *b))
    mine, theirs = ([_identity(run.record, in_sweeps) for run in side] for side in (a, b))
    varying = _varying(mine, theirs)
    shown = [_short(name, varying) for name in varying]
    sides = [*zip(a, mine, ["a"] * len(a), strict=True), *zip(b, theirs, ["b"] * len(b), strict=True)]
    cells: dict[tuple[str, ...], Cell] = {}
    for run, identity, side in sorted(sides, key=lambda entry: _start(entry[0])):
        key = tuple(identity.get(name, _ABSENT) for name in varying)
        cell = cells.setdefault(key, Cell(", ".join(f"{n} {v}" for n, v in zip(shown, key, strict=True))))
        (cell.a if side == "a" else cell.b).append(run)
    return list(cells.values())


def _identity(record: RunRecord, in_sweeps: bool) -> _Identity:
    if not in_sweeps:
        return {name: as_text(value) for name, value in settings(record).items()}
    assert record.sweep is not None
    found = {name: as_text(value) for name, value in (record.sweep.axes or {}).items()}
    return found if record.sweep.environment is None else {**found, "environment": record.sweep.environment}


def _varying(mine: Sequence[_Identity], theirs: Sequence[_Identity]) -> list[str]:
    """Names that tell cells apart, in the order of their first appearance."""
    found = []
    for name in dict.fromkeys(name for identity in (*mine, *theirs) for name in identity):
        ours, others = ({identity.get(name) for identity in side} for side in (mine, theirs))
        is_compared = len(ours) == len(others) == 1
        if len(ours | others) > 1 and not is_compared:
            found.append(name)
    return found


def _short(name: str, names: Sequence[str]) -> str:
    """The last part of a dotted name, where no other one ends in it."""
    last = name.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in names].count(last) == 1 else name
