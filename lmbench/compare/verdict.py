"""From ratios to verdicts with their reasons, and Holm's correction before it."""

from __future__ import annotations

import math
from typing import NamedTuple

from lmbench.compare.rounds import FIRST_LOOK
from lmbench.compare.sides import SIZE_WORDS, TIME_WORDS
from lmbench.errors import ExitCode
from lmbench.records.statistics import CONFIDENCE, MIN_REPEATS, Ratio, detectable_fraction
from lmbench.report.units import change_percent, change_range, percent_short

#: A machine that was not seen to be busy may be slower by so much an hour later.
DRIFT_FRACTION = 0.1

SAME, UNDECIDED, INVALID = "same", "undecided", "invalid"
SLOWER, FASTER = TIME_WORDS

#: The verdict of many cells together is the first of these that occurs, with its exit code. A cell proven slower stays
#: so whatever the others are; a comparison that cannot be made is graver than one that needs more repeats.
EXIT_CODES = {
    SLOWER: ExitCode.SLOWER,
    INVALID: ExitCode.INVALID,
    UNDECIDED: ExitCode.UNDECIDED,
    FASTER: ExitCode.OK,
    SAME: ExitCode.OK,
}


class Decision(NamedTuple):
    """A verdict's word and, in one line with the figures, why."""

    word: str
    reason: str


def decide(  # noqa: PLR0911 (the order of decisions)
    ratio: Ratio,
    *,
    tolerance: float,
    adjusted_p: float | None,
    floor: float | None = None,
    family: int = 1,
    is_time: bool = True,
    is_apart: bool = False,
    busy: str | None = None,
) -> Decision:
    """The verdict of a comparison that is valid.

    Args:
        tolerance: changes up to this fraction count as none (`--gate`).
        floor: the change that the same configuration shows against itself (`lmbench noise`), None if not measured.
        adjusted_p: p after Holm's correction over a family of so many tests.
        is_time: it is a time, to which the machine's load and drift belong.
        is_apart: one side was measured before the other: a drift of the machine is in the ratio.
        busy: why the ratio may be one of the machine's load, None where it may not.
    """
    change, by_rounds, gate = change_percent(ratio.change), bool(ratio.differences), f"±{percent_short(tolerance)}"
    shown_floor = "" if floor is None else f"the A/A noise floor of {percent_short(floor)}"
    repeats, least = min(ratio.n_a, ratio.n_b), FIRST_LOOK if by_rounds else MIN_REPEATS
    if adjusted_p is None or repeats < least:
        few = f"rounds: {ratio.n_a}" if by_rounds else f"repeats: A has {ratio.n_a}, B has {ratio.n_b}"
        return Decision(UNDECIDED, f"{few}; a verdict takes {least} ({change} so far)")
    if busy and is_time:
        return Decision(UNDECIDED, f"{change}, and {busy}")
    if ratio.lies_within(tolerance):
        return Decision(SAME, f"the 90 % interval {interval(ratio.equal_low, ratio.equal_high)} lies within {gate}")
    limits = interval(ratio.low, ratio.high)
    if adjusted_p < 1.0 - CONFIDENCE:
        if floor is not None and abs(math.log(ratio.point)) <= math.log1p(floor):
            return Decision(UNDECIDED, f"the interval {limits} excludes 0, but {change} is not above {shown_floor}")
        if is_apart and is_time and floor is None and abs(math.log(ratio.point)) <= math.log1p(DRIFT_FRACTION):
            remedy = "`lmbench noise` measures it, `lmbench compare --run` takes turns"
            drift = f"one side was measured before the other, and no A/A noise floor is known: {remedy}"
            return Decision(UNDECIDED, f"{change}, interval {limits} excludes 0, but this may be a drift: {drift}")
        above = f"above {shown_floor}" if shown_floor else "no A/A noise floor is known"
        above = f"after {ratio.n_a} rounds" if by_rounds else above
        corrected = f"; p = {adjusted_p:.2g} after Holm over {family}" if family > 1 else ""
        words = TIME_WORDS if is_time else SIZE_WORDS
        return Decision(words[ratio.point < 1], f"{change}, interval {limits} excludes 0, {above}{corrected}")
    if ratio.excludes_one:
        holm_words = f"Holm's correction over {family} (p {ratio.p:.2g} becomes {adjusted_p:.2g})"
        return Decision(UNDECIDED, f"the interval {limits} excludes 0 by itself, but not after {holm_words}")
    reach = f"{change}, interval {limits}: neither a change nor `same` within {gate} is shown"
    if ratio.persistence:
        shares = "of A {:.2f}, of B {:.2f}, of the differences {:.2f}".format(*ratio.persistence)
        return Decision(UNDECIDED, f"noise persists over rounds (autocorrelation {shares}): {reach}")
    if ratio.std_a is None or ratio.std_b is None:
        return Decision(UNDECIDED, reach)
    detectable = detectable_fraction(math.hypot(ratio.std_a, ratio.std_b) / math.sqrt(2), repeats)
    return Decision(UNDECIDED, f"{reach}; at this spread {repeats} repeats tell {percent_short(detectable)} from none")


def interval(low: float | None, high: float | None) -> str:
    """An interval of ratios as changes: `-0.31 .. +0.42 %`, or `none yet`."""
    return "none yet" if low is None or high is None else change_range(low - 1, high - 1)
