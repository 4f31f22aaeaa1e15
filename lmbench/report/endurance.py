"""Lines of a run on what lies beside its steps: pauses, checkpoints, and changes of pace with what else changed."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.records.endurance import Saving, StepChange
from lmbench.records.run import RunRecord
from lmbench.report.answer import Line
from lmbench.report.units import gib, milliseconds, percent

#: The units of what stands beside a change: the factor of a figure, and its text.
_BESIDE = {
    "sm_clock_hz": (1e-6, "SM clock {:.0f} -> {:.0f} MHz"), "temperature_c": (1, "{:.0f} -> {:.0f} °C"),
    "host_bytes": (2**-30, "host {:.2f} -> {:.2f} GiB"), "reserved_bytes": (2**-30, "reserved {:.2f} -> {:.2f} GiB"),
    "gc_s": (1e3, "garbage collections of {:.3g} -> {:.3g} ms"),
}  # fmt: skip


def endurance_lines(run: RunRecord) -> list[Line]:
    """The window's goodput where pauses interrupt it, the cost of checkpoints, and changes of the step time."""
    window, lines = run.window, list[Line]()
    wall_s = (window.wall_s or 0.0) + (window.excluded_s or 0.0)
    pauses = [("checkpoints", window.checkpoint_s), ("validation", window.validation_s)]
    told = [f"{name} {percent(seconds / wall_s)}" for name, seconds in pauses if seconds and wall_s]
    if told and window.goodput_fraction is not None:
        lines.append(
            Line("goodput", f"{percent(window.goodput_fraction)} of the wall time is steps; {', '.join(told)}")
        )
    return [*lines, *_saving(run.saving), *(Line("changed", _changed(change)) for change in window.changes)]


def _saving(saving: Saving) -> list[Line]:
    """How long checkpoints block, what they do to steps beside their writing, and what they cost in all."""
    if not saving.count:
        return []
    size = f" of {gib(saving.checkpoint_bytes)}" if saving.checkpoint_bytes else ""
    rate = f", {saving.written_bytes_per_s / 1e9:.3g} GB/s" if saving.written_bytes_per_s else ""
    lines = [Line("saving", f"{saving.count} checkpoints{size} block {milliseconds(saving.blocked_s)} ms each{rate}")]
    if saving.slowed_fraction is not None and saving.slowed_interval:
        slower = _with_interval(saving.slowed_fraction, saving.slowed_interval)
        lines.append(Line("", f"steps beside the writing of one take {slower}"))
    if saving.cost_fraction is not None and saving.interval_steps:
        cost = _with_interval(saving.cost_fraction, saving.cost_interval or [])
        every = saving.interval_steps
        cheap = max(1.0, every * saving.cost_fraction / 0.01)
        lines.append(Line("", f"in all {cost} time at one every {every:.0f} steps; 1 % at one every {cheap:,.0f}"))
    return lines


def _with_interval(fraction: float, interval: Sequence[float]) -> str:
    ends = ", ".join(f"{end:+.1%}" for end in interval)
    return f"{fraction:+.1%}" + (f" [{ends}]" if ends else "")


def _changed(change: StepChange) -> str:
    """When and how much the step time changed, and what stood at another level before than after."""
    beside = [
        text.format(change.before.get(name, 0.0) * factor, change.after.get(name, 0.0) * factor)
        for name, (factor, text) in _BESIDE.items()
        if name in change.before or name in change.after
    ]
    step = f"step {_with_interval(change.ratio - 1, [change.low - 1, change.high - 1])}"
    return ", ".join([f"after {change.after_s:.0f} s, at step {change.step:,}: {step}", *beside])
