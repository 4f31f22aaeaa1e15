"""All guards of a run, in the order they are printed (design section 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmbench.results import guards_device, guards_settings, guards_timing, guards_training
from lmbench.results.guard import Guard
from lmbench.results.vocabulary import Record

#: Each takes run.json's content and the step records, and returns its guard under its own name.
CHECKS: tuple[Callable[[Record, Sequence[Record]], Guard], ...] = (
    guards_training.finite_loss,
    guards_training.first_loss,
    guards_training.gradients,
    guards_training.trained,
    guards_training.skipped_steps,
    guards_timing.window_complete,
    guards_timing.probe_steps,
    guards_timing.window_identity,
    guards_timing.mfu,
    guards_timing.trend,
    guards_timing.spread,
    guards_timing.other_share,
    guards_timing.hidden_syncs,
    guards_settings.launch_blocking,
    guards_settings.anomaly_mode,
    guards_settings.deterministic,
    guards_settings.recompiles,
    guards_device.power_cap,
    guards_device.thermal_cap,
    guards_device.sm_clock_drop,
    guards_device.other_processes,
    guards_device.allocator_growth,
    guards_device.allocator_retries,
)


def evaluate_guards(run: Record, steps: Sequence[Record]) -> list[Guard]:
    """Every guard, each once. Reads only; what a run does not have makes `n/a`, never an error or a pass."""
    return [check(run, steps) for check in CHECKS]
