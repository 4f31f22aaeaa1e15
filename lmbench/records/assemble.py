"""Complete a run's record from its step records: sums of the window, statistics, rates, guards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lmbench.records.guards.checks import evaluate_guards
from lmbench.records.summary import select_window, summarize_steps
from lmbench.records.throughput import throughput

Record = dict[str, Any]


def complete_run(run: Record, steps: Sequence[Record]) -> None:
    """Fill in, in place, what follows from the facts of the run and its steps (`stage` window or warm-up)."""
    _complete_window(run["window"], steps)
    run["phases"] = summarize_steps(steps)
    flops = run.get("flops") or {}
    run["throughput"] = throughput(
        tokens=run["window"].get("tokens"),
        wall_s=run["window"].get("wall_s"),
        per_token_flops=flops.get("per_token_flops"),
        causal_per_token_flops=flops.get("causal_per_token_flops"),
        peak_flops_per_s=flops.get("peak_flops_per_s"),
        energy_j=(run.get("device_state") or {}).get("energy_j"),
        reason=_why_no_mfu(run, flops),
    )
    run["guards"] = [guard.as_dict() for guard in evaluate_guards(run, steps)]


def _complete_window(window: Record, records: Sequence[Record]) -> None:
    """Subtract the pauses from the wall time, and compare it with the sum of the steps."""
    steps = [record for record in records if record["stage"] == "window"]
    window["steps_sum_s"] = math.fsum(step["step_s"] for step in steps)
    window["excluded_s"] = math.fsum(step["excluded_s"] for step in steps)
    window["excluded_count"] = sum(step["excluded_s"] > 0 for step in steps)
    selected = select_window(records, window["micro_batches"])
    window["skipped_count"], window["short_count"] = selected.skipped_count, selected.short_count
    raw_wall_s = window.pop("raw_wall_s", None)
    if raw_wall_s is not None:
        window["wall_s"] = raw_wall_s - window["excluded_s"]
        window["identity_error_fraction"] = (window["steps_sum_s"] - window["wall_s"]) / window["wall_s"]


def _why_no_mfu(run: Record, flops: Record) -> str | None:
    if flops.get("peak_flops_per_s") is None:
        device = (run.get("environment", {}).get("gpu") or {}).get("name") or run.get("device_type")
        return f"no datasheet peak known for {device} in {run.get('precision')}"
    if flops.get("per_token_flops") is None:
        return str(flops.get("reason") or "the module does not tell its FLOPs")
    reason: str | None = run["window"].get("tokens_reason")
    return reason
