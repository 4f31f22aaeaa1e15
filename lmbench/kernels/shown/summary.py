"""What run.json says of a profiled run's kernels, without what somebody damaged: there a figure is missing."""

from __future__ import annotations

import math
from typing import Any

from lmbench.records.vocabulary import Record
from lmbench.report.text import KERNEL_WIDTH, shortened, shown
from lmbench.report.units import percent

#: Parts of a phase's record that are sums by name.
_SUMS = ("kinds", "parts")


def sound_kernels(kernels: Any) -> Record:
    """The part `kernels` with numbers where the registry has numbers, and names that can be shown.

    `phases` and `attention` are records of records in any case; what is not of its type is left out.
    """
    record = _record(kernels)
    found = {**_numbers(record), "phases": {}, "attention": {}}
    if isinstance(record.get("reason"), str):
        found["reason"] = shown(record["reason"])
    for name, phase in _record(record.get("phases")).items():
        found["phases"][shown(name)] = _phase(_record(phase))
    for name, times in _record(record.get("attention")).items():
        found["attention"][shown(name)] = _numbers(_record(times))
    return found


def top_other_words(name: str, share_fraction: float) -> str:
    """The longest kernel that is no matrix product, to follow their share in a line of text."""
    return f"; top other kernel {shortened(name, KERNEL_WIDTH)}, {percent(share_fraction)}"


def _phase(record: Record) -> Record:
    found = {**_numbers(record), **{name: _numbers(_record(record.get(name))) for name in _SUMS}}
    other = _record(record.get("top_other"))
    share = _numbers(other).get("share_fraction")
    if isinstance(other.get("name"), str) and share is not None:
        found["top_other"] = {"name": shown(other["name"]), "share_fraction": share}
    return found


def _record(value: Any) -> Record:
    return value if isinstance(value, dict) else {}


def _numbers(record: Record) -> dict[str, Any]:
    return {
        shown(name): value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
