"""Two sides compared, cell by cell: ratios with intervals, verdicts with reasons.

Sides are read and joined to cells; a cell is checked for what makes it invalid; its figures become ratios; their p
values are corrected over all cells; then each ratio has its verdict, and each cell its notes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmbench.compare.comparability import busy_reason, check_about, failed_guards, invalid_reasons
from lmbench.compare.metrics import METRICS, SIZE_WORDS, STEP, TIME_WORDS, Metric
from lmbench.compare.noise import Floors
from lmbench.compare.notes import notes
from lmbench.compare.rounds import ratio_by_rounds
from lmbench.compare.sides import Cell, LeftOut, Side, join_cells, pair_rounds, read_side, refuse_overlap, split_usable
from lmbench.compare.verdict import EXIT_CODES, INVALID, SAME, UNDECIDED, decide, holm, overall
from lmbench.errors import ExitCode, UsageError
from lmbench.records.load import Run
from lmbench.records.schema import value_at
from lmbench.records.settings import Difference, differences
from lmbench.records.statistics import MIN_REPEATS, STD_PER_MAD, Ratio, geometric_mean, ratio_from, ratio_of
from lmbench.report.units import change_percent, percent_short

#: A guard that fails in more of a side's rounds than this is no accident.
_ACCIDENTS_FRACTION = 1 / 3
#: A process is slow from so many standard deviations on, of the differences of all rounds (from their median absolute
#: deviation), and from this share of the step.
_SLOW_STDS, _SLOW_FRACTION, _SLOW_ROUNDS = 4.0, 0.01, 4


@dataclass(frozen=True)
class Figure:
    """A metric on both sides: geometric means over processes (SI), their ratio, p after Holm's correction (None with
    fewer than two repeats a side), the A/A floor (None if not measured), and the finding with its reason.

    `step_share_fraction` is the change as a share of A's step, for times: these add up over phases.
    """

    name: str
    title: str
    unit: str
    a: float
    b: float
    ratio: Ratio
    adjusted_p: float | None
    noise_floor_fraction: float | None
    step_share_fraction: float | None
    finding: str
    reason: str


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


@dataclass(frozen=True)
class CellComparison:
    """One cell on both sides. `verdict` is that of the step time; `metrics` begins with it and is empty where a side
    has no run that counts. `by_rounds`: runs are paired by the round that they were measured in."""

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


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: cells on both sides, names of those on one side only, and, with the reason, of those where
    no run counts on either side (out of memory on both, say), which are not judged."""

    a: Side
    b: Side
    tolerance: float
    about: Sequence[str]
    cells: Sequence[CellComparison]
    only_a: Sequence[str]
    only_b: Sequence[str]
    neither: Sequence[tuple[str, str]]
    problems: Sequence[str]

    @property
    def verdict(self) -> str:
        return overall([cell.verdict for cell in self.cells])

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.verdict]

    @property
    def family(self) -> int:
        """How many step times were tested together."""
        return sum(bool(cell.metrics) and cell.metrics[0].adjusted_p is not None for cell in self.cells)


class _Pair:
    """A cell while it is worked on: runs of A and B that count, why they cannot be compared, and their ratios."""

    def __init__(self, cell: Cell, about: Sequence[str]) -> None:
        self.name = cell.name
        (runs_a, out_a), (runs_b, out_b) = split_usable(cell.a), split_usable(cell.b)
        self.runs, self.left_out = [runs_a, runs_b], [out_a, out_b]
        self.invalid: list[str] = []
        self.rounds = pair_rounds(*self.runs)
        if self.rounds is not None:
            self.rounds = self._whole_rounds()
        #: Of each figure that every run of both sides has: both sides' geometric means, and their ratio.
        self.ratios: dict[Metric, tuple[float, float, Ratio]] = {}
        self.adjusted_p: dict[Metric, float] = {}
        if not all(self.runs):
            return
        self.invalid += invalid_reasons(self.runs[0], self.runs[1], about)
        for metric in METRICS:
            a, b = ([v for run in runs if (v := metric.of(run.record)) is not None] for runs in self.runs)
            if [len(a), len(b)] == [len(runs) for runs in self.runs]:
                ratio = ratio_of(a, b) if self.rounds is None else ratio_by_rounds(a, b)
                self.ratios[metric] = geometric_mean(a), geometric_mean(b), ratio

    def _whole_rounds(self) -> list[tuple[Run, Run]]:
        """Leave out runs whose guard failed, which are measured again in another round, and the other run of theirs.
        Where many failed it was no accident."""
        for place, runs in enumerate(self.runs):
            failed = {run.path: guard for run in runs for guard in run.record.guards if guard.status == "fail"}
            if len(runs) >= MIN_REPEATS and len(failed) > _ACCIDENTS_FRACTION * len(runs):
                self.invalid += failed_guards("AB"[place], runs)
            self._leave_out(
                place, {path: f"guard {guard.name} failed: {guard.message}" for path, guard in failed.items()}
            )
        rounds = pair_rounds(*self.runs) or []
        paired = {run.path for pair in rounds for run in pair}
        for place, runs in enumerate(self.runs):
            alone = [run.path for run in runs if run.path not in paired]
            self._leave_out(place, dict.fromkeys(alone, "the other side has no run of this round that counts"))
            self.runs[place] = [pair[place] for pair in rounds]
        return rounds

    def _leave_out(self, place: int, reasons: Mapping[Path, str]) -> None:
        runs = self.runs[place]
        self.left_out[place] += [LeftOut.of(run, reasons[run.path]) for run in runs if run.path in reasons]
        self.runs[place] = [run for run in runs if run.path not in reasons]

    @property
    def without_runs(self) -> list[str]:
        """How the runs of a side without one that counts ended; empty where both sides have some."""
        return [
            f"no run of {side} counts: " + ", ".join(sorted({run.reason for run in left_out}))
            for side, runs, left_out in zip("AB", self.runs, self.left_out, strict=True)
            if not runs
        ]

    def result(self, tolerance: float, floors: Floors, families: Mapping[bool, int]) -> CellComparison:
        a, b = self.runs
        changes = differences(a[0].record, b[0].record) if a and b else []
        slow = slow_processes(self.rounds or [])
        # Rounds measure both sides under the same load, and take out drift from one side to the other.
        busy = busy_reason(a, b) if self.rounds is None else None
        figures: list[Figure] = []
        for metric, (mean_a, mean_b, ratio) in self.ratios.items():
            is_step, is_time = metric is STEP, metric.unit == "s"
            floor = floors.floor((a[0], b[0]), metric.name) if self.rounds is None else None
            adjusted_p = self.adjusted_p.get(metric)
            word, reason = INVALID, ""
            if not self.invalid:
                words = TIME_WORDS if is_time else SIZE_WORDS
                word, reason = decide(
                    ratio,
                    tolerance=tolerance,
                    floor=floor,
                    adjusted_p=adjusted_p,
                    family=families[is_step],
                    words=words,
                    has_hint=is_step,
                )
            if busy is not None and is_time and word not in (INVALID, UNDECIDED):
                word, reason = UNDECIDED, f"{change_percent(ratio.change)}, and {busy}"
            if is_step and word == SAME and (side := one_sided(slow)) is not None:
                reason = f"{reason} for most processes, but all {len(slow)} slow ones are {side}'s"
                word = UNDECIDED
            share = (mean_b - mean_a) / figures[0].a if is_time and figures else None
            figures.append(
                Figure(
                    metric.name,
                    metric.title,
                    metric.unit,
                    mean_a,
                    mean_b,
                    ratio,
                    adjusted_p,
                    floor,
                    share,
                    word,
                    reason,
                )
            )
        verdict = INVALID if self.invalid else figures[0].finding if figures else UNDECIDED
        return CellComparison(
            self.name,
            verdict,
            reasons=self.invalid or self.without_runs or [figures[0].reason],
            notes=notes(a, b, changes) if figures else [],
            differences=changes,
            metrics=figures,
            used_a=[run.run_id for run in a],
            used_b=[run.run_id for run in b],
            left_out_a=self.left_out[0],
            left_out_b=self.left_out[1],
            by_rounds=self.rounds is not None,
            slow=slow,
        )


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
    side_a, side_b = read_side(a), read_side(b)
    runs = [*side_a.runs, *side_b.runs]
    refuse_overlap(side_a, side_b)
    check_about(about, runs)
    cells = join_cells(side_a.runs, side_b.runs)
    joined = [_Pair(cell, about) for cell in cells if cell.a and cell.b]
    if not joined:
        raise UsageError(_nothing_in_common(cells, side_a, side_b))
    pairs = [pair for pair in joined if any(pair.runs)]
    families = {is_step: _correct(pairs, is_step) for is_step in (True, False)}
    floors = Floors.beside(runs)
    return Comparison(
        side_a,
        side_b,
        tolerance,
        about,
        cells=[pair.result(tolerance, floors, families) for pair in pairs],
        only_a=[cell.name for cell in cells if not cell.b],
        only_b=[cell.name for cell in cells if not cell.a],
        neither=[(pair.name, "; ".join(pair.without_runs)) for pair in joined if not any(pair.runs)],
        problems=floors.problems,
    )


def _correct(pairs: Sequence[_Pair], is_step: bool) -> int:
    """Holm's correction over the step times of all cells, or over everything else of all cells; returns how many were
    tested together: nothing of a cell that is invalid, and no side of one repeat."""
    tests = [
        (pair, metric, ratio.p)
        for pair in pairs
        for metric, (_, _, ratio) in pair.ratios.items()
        if (metric is STEP) == is_step and ratio.p is not None and not pair.invalid
    ]
    for (pair, metric, _), p in zip(tests, holm([p for _, _, p in tests]), strict=True):
        pair.adjusted_p[metric] = p
    return len(tests)


def slow_processes(rounds: Sequence[tuple[Run, Run]]) -> list[SlowProcess]:
    """The slow ones among the processes of both sides, in the order of their rounds. Nothing is dropped for it: the
    rule of `rounds` weighs what lies far out, and knows no sides."""
    if len(rounds) < _SLOW_ROUNDS:
        return []
    steps = [(STEP.of(a.record), STEP.of(b.record)) for a, b in rounds]
    logs = [math.log(b) - math.log(a) if a and b else 0.0 for a, b in steps]
    middle = statistics.median(logs)
    spread = STD_PER_MAD * statistics.median(abs(log - middle) for log in logs)
    limit = max(_SLOW_STDS * spread, math.log1p(_SLOW_FRACTION))
    runs = [run for pair in rounds for run in pair]
    slow = []
    for pair, log in zip(rounds, logs, strict=True):
        if abs(log - middle) > limit:
            # Of the two the one that took longer than the difference of the other rounds lets expect.
            side = int(log > middle)
            sweep, excess = pair[side].record.sweep, ratio_from(abs(log - middle)) - 1
            number = 1 + (sweep.repeat or 0) if sweep else 0
            slow.append(SlowProcess("AB"[side], number, pair[side].run_id, excess, _state(pair[side], runs)))
    return slow


def _state(run: Run, runs: Sequence[Run]) -> str:
    """Clock, power and load of a process beside the median of the others."""
    facts = (
        ("SM clock", "device_state.close.sm_clock_hz", 1e-6, " MHz"),
        ("power", "device_state.mean_power_w", 1.0, " W"),
        ("load per core", "sweep.load_per_core", 1.0, ""),
    )
    texts = []
    for title, name, scale, unit in facts:
        value = value_at(run.record, name)
        others = [known for other in runs if other is not run and (known := value_at(other.record, name)) is not None]
        if value is not None and others:
            texts.append(f"{title} {value * scale:.4g}{unit}, others {statistics.median(others) * scale:.4g}{unit}")
    return "; ".join(texts) or "clock, power and load were not recorded"


def one_sided(slow: Sequence[SlowProcess]) -> str | None:
    """The side that slow processes belong to, where chance would hardly have it so (two-sided sign test at 5 %)."""
    count_b = sum(process.side == "B" for process in slow)
    fewer = min(count_b, len(slow) - count_b)
    if 2 * sum(math.comb(len(slow), k) for k in range(fewer + 1)) >= 0.05 * 2 ** len(slow):
        return None
    return "B" if 2 * count_b > len(slow) else "A"


def _nothing_in_common(cells: Sequence[Cell], a: Side, b: Side) -> str:
    for name, side in (("A", a), ("B", b)):
        if not side.runs:
            return f"{name} ({side.given}) has nothing to compare: {side.left_out[0].reason}"
    names_a, names_b = [cell.name for cell in cells if cell.a], [cell.name for cell in cells if cell.b]
    return (
        f"A and B have no cell in common: A has {len(names_a)} (such as {names_a[0]!r}), B {len(names_b)} (such as "
        f"{names_b[0]!r}); give one cell each, or pick cells with FOLDER@AXIS=VALUE"
    )
