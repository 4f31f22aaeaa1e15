"""The A/A noise floor: how far the same configuration is from itself when its repeats are split in two."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmbench.compare.identity import as_text, settings
from lmbench.compare.verdict import MIN_REPEATS
from lmbench.errors import UsageError
from lmbench.records.load import Run
from lmbench.records.paths import lookup
from lmbench.records.statistics import quantile
from lmbench.records.store import write_whole
from lmbench.records.vocabulary import Record
from lmbench.records.welch import CONFIDENCE, ratio_of

NOISE_FILE = "noise.json"
NOISE_SCHEMA_VERSION = 1
#: Two halves have at least as many repeats as a comparison takes.
MIN_NOISE_REPEATS = 2 * MIN_REPEATS
#: noise.json may lie so many folders above a run's: results, a sweep in it, its runs.
_SEARCH_DEPTH = 4
_SPLITS = 500


@dataclass(frozen=True)
class Noise:
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
    floor_fraction: float
    false_alarm_fraction: float
    consecutive_alarm_count: int
    consecutive_count: int


def measure_noise(values: Sequence[float], seed: int = 0) -> Noise:
    """The noise of one value a process, in the order they were measured. Raises ValueError for fewer than six."""
    n, half = len(values), len(values) // 2
    if n < MIN_NOISE_REPEATS:
        raise ValueError(f"{n} repeats; a noise floor takes {MIN_NOISE_REPEATS}")
    shuffled, generator = list(values), random.Random(seed)
    changes, alarms = [], 0
    for _ in range(_SPLITS):
        generator.shuffle(shuffled)
        found = ratio_of(shuffled[:half], shuffled[half : 2 * half])
        changes.append(abs(math.log(found.ratio)))
        alarms += found.excludes_one
    drift = math.log(ratio_of(values[:half], values[-half:]).ratio)
    usual = quantile(sorted(changes), CONFIDENCE)
    pairs = [
        ratio_of(values[i : i + MIN_REPEATS], values[i + MIN_REPEATS : i + 2 * MIN_REPEATS])
        for i in range(n - 2 * MIN_REPEATS + 1)
    ]
    return Noise(
        n=n,
        std_fraction=statistics.stdev(map(math.log, values)),
        drift_fraction=math.expm1(drift),
        floor_fraction=math.expm1(max(usual, abs(drift))),
        false_alarm_fraction=alarms / _SPLITS,
        consecutive_alarm_count=sum(pair.excludes_one for pair in pairs),
        consecutive_count=len(pairs),
    )


def noise_key(run: Record) -> dict[str, str | None]:
    """What a floor belongs to: host, device, and the settings. Not the code: that is what comparisons change."""
    chosen = json.dumps({name: as_text(value) for name, value in sorted(settings(run).items())})
    return {
        "host": lookup(run, "environment.host.hostname"),
        "device": lookup(run, "environment.gpu.name") or lookup(run, "environment.host.cpu_model"),
        "settings_digest": sha256(chosen.encode()).hexdigest()[:16],
    }


def store_noise(folder: Path, entries: Sequence[Record]) -> Path:
    """Add entries to the folder's noise.json, in the place of older ones of the same key; returns the file.

    Of several with one key (two commits of the code, say) the one with the largest floor for the step is kept.

    Raises UsageError where it cannot be read or written.
    """
    path = folder / NOISE_FILE
    kept = {_key_text(entry["key"]): entry for entry in (_read(path) if path.exists() else [])}
    floor = "metrics.step_s.floor_fraction"
    kept.update((_key_text(entry["key"]), entry) for entry in sorted(entries, key=lambda e: lookup(e, floor) or 0.0))
    content = {"schema_version": NOISE_SCHEMA_VERSION, "entries": list(kept.values())}
    try:
        write_whole(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}; --json prints the floors") from error
    return path


class NoiseFloors:
    """Looks up floors in the noise.json files beside and above runs. `problems` are the files that cannot be read."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._files: dict[Path, dict[str, Record]] = {}

    def floor(self, runs: Iterable[Run], metric: str) -> float | None:
        """The largest floor of this figure that is known for any of these runs' configurations, None if none is."""
        entries = [entry for run in runs if (entry := self._entry(run)) is not None]
        floors = [lookup(entry, f"metrics.{metric}.floor_fraction") for entry in entries]
        return max((float(floor) for floor in floors if floor is not None), default=None)

    def _entry(self, run: Run) -> Record | None:
        key = _key_text(noise_key(run.run))
        for folder in list(run.path.parents)[:_SEARCH_DEPTH]:
            if (entry := self._content(folder / NOISE_FILE).get(key)) is not None:
                return entry
        return None

    def _content(self, path: Path) -> dict[str, Record]:
        if path not in self._files:
            self._files[path] = {}
            if path.is_file():
                try:
                    self._files[path] = {_key_text(entry["key"]): entry for entry in _read(path)}
                except UsageError as error:
                    self.problems.append(str(error))
        return self._files[path]


def as_entry(key: Record, run: Record, noises: dict[str, Noise], last_measured_at: str) -> Record:
    """One configuration's floors as noise.json holds them."""
    named = ("precision", "matmul_precision", "mode")
    about: dict[str, Any] = {name: run.get(name) for name in named}
    about |= {"size": lookup(run, "model.size"), "axes": lookup(run, "sweep.axes")}
    metrics = {name: asdict(noise) for name, noise in noises.items()}
    return {"key": key, "cell": about, "last_measured_at": last_measured_at, "metrics": metrics}


def _read(path: Path) -> list[Record]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content["entries"]
        version = content["schema_version"]
        if version == NOISE_SCHEMA_VERSION and all(isinstance(entry["key"], dict) for entry in entries):
            return list(entries)
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{str(path)!r} cannot be read; remove it and run `lmbench noise` again") from None
    raise UsageError(
        f"{str(path)!r} has schema version {version}, this lmbench reads {NOISE_SCHEMA_VERSION}; remove it and run "
        "`lmbench noise` again"
    )


def _key_text(key: Record) -> str:
    return json.dumps(key, sort_keys=True)
