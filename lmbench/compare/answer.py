"""A comparison as an answer: verdict with its reasons, step times, what else changed, and why runs do not count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import asdict

from lmbench.compare.comparison import EXIT_CODES, INVALID, SAME, UNDECIDED, Comparison, Figure, interval
from lmbench.compare.sides import SAMPLE
from lmbench.records.statistics import CONFIDENCE
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
from lmbench.report.units import unit_of

#: A sentence that more cells or runs share than this counts them instead of naming them.
_NAMED = 4
_FIGURE = re.compile(r"[-+±]?\d[\d.,]*")
COMPARISON_SCHEMA_VERSION = 3

#: Which test was used, and why.
BY_WELCH = (
    "Welch's t on logarithms of process means, since the sides were measured apart; same by two one-sided tests at 5 % "
    "(the 90 % interval lies within the gate)"
)
BY_ROUNDS = (
    "paired by round, since both sides were measured in turn: what drifts on both is out. At most 5 % are false over "
    "all looks together, where a side's own noise is independent from round to round or persists with an "
    "autocorrelation up to 0.9"
)
_FIGURES = (
    Column("A", name="a"), Column("B", name="b"), Column("B / A", name="ratio"), Column("95 % interval"),
    Column("finding"),
)  # fmt: skip


#: Labels of lines with what of a cell, and what of all, they tell.
_OF_CELLS = {"differs": "differences", "note": "notes", "reason": "reasons", "slow": "slow"}
_OF_ALL = {"only A": "only_a", "only B": "only_b"}


def comparison_answer(comparison: Comparison) -> Answer:
    """The verdict with its reasons and what keeps it from being more, then the step times. Tables of phases and memory,
    which test was used and what a sample is come with `--all`; `figures` hold everything in SI units."""
    cells, sides = comparison.cells, {"A": comparison.a, "B": comparison.b}
    counts = Counter(cell.verdict for cell in cells)
    tally = ", ".join(f"{counts[word]} {word}" for word in EXIT_CODES if counts[word]) or "none can be judged"
    verdict, *reasons = cells[0].reasons if len(cells) == 1 else [f"of {len(cells)} cells {tally}"]
    lines = [Line("verdict", f"{comparison.verdict.upper()}: {verdict}"), *(Line("", reason) for reason in reasons)]
    lines += [Line(name, side.given) for name, side in sides.items()]
    if any(cell.metrics for cell in cells) and not any(cell.differences for cell in cells):
        lines.append(Line("differs", "nothing that is recorded: an A/A comparison"))
    for label, field in _OF_CELLS.items():
        # The reasons of one cell are the verdict's, and a verdict that stands needs none.
        told = [
            cell for cell in cells if label != "reason" or (len(cells) > 1 and cell.verdict in (UNDECIDED, INVALID))
        ]
        texts = [(str(text), cell.name) for cell in told for text in getattr(cell, field)]
        lines += _grouped(label, texts, len(cells), by_kind=label in ("note", "reason"))
    for label, field in _OF_ALL.items():
        lines += [Line(label, text) for text in getattr(comparison, field)]
    lines += [Line("neither", ": ".join(filter(None, cell.values()))) for cell in comparison.neither]
    for name, side in sides.items():
        left_out = [*side.left_out, *(run for cell in cells for run in getattr(cell, f"left_out_{name.lower()}"))]
        lines += _grouped("left out", [(f"{name}: {run.reason}", run.path) for run in left_out])
    tests = {BY_ROUNDS if cell.by_rounds else BY_WELCH: None for cell in cells}
    tables = [table for table in _tables(comparison) if table.rows]
    return Answer(
        headline=lines,
        tables=tables,
        notes=[*(Line("test", test) for test in tests), Line("sample", SAMPLE)],
        first=[table.name for table in tables[:1]],
        figures={
            **asdict(comparison),
            "a": comparison.a.figures(),
            "b": comparison.b.figures(),
            "schema_version": COMPARISON_SCHEMA_VERSION,
            "verdict": comparison.verdict,
            "exit_code": int(EXIT_CODES[comparison.verdict]),
            "confidence_fraction": CONFIDENCE,
        },
        exit_code=EXIT_CODES[comparison.verdict],
    )


def _grouped(label: str, texts: Sequence[tuple[str, str]], everyone: int = 0, *, by_kind: bool = False) -> list[Line]:
    """A line for each text with the names that it belongs to, their number where they are many, nothing where it
    belongs to everyone. By kind texts that differ in their figures, or after a colon, have one line, the first's."""
    kinds: dict[str, tuple[str, list[str]]] = {}
    for text, name in texts:
        kind = _FIGURE.sub("", text.partition(":")[0]) if by_kind else text
        kinds.setdefault(kind, (text, []))[1].append(name)
    lines = []
    for text, names in kinds.values():
        where = f"{len(names)} of them" if len(names) > _NAMED else "; ".join(names)
        exact = sum(other == text for other, _ in texts)
        if exact < len(names):
            where = f"{names[0]}; alike in {len(names) - 1} others"
        lines.append(Line(label, text if exact == everyone else f"{text} ({where})"))
    return lines


def _tables(comparison: Comparison) -> list[Table]:
    """One cell's figures; of many cells their step times, and which other figures changed."""
    cells, name = comparison.cells, Column("cell")
    if len(cells) == 1:
        rows = [[figure.title, *_row(figure)] for figure in cells[0].metrics]
        counted = f"geometric means of {len(cells[0].used_a)} and {len(cells[0].used_b)} processes"
        caption = f"{counted}; findings of phases and memory after Holm's correction"
        return [Table("figures", "Compared", [Column("figure"), *_FIGURES], rows, caption)]
    steps = [[cell.name, *(_row(cell.metrics[0]) if cell.metrics else [None] * 4 + [cell.verdict])] for cell in cells]
    changes: list[list[Value | Cell]] = [
        [cell.name, figure.title, *_row(figure)]
        for cell in cells
        for figure in cell.metrics[1:]
        if figure.finding not in (SAME, UNDECIDED, INVALID)
    ]
    family = f"verdicts after Holm's correction over {comparison.family} cells"
    caption = "only what changed, after Holm's correction over all cells; --json has all"
    return [
        Table("cells", "Step time", [name, *_FIGURES], steps, f"geometric means over processes; {family}"),
        Table("changes", "Phases and memory", [name, Column("figure"), *_FIGURES], changes, caption),
    ]


def _row(figure: Figure) -> list[Value | Cell]:
    ratio, unit = figure.ratio, unit_of(figure.unit)
    return [
        *(Cell(value, text=f"{unit.text(value)} {unit.word}".rstrip()) for value in (figure.a, figure.b)),
        Cell(ratio.point, text=f"{ratio.point:.4f}" if ratio.point < 10 else f"{ratio.point:.4g}"),
        None if ratio.low is None else interval(ratio.low, ratio.high),
        Cell(figure.finding, style="outcome"),
    ]
