"""Whose work a step waits for, in lines of a run's answer."""

from __future__ import annotations

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
