"""A comparison as an answer: verdict with its reasons, step times, what else changed, and why runs do not count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import asdict

from lmbench.compare.comparison import Comparison, Figure
from lmbench.compare.sides import SAMPLE, LeftOut, Side
from lmbench.compare.verdict import EXIT_CODES, INVALID, SAME, UNDECIDED, interval
from lmbench.records.statistics import CONFIDENCE
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
from lmbench.report.units import change_percent, unit_of

#: A sentence that more cells or runs share than this counts them instead of naming them.
_NAMED = 4
_FIGURE = re.compile(r"[-+±]?\d[\d.,]*")
COMPARISON_SCHEMA_VERSION = 2

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
    Column("of step", name="step_share_fraction", is_extra=True), Column("finding"),
)  # fmt: skip


def comparison_answer(comparison: Comparison) -> Answer:
    """The verdict with its reasons and what keeps it from being more, then the step times. Tables of phases and memory,
    which test was used and what a sample is come with `--all`; `figures` hold everything in SI units."""
    cells = comparison.cells
    reasons = [(reason, cell.name) for cell in cells for reason in cell.reasons if cell.verdict in (UNDECIDED, INVALID)]
    if len(cells) == 1:
        verdict, *others = cells[0].reasons
        lines = [Line("verdict", f"{cells[0].verdict.upper()}: {verdict}"), *(Line("", reason) for reason in others)]
        reasons = []
    else:
        counts = Counter(cell.verdict for cell in cells)
        tally = ", ".join(f"{counts[word]} {word}" for word in EXIT_CODES if counts[word]) or "none can be judged"
        lines = [Line("verdict", f"{comparison.verdict.upper()}: of {len(cells)} cells {tally}")]
    differences = [(str(difference), cell.name) for cell in cells for difference in cell.differences]
    if not differences and any(cell.metrics for cell in cells):
        differences = [("nothing that is recorded: an A/A comparison", cell.name) for cell in cells]
    notes = [(note, cell.name) for cell in cells for note in cell.notes]
    left_out = [(f"A: {run.reason}", run.path) for run in _left_out(comparison, comparison.a, "left_out_a")]
    left_out += [(f"B: {run.reason}", run.path) for run in _left_out(comparison, comparison.b, "left_out_b")]
    lines += [
        Line("A", comparison.a.given),
        Line("B", comparison.b.given),
        *_grouped("differs", differences, len(cells)),
        *_grouped("note", notes, len(cells), by_kind=True),
        *(Line("note", problem) for problem in comparison.problems),
        *_grouped("reason", reasons, len(cells), by_kind=True),
        *(Line("only A", name) for name in comparison.only_a),
        *(Line("only B", name) for name in comparison.only_b),
        *(Line("neither", f"{cell['name']}: {cell['reason']}".removeprefix(": ")) for cell in comparison.neither),
        *_grouped("left out", left_out),
        *(Line("slow", str(process)) for cell in cells for process in cell.slow),
    ]
    tests = {BY_ROUNDS if cell.by_rounds else BY_WELCH: None for cell in cells}
    tables = [table for table in _tables(comparison) if table.rows]
    return Answer(
        headline=lines,
        tables=tables,
        notes=[*(Line("test", test) for test in tests), Line("sample", SAMPLE)],
        first=[table.name for table in tables[:1]],
        figures={
            **asdict(comparison),
            "schema_version": COMPARISON_SCHEMA_VERSION,
            "verdict": comparison.verdict,
            "exit_code": int(EXIT_CODES[comparison.verdict]),
            "confidence_fraction": CONFIDENCE,
            "a": _side_figures(comparison.a),
            "b": _side_figures(comparison.b),
        },
        exit_code=EXIT_CODES[comparison.verdict],
    )


def _left_out(comparison: Comparison, side: Side, of_cell: str) -> list[LeftOut]:
    return [*side.left_out, *(run for cell in comparison.cells for run in getattr(cell, of_cell))]


def _side_figures(side: Side) -> dict[str, object]:
    return {"given": side.given, "run_count": len(side.runs) + len(side.left_out), "left_out": side.left_out}


def _grouped(label: str, texts: Iterable[tuple[str, str]], everyone: int = 0, *, by_kind: bool = False) -> list[Line]:
    """A line for each text with the names that it belongs to, their number where they are many, nothing where it
    belongs to everyone. By kind texts that differ in their figures, or after a colon, have one line, the first's."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for text, name in texts:
        kind = _FIGURE.sub("", text.partition(":")[0]) if by_kind else text
        kinds.setdefault(kind, {}).setdefault(text, []).append(name)
    lines = []
    for names in kinds.values():
        (text, known), *others = names.items()
        alike = [name for _, more in others for name in more]
        where = _listed(known) + (f"; alike in {_listed(alike)}" if alike else "")
        lines.append(Line(label, text if len(known) == everyone else f"{text} ({where})"))
    return lines


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} of them" if len(names) > _NAMED else "; ".join(names)


def _tables(comparison: Comparison) -> list[Table]:
    """One cell's figures; of many cells their step times, and which other figures changed."""
    cells = comparison.cells
    if len(cells) == 1 and cells[0].metrics:
        cell, step = cells[0], cells[0].metrics[0].ratio
        counted = f"{step.n_a} rounds" if cell.by_rounds else f"{step.n_a} and {step.n_b} processes"
        caption = f"geometric means of {counted}; findings of phases and memory after Holm's correction"
        rows = [[figure.title, *_row(figure)] for figure in cell.metrics]
        return [Table("figures", "Compared", [Column("figure"), *_FIGURES], rows, caption)]
    step_times, changes = list[list[Value | Cell]](), list[list[Value | Cell]]()
    for cell in cells if len(cells) > 1 else ():
        step_row = _row(cell.metrics[0])[:4] if cell.metrics else [None] * 4
        repeats = f"{len(cell.used_a)} / {len(cell.used_b)}"
        step_times.append([cell.name, repeats, *step_row, Cell(cell.verdict, style="outcome")])
        for figure in cell.metrics[1:]:
            if figure.finding not in (SAME, UNDECIDED, INVALID):
                changes.append([cell.name, figure.title, *_row(figure)])
    corrected = f"; verdicts after Holm's correction over {comparison.family} cells" if comparison.family > 1 else ""
    columns = [Column("cell"), Column("repeats"), *_FIGURES[:4], Column("verdict")]
    caption = "only what changed, after Holm's correction over all cells; --json has all"
    return [
        Table("cells", "Step time", columns, step_times, f"geometric means over processes{corrected}"),
        Table("changes", "Phases and memory", [Column("cell"), Column("figure"), *_FIGURES], changes, caption),
    ]


def _row(figure: Figure) -> list[Value | Cell]:
    ratio, unit, share = figure.ratio, unit_of(figure.unit), figure.step_share_fraction
    return [
        *(Cell(value, text=f"{unit.text(value)} {unit.word}".rstrip()) for value in (figure.a, figure.b)),
        Cell(ratio.point, text=f"{ratio.point:.4f}" if ratio.point < 10 else f"{ratio.point:.4g}"),
        None if ratio.low is None else interval(ratio.low, ratio.high),
        None if share is None else Cell(share, text=change_percent(share)),
        Cell(figure.finding, style="outcome"),
    ]
