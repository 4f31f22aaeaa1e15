"""Two sides compared, cell by cell: ratios with intervals, verdicts with reasons (design section 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from lmbench.compare.comparability import Difference, differences, invalid_reasons, known_names, names_something
from lmbench.compare.holm import holm
from lmbench.compare.identity import Cell, join_cells
from lmbench.compare.metrics import METRICS, STEP, Metric
from lmbench.compare.noise import NoiseFloors
from lmbench.compare.notes import notes
from lmbench.compare.side import LeftOut, Side, is_forked, read_side, refuse_overlap, split_usable
from lmbench.compare.verdict import EXIT_CODES, INVALID, UNDECIDED, Decision, decide, overall
from lmbench.errors import ExitCode, UsageError
from lmbench.records.load import Run
from lmbench.records.welch import Ratio, geometric_mean, ratio_of

_FORKED = (
    "some repeats were forked from one process, share its hash seed and address layout, and are not independent: "
    "measure them anew with `lmbench sweep SWEEP --engine exec --name NAME`, or write `engine: exec` in the file"
)


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


@dataclass
class _Pair:
    """A cell while it is worked on: its runs that count, and figures before the corrections over all cells."""

    cell: Cell
    a: list[Run]
    b: list[Run]
    left_out_a: list[LeftOut]
    left_out_b: list[LeftOut]
    invalid: list[str]
    ratios: dict[Metric, Ratio]
    adjusted: dict[Metric, float]

    @classmethod
    def of(cls, cell: Cell, about: Sequence[str]) -> _Pair:
        (a, left_out_a), (b, left_out_b) = split_usable(cell.a), split_usable(cell.b)
        invalid = invalid_reasons(a, b, about) if a and b else []
        return cls(cell, a, b, left_out_a, left_out_b, invalid, _ratios(a, b), {})


def compare(a: str, b: str, tolerance: float, about: Sequence[str] = ()) -> Comparison:
    """Compare what `a` and `b` name (see `read_side`); a ratio is B over A.

    Args:
        tolerance: changes up to this fraction count as none.
        about: dotted names of what is compared; with some, any other difference is invalid.

    Raises:
        UsageError: a side names no result, both hold the same run, or nothing is on both sides.
    """
    mine, theirs = read_side(a), read_side(b)
    refuse_overlap(mine, theirs)
    _check_names(about, mine, theirs)
    cells = join_cells(mine.runs, theirs.runs)
    joined = [_Pair.of(cell, about) for cell in cells if cell.a and cell.b]
    if not joined:
        raise UsageError(_nothing_in_common(cells, mine, theirs))
    pairs = [pair for pair in joined if pair.a or pair.b]
    families = _correct(pairs)
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
        tuple((pair.cell.name, "; ".join(_without_runs(pair))) for pair in joined if not (pair.a or pair.b)),
        tuple(floors.problems),
    )


def _ratios(a: Sequence[Run], b: Sequence[Run]) -> dict[Metric, Ratio]:
    """Figures that every run of both sides has."""
    found = {}
    for metric in METRICS:
        sides = _values(metric, a), _values(metric, b)
        if a and b and None not in (*sides[0], *sides[1]):
            found[metric] = ratio_of(*([v for v in side if v is not None] for side in sides))
    return found


def _values(metric: Metric, runs: Sequence[Run]) -> list[float | None]:
    return [metric.of(run.run) for run in runs]


def _correct(pairs: Sequence[_Pair]) -> dict[bool, int]:
    """Holm's correction: over the step times of all cells (True), and apart from those over everything else of all
    cells (False). Returns the sizes of both families."""
    sizes = {}
    for is_step in (True, False):
        tests = [(pair, metric, ratio.p) for pair, metric, ratio in _tests(pairs) if (metric is STEP) == is_step]
        adjusted = holm([p for _, _, p in tests if p is not None])
        for (pair, metric, _), p in zip(tests, adjusted, strict=True):
            pair.adjusted[metric] = p
        sizes[is_step] = len(tests)
    return sizes


def _tests(pairs: Sequence[_Pair]) -> Iterator[tuple[_Pair, Metric, Ratio]]:
    """What is tested: nothing of a cell that is invalid, and no side of one repeat."""
    for pair in pairs:
        if not pair.invalid:
            yield from ((pair, metric, ratio) for metric, ratio in pair.ratios.items() if ratio.p is not None)


def _result(pair: _Pair, tolerance: float, floors: NoiseFloors, families: dict[bool, int]) -> CellResult:
    found = differences(pair.a[0].run, pair.b[0].run) if pair.a and pair.b else []
    metrics = _metrics(pair, tolerance, floors, families)
    reasons = pair.invalid or _without_runs(pair) or [metrics[0].decision.reason]
    verdict = INVALID if pair.invalid else UNDECIDED if not metrics else metrics[0].decision.word
    return CellResult(
        pair.cell.name,
        verdict,
        tuple(reasons),
        tuple(notes(pair.a, pair.b, found) if metrics else []),
        tuple(found),
        metrics,
        tuple(run.run_id for run in pair.a),
        tuple(run.run_id for run in pair.b),
        tuple(pair.left_out_a),
        tuple(pair.left_out_b),
    )


def _metrics(pair: _Pair, tolerance: float, floors: NoiseFloors, families: dict[bool, int]) -> tuple[MetricResult, ...]:
    results: list[MetricResult] = []
    for metric, ratio in pair.ratios.items():
        floor = floors.floor([pair.a[0], pair.b[0]], metric.name)
        adjusted = pair.adjusted.get(metric)
        decision = Decision(INVALID, "")
        if not pair.invalid:
            decision = decide(
                ratio,
                tolerance=tolerance,
                floor=floor,
                adjusted_p=adjusted,
                family=families[metric is STEP],
                words=metric.words,
            )
            if decision.word != UNDECIDED and any(map(is_forked, (*pair.a, *pair.b))):
                decision = Decision(UNDECIDED, f"{_FORKED}; if they were: {decision.word}, {decision.reason}")
        a, b = (geometric_mean([v for v in _values(metric, runs) if v is not None]) for runs in (pair.a, pair.b))
        share = (b - a) / results[0].a if metric.unit == "s" and results else None
        results.append(MetricResult(metric, a, b, ratio, floor, adjusted, decision, share))
    return tuple(results)


def _without_runs(pair: _Pair) -> list[str]:
    """Why a cell has nothing to compare: how the runs of the side without one ended."""
    lines = []
    for name, used, left_out in (("A", pair.a, pair.left_out_a), ("B", pair.b, pair.left_out_b)):
        if not used:
            lines.append(f"no run of {name} counts: " + ", ".join(sorted({run.reason for run in left_out})))
    return lines


def _nothing_in_common(cells: Sequence[Cell], a: Side, b: Side) -> str:
    for name, side in (("A", a), ("B", b)):
        if not side.runs:
            return f"{name} ({side.given}) has nothing to compare: {side.left_out[0].reason}"
    mine, theirs = [cell.name for cell in cells if cell.a], [cell.name for cell in cells if cell.b]
    return (
        f"A and B have no cell in common: A has {len(mine)} (such as {mine[0]!r}), B {len(theirs)} (such as "
        f"{theirs[0]!r}); give one cell each, or pick cells with FOLDER@AXIS=VALUE"
    )


def _check_names(about: Sequence[str], a: Side, b: Side) -> None:
    known = known_names((*a.runs, *b.runs))
    for name in about:
        if not names_something(name, known):
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--about {name}: these runs record nothing of that name{hint}")
