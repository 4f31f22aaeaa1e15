"""Whose work a step waits for, and whether it waits for its input, in lines of a run's answer."""

from __future__ import annotations

from lmbench.records.measured import PhaseSummary
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import PHASES
from lmbench.report.answer import Line
from lmbench.report.units import milliseconds, percent

#: Smallest share of the step that an owner needs for a place in its phase's line.
_NOTABLE_FRACTION = 0.02
#: Owners in a line at most.
_SHOWN = 3


def owner_lines(run: RunRecord) -> list[Line]:
    """A line for each phase in which hooks, logging, the loader or the collector take a notable share of the step."""
    step, lines = run.phases.step or PhaseSummary(), []
    for phase in PHASES:
        summary = run.phases.get(phase) or PhaseSummary()
        owners = [
            f"{owned} {milliseconds(owned.host_s)} ms"
            for owned in run.host_time.owners_within(phase, summary.mean_s or 0.0)
            if owned.host_s > _NOTABLE_FRACTION * (step.mean_s or 0.0)
        ]
        if owners:
            lines.append(Line(phase, f"{percent(summary.share_fraction)}: {', '.join(owners[:_SHOWN])}"))
    return lines


def input_lines(run: RunRecord) -> list[Line]:
    """Whether the loader or the model limits the step, who makes a batch, and the settings that end the waiting."""
    facts, step = run.input_pipeline, run.phases.step
    if facts is None or step is None or not step.mean_s:
        return []
    if facts.reason or facts.resident_step_s is None:
        return [Line("input", f"not measured: {facts.reason}")]
    settings = ", ".join(f"{name}={value}" for name, value in facts.fix.items())
    bound = f"input-bound by {percent(1 - facts.resident_step_s / step.mean_s)} of the step" if settings else "fine"
    lines = [
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
    ]
    if slow := [
        f"{line.location} {milliseconds(line.host_s)} ms ({percent(line.idle_fraction)} waits)"
        for line in facts.lines
        if line.host_s > _NOTABLE_FRACTION * step.mean_s
    ]:
        lines.append(Line("in it", ", ".join(slow)))
    if settings:
        predicted, measured = milliseconds(facts.predicted_step_s), milliseconds(facts.fixed_step_s)
        band = " .. ".join(map(milliseconds, facts.predicted_interval or []))
        lines.append(Line("fix", f"{settings}: {predicted} ms a step predicted ({band}), {measured} measured"))
    return lines
