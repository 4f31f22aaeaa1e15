"""The answer of `lmbench compare`: verdict with its reasons, step times, other changes, and runs that do not count."""

from __future__ import annotations

from collections import Counter, defaultdict

from msgspec.structs import asdict

from lmbench.compare.comparison import EXIT_CODES, INVALID, SAME, UNDECIDED, Comparison, Figure, interval
from lmbench.compare.sides import SAMPLE, Side
from lmbench.records.statistics import CONFIDENCE
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value, listed
from lmbench.report.units import MISSING, SETTING, unit_of

COMPARISON_SCHEMA_VERSION = 3

#: The notes on the test that was used.
BY_WELCH = (
    "Welch's t on logarithms of one figure a process, since the sides were measured apart; same by two one-sided tests "
    "at 5 % (the 90 % interval lies within the gate)"
)
BY_ROUNDS = (
    "paired by round, the order drawn by coin: the evidence is a bet on the signs of the rounds' differences, to which "
    "drift, bursts and outliers are no change. At most 5 % of verdicts are false over all looks together, if a side "
    "brings nothing but its code from round to round: processes and servers are fresh, or only a change beyond the "
    "gate counts"
)
_FIGURES = (
    Column("A", SETTING, "a"), Column("B", SETTING, "b"), Column("B / A", SETTING, "ratio"),
    Column("95 % interval", SETTING, "change_fraction"), Column("finding"),
)  # fmt: skip


def comparison_answer(comparison: Comparison) -> Answer:
    """The verdict with its reasons, differences, notes and left-out runs, then the table of step times.

    Reasons and notes of several cells are notes of the table. `--all` adds the other tables, the test that was used,
    and what a sample is. `figures` hold everything in SI units.
    """
    cells, sides = comparison.cells, {"A": comparison.a, "B": comparison.b}
    if len(cells) == 1:
        (verdict, *reasons), notes, slow = cells[0].reasons, cells[0].notes, cells[0].slow
    else:
        counts = Counter(cell.verdict for cell in cells)
        tally = ", ".join(f"{counts[word]} {word}" for word in EXIT_CODES if counts[word]) or "none can be judged"
        verdict, reasons, notes, slow = f"of {len(cells)} cells {tally}", [], [], []
    differences = dict.fromkeys(str(difference) for cell in cells for difference in cell.differences)
    if not differences and comparison.verdict != INVALID and any(cell.metrics for cell in cells):
        differences = dict.fromkeys(["nothing but seeds at most: an A/A comparison"])
    left_out = defaultdict[str, list[str]](list)
    for name, side in sides.items():
        for run in (*side.left_out, *(run for cell in cells for run in getattr(cell, f"left_out_{name.lower()}"))):
            left_out[f"{name}: {run.reason}"].append(run.path)
    texts = {
        "verdict": [f"{comparison.verdict.upper()}: {verdict}"],
        "": reasons,
        **{name: [_named(side)] for name, side in sides.items()},
        "differs": differences,
        "note": notes,
        "slow": slow,
        "only A": comparison.only_a,
        "only B": comparison.only_b,
        "neither": [listed(*cell.values(), separator=": ") for cell in comparison.neither],
        "left out": [
            f"{reason} ({path}{f' and {len(others)} more' if others else ''})"
            for reason, (path, *others) in left_out.items()
        ],
    }
    tests = dict.fromkeys(BY_ROUNDS if cell.by_rounds else BY_WELCH for cell in cells)
    exit_code = EXIT_CODES[comparison.verdict]
    tables = [table for table in _tables(comparison) if table.rows]
    return Answer(
        headline=[Line(label, str(text)) for label, of_label in texts.items() for text in of_label],
        tables=tables,
        notes=[*(Line("test", test) for test in tests), Line("sample", SAMPLE)],
        first=[table.name for table in tables[:1]],
        figures={
            **asdict(comparison),
            "a": comparison.a.figures(),
            "b": comparison.b.figures(),
            "schema_version": COMPARISON_SCHEMA_VERSION,
            "verdict": comparison.verdict,
            "exit_code": int(exit_code),
            "confidence_fraction": CONFIDENCE,
        },
        exit_code=exit_code,
    )


def _named(side: Side) -> str:
    """A side as it was given, after the revision, Python or variables in which all of its runs ran."""
    environments = {run.record.place.environment for run in side.runs}
    return listed(*environments, side.given, separator=": ") if len(environments) == 1 else side.given


def _tables(comparison: Comparison) -> list[Table]:
    """All figures of a single cell; for several cells their step times, and the other figures that changed."""
    cells, name = comparison.cells, Column("cell")
    if len(cells) == 1:
        (cell,) = cells
        rows = [_row(figure) for figure in cell.metrics]
        counts = f"{len(cell.used_a)} and {len(cell.used_b)} processes"
        means = f"geometric means of {counts}; step is the trimean of a process's steps"
        if cell.metrics and cell.metrics[0].ratio.differences:
            means += "; B / A is the median over rounds, its interval holds after every round"
        caption = f"{means}; findings of phases and memory after Holm's correction"
        return [Table("figures", "Compared", [Column("figure"), *_FIGURES], rows, caption)]
    steps = []
    for cell in cells:
        # A verdict that stands needs no reason.
        reasons = cell.reasons if cell.verdict in (UNDECIDED, INVALID) else []
        finding = Cell(cell.verdict, style="outcome", notes=(*reasons, *cell.notes, *map(str, cell.slow)))
        figures = _row(cell.metrics[0])[1:-1] if cell.metrics else [None] * 4
        steps.append([cell.name, *figures, finding])
    changes = [
        [cell.name, *_row(figure)]
        for cell in cells
        for figure in cell.metrics[1:]
        if figure.finding not in (SAME, UNDECIDED, INVALID)
    ]
    means = "geometric means over processes, each the trimean of its steps"
    if comparison.family > 1:
        means += f"; verdicts after Holm's correction over {comparison.family} cells"
    caption = "only what changed, after Holm's correction over all cells; --format json has all"
    return [
        Table("cells", "Step time", [name, *_FIGURES], steps, means),
        Table("changes", "Phases and memory", [name, Column("figure"), *_FIGURES], changes, caption),
    ]


def _row(figure: Figure) -> list[Value | Cell]:
    """The figure, A, B, their ratio, its interval and the finding. The figure's name ends in the unit of A and B."""
    ratio, unit = figure.ratio, unit_of(figure.unit)
    low, high = (None if end is None else end - 1 for end in (ratio.low, ratio.high))
    return [
        Cell(figure.name, text=figure.title),
        *(Cell(value, text=f"{unit.text(value)} {unit.word}".rstrip()) for value in (figure.a, figure.b)),
        Cell(ratio.point, text=f"{ratio.point:.4f}" if ratio.point < 10 else f"{ratio.point:.4g}"),
        Cell(ratio.change, low=low, high=high, text=MISSING if ratio.low is None else interval(ratio.low, ratio.high)),
        Cell(figure.finding, style="outcome"),
    ]
