"""All guards of a run, in the order they are printed (design section 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmbench.records.guards import device, settings, timing, training
from lmbench.records.guards.guard import Guard
from lmbench.records.vocabulary import Record

#: Each takes run.json's content and the step records, and returns its guard under its own name.
CHECKS: tuple[Callable[[Record, Sequence[Record]], Guard], ...] = (
    training.finite_loss,
    training.first_loss,
    training.gradients,
    training.trained,
    training.skipped_steps,
    timing.window_complete,
    timing.probe_steps,
    timing.window_identity,
    timing.mfu,
    timing.trend,
    timing.spread,
    timing.other_share,
    timing.hidden_syncs,
    settings.launch_blocking,
    settings.anomaly_mode,
    settings.deterministic,
    settings.recompiles,
    device.power_cap,
    device.thermal_cap,
    device.sm_clock_drop,
    device.other_processes,
    device.allocator_growth,
    device.allocator_retries,
)


def evaluate_guards(run: Record, steps: Sequence[Record]) -> list[Guard]:
    """Every guard, each once. Reads only; what a run does not have makes `n/a`, never an error or a pass."""
    return [check(run, steps) for check in CHECKS]
