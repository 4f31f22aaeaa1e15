"""The A/A noise floor: how far the same configuration is from itself when its repeats are split in two.

`survey` measures it, `store_noise` keeps it beside the results, `NoiseFloors` finds it there for a comparison, and
`print_noise` shows it.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from rich.console import Console

from lmbench.compare.comparability import mixture
from lmbench.compare.metrics import METRICS, STEP
from lmbench.compare.sides import LeftOut, join_cells, read_side, split_usable
from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file
from lmbench.records.codec import DamagedRecord, decode, indented_json
from lmbench.records.environment import Environment
from lmbench.records.load import Run, is_run_folder
from lmbench.records.run import RunRecord
from lmbench.records.settings import as_text, settings
from lmbench.records.statistics import CONFIDENCE, MIN_REPEATS, detectable_fraction, logs_of, ratio_of, std_of_logs
from lmbench.records.store import write_whole
from lmbench.report.screen import print_table
from lmbench.report.table import Entry, Heading, Table, fact

NOISE_FILE = "noise.json"
NOISE_SCHEMA_VERSION = 1
#: A configuration takes 3 kB.
_MAX_NOISE_BYTES = 16 * 2**20
#: Two halves have at least as many repeats as a comparison takes.
MIN_NOISE_REPEATS = 2 * MIN_REPEATS
#: noise.json may lie so many folders above a run's: results, a sweep in it, its runs.
_SEARCH_DEPTH = 4
_SPLITS = 500


class Noise(Struct, frozen=True):
    """What one figure of one configuration did over its repeats.

    `std_fraction` is the spread between processes (of logarithms). `drift_fraction` is the change from the earlier half
    of the repeats to the later one. `floor_fraction` is the larger of that and of what 95 % of random splits into
    halves stay under. `false_alarm_fraction` is the share of those splits whose 95 % interval excluded no change;
    `consecutive_alarm_count` counts the same over `consecutive_count` comparisons of three repeats with the next three,
    where a drift of the machine shows.
    """

    n: int
    std_fraction: float
    drift_fraction: float
    floor_fraction: Annotated[float, Meta(ge=0)]
    false_alarm_fraction: float
    consecutive_alarm_count: int
    consecutive_count: int


class NoiseKey(Struct, frozen=True):
    """What a floor belongs to: host, device, and the settings. Not the code: that is what comparisons change."""

    host: str | None
    device: str | None
    settings_digest: str


class NoiseSubject(Struct, frozen=True):
    """The configuration in the words that people choose first, for who reads noise.json."""

    precision: str | None = None
    matmul_precision: str | None = None
    mode: str | None = None
    size: str | None = None
    axes: dict[str, Any] | None = None


class NoiseEntry(Struct, frozen=True):
    """One configuration's floors as noise.json holds them, by the names of a comparison's figures."""

    key: NoiseKey
    cell: NoiseSubject
    last_measured_at: str
    metrics: dict[str, Noise]


class NoiseFile(Struct, frozen=True):
    """The content of noise.json."""

    schema_version: int
    entries: list[NoiseEntry]


class _Versioned(Struct):
    schema_version: int


@dataclass(frozen=True)
class NoiseCell:
    """One configuration on one machine. `entry` is what noise.json holds of it, None with the reason in `problem`."""

    name: str
    run_count: int
    entry: NoiseEntry | None
    problem: str | None


@dataclass(frozen=True)
class Survey:
    """The noise of some runs' configurations; `folder` is where noise.json belongs."""

    cells: tuple[NoiseCell, ...]
    left_out: tuple[LeftOut, ...]
    folder: Path

    @property
    def entries(self) -> list[NoiseEntry]:
        return [cell.entry for cell in self.cells if cell.entry is not None]


def measure_noise(values: Sequence[float], seed: int = 0) -> Noise:
    """The noise of one value a process, in the order they were measured. Raises ValueError for fewer than six."""
    n, half = len(values), len(values) // 2
    if n < MIN_NOISE_REPEATS:
        raise ValueError(f"{n} repeats; a noise floor takes {MIN_NOISE_REPEATS}")
    shuffled = np.random.default_rng(seed).permuted(np.tile(values, (_SPLITS, 1)), axis=1)
    splits = [ratio_of(row[:half], row[half : 2 * half]) for row in shuffled]
    later = range(MIN_REPEATS, n - MIN_REPEATS + 1)
    pairs = [ratio_of(values[i - MIN_REPEATS : i], values[i : i + MIN_REPEATS]) for i in later]
    drift = math.log(ratio_of(values[:half], values[-half:]).point)
    usual = float(np.quantile([abs(math.log(split.point)) for split in splits], CONFIDENCE))
    return Noise(
        n=n,
        std_fraction=std_of_logs(logs_of(values)) or 0.0,
        drift_fraction=math.expm1(drift),
        floor_fraction=math.expm1(max(usual, abs(drift))),
        false_alarm_fraction=sum(split.excludes_one for split in splits) / _SPLITS,
        consecutive_alarm_count=sum(pair.excludes_one for pair in pairs),
        consecutive_count=len(pairs),
    )


def noise_key(record: RunRecord) -> NoiseKey:
    """The configuration and machine that a run's noise belongs to."""
    chosen = json.dumps({name: as_text(value) for name, value in sorted(settings(record).items())})
    environment = record.environment or Environment()
    return NoiseKey(
        host=environment.host.hostname,
        device=environment.gpu.name or environment.host.cpu_model,
        settings_digest=sha256(chosen.encode()).hexdigest()[:16],
    )


def survey(given: Sequence[str]) -> Survey:
    """Measure the noise of every configuration that these results repeat.

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
        by_key: dict[NoiseKey, list[Run]] = {}
        for run in cell.a:
            by_key.setdefault(noise_key(run.record), []).append(run)
        for key, group in by_key.items():
            found, others = _measure(cell.name, key, group)
            cells.append(found)
            left_out += others
    return Survey(tuple(cells), tuple(left_out), _home(given, runs))


def _measure(name: str, key: NoiseKey, group: Sequence[Run]) -> tuple[NoiseCell, list[LeftOut]]:
    """One configuration's noise, and which of its runs are not in it."""
    usable, left_out = split_usable(group)
    runs = []
    for run in usable:
        failed = [guard.name for guard in run.record.guards if guard.status == "fail"]
        if failed:
            left_out.append(LeftOut.of(run, f"guard {', '.join(failed)} failed"))
        else:
            runs.append(run)
    problem = None
    if len(runs) < MIN_NOISE_REPEATS:
        others = "; ".join(f"{n} {reason}" for reason, n in Counter(run.reason for run in left_out).items())
        problem = f"{len(runs)} repeats that count; a noise floor takes {MIN_NOISE_REPEATS}"
        problem += f" (left out: {others})" if others else ""
    elif mixed := mixture(runs):
        problem = f"not repeats of one thing: {mixed[0]}"
    entry = _entry(key, runs) if problem is None else None
    return NoiseCell(name, len(runs), entry, problem), left_out


def _entry(key: NoiseKey, runs: Sequence[Run]) -> NoiseEntry:
    noises = {}
    for metric in METRICS:
        values = [value for run in runs if (value := metric.of(run.record)) is not None]
        if len(values) == len(runs):
            noises[metric.name] = measure_noise(values)
    first = runs[0].record
    axes = first.sweep.axes if first.sweep else None
    subject = NoiseSubject(first.precision, first.matmul_precision, first.mode, first.model.size, axes)
    return NoiseEntry(key, subject, max(run.record.started_at or "" for run in runs), noises)


def _home(given: Sequence[str], runs: Sequence[Run]) -> Path:
    """The one folder that was given, if it is one of runs; else the closest one above all of them."""
    if len(given) == 1 and Path(given[0]).is_dir() and not is_run_folder(Path(given[0])):
        return Path(given[0]).resolve()
    parents = [run.path.parent for run in runs]
    shared = next(
        folder for folder in (parents[0], *parents[0].parents) if all(p.is_relative_to(folder) for p in parents)
    )
    return shared.parent if shared.name == "runs" else shared


def store_noise(folder: Path, entries: Sequence[NoiseEntry]) -> Path:
    """Add entries to the folder's noise.json, in the place of older ones of the same key; returns the file.

    Of several with one key (two commits of the code, say) the one with the largest floor for the step is kept.

    Raises UsageError where it cannot be read or written.
    """

    def floor(entry: NoiseEntry) -> float:
        step = entry.metrics.get(STEP.name)
        return step.floor_fraction if step else 0.0

    path = folder / NOISE_FILE
    kept = {entry.key: entry for entry in (_read(path) if os.path.lexists(path) else [])}
    kept.update((entry.key, entry) for entry in sorted(entries, key=floor))
    try:
        write_whole(path, noise_json(list(kept.values())))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}; --json prints the floors") from error
    return path


def noise_json(entries: list[NoiseEntry]) -> str:
    """Entries as noise.json has them; ends in a line feed."""
    return indented_json(NoiseFile(NOISE_SCHEMA_VERSION, entries))


def _read(path: Path) -> list[NoiseEntry]:
    try:
        content = read_file(path, _MAX_NOISE_BYTES)
        version = decode(content, _Versioned).schema_version
        if version == NOISE_SCHEMA_VERSION:
            return decode(content, NoiseFile).entries
    except (Unreadable, DamagedRecord) as error:
        raise UsageError(f"{str(path)!r} cannot be read ({error}); remove it and run `lmbench noise` again") from None
    raise UsageError(
        f"{str(path)!r} has schema version {version}, this lmbench reads {NOISE_SCHEMA_VERSION}; remove it and run "
        "`lmbench noise` again"
    )


class NoiseFloors:
    """Looks up floors in the noise.json files beside and above runs. `problems` are the files that cannot be read."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._files: dict[Path, dict[NoiseKey, NoiseEntry]] = {}

    def floor(self, runs: Iterable[Run], metric: str) -> float | None:
        """The largest floor of this figure that is known for any of these runs' configurations, None if none is."""
        entries = [entry for run in runs if (entry := self._entry(run)) is not None]
        return max((entry.metrics[metric].floor_fraction for entry in entries if metric in entry.metrics), default=None)

    def _entry(self, run: Run) -> NoiseEntry | None:
        """Its configuration's, in the closest file that has one."""
        contents = [self._content(folder / NOISE_FILE) for folder in list(run.path.parents)[:_SEARCH_DEPTH]]
        if not any(contents):
            return None
        key = noise_key(run.record)
        return next((content[key] for content in contents if key in content), None)

    def _content(self, path: Path) -> dict[NoiseKey, NoiseEntry]:
        if path not in self._files:
            self._files[path] = {}
            if os.path.lexists(path):
                try:
                    self._files[path] = {entry.key: entry for entry in _read(path)}
                except UsageError as error:
                    self.problems.append(str(error))
        return self._files[path]


_REPEATS = (3, 5, 8)
_MEANINGS = (
    "spread: standard deviation between processes; drift: later half of the repeats against the earlier one",
    "floor: what 95 % of random splits into halves stay under, or the drift if that is more; compare calls "
    "nothing below it faster or slower",
    "alarms: splits whose 95 % interval excluded no change (5 expected); in a row: the same for three repeats "
    "against the next three",
    f"detects: the change told from none in 95 % of cases with {' / '.join(map(str, _REPEATS))} repeats a side",
)


def print_noise(found: Survey, console: Console) -> None:
    """Print one table of all floors, and why some configurations have none."""
    rows = [_row(cell, cell.entry.metrics[STEP.name]) for cell in found.cells if cell.entry is not None]
    if rows:
        names = ("repeats", "spread", "drift", "floor", "alarms", "in a row", "detects")
        headings = [Heading("cell", False), *map(Heading, names)]
        print_table(Table("Step time against itself", "in percent of the step", headings, rows), console)
        for line in _MEANINGS:
            console.print(line)
    for cell in found.cells:
        if cell.problem is not None:
            console.print(f"no floor  {cell.name or 'the configuration'}: {cell.problem}")
    for run in found.left_out:
        console.print(f"left out  {run.path}: {run.reason}", soft_wrap=True)


def _row(cell: NoiseCell, noise: Noise) -> list[Entry]:
    figures = (
        str(cell.run_count),
        f"{noise.std_fraction * 100:.2f}",
        f"{noise.drift_fraction * 100:+.2f}",
        f"{noise.floor_fraction * 100:.2f}",
        f"{noise.false_alarm_fraction * 100:.1f}",
        f"{noise.consecutive_alarm_count} of {noise.consecutive_count}",
        " / ".join(f"{detectable_fraction(noise.std_fraction, n) * 100:.2f}" for n in _REPEATS),
    )
    return [fact(cell.name or "(one)"), *map(Entry, figures)]
