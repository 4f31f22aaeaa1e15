"""From ratios to verdicts with their reasons, in the order of design section 8, and Holm's correction before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmbench.compare.metrics import TIME_WORDS
from lmbench.compare.rounds import FIRST_LOOK
from lmbench.errors import ExitCode
from lmbench.records.statistics import CONFIDENCE, MIN_REPEATS, POWER, Ratio
from lmbench.report.units import change_percent, change_range, percent_short

DEFAULT_TOLERANCE_FRACTION = 0.01

SAME, UNDECIDED, INVALID = "same", "undecided", "invalid"
SLOWER, FASTER = TIME_WORDS

#: Verdicts of many cells together: the first of these that occurs. A cell proven slower stays so whatever the others
#: are; a comparison that cannot be made is graver than one that needs more repeats.
GRAVEST_FIRST = (SLOWER, INVALID, UNDECIDED, FASTER, SAME)

EXIT_CODES = {
    SLOWER: ExitCode.SLOWER,
    INVALID: ExitCode.INVALID,
    UNDECIDED: ExitCode.UNDECIDED,
    FASTER: ExitCode.OK,
    SAME: ExitCode.OK,
}


@dataclass(frozen=True)
class Decision:
    """A verdict's word and, in one line with the figures, why."""

    word: str
    reason: str


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given: below 0.05 with at most 5 % for any false one among them.

    Sequential rejection (Holm, Scandinavian Journal of Statistics 6, 1979): the k-th smallest of m is multiplied by
    m - k + 1, and no adjusted value is below that of a smaller p.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted


def decide(
    found: Ratio,
    *,
    tolerance: float,
    floor: float | None,
    adjusted_p: float | None,
    family: int,
    words: tuple[str, str] = TIME_WORDS,
    has_hint: bool = True,
) -> Decision:
    """The verdict of a comparison that is valid.

    Args:
        tolerance: changes up to this fraction count as none (`--gate`).
        floor: the change that the same configuration shows against itself (`lmbench noise`), None if not measured.
        adjusted_p: p after Holm's correction over a family of so many tests.
        words: what a ratio above 1 and one below are called.
        has_hint: say of one that is undecided how many repeats would do.
    """
    by_rounds = bool(found.differences)
    if by_rounds and found.n_a < FIRST_LOOK:
        why = f"{_count(found.n_a, 'round')}; a verdict takes {FIRST_LOOK}"
        return Decision(UNDECIDED, f"{why} ({change_percent(found.change)} so far)")
    if min(found.n_a, found.n_b) < MIN_REPEATS or adjusted_p is None or (found.low is None and not by_rounds):
        why = f"A has {_count(found.n_a, 'repeat')}, B has {found.n_b}; a verdict takes {MIN_REPEATS} a side"
        return Decision(UNDECIDED, f"{why} ({change_percent(found.change)} so far)")
    if found.lies_within(tolerance):
        why = f"the 90 % interval {_range(found.equal_low, found.equal_high)} lies within ±{percent_short(tolerance)}"
        if floor is not None and floor > tolerance:
            why += f"; but the A/A noise floor of {percent_short(floor)} is wider than that"
        return Decision(SAME, why)
    if adjusted_p >= 1.0 - CONFIDENCE:
        return Decision(UNDECIDED, _undecided(found, tolerance, adjusted_p, family, has_hint))
    if floor is not None and abs(math.log(found.point)) <= math.log1p(floor):
        why = f"the interval {interval(found)} excludes 0, but {change_percent(found.change)}"
        return Decision(UNDECIDED, f"{why} is not above the A/A noise floor of {percent_short(floor)}")
    above = "no A/A noise floor is known" if floor is None else f"above the A/A noise floor of {percent_short(floor)}"
    if by_rounds:
        above = f"after {found.n_a} rounds"
    corrected = f"; p = {adjusted_p:.2g} after Holm over {family}" if family > 1 else ""
    word = words[0] if found.point > 1 else words[1]
    return Decision(word, f"{change_percent(found.change)}, interval {interval(found)} excludes 0, {above}{corrected}")


def overall(words: list[str]) -> str:
    """The verdict of several cells together; `undecided` where there are none."""
    return next((word for word in GRAVEST_FIRST if word in words), UNDECIDED)


def _undecided(found: Ratio, tolerance: float, adjusted_p: float, family: int, has_hint: bool) -> str:
    if found.excludes_one:
        return (
            f"the interval {interval(found)} excludes 0 by itself, but not after Holm's correction over "
            f"{family} (p {found.p:.2g} becomes {adjusted_p:.2g})"
        )
    if found.low is None:
        return f"{found.n_a} rounds bound nothing yet ({change_percent(found.change)} so far)"
    text = f"the interval {interval(found)} includes 0 and reaches beyond ±{percent_short(tolerance)}"
    if not has_hint:
        return text
    what = "rounds" if bool(found.differences) else "repeats a side"
    needed = found.needed(tolerance)
    if needed is None:
        what_helps = "widen the gate, or quiet the machine"
        return f"{text}; at this spread no number of {what} is likely to give a verdict: {what_helps}"
    if needed <= min(found.n_a, found.n_b):
        return text
    return f"{text}; at this spread {needed} {what} in all give a verdict with {percent_short(POWER)} probability"


def interval(found: Ratio) -> str:
    """The 95 % interval of the change: `-0.31 .. +0.42 %`, or `none yet`."""
    return _range(found.low, found.high)


def _range(low: float | None, high: float | None) -> str:
    return "none yet" if low is None or high is None else change_range(low - 1, high - 1)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
