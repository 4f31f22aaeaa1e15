"""A comparison as plain data, for `lmbench compare --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lmbench.compare.comparison import CellResult, Comparison, MetricResult
from lmbench.compare.metrics import SAMPLE
from lmbench.compare.side import Side
from lmbench.records.welch import CONFIDENCE

COMPARISON_SCHEMA_VERSION = 1


def as_record(found: Comparison) -> dict[str, Any]:
    """The whole comparison in SI units, ratios as B over A."""
    return {
        "schema_version": COMPARISON_SCHEMA_VERSION,
        "verdict": found.verdict,
        "exit_code": int(found.exit_code),
        "a": _side(found.a),
        "b": _side(found.b),
        "tolerance_fraction": found.tolerance,
        "confidence_fraction": CONFIDENCE,
        "about": list(found.about),
        "sample": SAMPLE,
        "cells": [_cell(cell) for cell in found.cells],
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "neither": [{"name": name, "reason": reason} for name, reason in found.neither],
        "problems": list(found.problems),
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "given": side.given,
        "run_count": len(side.runs) + len(side.left_out),
        "left_out": [asdict(run) for run in side.left_out],
    }


def _cell(cell: CellResult) -> dict[str, Any]:
    return {
        "name": cell.name,
        "verdict": cell.verdict,
        "reasons": list(cell.reasons),
        "notes": list(cell.notes),
        "differences": [asdict(difference) for difference in cell.differences],
        "a": {"used": list(cell.used_a), "left_out": [asdict(run) for run in cell.left_out_a]},
        "b": {"used": list(cell.used_b), "left_out": [asdict(run) for run in cell.left_out_b]},
        "metrics": [_metric(metric) for metric in cell.metrics],
    }


def _metric(found: MetricResult) -> dict[str, Any]:
    ratio = found.ratio
    return {
        "name": found.metric.name,
        "unit": found.metric.unit,
        "a": {"n": ratio.n_a, "geometric_mean": found.a, "std_fraction": ratio.std_a},
        "b": {"n": ratio.n_b, "geometric_mean": found.b, "std_fraction": ratio.std_b},
        "ratio": ratio.ratio,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "p": ratio.p,
        "p_holm": found.adjusted_p,
        "noise_floor_fraction": found.floor,
        "step_share_fraction": found.step_share,
        "finding": found.decision.word,
        "reason": found.decision.reason,
    }
