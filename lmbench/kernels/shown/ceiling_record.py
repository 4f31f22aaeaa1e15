"""Finding the record of `lmbench ceiling` that belongs to a run: of the same GPU, in the folder of its results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.records.paths import lookup
from lmbench.records.vocabulary import Record

_PATTERN = "ceiling_*.json"
#: A run of a sweep lies three folders below the results.
_LEVELS = 3


@dataclass(frozen=True)
class Ceiling:
    """What a device attains at best, and what to know of it."""

    path: Path
    record: Record
    note: str = ""

    def rates(self, name: str) -> tuple[float | None, float | None]:
        """Burst and sustained rate of one kind of work (`bf16`, `copy`, ...), None where it was not measured."""
        for rate in self.record["rates"]:
            if rate["name"] == name:
                return rate["burst_per_s"], rate["sustained_per_s"]
        return None, None

    def as_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "measured_at": self.record.get("measured_at"), "note": self.note}


def find_ceiling(folder: Path, run: Record, given: Path | None = None) -> Ceiling | None:
    """The ceiling of a run's GPU: the file that is given, else the newest of that GPU above the run's folder.

    Raises UsageError for a given file that is no record of a ceiling.
    """
    if given is not None:
        record = _read(given)
        if record is None:
            raise UsageError(f"--ceiling {str(given)!r} is no record of `lmbench ceiling`; measure one with it")
        return Ceiling(given, record, _note(record, run))
    gpu = lookup(run, "environment.gpu.name")
    if not gpu:
        return None
    found = []
    for level in list(folder.absolute().parents)[:_LEVELS]:
        for path in sorted(level.glob(_PATTERN)):
            record = _read(path)
            if record is not None and lookup(record, "environment.gpu.name") == gpu:
                found.append(Ceiling(path, record, _note(record, run)))
        if found:
            break
    return max(found, key=lambda one: str(one.record.get("measured_at")), default=None)


def _read(path: Path) -> Record | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    rates = record.get("rates") if isinstance(record, dict) else None
    if not isinstance(rates, list) or not rates:
        return None
    is_sound = all(
        isinstance(rate, dict)
        and isinstance(rate.get("name"), str)
        and all(isinstance(rate.get(key), int | float) for key in ("burst_per_s", "sustained_per_s"))
        for rate in rates
    )
    return record if is_sound else None


def _note(record: Record, run: Record) -> str:
    """How the device that was measured differs from the run's."""
    mine, theirs = (lookup(one, "environment.gpu.name") for one in (run, record))
    if mine != theirs:
        return f"measured on {theirs or 'a CPU'}, the run was on {mine or 'a CPU'}"
    limits = [lookup(one, "environment.gpu.power_limit_w") for one in (run, record)]
    if None not in limits and limits[0] != limits[1]:
        return f"measured at a power limit of {limits[1]:.0f} W, the run had {limits[0]:.0f} W"
    return ""
