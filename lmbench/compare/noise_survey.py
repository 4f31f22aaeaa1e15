"""Noise floors of all configurations among some runs, and why some have none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmbench.compare.comparability import mixture
from lmbench.compare.identity import join_cells
from lmbench.compare.metrics import METRICS, STEP
from lmbench.compare.noise import MIN_NOISE_REPEATS, Noise, as_entry, measure_noise, noise_key
from lmbench.compare.side import LeftOut, is_forked, read_side, split_usable
from lmbench.errors import UsageError
from lmbench.records.load import Run, is_run_folder
from lmbench.records.vocabulary import Record
from lmbench.records.welch import geometric_mean

_FORKED = "forked: measure them anew with `lmbench sweep SWEEP --engine exec --name NAME`"


@dataclass(frozen=True)
class NoiseCell:
    """One configuration on one machine. `entry` is what noise.json holds of it, None with the reason in `problem`."""

    name: str
    run_count: int
    step_s: float | None
    noises: dict[str, Noise]
    entry: Record | None
    problem: str | None


@dataclass(frozen=True)
class Survey:
    cells: tuple[NoiseCell, ...]
    left_out: tuple[LeftOut, ...]
    folder: Path


def survey(given: Sequence[str]) -> Survey:
    """Measure the noise of every configuration that these results repeat; `folder` is where noise.json belongs.

    Raises:
        UsageError: one of them names no result.
    """
    sides = [read_side(each) for each in given]
    runs = list({run.path: run for side in sides for run in side.runs}.values())
    left_out = [run for side in sides for run in side.left_out]
    if not runs:
        raise UsageError(f"no run to measure noise from: {left_out[0].reason}")
    cells = []
    for cell in join_cells(runs, []):
        for group in _by_key(cell.a):
            usable, unusable = split_usable(group)
            sound, failed = _sound(usable)
            left_out += [*unusable, *failed]
            cells.append(_measure(cell.name, sound, [*unusable, *failed]))
    return Survey(tuple(cells), tuple(left_out), _home(given, runs))


def _measure(name: str, runs: Sequence[Run], left_out: Sequence[LeftOut]) -> NoiseCell:
    problem = None
    if len(runs) < MIN_NOISE_REPEATS:
        others = "; ".join(f"{n} {reason}" for reason, n in Counter(run.reason for run in left_out).items())
        problem = f"{len(runs)} repeats that count; a noise floor takes {MIN_NOISE_REPEATS}"
        problem += f" (left out: {others})" if others else ""
    elif mixed := mixture(runs):
        problem = f"not repeats of one thing: {mixed[0]}"
    step_s = geometric_mean([v for run in runs if (v := STEP.of(run.run)) is not None]) if runs else None
    if problem is not None:
        return NoiseCell(name, len(runs), step_s, {}, None, problem)
    noises = {}
    for metric in METRICS:
        values = [value for run in runs if (value := metric.of(run.run)) is not None]
        if len(values) == len(runs):
            noises[metric.name] = measure_noise(values)
    last = max(str(run.run.get("started_at")) for run in runs)
    entry = as_entry(noise_key(runs[0].run), runs[0].run, noises, last)
    return NoiseCell(name, len(runs), step_s, noises, entry, None)


def _by_key(runs: Iterable[Run]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(noise_key(run.run)), []).append(run)
    return list(groups.values())


def _sound(runs: Iterable[Run]) -> tuple[list[Run], list[LeftOut]]:
    sound, left_out = [], []
    for run in runs:
        failed = [str(g.get("name")) for g in run.run.get("guards") or () if g.get("status") == "fail"]
        if is_forked(run):
            left_out.append(LeftOut(str(run.path), run.outcome, _FORKED))
        elif failed:
            left_out.append(LeftOut(str(run.path), run.outcome, f"guard {', '.join(failed)} failed"))
        else:
            sound.append(run)
    return sound, left_out


def _home(given: Sequence[str], runs: Sequence[Run]) -> Path:
    """The one folder that was given, if it is one of runs; else the closest one above all of them."""
    if len(given) == 1 and Path(given[0]).is_dir() and not is_run_folder(Path(given[0])):
        return Path(given[0]).resolve()
    parents = [run.path.parent for run in runs]
    shared = next(
        folder for folder in (parents[0], *parents[0].parents) if all(p.is_relative_to(folder) for p in parents)
    )
    return shared.parent if shared.name == "runs" else shared
