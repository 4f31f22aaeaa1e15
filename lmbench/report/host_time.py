"""Whose work a step waits for, and whether it waits for its input, in lines of a run's answer."""

from __future__ import annotations

from collections.abc import Iterable

from lmbench.records.measured import PhaseSummary
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import PHASES
from lmbench.report.answer import Line
from lmbench.report.units import milliseconds, percent

#: Smallest share of the step that a phase, and an owner in it, need for a line.
_NOTABLE_FRACTION = 0.02
#: Owners in a line at most.
_SHOWN = 3


def owner_lines(run: RunRecord) -> list[Line]:
    """A line for each phase in which hooks, logging, the loader or the collector take a notable share of the step."""
    step_s = run.phases.step.mean_s if run.phases.step else None
    lines = []
    for phase in PHASES:
        summary = run.phases.get(phase) or PhaseSummary()
        owners = [
            f"{owner} {milliseconds(owner.host_s)} ms"
            for owner in run.host_time.owners_within(phase, summary.mean_s or 0.0)
            if step_s and owner.host_s >= _NOTABLE_FRACTION * step_s
        ]
        if owners:
            lines.append(Line(phase, f"{percent(summary.share_fraction)}: {', '.join(owners[:_SHOWN])}"))
    return lines


def input_lines(run: RunRecord) -> list[Line]:
    """Whether the loader or the model limits the step, who makes a batch, and the settings that end the waiting."""
    facts = run.input_pipeline
    if facts is None or facts.loader_step_s is None:
        return [Line("input", f"not measured: {facts.reason}")] if facts and facts.reason else []
    verdict = "no step waits for its batch"
    if facts.is_input_bound and facts.resident_step_s and run.phases.step and run.phases.step.mean_s:
        verdict = f"input-bound by {percent(1 - facts.resident_step_s / run.phases.step.mean_s)} of the step"
    steps = (("loader alone", facts.loader_step_s), ("model alone", facts.resident_step_s))
    starts = (("first batch", facts.first_batch_s), ("turn of an epoch", facts.turn_s))
    lines = [
        Line("input", f"{verdict}; in ms a step: {_timed(steps)}; {_timed(starts)}"),
        Line(
            "batch",
            f"{facts.reader} {milliseconds(facts.reader_s)} ms, collate {milliseconds(facts.collate_s)} ms in one "
            f"process, {percent(facts.idle_fraction)} of it waiting, as for a disk",
        ),
    ]
    if facts.fix:
        settings = ", ".join(f"{name}={value}" for name, value in facts.fix.items())
        steps = (("predicted", facts.predicted_step_s), ("measured", facts.fixed_step_s))
        lines.append(Line("fix", f"{settings}; ms a step {_timed(steps)}"))
    return lines


def _timed(spans: Iterable[tuple[str, float | None]]) -> str:
    return ", ".join(f"{name} {milliseconds(time_s)}" for name, time_s in spans)
