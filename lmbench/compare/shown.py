"""A comparison as people and programs read it: lines and tables on the screen, the same as Markdown, and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from lmbench.compare.comparison import CellResult, Comparison, MetricResult
from lmbench.compare.metrics import SAMPLE, TIME_WORDS
from lmbench.compare.sides import LeftOut, Side
from lmbench.compare.verdict import GRAVEST_FIRST, INVALID, SAME, UNDECIDED, interval
from lmbench.records.statistics import CONFIDENCE
from lmbench.report.chosen import Chosen, more, print_chosen
from lmbench.report.markdown import parts_to_markdown
from lmbench.report.table import BLANK, Entry, Heading, Line, Part, Table, fact
from lmbench.report.units import MISSING, change_percent, gib, milliseconds, percent_short

#: More cells than this in one line are counted instead of named.
_NAMED = 4
#: Phases that are named as carrying a change, and cells whose change is told in a line of its own.
_CARRIERS, _CHANGES = 3, 5
_LEFT_OUT_SHOWN = 8
COMPARISON_SCHEMA_VERSION = 1
_HOW = ("more", "--all says which test was used, and what a sample is")

#: Which test was used, and why.
BY_WELCH = (
    "Welch's t on logarithms of process means, since the sides were measured apart; same by two one-sided tests at 5 % "
    "(the 90 % interval lies within the gate)"
)
BY_ROUNDS = (
    "paired by round, since both sides were measured in turn: drift is out; evidence of 20 : 1 for a change, 10 : 1 "
    "against either end of the gate for same, which holds over all looks together"
)


def print_comparison(found: Comparison, chosen: Chosen, console: Console) -> None:
    """Print the verdict with what carries it and what keeps it from being more, then the step times; or the tables
    that were chosen instead, or everything.

    Raises:
        UsageError: a table was chosen that there is none of.
    """
    made = tables(found)
    everything: list[Part] = [*answer(found), *made, *remarks(found), *method(found)]
    short: list[Part] = [*answer(found), *made[:1], *remarks(found), _HOW if len(made) < 2 else more(made)]
    print_chosen(chosen, made, everything, short, console)


def markdown(found: Comparison) -> str:
    """All of it as Markdown, ready to paste; ends in a line feed."""
    return parts_to_markdown([*answer(found), *tables(found), BLANK, *remarks(found), *method(found)])


def answer(found: Comparison) -> list[Line]:
    """The verdict with its reasons and what carries it, what was compared, and what a reader must know of it."""
    if len(found.cells) == 1:
        cell = found.cells[0]
        lines = [("verdict", f"{cell.verdict.upper()}: {cell.reasons[0]}")]
        lines += [("", reason) for reason in cell.reasons[1:]]
        lines += [("mostly", text) for text in _carried(cell)]
    else:
        counted = Counter(cell.verdict for cell in found.cells)
        tally = ", ".join(f"{counted[word]} {word}" for word in GRAVEST_FIRST if counted[word])
        of = f"of {len(found.cells)} cells {tally or 'none can be judged'}"
        lines = [("verdict", f"{found.verdict.upper()}: {of}"), *_largest(found.cells)]
    lines += [("A", found.a.given), ("B", found.b.given)]
    lines += [("differs", text) for text in _differing(found.cells)]
    lines += [("note", text) for text in _by_text({cell.name: cell.notes for cell in found.cells}, len(found.cells))]
    lines += [("note", problem) for problem in found.problems]
    return [*lines, *_without_floor(found.cells)]


def _carried(cell: CellResult) -> list[str]:
    """The phases that most of a change of the step lies in."""
    if cell.verdict not in TIME_WORDS:
        return []
    known = [(metric, metric.step_share) for metric in cell.metrics[1:] if metric.step_share is not None]
    changed = [(m, share) for m, share in known if m.decision.word == cell.verdict]
    longest = sorted(changed, key=lambda pair: -abs(pair[1]))[:_CARRIERS]
    told = ", ".join(f"{metric.metric.title} {change_percent(share)}" for metric, share in longest)
    return [f"{told} of the step"] if told else []


def _largest(cells: Sequence[CellResult]) -> list[Line]:
    """The largest changes that are proven, a line each, and how many more there are."""
    proven = [(cell, cell.metrics[0]) for cell in cells if cell.verdict in TIME_WORDS]
    proven.sort(key=lambda pair: -abs(math.log(pair[1].ratio.point)))
    lines = []
    for cell, step in proven[:_CHANGES]:
        times = f"{milliseconds(step.a)} -> {milliseconds(step.b)} ms"
        lines.append(
            (cell.verdict, f"{cell.name}: {change_percent(step.ratio.change)} ({interval(step.ratio)}), {times}")
        )
    if more_of := len(proven) - _CHANGES:
        lines += [("", f"and {more_of} more cells")] * (more_of > 0)
    return lines


def tables(found: Comparison) -> list[Table]:
    """Step time first; then phases and memory, of many cells only what changed."""
    if len(found.cells) == 1:
        return [_metric_table(found.cells[0])] if found.cells[0].metrics else []
    changed = _changed_table(found)
    return [_cell_table(found), *([changed] if changed.rows else [])] if found.cells else []


def remarks(found: Comparison) -> list[Line]:
    """Why cells of many have no verdict, and runs that do not count."""
    lines: list[Line] = []
    if len(found.cells) > 1:
        judged = [cell for cell in found.cells if cell.verdict in (UNDECIDED, INVALID)]
        lines += [("reason", text) for text in _by_text({cell.name: cell.reasons for cell in judged}, len(found.cells))]
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        lines += [(f"only {side}", name) for name in names]
    lines += [("neither", f"{name}: {reason}".removeprefix(": ")) for name, reason in found.neither]
    left_out_a = [*found.a.left_out, *(run for cell in found.cells for run in cell.left_out_a)]
    left_out_b = [*found.b.left_out, *(run for cell in found.cells for run in cell.left_out_b)]
    lines += [*_left_out("A", left_out_a), *_left_out("B", left_out_b)]
    return [*lines, *(("slow", str(each)) for cell in found.cells if cell.by_rounds for each in cell.slow)]


def method(found: Comparison) -> list[Line]:
    """What the other verdicts of many cells rest on, which test was used, and what a sample is."""
    lines: list[Line] = []
    if len(found.cells) > 1:
        changed = {cell.name: cell.reasons for cell in found.cells if cell.verdict in TIME_WORDS}
        lines += [("reason", text) for text in _by_text(changed, len(found.cells))]
    by_rounds = [cell for cell in found.cells if cell.by_rounds]
    tests = [BY_ROUNDS] * bool(by_rounds) + [BY_WELCH] * (len(by_rounds) < len(found.cells))
    return [*lines, *(("test", test) for test in tests), ("sample", SAMPLE)]


def _metric_table(cell: CellResult) -> Table:
    step = cell.metrics[0].ratio
    counted = f"{step.n_a} rounds" if cell.by_rounds else f"{step.n_a} and {step.n_b} processes"
    caption = f"geometric means of {counted}; findings of phases and memory after Holm's correction"
    return Table(
        "Compared",
        caption,
        _headings("figure"),
        [[fact(m.metric.title), *_figures(m)] for m in cell.metrics],
        name="figures",
    )


def _cell_table(found: Comparison) -> Table:
    rows = []
    for cell in found.cells:
        blank = [Entry(MISSING, "missing")] * 4
        figures = _figures(cell.metrics[0])[:4] if cell.metrics else blank
        counts = Entry(f"{len(cell.used_a)} / {len(cell.used_b)}")
        rows.append([fact(cell.name), counts, *figures, Entry(cell.verdict, "outcome")])
    headings = [Heading("cell", False), Heading("repeats"), *_headings("")[1:5], Heading("verdict", False)]
    corrected = f"; verdicts after Holm's correction over {found.family} cells" if found.family > 1 else ""
    caption = f"geometric means over processes{corrected}"
    return Table("Step time", caption, headings, rows, name="cells")


def _changed_table(found: Comparison) -> Table:
    unchanged = (SAME, UNDECIDED, INVALID)
    rows = []
    for cell in found.cells:
        for metric in cell.metrics[1:]:
            if metric.decision.word not in unchanged:
                a, b, _, limits, _, finding = _figures(metric)
                rows.append([fact(cell.name), fact(metric.metric.title), a, b, limits, finding])
    numbers = [Heading(name) for name in ("A", "B", "95 % interval")]
    headings = [Heading("cell", False), Heading("figure", False), *numbers, Heading("finding", False)]
    caption = "only what changed, after Holm's correction over all cells; --json has all"
    return Table("Phases and memory", caption, headings, rows, name="changes")


def _headings(first: str) -> list[Heading]:
    numbers = [Heading(name) for name in ("A", "B", "B / A", "95 % interval", "of step")]
    return [Heading(first, False), *numbers, Heading("finding", False)]


def _figures(found: MetricResult) -> list[Entry]:
    ratio = found.ratio
    change = f"{ratio.point:.4f}" if ratio.point < 10 else f"{ratio.point:.4g}"
    limits = interval(ratio) if ratio.low is not None else MISSING
    share = MISSING if found.step_share is None else change_percent(found.step_share)
    return [
        Entry(_with_unit(found.a, found.metric.unit)),
        Entry(_with_unit(found.b, found.metric.unit)),
        Entry(change),
        Entry(limits, "number" if ratio.low is not None else "missing"),
        Entry(share),
        Entry(found.decision.word, "outcome"),
    ]


def _with_unit(value: float, unit: str) -> str:
    """A figure in the unit that people read it in: seconds as ms, bytes as GiB, fractions in percent."""
    if unit == "s":
        return f"{milliseconds(value)} ms"
    if unit == "bytes":
        return gib(value)
    if unit == "fraction":
        return percent_short(value)
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return text if unit in ("1", "count") else f"{text} {unit}"


def _differing(cells: Sequence[CellResult]) -> list[str]:
    """Differences of all cells, those that only some have with their number."""
    if not any(cell.metrics for cell in cells):
        return []
    counted = Counter(str(difference) for cell in cells for difference in cell.differences)
    if not counted:
        return ["nothing that is recorded: an A/A comparison"]
    return [text if n == len(cells) else f"{text} ({n} of {len(cells)} cells)" for text, n in counted.items()]


def _by_text(texts: Mapping[str, Sequence[str]], of: int) -> list[str]:
    """Each text once, with the cells that it belongs to."""
    named: dict[str, list[str]] = {}
    for cell, lines in texts.items():
        for line in lines:
            named.setdefault(line, []).append(cell)
    return [f"{line}{_where(names, of)}" for line, names in named.items()]


def _without_floor(cells: Sequence[CellResult]) -> list[Line]:
    compared = [cell for cell in cells if cell.metrics and cell.verdict != INVALID and not cell.by_rounds]
    missing = [cell.name for cell in compared if cell.metrics[0].floor is None]
    if not missing:
        return []
    text = f"no A/A noise floor is known{_where(missing, len(cells))}; `lmbench noise` measures it"
    return [("note", text)]


def _where(names: Sequence[str], of: int) -> str:
    if len(names) == of:
        return ""
    return f" ({'; '.join(names)})" if len(names) <= _NAMED else f" ({len(names)} of {of} cells)"


def _left_out(side: str, left_out: Iterable[LeftOut]) -> list[Line]:
    runs = list(left_out)
    lines = [("left out", f"{side}: {run.path}: {run.reason}") for run in runs[:_LEFT_OUT_SHOWN]]
    more = Counter(run.outcome for run in runs[_LEFT_OUT_SHOWN:])
    if more:
        listed = ", ".join(f"{n} {outcome}" for outcome, n in sorted(more.items()))
        lines.append(("left out", f"{side}: {sum(more.values())} more runs ({listed}); --json names them"))
    return lines


def as_record(found: Comparison) -> dict[str, Any]:
    """The whole comparison for `--json`, in SI units, ratios as B over A."""
    return {
        "schema_version": COMPARISON_SCHEMA_VERSION,
        "verdict": found.verdict,
        "exit_code": int(found.exit_code),
        "a": _side_record(found.a),
        "b": _side_record(found.b),
        "tolerance_fraction": found.tolerance,
        "confidence_fraction": CONFIDENCE,
        "about": list(found.about),
        "sample": SAMPLE,
        "cells": [_cell_record(cell) for cell in found.cells],
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "neither": [{"name": name, "reason": reason} for name, reason in found.neither],
        "problems": list(found.problems),
    }


def _side_record(side: Side) -> dict[str, Any]:
    return {
        "given": side.given,
        "run_count": len(side.runs) + len(side.left_out),
        "left_out": [asdict(run) for run in side.left_out],
    }


def _cell_record(cell: CellResult) -> dict[str, Any]:
    return {
        "name": cell.name,
        "verdict": cell.verdict,
        "reasons": list(cell.reasons),
        "notes": list(cell.notes),
        "test": "rounds" if cell.by_rounds else "welch",
        "slow": [asdict(process) for process in cell.slow],
        "differences": [asdict(difference) for difference in cell.differences],
        "a": {"used": list(cell.used_a), "left_out": [asdict(run) for run in cell.left_out_a]},
        "b": {"used": list(cell.used_b), "left_out": [asdict(run) for run in cell.left_out_b]},
        "metrics": [_metric_record(metric) for metric in cell.metrics],
    }


def _metric_record(found: MetricResult) -> dict[str, Any]:
    ratio = found.ratio
    return {
        "name": found.metric.name,
        "unit": found.metric.unit,
        "a": {"n": ratio.n_a, "geometric_mean": found.a, "std_fraction": ratio.std_a},
        "b": {"n": ratio.n_b, "geometric_mean": found.b, "std_fraction": ratio.std_b},
        "ratio": ratio.point,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "equivalence_low": ratio.equal_low,
        "equivalence_high": ratio.equal_high,
        "p": ratio.p,
        "p_holm": found.adjusted_p,
        "noise_floor_fraction": found.floor,
        "step_share_fraction": found.step_share,
        "finding": found.decision.word,
        "reason": found.decision.reason,
    }
