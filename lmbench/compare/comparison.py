"""Two sides compared, cell by cell: ratios with intervals, verdicts with reasons.

Sides are read and joined to cells; a cell is checked for what makes it invalid; its figures become ratios; their p
values are corrected over all cells; then each ratio has its verdict, and each cell its notes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

import numpy as np
import scipy  # type: ignore[import-untyped]

from lmbench.compare.comparability import busy_reason, check_about, earlier_side, failed_guards, invalid_reasons, notes
from lmbench.compare.noise import Floors
from lmbench.compare.rounds import ratio_by_rounds
from lmbench.compare.sides import (
    MEAN_STEP,
    METRICS,
    SIZE_WORDS,
    STEP,
    TIME_WORDS,
    Cell,
    LeftOut,
    Side,
    join_cells,
    pair_rounds,
    read_side,
    refuse_overlap,
    split_usable,
)
from lmbench.compare.verdict import EXIT_CODES, INVALID, SAME, UNDECIDED, decide
from lmbench.errors import UsageError
from lmbench.records.load import Run
from lmbench.records.named import shown_path
from lmbench.records.schema import value_at
from lmbench.records.settings import Difference, differences
from lmbench.records.statistics import MIN_REPEATS, STD_PER_MAD, Ratio, geometric_mean, holm, ratio_from, ratio_of
from lmbench.report.units import change_percent, percent_short

#: A guard that fails in more of a side's rounds than this is no accident.
_ACCIDENTS_FRACTION = 1 / 3
#: A process is slow from so many standard deviations on, of the differences of all rounds (from their median absolute
#: deviation), and from this share of the step.
_SLOW_STDS, _SLOW_FRACTION, _SLOW_ROUNDS = 4.0, 0.01, 4


@dataclass
class Figure:
    """A metric on both sides: geometric means over processes (SI), their ratio, the A/A floor (None if not measured),
    p after Holm's correction (None with fewer than two repeats a side), and the finding with its reason.

    `step_share_fraction` is the change as a share of A's step, for times: these add up over phases.
    """

    name: str
    title: str
    unit: str
    a: float
    b: float
    ratio: Ratio
    noise_floor_fraction: float | None
    step_share_fraction: float | None
    adjusted_p: float | None = None
    finding: str = INVALID
    reason: str = ""


@dataclass(frozen=True)
class SlowProcess:
    """A process that took longer than the other one of its round (from 1) says, with its clock, power and load."""

    side: str
    round: int
    run_id: str
    excess_fraction: float
    state: str

    def __str__(self) -> str:
        excess = percent_short(self.excess_fraction)
        return f"round {self.round}: {self.side} took {excess} longer than its pair says ({self.state})"


@dataclass
class CellComparison:
    """One cell on both sides. `verdict` is that of the step time; `metrics` begins with it and is empty where a side
    has no run that counts. `by_rounds`: runs are paired by the round that they were measured in; `busy`: why a change
    may be one of the machine's load, None where it may not."""

    name: str
    verdict: str
    reasons: Sequence[str]
    notes: Sequence[str]
    differences: Sequence[Difference]
    metrics: Sequence[Figure]
    used_a: Sequence[str]
    used_b: Sequence[str]
    left_out_a: Sequence[LeftOut]
    left_out_b: Sequence[LeftOut]
    by_rounds: bool
    slow: Sequence[SlowProcess]
    busy: str | None
    is_apart: bool


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: cells on both sides, names of those on one side only, and, with the reason, of those where
    no run counts on either side (out of memory on both, say), which are not judged. `family` is how many step times
    were tested together."""

    a: Side
    b: Side
    tolerance_fraction: float
    about: Sequence[str]
    cells: Sequence[CellComparison]
    only_a: Sequence[str]
    only_b: Sequence[str]
    neither: Sequence[dict[str, str]]
    problems: Sequence[str]
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
        UsageError: a side names no result, both hold the same run, or nothing is on both sides.
    """
    sides = (read_side(a), read_side(b))
    refuse_overlap(*sides)
    for side in sides:
        if not side.runs:
            raise UsageError(f"{side.given!r} has nothing to compare: {side.left_out[0].reason}")
    runs = [run for side in sides for run in side.runs]
    check_about(about, runs)
    cells = join_cells(sides[0].runs, sides[1].runs)
    only_a, only_b = ([cell.name for cell in cells if not cell.runs[other]] for other in (1, 0))
    floors = Floors(runs)
    compared = [_compare_cell(cell, about, floors) for cell in cells if all(cell.runs)]
    if not compared:
        raise UsageError(
            f"A and B have no cell in common: A has {len(only_a)} (such as {only_a[0]!r}), B {len(only_b)} (such as "
            f"{only_b[0]!r}); give one cell each, or pick cells with FOLDER@AXIS=VALUE"
        )
    judged = [cell for cell in compared if cell.used_a or cell.used_b]
    return Comparison(
        *sides,
        tolerance,
        about,
        cells=judged,
        only_a=only_a,
        only_b=only_b,
        neither=[{"name": cell.name, "reason": "; ".join(cell.reasons)} for cell in compared if cell not in judged],
        problems=floors.problems,
        family=_judge(judged, tolerance),
    )


def _compare_cell(cell: Cell, about: Sequence[str], floors: Floors) -> CellComparison:
    """A cell's samples and ratios, and what makes it invalid; its other verdicts need the ratios of all cells."""
    # A run whose guard failed is measured again in another round. Where many failed it was no accident.
    in_rounds = pair_rounds(*cell.runs) is not None
    (a, left_out_a), (b, left_out_b) = (split_usable(runs, takes_failed=not in_rounds) for runs in cell.runs)
    samples, left_out, rounds = (a, b), (left_out_a, left_out_b), pair_rounds(a, b)
    if rounds is not None:
        samples = ([pair[0] for pair in rounds], [pair[1] for pair in rounds])
    invalid, without_runs = list[str](), list[str]()
    for place, (side, usable) in enumerate(zip("AB", (a, b), strict=True)):
        ended = [run for run in cell.runs[place] if run.outcome == "ok"]
        failed = [run for run in ended if any(guard.status == "fail" for guard in run.record.guards)]
        if in_rounds and len(ended) >= MIN_REPEATS and len(failed) > _ACCIDENTS_FRACTION * len(ended):
            invalid += failed_guards(side, ended)
        reason = "the other side has no run of this round that counts"
        alone = [run for run in usable if run not in samples[place]]
        left_out[place].extend(LeftOut(str(run.path), run.outcome, reason) for run in alone)
        if not samples[place]:
            reasons = sorted({run.reason for run in left_out[place]})
            without_runs.append(f"no run of {side} counts: {', '.join(reasons)}")
    a, b = samples
    figures, remarks, changes = list[Figure](), list[str](), list[Difference]()
    if not without_runs:
        invalid += invalid_reasons(a, b, about)
        changes = differences(a[0].record, b[0].record)
        for metric in METRICS:
            known = [[v for run in runs if (v := metric.of(run.record)) is not None] for runs in samples]
            if [len(values) for values in known] == [len(a), len(b)]:
                ratio = ratio_of(*known) if rounds is None else ratio_by_rounds(*known)
                mean_a, mean_b = map(geometric_mean, known)
                floor = floors.floor((a[0], b[0]), metric.name) if rounds is None else None
                # Phases add up to the mean step.
                step_s = next((figure.a for figure in figures if figure.name == MEAN_STEP.name), None)
                share = (mean_b - mean_a) / step_s if metric.unit == "s" and step_s else None
                figures.append(Figure(metric.name, metric.title, metric.unit, mean_a, mean_b, ratio, floor, share))
            elif known != [[], []]:
                remarks.append(f"{metric.title} is not compared: not every run has it")
        remarks = [*notes(a, b, figures[0].ratio), *remarks]
        if rounds is None and not invalid and figures[0].noise_floor_fraction is None:
            remarks.append("no A/A noise floor is known; `lmbench noise` measures it")
        for side, runs in zip("AB", samples, strict=True):
            if rounds is None and not invalid and len(runs) < MIN_REPEATS:
                config = quote(shown_path(runs[0].path / "config.yaml"))
                remarks.append(f"repeats of {side}: lmbench fit --config {config} --repeats {MIN_REPEATS}")
    return CellComparison(
        cell.name,
        verdict=INVALID if invalid else UNDECIDED,
        reasons=invalid or without_runs,
        notes=remarks,
        differences=changes,
        metrics=figures,
        used_a=[run.run_id for run in a],
        used_b=[run.run_id for run in b],
        left_out_a=left_out_a,
        left_out_b=left_out_b,
        by_rounds=rounds is not None,
        slow=slow_processes(rounds, figures[0].ratio) if rounds else [],
        # Rounds measure both sides under the same load, and take out drift from one side to the other.
        busy=busy_reason(a, b) if rounds is None else None,
        is_apart=rounds is None and earlier_side(a, b) is not None,
    )


def _judge(cells: Sequence[CellComparison], tolerance: float) -> int:
    """Give every figure of valid cells its finding, and these cells their verdicts; returns how many step times were
    tested together. Holm's correction is over the step times of all cells, and over everything else of all cells."""
    family = 0
    for is_step in (False, True):
        pairs = [
            (cell, figure)
            for cell in cells
            for figure in cell.metrics
            if (figure.name == STEP.name) == is_step and cell.verdict != INVALID
        ]
        tested = [figure for _, figure in pairs if figure.ratio.p is not None]
        family = len(tested)
        for figure, p in zip(tested, holm([figure.ratio.p or 0.0 for figure in tested]), strict=True):
            figure.adjusted_p = p
        for cell, figure in pairs:
            is_time = figure.unit == "s"
            figure.finding, figure.reason = decide(
                figure.ratio,
                tolerance=tolerance,
                floor=figure.noise_floor_fraction,
                adjusted_p=figure.adjusted_p,
                family=family,
                words=TIME_WORDS if is_time else SIZE_WORDS,
                has_hint=is_step,
                is_apart=is_time and cell.is_apart,
            )
            slow_side = one_sided(cell.slow) if is_step and figure.finding == SAME else None
            if cell.busy is not None and is_time and figure.finding != UNDECIDED:
                figure.reason = f"{change_percent(figure.ratio.change)}, and {cell.busy}"
                figure.finding = UNDECIDED
            elif slow_side is not None:
                figure.reason += f" for most processes, but all {len(cell.slow)} slow ones are {slow_side}'s"
                figure.finding = UNDECIDED
            if is_step:
                mean = next((other for other in cell.metrics if other.name == MEAN_STEP.name), figure)
                if figure.finding == SAME and mean.finding in TIME_WORDS:
                    figure.finding, figure.reason = mean.finding, f"only the mean step: {mean.reason}"
                cell.verdict, cell.reasons = figure.finding, [figure.reason]
    return family


def slow_processes(rounds: Sequence[tuple[Run, Run]], ratio: Ratio) -> list[SlowProcess]:
    """The slow ones among the processes of both sides, in the order of their rounds. Nothing is dropped for it: the
    rule of `rounds` weighs what lies far out, and knows no sides."""
    if len(rounds) < _SLOW_ROUNDS:
        return []
    # Of the two the one that took longer than the difference of the other rounds lets expect.
    excess = np.array(ratio.differences) - np.median(ratio.differences)
    limit = max(_SLOW_STDS * STD_PER_MAD * np.median(np.abs(excess)), math.log1p(_SLOW_FRACTION))
    slow = []
    for index in np.flatnonzero(np.abs(excess) > limit).tolist():
        side = int(excess[index] > 0)
        run, fraction = rounds[index][side], ratio_from(abs(excess[index])) - 1
        number = 1 + (value_at(run.record, "sweep.repeat") or 0)
        slow.append(SlowProcess("AB"[side], number, run.run_id, fraction, _state(run, rounds)))
    return slow


def _state(run: Run, rounds: Sequence[tuple[Run, Run]]) -> str:
    """Clock, power and load of a process beside the median of the others."""
    others = [other for pair in rounds for other in pair if other is not run]
    texts = []
    for title, name, scale, unit in (
        ("SM clock", "device_state.close.sm_clock_hz", 1e-6, " MHz"),
        ("power", "device_state.mean_power_w", 1.0, " W"),
        ("load per core", "sweep.load_per_core", 1.0, ""),
    ):
        value, *rest = (value_at(process.record, name) for process in (run, *others))
        known = [other * scale for other in rest if other is not None]
        if value is not None and known:
            texts.append(f"{title} {value * scale:.4g}{unit}, others {statistics.median(known):.4g}{unit}")
    return "; ".join(texts) or "clock, power and load were not recorded"


def one_sided(slow: Sequence[SlowProcess]) -> str | None:
    """The side that slow processes belong to, where chance would hardly have it so (two-sided sign test at 5 %)."""
    count_b = sum(process.side == "B" for process in slow)
    fewer, side = (len(slow) - count_b, "B") if 2 * count_b > len(slow) else (count_b, "A")
    return side if 2 * scipy.special.bdtr(fewer, len(slow), 0.5) < 0.05 else None
