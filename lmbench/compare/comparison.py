"""Compare two sides cell by cell: ratios with intervals, and verdicts with their reasons.

`compare` reads both sides and joins their runs to cells. `_compare_cell` checks whether a cell is valid and computes
its ratios. `_judge` corrects their p values over all cells and decides the verdicts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from glob import escape
from typing import NamedTuple

import numpy as np
import scipy  # type: ignore[import-untyped]
from msgspec import Struct

from lmbench.compare.comparability import are_apart, busy_reason, check_about, failed_guards, invalid_reasons, notes
from lmbench.compare.noise import NoiseEntry, noise_facts, read_floors
from lmbench.compare.rounds import LEAST_OF_CHANGE, LEAST_ROUNDS, ratio_by_rounds
from lmbench.compare.sides import (
    MEAN_STEP,
    METRICS,
    SIZE_WORDS,
    TIME_WORDS,
    BothRuns,
    LeftOut,
    Runs,
    Side,
    are_rounds,
    home_of,
    join_cells,
    paired,
    read_side,
    share_servers,
    split_usable,
    turn_differences,
)
from lmbench.errors import ExitCode, UsageError
from lmbench.records.load import StoredRun, guards_by_name, is_run_folder, load_known, process_of
from lmbench.records.named import repeat_command, shown_path, sweep_of
from lmbench.records.settings import SettingDifference, differences
from lmbench.records.statistics import (
    CONFIDENCE,
    Ratio,
    detectable_fraction,
    geometric_mean,
    holm,
    ratio_from,
    ratio_of,
    robust_std,
)
from lmbench.records.vocabulary import MIN_REPEATS
from lmbench.report.units import change_percent, change_range, percent_short

Floors = Sequence[NoiseEntry]
#: Outcomes that further repeats would have again.
_FAILED = {"error", "oom"}
#: A comparison is invalid where guards failed in more than this fraction of a side's rounds; fewer are accidents.
_ACCIDENTS_FRACTION = 1 / 3
#: A process is slow if the difference of its round is this many standard deviations, and this fraction of the step, off
#: the median over rounds. The median absolute deviation estimates the standard deviation if there are `_SLOW_ROUNDS`.
_SLOW_STDS, _SLOW_FRACTION, _SLOW_ROUNDS = 4.0, 0.01, 4
#: Without a sign of load, a machine may still be this much slower an hour later.
DRIFT_FRACTION = 0.1

SAME, UNDECIDED, INVALID = "same", "undecided", "invalid"
SLOWER, FASTER = TIME_WORDS

#: Verdicts in order of gravity, with their exit codes: the verdict of several cells is the gravest of theirs. A cell
#: proven slower outweighs everything; an invalid comparison is graver than one that needs more repeats.
EXIT_CODES = {
    SLOWER: ExitCode.SLOWER,
    INVALID: ExitCode.INVALID,
    UNDECIDED: ExitCode.UNDECIDED,
    FASTER: ExitCode.OK,
    SAME: ExitCode.OK,
}


class Figure(Struct):
    """A metric on both sides: geometric means over processes in SI units, their ratio, and the finding with its reason.

    `noise_floor_fraction` is None if no A/A floor was measured. `adjusted_p` is p after Holm's correction, None with
    fewer than two repeats on a side.
    """

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
    """A process that took longer than its pair, the process of the other side in this round, leads to expect.

    Rounds count from 1.
    """

    side: str
    round: int
    run_id: str
    excess_fraction: float

    def __str__(self) -> str:
        excess = percent_short(self.excess_fraction)
        return f"round {self.round}: {self.side} took {excess} longer than its pair suggests"


class CellComparison(Struct):
    """The comparison of one cell.

    `verdict` is the finding on the step time. `metrics` begins with the step time, and is empty where no run of a side
    counts. `by_rounds`: runs are paired by the round in which they were measured. `busy`: why the load of the machine
    may explain a change, or None. `is_apart`: one side was measured before the other, and no floor is of several days.
    `shares_servers`: one server forked several rounds. `round_std`: standard deviation of a round's difference, and
    `window_std` the part of it that a longer window lessens; None while that is unknown.
    """

    name: str
    used_a: list[str]
    used_b: list[str]
    left_out_a: list[LeftOut]
    left_out_b: list[LeftOut]
    by_rounds: bool
    verdict: str = UNDECIDED
    reasons: list[str] = []
    notes: list[str] = []
    differences: list[SettingDifference] = []
    metrics: list[Figure] = []
    slow: list[SlowProcess] = []
    busy: str | None = None
    is_apart: bool = False
    shares_servers: bool = False
    round_std: float | None = None
    window_std: float | None = None


class Comparison(Struct):
    """The comparison of two sides.

    `cells` are on both sides; `only_a` and `only_b` name the cells of one side. `neither` has name and reason of each
    cell without a run that counts on either side (out of memory on both, for example): these are not judged, unless
    there is no other cell. `family` is the number of step times that were tested together.
    """

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
    def step(self) -> Figure | None:
        """The step time of the first cell that has one, which is that of two sides; None where no run counts."""
        return next((cell.metrics[0] for cell in self.cells if cell.metrics), None)

    @property
    def reason(self) -> str:
        """The reason for the verdict of the first cell."""
        return self.cells[0].reasons[0] if self.cells else "no run counts"

    @property
    def verdict(self) -> str:
        """The gravest of the cells' verdicts; `undecided` without cells."""
        return next((word for word in EXIT_CODES if word in [cell.verdict for cell in self.cells]), UNDECIDED)


def compare(a: str, b: str, tolerance: float, about: Sequence[str] = ()) -> Comparison:
    """Compare the results that `a` and `b` name, in a form that `read_side` reads. Ratios are B over A.

    Args:
        a: before.
        b: after.
        tolerance: changes up to this fraction count as none.
        about: dotted names of what is compared; with names, any other difference makes a cell invalid.

    Raises:
        UsageError: a side names no result, both hold runs of one process, no cell is on both sides, or noise.json is
            damaged.
    """
    side_a, side_b = read_side(a), read_side(b)
    processes = {process_of(run) for run in side_b.runs}
    if same := [str(run.path) for run in side_a.runs if process_of(run) in processes]:
        raise UsageError(
            f"A ({a}) and B ({b}) hold runs of the same processes, {len(same)} such as {same[0]!r}; give two that "
            "processes of their own measured"
        )
    runs = [*side_a.runs, *side_b.runs]
    check_about(about, runs)
    joined = join_cells(side_a.runs, side_b.runs)
    homes = dict.fromkeys(map(home_of, (runs, side_a.runs, side_b.runs)))
    floors = [entry for home in homes for entry in read_floors(home)]
    only_a = [name for name, (_, runs_b) in joined.items() if not runs_b]
    only_b = [name for name, (runs_a, _) in joined.items() if not runs_a]
    cells = [_compare_cell(name, cell, about, floors) for name, cell in joined.items() if all(cell)]
    if not cells:
        raise UsageError(
            f"A and B have no cell in common: A has {len(only_a)} (such as {only_a[0]!r}), B {len(only_b)} (such as "
            f"{only_b[0]!r}); give one cell each, or pick cells with FOLDER@AXIS=VALUE"
        )
    # Guards that failed in many rounds of both sides leave no run, and are a verdict.
    judged = [cell for cell in cells if cell.used_a or cell.used_b or cell.verdict == INVALID]
    if not judged:
        # Code that fails on both sides lacks no rounds. A check in CI may pass `undecided`, and must not pass this.
        judged = [cell for cell in cells if _FAILED & {run.outcome for run in (*cell.left_out_a, *cell.left_out_b)}]
        for cell in judged:
            cell.verdict = INVALID
    neither = [{"name": cell.name, "reason": "; ".join(cell.reasons)} for cell in cells if cell not in judged]
    family = _judge(judged, tolerance)
    return Comparison(side_a, side_b, tolerance, about, judged, only_a, only_b, neither, family)


def _compare_cell(name: str, runs: BothRuns, about: Sequence[str], floors: Floors) -> CellComparison:
    """The samples and ratios of a cell, and the verdict `invalid` where it applies.

    `_judge` decides all other verdicts, because they depend on the ratios of all cells.
    """
    # A further round makes up for a run whose guard failed, unless guards failed in many rounds.
    in_rounds = are_rounds(*runs)
    (a, left_out_a), (b, left_out_b) = (split_usable(side, takes_failed=not in_rounds) for side in runs)
    by_rounds = in_rounds and bool(a and b)
    if by_rounds:
        a, b = paired(a, b)
    used_a, used_b = ([run.run_id for run in side] for side in (a, b))
    cell = CellComparison(name, used_a, used_b, left_out_a, left_out_b, by_rounds)
    invalid = []
    for side, members, sample, left_out in zip("AB", runs, (a, b), (left_out_a, left_out_b), strict=True):
        ended = [run for run in members if run.outcome == "ok"]
        failed = [run for run in ended if guards_by_name([run], "fail")]
        if in_rounds and len(ended) >= MIN_REPEATS and len(failed) > _ACCIDENTS_FRACTION * len(ended):
            invalid += failed_guards(side, ended)
        if not sample:
            why = ", ".join(sorted({run.reason for run in left_out})) or "the sides of its round ran on two hosts"
            # A cell that runs on neither side is not judged.
            fails = (a or b) and any(run.outcome in _FAILED for run in left_out)
            (invalid if fails else cell.reasons).append(f"no run of {side} counts: {why}")
    if a and b:
        invalid += invalid_reasons(a, b, about, by_rounds)
        _measure(cell, a, b, floors, is_invalid=bool(invalid))
    if invalid:
        cell.verdict, cell.reasons = INVALID, invalid
    return cell


def _measure(cell: CellComparison, a: Runs, b: Runs, floors: Floors, is_invalid: bool) -> None:
    """Fill in the figures of a cell, its differences and notes, and signs of load, drift and slow processes."""
    cell.differences = differences(a[0].record, b[0].record)
    facts = [noise_facts(run.record) for run in (a[0], b[0])]
    known = [] if cell.by_rounds else [entry for entry in floors if entry.facts in facts]
    for metric in METRICS:
        values = metric.of_all(a), metric.of_all(b)
        if all(values):
            mean_a, mean_b = map(geometric_mean, values)
            if cell.by_rounds:
                ratio = ratio_by_rounds([metric.difference(*pair) for pair in zip(a, b, strict=True)])
                peaks_a, peaks_b = map(sorted, values)
                if metric.unit == "bytes" and (peaks_a[-1] < peaks_b[0] or peaks_b[-1] < peaks_a[0]):
                    # A permutation test: two of all ways to deal these peaks to the sides part them like this.
                    ratio = replace(ratio, p=2 / math.comb(2 * len(a), len(a)))
            else:
                ratio = ratio_of(*values)
            noises = [noise for entry in known if (noise := entry.metrics.get(metric.name))]
            floor = max((noise.floor_fraction for noise in noises), default=None)
            cell.metrics.append(Figure(metric.name, metric.title, metric.unit, mean_a, mean_b, ratio, floor))
    step = cell.metrics[0]
    cell.notes = notes(a, b, step.ratio)
    if cell.by_rounds:
        # Both sides of a round run under the same load, and no side runs before the other one.
        cell.slow, cell.shares_servers = slow_processes(a, b, step.ratio), share_servers(a)
        cell.window_std = window_std(a[-1], b[-1])
        is_known = len(step.ratio.differences) >= _SLOW_ROUNDS
        cell.round_std = robust_std(step.ratio.differences) if is_known else cell.window_std
        return
    has_drift = all(any(entry.facts == of_side and entry.days > 1 for entry in known) for of_side in facts)
    cell.busy = busy_reason({"runs of A": a, "runs of B": b})
    cell.is_apart = are_apart(a, b) and not has_drift
    if is_invalid:
        return
    if step.noise_floor_fraction is None:
        cell.notes.append("no A/A noise floor is known; `lmbench noise` measures it")
    for side, runs in (("A", a), ("B", b)):
        # A user's own script records no configuration, and lmbench has no command for it.
        if len(runs) < MIN_REPEATS and runs[0].record.config is not None:
            cell.notes.append(_repeats_note(side, runs[0]))


def _repeats_note(side: str, run: StoredRun) -> str:
    """How a side of too few runs, of which this is one, gets the repeats that a verdict takes."""
    if (sweep := sweep_of(run.path)) is None:
        return f"repeats of {side}: {repeat_command(run.record, run.path)} --repeats {MIN_REPEATS}"
    # A sweep's folders of runs end in the number of the repeat.
    cell_name, separator, _ = run.path.name.rpartition("-r")
    folders = filter(is_run_folder, run.path.parent.glob(f"{escape(cell_name + separator)}*"))
    repeats, _ = split_usable([load_known(folder) for folder in folders])
    if len(repeats) >= MIN_REPEATS:
        return f"{side} is one of {len(repeats)} repeats: give its cell, SWEEP@AXIS=VALUE, instead"
    return f"repeats of {side}: {shlex.join(['lmbench', 'sweep', shown_path(sweep)])} --repeats {MIN_REPEATS}"


def _judge(cells: Sequence[CellComparison], tolerance: float) -> int:
    """Decide the finding on every figure of the valid cells, and the verdicts of these cells.

    Holm's correction is taken over the step times of all cells, and separately over all other figures of all cells.
    Returns the number of step times that were tested together.
    """
    valid = [cell for cell in cells if cell.metrics and cell.verdict != INVALID]
    steps = [(cell, cell.metrics[0]) for cell in valid]
    others = [(cell, figure) for cell in valid for figure in cell.metrics[1:]]
    for pairs in (others, steps):
        tested = [figure for _, figure in pairs if figure.ratio.p is not None]
        for figure, p in zip(tested, holm([figure.ratio.p or 0.0 for figure in tested]), strict=True):
            figure.adjusted_p = p
        for cell, figure in pairs:
            figure.finding, figure.reason = decide(figure, cell, tolerance, len(tested))
    for cell, step in steps:
        mean = next((figure for figure in cell.metrics if figure.name == MEAN_STEP.name), step)
        if step.finding == SAME and (side := one_sided(cell.slow)) is not None:
            step.finding = UNDECIDED
            count = sum(process.side == side for process in cell.slow)
            step.reason += f" for most processes, but {count} of {len(cell.slow)} slow ones are {side}'s"
        elif step.finding == SAME and mean.finding in TIME_WORDS:
            step.finding, step.reason = mean.finding, f"only the mean step: {mean.reason}"
        cell.verdict, cell.reasons = step.finding, [step.reason]
    return len(tested)


def slow_processes(a: Runs, b: Runs, ratio: Ratio) -> list[SlowProcess]:
    """The slow processes of both sides, in the order of their rounds.

    No round is dropped for a slow process: the bets of `compare.rounds` give an outlying round little weight, whichever
    side was slow.
    """
    if len(a) < _SLOW_ROUNDS:
        return []
    # In an outlying round, the slow process is the one of the side that took longer than usual against the other.
    excess = np.array(ratio.differences) - np.median(ratio.differences)
    limit = max(_SLOW_STDS * robust_std(ratio.differences), math.log1p(_SLOW_FRACTION))
    slow = []
    for index in np.flatnonzero(np.abs(excess) > limit).tolist():
        side, run = ("B", b[index]) if excess[index] > 0 else ("A", a[index])
        number, fraction = 1 + (run.record.place.repeat or 0), ratio_from(abs(excess[index])) - 1
        slow.append(SlowProcess(side, number, run.run_id, fraction))
    return slow


def window_std(a: StoredRun, b: StoredRun) -> float | None:
    """The standard error of a round's difference, which is the median of its turns; None for fewer than three."""
    turns = turn_differences(a, b)
    return float(math.sqrt(math.pi / 2 / turns.size) * turns.std(ddof=1)) if turns.size > 2 else None


def one_sided(slow: Sequence[SlowProcess]) -> str | None:
    """The side that most slow processes belong to, if that is significant (two-sided sign test at 5 %), else None."""
    count_b = sum(process.side == "B" for process in slow)
    fewer, side = min((count_b, "A"), (len(slow) - count_b, "B"))
    return side if 2 * scipy.special.bdtr(fewer, len(slow), 0.5) < 0.05 else None


# verdicts


class Decision(NamedTuple):
    """The word of a verdict and its reason, one line with figures."""

    word: str
    reason: str


def decide(  # noqa: PLR0911 (one return for each verdict and reason)
    figure: Figure, cell: CellComparison, tolerance: float, family: int
) -> Decision:
    """The finding on a figure of a valid cell, whose p value is corrected.

    Load, drift of a machine, and the address layout of a server that rounds share affect times alone. That layout may
    change a time by as much as the tolerance.

    Args:
        tolerance: changes up to this fraction count as none (`--gate`).
        family: the number of tests that Holm's correction was taken over.
    """
    ratio, adjusted_p, floor, is_time = figure.ratio, figure.adjusted_p, figure.noise_floor_fraction, figure.unit == "s"
    change, by_rounds, gate = change_percent(ratio.change), bool(ratio.differences), f"±{percent_short(tolerance)}"
    shown_floor = "" if floor is None else f"the A/A noise floor of {percent_short(floor)}"
    repeats, least = min(ratio.n_a, ratio.n_b), LEAST_ROUNDS if by_rounds else MIN_REPEATS
    if adjusted_p is None or repeats < least:
        count = f"repeats: A has {ratio.n_a}, B has {ratio.n_b}; a verdict takes {MIN_REPEATS}"
        if by_rounds:
            count = f"rounds: {ratio.n_a}; `same` takes {LEAST_ROUNDS}, a change {LEAST_OF_CHANGE}"
        return Decision(UNDECIDED, f"{count} ({change} so far)")
    if cell.busy and is_time:
        return Decision(UNDECIDED, f"{change}, and {cell.busy}")
    if ratio.lies_within(tolerance):
        return Decision(SAME, f"the 90 % interval {interval(ratio.equal_low, ratio.equal_high)} lies within {gate}")
    limits = interval(ratio.low, ratio.high)
    if adjusted_p < 1.0 - CONFIDENCE and ratio.excludes_one:
        if floor is not None and abs(math.log(ratio.point)) <= math.log1p(floor):
            return Decision(UNDECIDED, f"the interval {limits} excludes 0, but {change} is not above {shown_floor}")
        if cell.is_apart and is_time and abs(math.log(ratio.point)) <= math.log1p(DRIFT_FRACTION):
            known = f"{shown_floor} is of one day" if shown_floor else "no A/A noise floor is known"
            remedy = "`lmbench noise` over repeats of two days measures it, `lmbench compare --run` takes turns"
            drift = f"one side was measured before the other, and {known}: {remedy}"
            return Decision(UNDECIDED, f"{change}, interval {limits} excludes 0, but this may be a drift: {drift}")
        excluded = gate if cell.shares_servers and is_time else "0"
        if excluded == gate and not ratio.lies_beyond(tolerance):
            return Decision(UNDECIDED, f"{change}, but rounds of one server have to exclude {gate}: {limits}")
        basis = f"above {shown_floor}" if shown_floor else "no A/A noise floor is known"
        basis = f"after {ratio.n_a} rounds" if by_rounds else basis
        corrected = f"; p = {adjusted_p:.2g} after Holm over {family}" if family > 1 else ""
        more, less = TIME_WORDS if is_time else SIZE_WORDS
        reason = f"{change}, interval {limits} excludes {excluded}, {basis}{corrected}"
        return Decision(more if ratio.point >= 1 else less, reason)
    if ratio.excludes_one:
        correction = f"Holm's correction over {family} (p {ratio.p:.2g} becomes {adjusted_p:.2g})"
        return Decision(UNDECIDED, f"the interval {limits} excludes 0 by itself, but not after {correction}")
    unclear = f"{change}, interval {limits}: neither a change nor `same` within {gate} is shown"
    if ratio.std_a is None or ratio.std_b is None:
        return Decision(UNDECIDED, unclear)
    smallest = smallest_change(math.hypot(ratio.std_a, ratio.std_b) / math.sqrt(2), repeats)
    return Decision(UNDECIDED, f"{unclear}; at this spread {repeats} repeats can only show a change {smallest} or more")


def smallest_change(std: float, repeats: int) -> str:
    """The change that repeats of this spread show in words, `of 1.2 %` or `by a factor of 2.5`."""
    detectable = detectable_fraction(std, repeats)
    return f"of {percent_short(detectable)}" if detectable < 1 else f"by a factor of {1 + detectable:.2g}"


def interval(low: float | None, high: float | None) -> str:
    """The text of an interval of ratios, as changes in percent: `-0.31 .. +0.42 %`; `none yet` without an interval."""
    return "none yet" if low is None or high is None else change_range(low - 1, high - 1)
