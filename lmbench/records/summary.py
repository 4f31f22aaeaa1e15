"""Summaries of a run: per phase, over the window's full and unskipped steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lmbench.records.statistics import (
    lag1_autocorrelation,
    median_interval,
    outlier_count,
    quantile,
    sample_std,
    trend,
)
from lmbench.records.vocabulary import BORDERS, PHASES, Record

_SECONDS = (
    "mean", "std", "min", "p5", "p25", "median", "p75", "p95", "p99", "max", "median_low", "median_high",
)  # fmt: skip
_PLAIN = (
    "cv_fraction", "median_coverage_fraction", "lag1_autocorrelation", "trend_fraction", "trend_p",
)  # fmt: skip


@dataclass(frozen=True)
class WindowSteps:
    """The window's step records: those that enter statistics, and how many do not and why."""

    used: list[Record]
    micro_batches: int | None
    skipped_count: int
    short_count: int


def select_window(records: Iterable[Record], micro_batches: int | None = None) -> WindowSteps:
    """The steps that statistics rest on: of stage `window`, full, and not skipped by the scaler.

    A full step has `micro_batches`; where that is not given, as many as the window's longest step.
    """
    window = [record for record in records if record.get("stage") == "window"]
    counts = [record["micro_batches"] for record in window if record.get("micro_batches") is not None]
    full = micro_batches if micro_batches is not None else max(counts, default=None)
    skipped = [record for record in window if record.get("is_skipped")]
    kept = [record for record in window if not record.get("is_skipped")]
    used = [record for record in kept if full is None or record.get("micro_batches", full) in (None, full)]
    return WindowSteps(used, full, len(skipped), len(kept) - len(used))


def summarize(values: Sequence[float], unit: str = "s") -> dict[str, Any]:
    """Statistics of one series in the order it was measured; the unit ends the names (`mean_s`), "" for none.

    Every key is always there, None where the series is too short for it (std below 2 values, autocorrelation
    below 3, trend and the median's interval below 6, p5 and p95 below 20, p99 below 100).
    Raises ValueError for a value that is not finite.
    """
    if not all(math.isfinite(value) for value in values):
        raise ValueError("a series with a non-finite value has no summary")
    found = _statistics(values) if values else {}
    suffix = f"_{unit}" if unit else ""
    summary: dict[str, Any] = {"n": len(values)}
    summary.update((f"{name}{suffix}", found.get(name)) for name in _SECONDS)
    summary.update((name, found.get(name)) for name in _PLAIN)
    summary["outlier_count"] = found.get("outlier_count")
    return summary


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    n, mean, median = len(ordered), statistics.fmean(ordered), quantile(ordered, 0.5)
    std = sample_std(ordered, mean)
    found: dict[str, Any] = {
        "mean": mean, "std": std, "min": ordered[0], "p25": quantile(ordered, 0.25), "median": median,
        "p75": quantile(ordered, 0.75), "max": ordered[-1],
        "cv_fraction": std / mean if std is not None and mean > 0 else None,
        "lag1_autocorrelation": lag1_autocorrelation(values, mean),
        "outlier_count": outlier_count(values, median),
    }  # fmt: skip
    if n >= 20:
        found |= {"p5": quantile(ordered, 0.05), "p95": quantile(ordered, 0.95)}
    if n >= 100:
        found["p99"] = quantile(ordered, 0.99)
    if (interval := median_interval(ordered)) is not None:
        found["median_low"], found["median_high"], found["median_coverage_fraction"] = interval
    if (drift := trend(values)) is not None:
        found["trend_fraction"] = drift[0] / median if median > 0 else None
        found["trend_p"] = drift[1]
    return found


def summarize_steps(records: Iterable[Record], micro_batches: int | None = None) -> dict[str, dict[str, Any]]:
    """Statistics of the step and of every phase, over the steps that `select_window` keeps.

    Returns {phase: summary} for `step` and those of PHASES that were seen: `summarize` of the device spans,
    `share_fraction` of the mean step, and under `host` and `lag` the spread of host spans and of lags.
    """
    steps = select_window(records, micro_batches).used
    step_mean = summarize(_series(steps, "step_s"))["mean_s"]
    seen = [phase for phase in ("step", *PHASES) if _series(steps, f"{phase}_s")]
    return {phase: _phase_summary(steps, phase, step_mean) for phase in seen}


def _phase_summary(steps: list[Record], phase: str, step_mean: float | None) -> dict[str, Any]:
    summary = summarize(_series(steps, f"{phase}_s"))
    mean = summary["mean_s"]
    summary["share_fraction"] = mean / step_mean if mean is not None and step_mean else None
    summary["host"] = _spread(_series(steps, f"{phase}_host_s"), mean=True)
    if phase in BORDERS:
        summary["lag"] = _spread(_series(steps, f"lag_{phase}_s"))
    return summary


def _spread(values: list[float], mean: bool = False) -> dict[str, float | None]:
    spread: dict[str, float | None] = {"mean_s": statistics.fmean(values) if values else None} if mean else {}
    spread["min_s"] = min(values, default=None)
    spread["median_s"] = statistics.median(values) if values else None
    spread["max_s"] = max(values, default=None)
    return spread


def _series(steps: list[Record], name: str) -> list[float]:
    return [step[name] for step in steps if step.get(name) is not None]
