"""Two sides compared, cell by cell: ratios with intervals, verdicts with reasons (design section 8).

Sides are read and joined to cells; a cell is checked for what makes it invalid; its figures become ratios; their p
values are corrected over all cells; then each ratio has its verdict, and each cell its notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmbench.compare.comparability import busy_reason, check_about, failed_guards, invalid_reasons
from lmbench.compare.metrics import METRICS, STEP, Metric
from lmbench.compare.noise import NoiseFloors
from lmbench.compare.notes import notes
from lmbench.compare.sides import (
    Cell,
    LeftOut,
    Side,
    join_cells,
    pair_rounds,
    read_side,
    refuse_overlap,
    split_usable,
)
from lmbench.compare.slow import SlowProcess, one_sided, slow_processes
from lmbench.compare.verdict import EXIT_CODES, INVALID, SAME, UNDECIDED, Decision, decide, holm, overall
from lmbench.errors import ExitCode, UsageError
from lmbench.records.load import Run
from lmbench.records.settings import Difference, differences
from lmbench.records.statistics import MIN_REPEATS, Ratio, geometric_mean, ratio_of
from lmbench.report.units import change_percent

#: A guard that fails in more of a side's rounds than this is no accident.
_ACCIDENTS_FRACTION = 1 / 3


@dataclass(frozen=True)
class MetricResult:
    """One figure on both sides: geometric means over processes (SI), their ratio, p after Holm's correction (None with
    fewer than two repeats a side), the A/A floor (None if not measured), and the decision."""

    metric: Metric
    a: float
    b: float
    ratio: Ratio
    floor: float | None
    adjusted_p: float | None
    decision: Decision
    #: The change as a share of A's step, for times: these add up over phases.
    step_share: float | None


@dataclass(frozen=True)
class CellResult:
    """One cell on both sides. `verdict` is that of the step time; `metrics` begins with it and is empty where a side
    has no run that counts."""

    name: str
    verdict: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]
    metrics: tuple[MetricResult, ...]
    used_a: tuple[str, ...]
    used_b: tuple[str, ...]
    left_out_a: tuple[LeftOut, ...]
    left_out_b: tuple[LeftOut, ...]
    #: Whether runs are paired by the round that they were measured in, and which of those were slow.
    by_rounds: bool
    slow: tuple[SlowProcess, ...]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: cells on both sides, names of those on one side only, and, with the reason, of those where
    no run counts on either side (out of memory on both, say), which are not judged."""

    a: Side
    b: Side
    tolerance: float
    about: tuple[str, ...]
    verdict: str
    cells: tuple[CellResult, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    neither: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.verdict]

    @property
    def family(self) -> int:
        """How many step times were tested together."""
        return sum(any(m.metric is STEP and m.adjusted_p is not None for m in cell.metrics) for cell in self.cells)


class _Pair:
    """A cell while it is worked on: its runs that count, why they cannot be compared, and its figures."""

    def __init__(self, cell: Cell, about: Sequence[str]) -> None:
        self.name = cell.name
        self.a, self.left_out_a = split_usable(cell.a)
        self.b, self.left_out_b = split_usable(cell.b)
        self.invalid: list[str] = []
        self.rounds = pair_rounds(self.a, self.b)
        if self.rounds is not None:
            for name in "AB":
                self._leave_out_failed(name)
            self.rounds = pair_rounds(self.a, self.b) or []
            self._keep_whole_rounds(self.rounds)
        #: Of each figure that every run of both sides has: a value of each run.
        self.values: dict[Metric, tuple[list[float], list[float]]] = {}
        if self.a and self.b:
            self.invalid += invalid_reasons(self.a, self.b, about)
            self.values = {metric: found for metric in METRICS if (found := _values(metric, self.a, self.b))}
        self.ratios = self._ratios()
        self.adjusted_p: dict[Metric, float] = {}

    def _ratios(self) -> dict[Metric, Ratio]:
        if self.rounds is None:
            return {metric: ratio_of(*values) for metric, values in self.values.items()}
        # Here: it takes numpy, which help and other comparisons do without.
        from lmbench.compare.rounds import ratio_by_rounds

        return {metric: ratio_by_rounds(*values) for metric, values in self.values.items()}

    def _leave_out_failed(self, name: str) -> None:
        """A run whose guard failed is measured again in another round; where many did, it was no accident."""
        runs, left_out = (self.a, self.left_out_a) if name == "A" else (self.b, self.left_out_b)
        failed = [(run, guard) for run in runs for guard in run.record.guards if guard.status == "fail"]
        paths = {run.path for run, _ in failed}
        if len(runs) >= MIN_REPEATS and len(paths) > _ACCIDENTS_FRACTION * len(runs):
            self.invalid += failed_guards(name, runs)
        left_out += [LeftOut.of(run, f"guard {guard.name} failed: {guard.message}") for run, guard in failed]
        runs[:] = [run for run in runs if run.path not in paths]

    def _keep_whole_rounds(self, rounds: Sequence[tuple[Run, Run]]) -> None:
        whole = {run.path for pair in rounds for run in pair}
        reason = "the other side has no run of this round that counts"
        self.left_out_a += [LeftOut.of(run, reason) for run in self.a if run.path not in whole]
        self.left_out_b += [LeftOut.of(run, reason) for run in self.b if run.path not in whole]
        self.a, self.b = [mine for mine, _ in rounds], [theirs for _, theirs in rounds]

    @property
    def without_runs(self) -> list[str]:
        """How the runs of a side without one that counts ended; empty where both sides have some."""
        sides = (("A", self.a, self.left_out_a), ("B", self.b, self.left_out_b))
        return [
            f"no run of {name} counts: " + ", ".join(sorted({run.reason for run in left_out}))
            for name, used, left_out in sides
            if not used
        ]


def compare(a: str, b: str, tolerance: float, about: Sequence[str] = ()) -> Comparison:
    """Compare what `a` and `b` name (see `read_side`); a ratio is B over A.

    Args:
        tolerance: changes up to this fraction count as none.
        about: dotted names of what is compared; with some, any other difference is invalid.

    Raises:
        UsageError: a side names no result, both hold the same run, or nothing is on both sides.
    """
    return compare_sides(read_side(a), read_side(b), tolerance, about)


def compare_sides(mine: Side, theirs: Side, tolerance: float, about: Sequence[str] = ()) -> Comparison:
    """Compare two sides that were read. Raises UsageError as `compare` does."""
    refuse_overlap(mine, theirs)
    check_about(about, (*mine.runs, *theirs.runs))
    cells = join_cells(mine.runs, theirs.runs)
    joined = [_Pair(cell, about) for cell in cells if cell.a and cell.b]
    if not joined:
        raise UsageError(_nothing_in_common(cells, mine, theirs))
    pairs = [pair for pair in joined if pair.a or pair.b]
    families = {is_step: _correct(pairs, is_step) for is_step in (True, False)}
    floors = NoiseFloors()
    results = tuple(_result(pair, tolerance, floors, families) for pair in pairs)
    return Comparison(
        mine,
        theirs,
        tolerance,
        tuple(about),
        overall([result.verdict for result in results]),
        results,
        tuple(cell.name for cell in cells if not cell.b),
        tuple(cell.name for cell in cells if not cell.a),
        tuple((pair.name, "; ".join(pair.without_runs)) for pair in joined if not (pair.a or pair.b)),
        tuple(floors.problems),
    )


def _values(metric: Metric, a: Sequence[Run], b: Sequence[Run]) -> tuple[list[float], list[float]] | None:
    mine, theirs = ([v for run in side if (v := metric.of(run.record)) is not None] for side in (a, b))
    return (mine, theirs) if (len(mine), len(theirs)) == (len(a), len(b)) else None


def _correct(pairs: Sequence[_Pair], is_step: bool) -> int:
    """Holm's correction over the step times of all cells, or over everything else of all cells; returns how many were
    tested together: nothing of a cell that is invalid, and no side of one repeat."""
    tests = [
        (pair, metric, ratio.p)
        for pair in pairs
        for metric, ratio in pair.ratios.items()
        if (metric is STEP) == is_step and ratio.p is not None and not pair.invalid
    ]
    for (pair, metric, _), p in zip(tests, holm([p for _, _, p in tests]), strict=True):
        pair.adjusted_p[metric] = p
    return len(tests)


def _result(pair: _Pair, tolerance: float, floors: NoiseFloors, families: dict[bool, int]) -> CellResult:
    found = differences(pair.a[0].record, pair.b[0].record) if pair.a and pair.b else []
    metrics: list[MetricResult] = []
    slow = [] if pair.rounds is None else slow_processes(pair.rounds)
    # Rounds measure both sides under the same load.
    busy = busy_reason(pair.a, pair.b) if pair.rounds is None else None
    for metric, ratio in pair.ratios.items():
        # It guards against drift from one side to the other, which rounds take out.
        floor = None if pair.rounds is not None else floors.floor((pair.a[0], pair.b[0]), metric.name)
        adjusted_p, family = pair.adjusted_p.get(metric), families[metric is STEP]
        decision = Decision(INVALID, "")
        if not pair.invalid:
            decision = decide(
                ratio,
                tolerance=tolerance,
                floor=floor,
                adjusted_p=adjusted_p,
                family=family,
                words=metric.words,
                has_hint=metric is STEP,
            )
            if busy is not None and metric.unit == "s" and decision.word != UNDECIDED:
                decision = Decision(UNDECIDED, f"{change_percent(ratio.change)}, and {busy}")
            if metric is STEP and decision.word == SAME and (side := one_sided(slow)) is not None:
                told = f"{decision.reason} for most processes, but all {len(slow)} slow ones are {side}'s"
                decision = Decision(UNDECIDED, told)
        a, b = map(geometric_mean, pair.values[metric])
        share = (b - a) / metrics[0].a if metric.unit == "s" and metrics else None
        metrics.append(MetricResult(metric, a, b, ratio, floor, adjusted_p, decision, share))
    return CellResult(
        pair.name,
        INVALID if pair.invalid else metrics[0].decision.word if metrics else UNDECIDED,
        tuple(pair.invalid or pair.without_runs or [metrics[0].decision.reason]),
        tuple(notes(pair.a, pair.b, found) if metrics else []),
        tuple(found),
        tuple(metrics),
        tuple(run.run_id for run in pair.a),
        tuple(run.run_id for run in pair.b),
        tuple(pair.left_out_a),
        tuple(pair.left_out_b),
        pair.rounds is not None,
        tuple(slow),
    )


def _nothing_in_common(cells: Sequence[Cell], a: Side, b: Side) -> str:
    for name, side in (("A", a), ("B", b)):
        if not side.runs:
            return f"{name} ({side.given}) has nothing to compare: {side.left_out[0].reason}"
    mine, theirs = [cell.name for cell in cells if cell.a], [cell.name for cell in cells if cell.b]
    return (
        f"A and B have no cell in common: A has {len(mine)} (such as {mine[0]!r}), B {len(theirs)} (such as "
        f"{theirs[0]!r}); give one cell each, or pick cells with FOLDER@AXIS=VALUE"
    )
