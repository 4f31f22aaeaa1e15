"""The two sides of a comparison: from what was given to runs, to samples, and to the cells where they meet."""

from __future__ import annotations

import os
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
from lmbench.records.store import RUNS_FOLDER
from lmbench.records.vocabulary import DAMAGED, RUNNING, SIDE

_ABSENT = "(none)"


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
            left_out.append(LeftOut.of(run, f"damaged: {run.damage}"))
        elif not look.has_timing:
            left_out.append(LeftOut.of(run, f"{look.label}: its step times are in no comparison"))
        else:
            readable.append(run)
    if not readable and refused is not None:
        raise refused
    runs = tuple(run for run in readable if all(_on_axis(run, name) == value for name, _, value in pairs))
    if readable and not runs:
        known = [f"{name} has {', '.join(sorted({_on_axis(run, name) for run in readable}))}" for name, _, _ in pairs]
        raise UsageError(f"no run of {path!r} is {selector}: {'; '.join(known)}")
    return Side(given, runs, tuple(left_out))


def _folders(path: Path) -> list[Path]:
    if not path.exists():
        repeat = re.compile(re.escape(path.name) + r"-r\d+")
        for parent in (path.parent, path.parent / RUNS_FOLDER):
            if repeats := [folder for folder in parent.glob("*-r*") if repeat.fullmatch(folder.name)]:
                return find_runs(repeats)
    return find_runs([path])


def _on_axis(run: Run, name: str) -> str:
    """A run's value on an axis: of its sweep, else of its configuration or its record."""
    values = [(_axes(run.record) or {}).get(name)]
    values += [value_at(run.record, path) for path in (f"sweep.{name}", f"config.{name}", name)]
    return as_text(next((value for value in values if value is not None), None))


def _axes(record: RunRecord) -> dict[str, Any] | None:
    return record.sweep.axes if record.sweep else None


def home_of(runs: Sequence[Run]) -> Path:
    """The closest folder above all of these runs, a sweep's where they are of one."""
    shared = Path(os.path.commonpath([run.path.parent for run in runs]))
    return shared.parent if shared.name == RUNS_FOLDER else shared


def refuse_overlap(a: Side, b: Side) -> None:
    """Raises UsageError where both sides hold the same run, or copies of it."""
    others = {_process_of(run): run for run in b.runs}
    same = [(run, others[_process_of(run)]) for run in a.runs if _process_of(run) in others]
    if len(same) == len(a.runs) == len(b.runs) > 0:
        raise UsageError(f"A ({a.given}) and B ({b.given}) are the same results; give two that were measured apart")
    if same:
        raise UsageError(
            f"{len(same)} runs are on both sides, {str(same[0][0].path)!r} of A and {str(same[0][1].path)!r} of B "
            "among them; give sides without a run in common"
        )


def _process_of(run: Run) -> tuple[object, ...]:
    """Which process made a run; a copy of a result has the same one."""
    record = run.record
    process = (record.boot_id, record.pid, record.process_start_s)
    return process if None not in process else (record.run_id, record.started_at, *process)


def split_usable(runs: Iterable[Run]) -> tuple[list[Run], list[LeftOut]]:
    """The runs that are samples, each of a process of its own, and why the others are not."""
    usable: dict[tuple[object, ...], Run] = {}
    left_out = []
    for run in sorted(runs, key=_start):
        process, error = _process_of(run), run.record.error
        if run.outcome == RUNNING:
            reason = "still running"
        elif run.outcome != "ok":
            reason = f"outcome {run.outcome}" + (f" in {error.phase}" if error and error.phase else "")
        elif STEP.of(run.record) is None:
            reason = "empty window: no step was measured"
        elif process in usable:
            reason = f"the same process as {usable[process].run_id}: one process is one sample"
        else:
            usable[process] = run
            continue
        left_out.append(LeftOut.of(run, reason))
    return list(usable.values()), left_out


def _start(run: Run) -> tuple[str, str]:
    return run.record.started_at or "", str(run.path)


def pair_rounds(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[Run, Run]] | None:
    """The runs of both sides that were measured in one round of one sweep of two sides (`compare --run`), in order;
    None where they are not of one.

    Repeats of other sweeps are not paired: with few of them the degrees of freedom that pairing takes are worth more.
    """
    homes = {(run.path.parent, run.record.sweep and run.record.sweep.name) for run in (*a, *b)}
    names = [{as_text((_axes(run.record) or {}).get(SIDE)) for run in runs} for runs in (a, b)]
    if len(homes) != 1 or [len(side) for side in names] != [1, 1] or len(names[0] | names[1] | {as_text(None)}) != 3:
        return None
    rounds_a, rounds_b = ({run.record.sweep.repeat or 0: run for run in runs if run.record.sweep} for runs in (a, b))
    return [(rounds_a[repeat], rounds_b[repeat]) for repeat in sorted({*rounds_a} & {*rounds_b})]


def join_cells(a: Sequence[Run], b: Sequence[Run]) -> list[Cell]:
    """Runs of both sides by cell, in the order in which the cells were first measured.

    A cell's identity are the axes of its sweep (with its environment) where every run has some, else its settings.
    What is constant on each side and differs between them is the thing compared, and separates no cells: so two
    single runs, two sweeps over the same grid, or two columns of one grid meet.
    """
    in_sweeps = all(_axes(run.record) is not None for run in (*a, *b))
    identities = [[_identity(run.record, in_sweeps) for run in side] for side in (a, b)]
    varying = []
    for name in dict.fromkeys(name for side in identities for identity in side for name in identity):
        values_a, values_b = ({identity.get(name) for identity in side} for side in identities)
        is_compared = len(values_a) == len(values_b) == 1
        if len(values_a | values_b) > 1 and not is_compared:
            varying.append(name)
    lasts = [name.rpartition(".")[2] for name in varying]
    titles = [last if lasts.count(last) == 1 else name for name, last in zip(varying, lasts, strict=True)]
    runs = [(run, identity, "a") for run, identity in zip(a, identities[0], strict=True)]
    runs += [(run, identity, "b") for run, identity in zip(b, identities[1], strict=True)]
    cells: dict[tuple[str, ...], Cell] = {}
    for run, identity, side in sorted(runs, key=lambda entry: _start(entry[0])):
        key = tuple(identity.get(name, _ABSENT) for name in varying)
        name = ", ".join(f"{title} {value}" for title, value in zip(titles, key, strict=True))
        cell = cells.setdefault(key, Cell(name))
        (cell.a if side == "a" else cell.b).append(run)
    return list(cells.values())


def _identity(record: RunRecord, in_sweeps: bool) -> Mapping[str, str]:
    chosen: Mapping[str, Any] = settings(record)
    if in_sweeps and record.sweep is not None:
        environment = record.sweep.environment
        chosen = {**(record.sweep.axes or {}), **({} if environment is None else {"environment": environment})}
    return {name: as_text(value) for name, value in chosen.items()}
