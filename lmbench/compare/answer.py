"""A comparison as an answer: verdict with its reasons, step times, what else changed, and why runs do not count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lmbench.compare.comparison import CellComparison, Comparison, Figure
from lmbench.compare.metrics import SAMPLE, TIME_WORDS
from lmbench.compare.sides import LeftOut, Side
from lmbench.compare.verdict import EXIT_CODES, INVALID, SAME, UNDECIDED, interval
from lmbench.records.statistics import CONFIDENCE
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
from lmbench.report.units import change_percent, milliseconds, unit_of

#: More cells than this in one line are counted instead of named.
_NAMED = 4
#: Phases that are named as carrying a change, and cells whose change is told in a line of its own.
_CARRIERS, _CHANGES = 3, 5
_LEFT_OUT_SHOWN = 8
COMPARISON_SCHEMA_VERSION = 2

#: Which test was used, and why.
BY_WELCH = (
    "Welch's t on logarithms of process means, since the sides were measured apart; same by two one-sided tests at 5 % "
    "(the 90 % interval lies within the gate)"
)
BY_ROUNDS = (
    "paired by round, since both sides were measured in turn: drift is out; evidence of 20 : 1 for a change, 10 : 1 "
    "against either end of the gate for same, which holds over all looks together"
)
_FIGURES = (
    Column("A", name="a"), Column("B", name="b"), Column("B / A", name="ratio"), Column("95 % interval"),
    Column("of step", name="step_share_fraction"), Column("finding"),
)  # fmt: skip


def comparison_answer(comparison: Comparison) -> Answer:
    """The verdict with what carries it and what keeps it from being more, then the step times. Tables of phases and
    memory, which test was used and what a sample is come with `--all`; `figures` hold everything in SI units."""
    cells = comparison.cells
    if len(cells) == 1:
        lines = [Line("verdict", f"{cells[0].verdict.upper()}: {cells[0].reasons[0]}")]
        lines += [Line("", reason) for reason in cells[0].reasons[1:]]
        lines += _carried(cells[0])
        tables = [_figure_table(cells[0])] if cells[0].metrics else []
    else:
        counts = Counter(cell.verdict for cell in cells)
        tally = ", ".join(f"{counts[word]} {word}" for word in EXIT_CODES if counts[word]) or "none can be judged"
        lines = [Line("verdict", f"{comparison.verdict.upper()}: of {len(cells)} cells {tally}"), *_largest(cells)]
        tables = [table for table in (_cell_table(comparison), _changed_table(cells)) if table.rows]
    lines += [Line("A", comparison.a.given), Line("B", comparison.b.given)]
    lines += [Line("differs", text) for text in _differing(cells)]
    lines += [Line("note", text) for text in _by_text({cell.name: cell.notes for cell in cells}, len(cells))]
    lines += [Line("note", problem) for problem in comparison.problems]
    judged = [cell for cell in cells if cell.metrics and cell.verdict != INVALID and not cell.by_rounds]
    if without_floor := [cell.name for cell in judged if cell.metrics[0].noise_floor_fraction is None]:
        cause = f"no A/A noise floor is known{_where(without_floor, len(cells))}"
        lines.append(Line("note", f"{cause}; `lmbench noise` measures it"))
    return Answer(
        headline=[*lines, *_remarks(comparison)],
        tables=tables,
        notes=_method(cells),
        first=[table.name for table in tables[:1]],
        figures=_figures(comparison),
        exit_code=comparison.exit_code,
    )


def _carried(cell: CellComparison) -> list[Line]:
    """The phases that most of a change of the step lies in."""
    phases = [figure for figure in cell.metrics[1:] if figure.finding == cell.verdict in TIME_WORDS]
    shares = {figure.title: figure.step_share_fraction for figure in phases}
    known = {title: share for title, share in shares.items() if share is not None}
    longest = sorted(known, key=lambda title: -abs(known[title]))[:_CARRIERS]
    text = ", ".join(f"{title} {change_percent(known[title])}" for title in longest)
    return [Line("mostly", f"{text} of the step")] if text else []


def _largest(cells: Sequence[CellComparison]) -> list[Line]:
    """The largest changes that are proven, a line each, and how many more there are."""
    proven = [(cell, cell.metrics[0]) for cell in cells if cell.verdict in TIME_WORDS]
    proven.sort(key=lambda pair: -abs(math.log(pair[1].ratio.point)))
    lines = [
        Line(
            cell.verdict,
            f"{cell.name}: {change_percent(step.ratio.change)} ({interval(step.ratio)}), "
            f"{milliseconds(step.a)} -> {milliseconds(step.b)} ms",
        )
        for cell, step in proven[:_CHANGES]
    ]
    return [*lines, Line("", f"and {len(proven) - _CHANGES} more cells")] if len(proven) > _CHANGES else lines


def _remarks(comparison: Comparison) -> list[Line]:
    """Why cells of many have no verdict, and runs that do not count."""
    cells = comparison.cells
    lines: list[Line] = []
    if len(cells) > 1:
        reasons = {cell.name: cell.reasons for cell in cells if cell.verdict in (UNDECIDED, INVALID)}
        lines += [Line("reason", text) for text in _by_text(reasons, len(cells))]
    lines += [Line("only A", name) for name in comparison.only_a]
    lines += [Line("only B", name) for name in comparison.only_b]
    lines += [Line("neither", f"{name}: {reason}".removeprefix(": ")) for name, reason in comparison.neither]
    lines += _left_out("A", [*comparison.a.left_out, *(run for cell in cells for run in cell.left_out_a)])
    lines += _left_out("B", [*comparison.b.left_out, *(run for cell in cells for run in cell.left_out_b)])
    return [*lines, *(Line("slow", str(process)) for cell in cells for process in cell.slow)]


def _method(cells: Sequence[CellComparison]) -> list[Line]:
    """What the other verdicts of many cells rest on, which test was used, and what a sample is."""
    changed = {cell.name: cell.reasons for cell in cells if len(cells) > 1 and cell.verdict in TIME_WORDS}
    tests = [test for test in (BY_ROUNDS, BY_WELCH) if any(cell.by_rounds == (test == BY_ROUNDS) for cell in cells)]
    lines = [Line("reason", text) for text in _by_text(changed, len(cells))]
    return [*lines, *(Line("test", test) for test in tests), Line("sample", SAMPLE)]


def _figure_table(cell: CellComparison) -> Table:
    step = cell.metrics[0].ratio
    counted = f"{step.n_a} rounds" if cell.by_rounds else f"{step.n_a} and {step.n_b} processes"
    caption = f"geometric means of {counted}; findings of phases and memory after Holm's correction"
    rows = [[figure.title, *_row(figure)] for figure in cell.metrics]
    return Table("figures", "Compared", [Column("figure"), *_FIGURES], rows, caption)


def _cell_table(comparison: Comparison) -> Table:
    rows = []
    for cell in comparison.cells:
        figures = _row(cell.metrics[0])[:4] if cell.metrics else [None] * 4
        verdict = Cell(cell.verdict, style="outcome")
        rows.append([cell.name, f"{len(cell.used_a)} / {len(cell.used_b)}", *figures, verdict])
    corrected = f"; verdicts after Holm's correction over {comparison.family} cells" if comparison.family > 1 else ""
    columns = [Column("cell"), Column("repeats"), *_FIGURES[:4], Column("verdict")]
    return Table("cells", "Step time", columns, rows, f"geometric means over processes{corrected}")


def _changed_table(cells: Sequence[CellComparison]) -> Table:
    rows = []
    for cell in cells:
        for figure in cell.metrics[1:]:
            if figure.finding not in (SAME, UNDECIDED, INVALID):
                a, b, _, limits, _, finding = _row(figure)
                rows.append([cell.name, figure.title, a, b, limits, finding])
    columns = [Column("cell"), Column("figure"), *(_FIGURES[place] for place in (0, 1, 3, 5))]
    caption = "only what changed, after Holm's correction over all cells; --json has all"
    return Table("changes", "Phases and memory", columns, rows, caption)


def _row(figure: Figure) -> list[Value | Cell]:
    ratio, unit, share = figure.ratio, unit_of(figure.unit), figure.step_share_fraction
    texts = [f"{unit.text(value)} {unit.word}".rstrip() for value in (figure.a, figure.b)]
    return [
        Cell(figure.a, text=texts[0]),
        Cell(figure.b, text=texts[1]),
        Cell(ratio.point, text=f"{ratio.point:.4f}" if ratio.point < 10 else f"{ratio.point:.4g}"),
        interval(ratio) if ratio.low is not None else None,
        None if share is None else Cell(share, text=change_percent(share)),
        Cell(figure.finding, style="outcome"),
    ]


def _differing(cells: Sequence[CellComparison]) -> list[str]:
    """Differences of all cells, those that only some have with their number."""
    if not any(cell.metrics for cell in cells):
        return []
    counts = Counter(str(difference) for cell in cells for difference in cell.differences)
    if not counts:
        return ["nothing that is recorded: an A/A comparison"]
    return [text if n == len(cells) else f"{text} ({n} of {len(cells)} cells)" for text, n in counts.items()]


def _by_text(texts: Mapping[str, Sequence[str]], of: int) -> list[str]:
    """Each text once, with the cells that it belongs to."""
    names: dict[str, list[str]] = {}
    for cell, lines in texts.items():
        for line in lines:
            names.setdefault(line, []).append(cell)
    return [f"{line}{_where(cells, of)}" for line, cells in names.items()]


def _where(names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return ""
    return f" ({'; '.join(names)})" if len(names) <= _NAMED else f" ({len(names)} of {of} cells)"


def _left_out(side: str, runs: Sequence[LeftOut]) -> list[Line]:
    lines = [Line("left out", f"{side}: {run.path}: {run.reason}", is_whole=True) for run in runs[:_LEFT_OUT_SHOWN]]
    if more := Counter(run.outcome for run in runs[_LEFT_OUT_SHOWN:]):
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(more.items()))
        lines.append(Line("left out", f"{side}: {more.total()} more runs ({outcomes}); --json names them"))
    return lines


def _figures(comparison: Comparison) -> dict[str, object]:
    """The whole comparison for JSON, in SI units, ratios as B over A."""

    def side_record(side: Side) -> dict[str, object]:
        return {"given": side.given, "run_count": len(side.runs) + len(side.left_out), "left_out": side.left_out}

    return {
        "schema_version": COMPARISON_SCHEMA_VERSION,
        "verdict": comparison.verdict,
        "exit_code": int(comparison.exit_code),
        "a": side_record(comparison.a),
        "b": side_record(comparison.b),
        "tolerance_fraction": comparison.tolerance,
        "confidence_fraction": CONFIDENCE,
        "about": comparison.about,
        "cells": comparison.cells,
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "neither": [{"name": name, "reason": reason} for name, reason in comparison.neither],
        "problems": comparison.problems,
    }
