"""Is a phase waiting for the host? The verdict from the lowest lag inside it."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.measure.timeline import StepSpans
from lmbench.records.field import PerPhase
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.vocabulary import Phase

# Design section 4: under 0.25 ms the device waits for the host; nine probe steps of ten must say the same.
HOST_BOUND_LAG_S = 0.25e-3
AGREEMENT_FRACTION = 0.9

# Waiting for data is the host's by definition, and `other` is the host's own work between phases.
JUDGED_PHASES: tuple[Phase, ...] = ("forward", "backward", "clip", "optimizer", "zero_grad")


def lag_verdicts(steps: Sequence[StepSpans]) -> PerPhase[LagVerdict]:
    """The verdict on each phase seen, from the lowest lag inside it in each probe step.

    Empty where the clock has no lag (a CPU run, the sync clock).
    """
    verdicts: PerPhase[LagVerdict] = PerPhase()
    for phase in JUDGED_PHASES:
        lags = sorted(step.min_lag_s[phase] for step in steps if phase in step.min_lag_s)
        if not lags:
            continue
        waiting = sum(lag < HOST_BOUND_LAG_S for lag in lags) / len(lags)
        agree = max(waiting, 1.0 - waiting)
        word: LagWord = "mixed" if agree < AGREEMENT_FRACTION else ("host-bound" if waiting > 0.5 else "queued")
        marks = min(step.mark_count[phase] for step in steps if phase in step.mark_count)
        verdicts.set(phase, LagVerdict(word, lags[len(lags) // 2], agree, marks))
    return verdicts
