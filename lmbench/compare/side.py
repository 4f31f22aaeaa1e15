"""One side of a comparison: from what was given on the command line to the runs that count and those that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmbench.compare.metrics import STEP
from lmbench.errors import UsageError
from lmbench.records.load import Run, find_runs, load_run
from lmbench.records.paths import lookup
from lmbench.records.vocabulary import DAMAGED, RUNNING, Record


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
    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]


def read_side(given: str) -> Side:
    """Read what `given` names: a run, a folder of runs, a sweep, or a sweep's cell (`SWEEP/CELL`, which stands for its
    repeats `SWEEP/runs/CELL-r*`), each with `@AXIS=VALUE[,AXIS=VALUE...]` to take only those cells.

    Raises:
        UsageError: it names nothing, no result, or only results of another schema version.
    """
    path, wanted = _split(given)
    runs, left_out, refused = [], [], None
    for folder in _folders(path):
        try:
            loaded = load_run(folder, with_steps=False)
        except UsageError as error:
            refused = error
            left_out.append(LeftOut(str(folder), "unread", str(error)))
            continue
        reason = _unreadable(loaded) or _other_instrument(loaded.run)
        if reason is not None:
            left_out.append(LeftOut(str(folder), loaded.outcome, reason))
        elif _has(loaded.run, wanted):
            runs.append(loaded)
    if not runs and refused is not None:
        raise refused
    if not runs and wanted:
        raise UsageError(_no_such_cell(given, path, wanted))
    return Side(given, tuple(runs), tuple(left_out))


def split_usable(runs: Iterable[Run]) -> tuple[list[Run], list[LeftOut]]:
    """The runs that are samples, each of a process of its own, and why the others are not."""
    usable: list[Run] = []
    left_out = []
    seen: dict[tuple[Any, ...], str] = {}
    for run in sorted(runs, key=lambda r: (str(r.run.get("started_at")), str(r.path))):
        reason = _unusable(run)
        process = process_of(run)
        if reason is None and process in seen:
            reason = f"the same process as {seen[process]}: one process is one sample"
        if reason is not None:
            left_out.append(LeftOut(str(run.path), run.outcome, reason))
            continue
        seen[process] = run.run_id
        usable.append(run)
    return usable, left_out


def process_of(run: Run) -> tuple[Any, ...]:
    """Which process made a run; a copy of a result has the same one."""
    process = tuple(run.run.get(name) for name in ("boot_id", "pid", "process_start_s"))
    return process if None not in process else (run.run.get("run_id"), run.run.get("started_at"), *process)


def is_forked(run: Run) -> bool:
    """Whether its process shares its hash seed and address layout with the other repeats."""
    return bool(lookup(run.run, "sweep.engine") == "forkserver")


def refuse_overlap(a: Side, b: Side) -> None:
    """Raises UsageError where both sides hold the same run, or copies of it."""
    theirs = {process_of(run): run for run in b.runs}
    same = [run for run in a.runs if process_of(run) in theirs]
    if not same:
        return
    if len(same) == len(a.runs) == len(b.runs):
        raise UsageError(f"A ({a.given}) and B ({b.given}) are the same results; give two that were measured apart")
    other = theirs[process_of(same[0])]
    raise UsageError(
        f"{len(same)} runs are on both sides, {str(same[0].path)!r} of A and {str(other.path)!r} of B among them; "
        "give sides without a run in common"
    )


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


def _unreadable(run: Run) -> str | None:
    return f"damaged: {run.damage}" if run.outcome == DAMAGED else None


def _other_instrument(run: Record) -> str | None:
    """Why the run's step times are not the step's own speed."""
    if run.get("is_profiled"):
        return "profiled: its step times are in no comparison"
    if run.get("clock") == "sync":
        return "clock sync: synchronizes at phase borders are in its step times"
    return None


def _unusable(run: Run) -> str | None:
    if run.outcome == RUNNING:
        return "still running"
    if run.outcome != "ok":
        error = run.run.get("error") or {}
        where = f" in {error['phase']}" if error.get("phase") else ""
        return f"outcome {run.outcome}{where}"
    if STEP.of(run.run) is None:
        return "empty window: no step was measured"
    return None


def _has(run: Record, wanted: dict[str, str]) -> bool:
    return all(_text(_axis(run, name)) == value for name, value in wanted.items())


def _axis(run: Record, name: str) -> Any:
    """A run's value on an axis: of its sweep, else of its configuration or its record."""
    axes = lookup(run, "sweep.axes")
    if isinstance(axes, dict) and name in axes:
        return axes[name]
    for path in (f"sweep.{name}", f"config.{name}", name):
        if (value := lookup(run, path)) is not None:
            return value
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _no_such_cell(given: str, path: Path, wanted: dict[str, str]) -> str:
    records = _records(_folders(path))
    found = [f"{name} has {', '.join(sorted({_text(_axis(run, name)) for run in records}))}" for name in wanted]
    return f"no run of {str(path)!r} is {given.rpartition('@')[2]}: {'; '.join(found)}"


def _records(folders: Sequence[Path]) -> list[Record]:
    return [load_run(folder, with_steps=False).run for folder in folders]
