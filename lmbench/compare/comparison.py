"""Two sides compared, cell by cell: ratios with intervals, verdicts with their reasons.

Sides are read and joined to cells; a cell is checked for what makes it invalid; its figures become ratios; their p
values are corrected over all cells; then each ratio has its verdict, and each cell its notes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import NamedTuple

import numpy as np
import scipy  # type: ignore[import-untyped]
from msgspec import Struct

from lmbench.compare.comparability import are_apart, busy_reason, check_about, failed_guards, invalid_reasons, notes
from lmbench.compare.noise import Noise, NoiseKey, noise_key, read_floors
from lmbench.compare.rounds import FIRST_LOOK, ratio_by_rounds
from lmbench.compare.sides import (
    MEAN_STEP,
    METRICS,
    SIZE_WORDS,
    TIME_WORDS,
    LeftOut,
    Side,
    are_rounds,
    by_round,
    home_of,
    join_cells,
    process_of,
    read_side,
    split_usable,
)
from lmbench.errors import ExitCode, UsageError
from lmbench.records.load import Run
from lmbench.records.named import shown_path
from lmbench.records.schema import value_at
from lmbench.records.settings import Difference, differences
from lmbench.records.statistics import (
    CONFIDENCE,
    MIN_REPEATS,
    STD_PER_MAD,
    Ratio,
    detectable_fraction,
    geometric_mean,
    holm,
    ratio_from,
    ratio_of,
)
from lmbench.report.units import change_percent, change_range, percent_short

Floors = Mapping[NoiseKey, Mapping[str, Noise]]
#: A guard that fails in more of a side's rounds than this is no accident.
_ACCIDENTS_FRACTION = 1 / 3
#: A process is slow from so many standard deviations on, of the differences of all rounds (from their median absolute
#: deviation), and from this share of the step.
_SLOW_STDS, _SLOW_FRACTION, _SLOW_ROUNDS = 4.0, 0.01, 4
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


class Figure(Struct):
    """A metric on both sides: geometric means over processes (SI), their ratio, the A/A floor (None if not measured),
    p after Holm's correction (None with fewer than two repeats a side), and the finding with its reason."""

    name: str
    title: str
    unit: str
    a: float
    b: float
    ratio: Ratio
    noise_floor_fraction: float | None
    adjusted_p: float | None = None
    finding: str = INVALID
    reason: str = ""


class SlowProcess(Struct):
    """A process that took longer than the other one of its round (from 1) says."""

    side: str
    round: int
    run_id: str
    excess_fraction: float

    def __str__(self) -> str:
        excess = percent_short(self.excess_fraction)
        return f"round {self.round}: {self.side} took {excess} longer than its pair says"


class CellComparison(Struct):
    """One cell on both sides. `verdict` is that of the step time; `metrics` begins with it and is empty where a side
    has no run that counts. `by_rounds`: runs are paired by the round that they were measured in; `busy`: why a change
    may be one of the machine's load, None where it may not; `is_apart`: one side was measured before the other."""

    name: str
    used_a: list[str]
    used_b: list[str]
    left_out_a: list[LeftOut]
    left_out_b: list[LeftOut]
    by_rounds: bool
    verdict: str = UNDECIDED
    reasons: list[str] = []
    notes: list[str] = []
    differences: list[Difference] = []
    metrics: list[Figure] = []
    slow: list[SlowProcess] = []
    busy: str | None = None
    is_apart: bool = False


class Comparison(Struct):
    """What `compare` found: cells on both sides, names of those on one side only, and, with the reason, of those where
    no run counts on either side (out of memory on both, say), which are not judged. `family` is how many step times
    were tested together."""

    a: Side
    b: Side
    tolerance_fraction: float
    about: Sequence[str]
    cells: list[CellComparison]
    only_a: list[str]
    only_b: list[str]
    neither: list[dict[str, str]]
    family: int

    @property
    def verdict(self) -> str:
        """The gravest of the cells' verdicts; `undecided` where there are none."""
        words = [cell.verdict for cell in self.cells]
        return next((word for word in EXIT_CODES if word in words), UNDECIDED)


def compare(a: str, b: str, tolerance: float, about: Sequence[str] = ()) -> Comparison:
    """Compare what `a` and `b` name (see `read_side`); a ratio is B over A.

    Args:
        a: before.
        b: after.
        tolerance: changes up to this fraction count as none.
        about: dotted names of what is compared; with some, any other difference is invalid.

    Raises:
        UsageError: a side names no result, both hold the same run, nothing is on both sides, or noise.json is damaged.
    """
    sides = (read_side(a), read_side(b))
    processes = {process_of(run) for run in sides[1].runs}
    if same := [str(run.path) for run in sides[0].runs if process_of(run) in processes]:
        raise UsageError(
            f"A ({a}) and B ({b}) hold the same results, {len(same)} runs such as {same[0]!r}; give two that were "
            "measured apart"
        )
    runs = [*sides[0].runs, *sides[1].runs]
    check_about(about, runs)
    joined, floors = join_cells(sides[0].runs, sides[1].runs), read_floors(home_of(runs))
    only_a, only_b = ([name for name, cell in joined.items() if not cell[other]] for other in (1, 0))
    cells = [_compare_cell(name, cell, about, floors) for name, cell in joined.items() if all(cell)]
    if not cells:
        raise UsageError(
            f"A and B have no cell in common: A has {len(only_a)} (such as {only_a[0]!r}), B {len(only_b)} (such as "
            f"{only_b[0]!r}); give one cell each, or pick cells with FOLDER@AXIS=VALUE"
        )
    judged = [cell for cell in cells if cell.used_a or cell.used_b]
    neither = [{"name": cell.name, "reason": "; ".join(cell.reasons)} for cell in cells if cell not in judged]
    family = _judge(judged, tolerance)
    return Comparison(*sides, tolerance, about, judged, only_a, only_b, neither, family)


def _compare_cell(name: str, runs: tuple[list[Run], list[Run]], about: Sequence[str], floors: Floors) -> CellComparison:
    """A cell's samples and ratios, and what makes it invalid; its other verdicts need the ratios of all cells."""
    # A run whose guard failed is measured again in another round. Where many failed it was no accident.
    in_rounds = are_rounds(*runs)
    (a, left_out_a), (b, left_out_b) = (split_usable(side, takes_failed=not in_rounds) for side in runs)
    by_rounds = in_rounds and bool(a and b)
    if by_rounds:
        sides = by_round(a), by_round(b)
        shared = sorted(sides[0].keys() & sides[1].keys())
        a, b = ([rounds[place] for place in shared] for rounds in sides)
    used_a, used_b = ([run.run_id for run in side] for side in (a, b))
    cell = CellComparison(name, used_a, used_b, left_out_a, left_out_b, by_rounds)
    invalid = []
    for side, members, sample, left_out in zip("AB", runs, (a, b), (left_out_a, left_out_b), strict=True):
        ended = [run for run in members if run.outcome == "ok"]
        failed = [run for run in ended if any(guard.status == "fail" for guard in run.record.guards)]
        if in_rounds and len(ended) >= MIN_REPEATS and len(failed) > _ACCIDENTS_FRACTION * len(ended):
            invalid += failed_guards(side, ended)
        if not sample:
            cell.reasons.append(f"no run of {side} counts: {', '.join(sorted({run.reason for run in left_out}))}")
    if a and b:
        invalid += invalid_reasons(a, b, about, by_rounds)
        _measure(cell, a, b, floors, is_invalid=bool(invalid))
    if invalid:
        cell.verdict, cell.reasons = INVALID, invalid
    return cell


def _measure(cell: CellComparison, a: Sequence[Run], b: Sequence[Run], floors: Floors, is_invalid: bool) -> None:
    """Fill in a cell's figures, and what is to be known of them."""
    cell.differences = differences(a[0].record, b[0].record)
    noises = [] if cell.by_rounds else [floors.get(noise_key(run.record), {}) for run in (a[0], b[0])]
    for metric in METRICS:
        known = metric.of_all(a), metric.of_all(b)
        if all(known):
            mean_a, mean_b = map(geometric_mean, known)
            ratio = ratio_by_rounds(*known) if cell.by_rounds else ratio_of(*known)
            floor = max((noise[metric.name].floor_fraction for noise in noises if metric.name in noise), default=None)
            cell.metrics.append(Figure(metric.name, metric.title, metric.unit, mean_a, mean_b, ratio, floor))
    step = cell.metrics[0]
    cell.notes = notes(a, b, step.ratio)
    if cell.by_rounds:
        # Rounds measure both sides under the same load, and take out drift from one side to the other.
        cell.slow = slow_processes(a, b, step.ratio)
        return
    cell.busy, cell.is_apart = busy_reason(a, b), are_apart(a, b)
    if not is_invalid and step.noise_floor_fraction is None:
        cell.notes.append("no A/A noise floor is known; `lmbench noise` measures it")
    for side, runs in (("A", a), ("B", b)) if not is_invalid else ():
        if len(runs) < MIN_REPEATS:
            config = quote(shown_path(runs[0].path / "config.yaml"))
            cell.notes.append(f"repeats of {side}: lmbench fit --config {config} --repeats {MIN_REPEATS}")


def _judge(cells: Sequence[CellComparison], tolerance: float) -> int:
    """Give every figure of valid cells its finding, and these cells their verdicts; returns how many step times were
    tested together. Holm's correction is over the step times of all cells, and over everything else of all cells."""
    valid = [cell for cell in cells if cell.metrics and cell.verdict != INVALID]
    steps = [(cell, cell.metrics[0]) for cell in valid]
    others = [(cell, figure) for cell in valid for figure in cell.metrics[1:]]
    for pairs in (others, steps):
        tested = [figure for _, figure in pairs if figure.ratio.p is not None]
        for figure, p in zip(tested, holm([figure.ratio.p or 0.0 for figure in tested]), strict=True):
            figure.adjusted_p = p
        for cell, figure in pairs:
            figure.finding, figure.reason = decide(
                figure.ratio,
                tolerance=tolerance,
                floor=figure.noise_floor_fraction,
                adjusted_p=figure.adjusted_p,
                family=len(tested),
                is_time=figure.unit == "s",
                is_apart=cell.is_apart,
                busy=cell.busy,
            )
    for cell, step in steps:
        mean = next((figure for figure in cell.metrics if figure.name == MEAN_STEP.name), step)
        if step.finding == SAME and (side := one_sided(cell.slow)) is not None:
            step.finding = UNDECIDED
            step.reason += f" for most processes, but all {len(cell.slow)} slow ones are {side}'s"
        elif step.finding == SAME and mean.finding in TIME_WORDS:
            step.finding, step.reason = mean.finding, f"only the mean step: {mean.reason}"
        cell.verdict, cell.reasons = step.finding, [step.reason]
    return len(tested)


def slow_processes(a: Sequence[Run], b: Sequence[Run], ratio: Ratio) -> list[SlowProcess]:
    """The slow ones among the processes of both sides, in the order of their rounds. Nothing is dropped for it: the
    rule of `rounds` weighs what lies far out, and knows no sides."""
    if len(a) < _SLOW_ROUNDS:
        return []
    # Of the two the one that took longer than the difference of the other rounds lets expect.
    excess = np.array(ratio.differences) - np.median(ratio.differences)
    limit = max(_SLOW_STDS * STD_PER_MAD * np.median(np.abs(excess)), math.log1p(_SLOW_FRACTION))
    slow = []
    for index in np.flatnonzero(np.abs(excess) > limit).tolist():
        side, run = ("B", b[index]) if excess[index] > 0 else ("A", a[index])
        number, fraction = 1 + (value_at(run.record, "sweep.repeat") or 0), ratio_from(abs(excess[index])) - 1
        slow.append(SlowProcess(side, number, run.run_id, fraction))
    return slow


def one_sided(slow: Sequence[SlowProcess]) -> str | None:
    """The side that slow processes belong to, where chance would hardly have it so (two-sided sign test at 5 %)."""
    count_b = sum(process.side == "B" for process in slow)
    fewer, side = min((count_b, "A"), (len(slow) - count_b, "B"))
    return side if 2 * scipy.special.bdtr(fewer, len(slow), 0.5) < 0.05 else None


# verdicts


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
    told = percent_short(detectable) if detectable < 1 else f"a factor of {1 + detectable:.2g}"
    return Decision(UNDECIDED, f"{reach}; at this spread {repeats} repeats tell {told} from none")


def interval(low: float | None, high: float | None) -> str:
    """An interval of ratios as changes: `-0.31 .. +0.42 %`, or `none yet`."""
    return "none yet" if low is None or high is None else change_range(low - 1, high - 1)
