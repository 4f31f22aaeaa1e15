"""What the arms of `lmbench overhead` cost over the bare loop, paired by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmbench.records.vocabulary import Record

ARMS = ("bare", "trainer", "harness", "hooks")
#: What the harness may cost: in step time where the device is the bottleneck, in its own hooks' time a step
#: where the host is, and in device memory.
TIME_LIMIT_FRACTION = 0.01
HOOKS_LIMIT_S = 0.1e-3
MEMORY_LIMIT_BYTES = 2**20
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over rounds with its 95 % interval."""

    mean: float
    low: float
    high: float

    def against(self, limit: float) -> str:
        """Is it at most the limit? `yes`, `no`, or `undecided` where the interval has both."""
        if self.high <= limit:
            return "yes"
        return "no" if self.low > limit else "undecided"


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean of one value a round (two rounds at least)."""
    from scipy import stats  # type: ignore[import-untyped]

    mean = statistics.fmean(values)
    quantile = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def summarize_arms(measurements: Sequence[Record]) -> dict[str, Record]:
    """For each arm: `step_s` (mean, min, max over rounds), its difference to bare as an interval in seconds
    (`over_bare_s`) and as a fraction, the highest peaks, and how far those are over bare's.

    A measurement has `arm`, `round`, `steps`, `wall_s` and peaks in bytes (null where the device has none).
    """
    bare = _by_round(measurements, "bare")
    return {arm: _summary(_by_round(measurements, arm), bare) for arm in ARMS}


def difference(measurements: Sequence[Record], arm: str, base: str) -> Interval:
    """Seconds a step that `arm` takes longer than `base`, paired by round."""
    return interval(_differences(_by_round(measurements, arm), _by_round(measurements, base)))


def hook_cost(measurements: Sequence[Record]) -> Record:
    """lmbench's own hooks, a step: `step_s` (an interval over rounds) and `median_step_s`, both without the
    clock's own `clocking_s`, and the number of `calls`.
    """
    found = [record["hooks"] for record in measurements if record["arm"] == "hooks"]
    net = interval([hooks["step_mean_s"] - hooks["clocking_s"] for hooks in found])
    return {
        "step_s": asdict(net),
        "clocking_s": statistics.fmean(hooks["clocking_s"] for hooks in found),
        "median_step_s": statistics.fmean(hooks["step_median_s"] - hooks["clocking_s"] for hooks in found),
        "calls": statistics.fmean(hooks["calls"] for hooks in found),
    }


def bottleneck(device_type: str, verdicts: dict[str, str]) -> str:
    """What a step waits for: `device` where every phase has work queued, `host` where one waits for the host,
    `cpu` where both are the same, `mixed` or `unknown` where the lag probes were undecided or did not run.

    Args:
        device_type: `cuda` or `cpu`.
        verdicts: of the lag probes, by phase.
    """
    if device_type == "cpu":
        return "cpu"
    if not verdicts:
        return "unknown"
    if "host-bound" in verdicts.values():
        return "host"
    return "mixed" if "mixed" in verdicts.values() else "device"


def _by_round(measurements: Sequence[Record], arm: str) -> list[Record]:
    return sorted((record for record in measurements if record["arm"] == arm), key=lambda r: int(r["round"]))


def _step_s(record: Record) -> float:
    return float(record["wall_s"]) / int(record["steps"])


def _differences(arm: list[Record], base: list[Record]) -> list[float]:
    return [_step_s(a) - _step_s(b) for a, b in zip(arm, base, strict=True)]


def _summary(arm: list[Record], bare: list[Record]) -> Record:
    times = [_step_s(record) for record in arm]
    fractions = [_step_s(a) / _step_s(b) - 1.0 for a, b in zip(arm, bare, strict=True)]
    summary: dict[str, Any] = {
        "step_s": {"mean": statistics.fmean(times), "min": min(times), "max": max(times)},
        "over_bare_s": asdict(interval(_differences(arm, bare))),
        "over_bare_fraction": asdict(interval(fractions)),
    }
    for name in ("run_peak_allocated_bytes", "steady_peak_allocated_bytes", "host_peak_rss_bytes"):
        peak, base = _highest(arm, name), _highest(bare, name)
        summary[name] = peak
        summary[f"over_bare_{name}"] = None if peak is None or base is None else peak - base
    return summary


def _highest(records: list[Record], name: str) -> int | None:
    values = [record[name] for record in records]
    return None if None in values else int(max(values))
