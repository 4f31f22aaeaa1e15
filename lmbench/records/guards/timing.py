"""Guards on the step times: identity, drift, spread, hidden synchronizes, framework time, MFU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmbench.records.guards.guard import Guard, at_most, not_applicable
from lmbench.records.paths import lookup, number
from lmbench.records.vocabulary import Record

IDENTITY_LIMIT_FRACTION = {"cuda": 0.001, "cpu": 0.005}
TREND_LIMIT_FRACTION = 0.01
#: A drift that noise makes this often is not called a trend.
TREND_P = 0.05
SPREAD_LIMIT_FRACTION = 0.10
OTHER_LIMIT_FRACTION = 0.02
MFU_LIMIT_FRACTION = 1.0


def window_identity(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if the window's steps do not add up to its wall time, which was clocked apart from them.

    The sum is taken from the records where all of the window's are there, else from run.json.
    """
    name = "window_identity"
    wall = number(run, "window.wall_s")
    if not wall or not number(run, "window.steps"):
        return not_applicable(name, "no window was closed")
    spans = [step.get("step_s") for step in steps if step.get("stage") == "window" and _is_own(run, step)]
    known = [span for span in spans if span is not None]
    complete = len(known) == number(run, "window.steps")
    total = math.fsum(known) if complete else number(run, "window.steps_sum_s")
    if total is None:
        return not_applicable(name, "the window's steps were not all recorded")
    error = abs(total - wall) / wall
    limit = IDENTITY_LIMIT_FRACTION.get(str(run.get("device_type")), IDENTITY_LIMIT_FRACTION["cuda"])
    message = f"steps sum to {total:.4f} s, the window took {wall:.4f} s ({error:.3%} apart)"
    advice = (
        "Time passed outside every step, or was counted twice: look for callbacks that work between batches; "
        "if there are none, please report it."
    )
    return at_most(name, error, limit, "fraction", message, advice=advice, otherwise="fail")


def window_complete(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if the window has fewer steps, or is shorter, than was asked for; fails if it has none."""
    name = "window_complete"
    if run.get("outcome") not in (None, "ok"):
        return not_applicable(name, f"the run's outcome is {run['outcome']}")
    asked, asked_s = number(run, "window.requested_steps"), number(run, "window.requested_s") or 0.0
    count, wall_s = number(run, "window.steps"), number(run, "window.wall_s")
    lasted_s = None if wall_s is None else wall_s + (number(run, "window.excluded_s") or 0.0)
    if count is None:
        return not_applicable(name, "no window was recorded")
    advice = "The run ended first: lift what ends training (max_steps, max_epochs, max_time, limits), or ask for less."
    message = f"{count:.0f} steps in the window"
    if asked is not None:
        message += f", {asked:.0f} asked for"
    if not count:
        return Guard(name, "fail", count, 1, "count", message, advice)
    if asked is None or (lasted_s is not None and count >= asked and lasted_s >= asked_s):
        return Guard(name, "pass", count, asked, "count", message)
    if count >= asked:
        message += f"; shorter than the {asked_s:g} s asked for"
    return Guard(name, "warn", count, asked, "count", message, advice)


def probe_steps(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if the steps after the window, which look inside it, ended too soon."""
    name = "probe_steps"
    if run.get("outcome") not in (None, "ok"):
        return not_applicable(name, f"the run's outcome is {run['outcome']}")
    is_complete, error = lookup(run, "probe.is_complete"), lookup(run, "probe.error")
    if is_complete is None:
        return not_applicable(name, "no probe steps were taken")
    if is_complete:
        return Guard(name, "pass", None, None, "", "every kind of probe step was taken")
    if error is None:
        message = "the run ended before its probe steps did: some verdicts or checks are missing"
        return Guard(name, "warn", None, None, "", message, "Lift what ends training, or ask for fewer steps.")
    message = f"out of memory in the probe steps, in {error.get('phase')}, after a complete window"
    advice = "Probes take memory of their own; --measure.probe_steps 0 leaves them out, a smaller batch makes room."
    return Guard(name, "warn", None, None, "", message, advice)


def _is_own(run: Record, step: Record) -> bool:
    return int(step.get("rank") or 0) == int(run.get("rank") or 0)


def trend(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if step times drift by over 1 % across the window, and noise alone would rarely order them so."""
    name = "trend"
    drift, chance = number(run, "phases.step.trend_fraction"), number(run, "phases.step.trend_p")
    if drift is None or chance is None:
        return not_applicable(name, "fewer than 6 steps")
    message = f"step time drifts by {drift:+.1%} over the window (p = {chance:.2g})"
    if abs(drift) > TREND_LIMIT_FRACTION and chance >= TREND_P:
        return Guard(name, "pass", abs(drift), TREND_LIMIT_FRACTION, "fraction", f"{message}: not told from noise")
    advice = (
        "Steps get slower: see power, temperature and clock, or memory that grows; measure a longer window."
        if drift > 0
        else "Steps get faster: warm up for longer."
    )
    return at_most(name, abs(drift), TREND_LIMIT_FRACTION, "fraction", message, advice=advice)


def spread(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if the standard deviation of step times is over 10 % of their mean."""
    name = "spread"
    value = number(run, "phases.step.cv_fraction")
    if value is None:
        return not_applicable(name, "fewer than 2 steps")
    outliers = number(run, "phases.step.outlier_count") or 0
    message = f"standard deviation is {value:.1%} of the mean step, {outliers:.0f} outlier{'s' * (outliers != 1)}"
    advice = (
        "Single steps stand out: see their phases in steps.jsonl (loader, other work on the machine), and "
        "quote the median."
        if outliers
        else "Steps vary throughout: keep the machine free of other work, or measure more steps."
    )
    return at_most(name, value, SPREAD_LIMIT_FRACTION, "fraction", message, advice=advice)


def hidden_syncs(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if a probe step found calls that make the host wait for the device."""
    name = "hidden_syncs"
    found = lookup(run, "probe.hidden_syncs")
    if run.get("device_type") != "cuda":
        return not_applicable(name, "not a CUDA device")
    if found is None:
        return not_applicable(name, "no probe step looked for them")
    message = f"{len(found)} hidden synchronizes in a step"
    advice = "See their stacks under probe.hidden_syncs (.item(), .cpu(), printing a tensor, a boolean index)."
    return at_most(name, len(found), 0, "count", message, advice=advice)


def other_share(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if `other` is over 2 % of a device-bound step (in a host-bound one it is the host's time)."""
    name = "other_share"
    share = number(run, "phases.other.share_fraction")
    if run.get("unseen_phases"):
        return not_applicable(name, f"it holds phases that cannot be told apart ({', '.join(run['unseen_phases'])})")
    if run.get("device_type") != "cuda" or share is None:
        return not_applicable(name, "not a CUDA device" if share is not None else "no steps were measured")
    verdicts = lookup(run, "probe.verdicts") or {}
    if not verdicts:
        return not_applicable(name, "no probe step said whether the device is the bottleneck")
    waiting = [phase for phase in verdicts if lookup(verdicts, f"{phase}.verdict") != "queued"]
    if waiting:
        return not_applicable(name, f"the step is not device-bound ({', '.join(waiting)})")
    message = f"`other` is {share:.1%} of the step"
    advice = "Work outside every phase reaches the device: look at callbacks, logging and hooks between the phases."
    return at_most(name, share, OTHER_LIMIT_FRACTION, "fraction", message, advice=advice)


def mfu(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if MFU is over 100 %, which no device can do."""
    name = "mfu"
    value = number(run, "throughput.mfu_fraction")
    if value is None:
        return not_applicable(name, str(lookup(run, "throughput.mfu_reason") or "no MFU"))
    advice = "The FLOP count, the peak or the clock is wrong: check flops.source and flops.peak_source."
    return at_most(name, value, MFU_LIMIT_FRACTION, "fraction", f"MFU {value:.1%}", advice=advice, otherwise="fail")
