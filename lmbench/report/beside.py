"""Lines of a run on what lies beside its kernels: whose work a step waits for, its input, checkpoints, pace."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.records.endurance import Saving, StepChange
from lmbench.records.measured import PhaseSummary
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import PHASES
from lmbench.report.answer import Line, labelled, listed
from lmbench.report.units import counted, gib, milliseconds, percent

#: Smallest share of the step that an owner needs for a place in its phase's line.
_NOTABLE_FRACTION = 0.02
#: Owners in a line at most.
_SHOWN = 3
#: The units of what stands beside a change: the factor of a figure, and its text.
_BESIDE = {
    "sm_clock_hz": (1e-6, "SM clock {:.0f} -> {:.0f} MHz"), "temperature_c": (1, "{:.0f} -> {:.0f} °C"),
    "host_bytes": (2**-30, "host {:.2f} -> {:.2f} GiB"), "reserved_bytes": (2**-30, "reserved {:.2f} -> {:.2f} GiB"),
    "gc_s": (1e3, "garbage collections of {:.3g} -> {:.3g} ms"),
}  # fmt: skip


def owner_lines(run: RunRecord) -> list[Line]:
    """A line for each phase in which hooks, logging, the loader or the collector take a notable share of the step."""
    step, lines = run.step, list[Line]()
    for phase in PHASES:
        summary = run.phases.get(phase) or PhaseSummary()
        owners = [
            f"{owned} {milliseconds(owned.host_s)} ms"
            for owned in run.host_time.owners_within(phase, summary.mean_s or 0.0)
            if owned.host_s > _NOTABLE_FRACTION * (step.mean_s or 0.0)
        ]
        if owners and phase == "other" and run.unseen_phases:
            owners.insert(0, f"{listed(*run.unseen_phases)} of a module that optimizes by hand")
        lines += labelled(phase, owners and f"{percent(summary.share_fraction)}: {', '.join(owners[:_SHOWN])}")
    return lines


def input_lines(run: RunRecord) -> list[Line]:
    """Whether the loader or the model limits the step, who makes a batch, and the settings that end the waiting."""
    facts, step = run.input_pipeline, run.step
    if facts is None or not step.mean_s:
        return []
    if facts.reason or facts.resident_step_s is None:
        return [Line("input", f"not measured: {facts.reason or 'the step without a loader is unknown'}")]
    settings = ", ".join(f"{name}={value}" for name, value in facts.fix.items())
    # On a busy machine the model alone may have had a better moment than the window, or a worse one.
    bound_s = max(0.0, min(step.mean_s - facts.resident_step_s, facts.waited_s or 0.0))
    bound = f"input-bound by {percent(bound_s / step.mean_s)} of the step" if settings else "fine"
    slow = [
        f"{line} {milliseconds(line_s)} ms"
        for line, line_s in facts.slowest_lines.items()
        if line_s > _NOTABLE_FRACTION * step.mean_s
    ]
    predicted, measured = milliseconds(facts.predicted_step_s), milliseconds(facts.fixed_step_s)
    vain = ", which is no less than now" if (facts.fixed_step_s or 0.0) >= step.mean_s else ""
    band = " .. ".join(map(milliseconds, facts.predicted_interval or []))
    return [
        Line(
            "input",
            f"{bound}: loader alone {milliseconds(facts.loader_step_s)} ms a step, model alone "
            f"{milliseconds(facts.resident_step_s)}, first batch {milliseconds(facts.first_batch_s)}, turn of an epoch "
            f"{milliseconds(facts.turn_s)}",
        ),
        Line(
            "batch",
            f"{facts.reader} {milliseconds(facts.reader_s)} ms, collate {milliseconds(facts.collate_s)}, in one "
            f"worker; {percent(facts.idle_fraction)} of it waits, as for a disk",
        ),
        *labelled("in it", listed(*slow)),
        *labelled(
            "fix", settings and f"{settings}: {predicted} ms a step predicted ({band}), {measured} measured{vain}"
        ),
    ]


def endurance_lines(run: RunRecord) -> list[Line]:
    """The window's goodput where pauses interrupt it, the cost of checkpoints, and changes of the step time."""
    window = run.window
    wall_s = window.lasted_s
    pauses = {"checkpoints": window.checkpoint_s, "validation": window.validation_s}
    told = [f"{name} {percent(seconds / wall_s)}" for name, seconds in pauses.items() if seconds and wall_s]
    goodput = f"{percent(window.goodput_fraction)} of the wall time is steps"
    return [
        *labelled("goodput", told and f"{goodput}; {', '.join(told)}"),
        *_saving(run.saving),
        *(Line("changed", _changed(change)) for change in window.changes),
    ]


def _saving(saving: Saving) -> list[Line]:
    """How long checkpoints block, what they do to steps beside their writing, and what they cost in all."""
    size = f" of {gib(saving.checkpoint_bytes)}" if saving.checkpoint_bytes else ""
    blocked = f"{counted(saving.count or 0, 'checkpoint')}{size} block {milliseconds(saving.blocked_s)} ms each"
    slower = _with_interval(saving.slowed_fraction or 0.0, saving.slowed_interval or ())
    every, cost = saving.interval_steps or 0.0, saving.cost_fraction or 0.0
    total = f"in all {_with_interval(cost, saving.cost_interval or ())} time at one every {every:.0f} steps"
    return [
        *labelled(
            "saving",
            saving.count and blocked,
            saving.written_bytes_per_s and f"{saving.written_bytes_per_s / 1e9:.3g} GB/s",
        ),
        *labelled("", saving.slowed_interval and f"steps beside the writing of one take {slower}"),
        *labelled("", saving.cost_interval and f"{total}; 1 % at one every {max(1.0, every * cost / 0.01):,.0f}"),
    ]


def _with_interval(fraction: float, interval: Sequence[float]) -> str:
    return f"{fraction:+.1%} [{', '.join(f'{end:+.1%}' for end in interval)}]"


def _changed(change: StepChange) -> str:
    """When and how much the step time changed, and what stood at another level before than after."""
    beside = [
        text.format(change.before.get(name, 0.0) * factor, change.after.get(name, 0.0) * factor)
        for name, (factor, text) in _BESIDE.items()
        if name in change.before or name in change.after
    ]
    step = f"step {_with_interval(change.ratio - 1, [change.low - 1, change.high - 1])}"
    return listed(f"after {change.after_s:.0f} s, at step {change.step:,}: {step}", *beside)
