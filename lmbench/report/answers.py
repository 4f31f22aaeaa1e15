"""The answer to a view's question in a sentence: what a lower precision buys, how a step grows, which batch is best.

A sentence is about the largest cells that can tell, by the order in which tables sort them; figures have their spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from lmbench.records.statistics import ratio_of
from lmbench.report.cells import Cell, Pairing, differing, in_order, in_short, told
from lmbench.report.columns import Column, Measure, numbers
from lmbench.report.facts import EAGER, heading, sort_key
from lmbench.report.fastest import SAME, UNDECIDED, Verdict, verdict_among
from lmbench.report.units import TIMES, percent
from lmbench.report.view import AnswerSpec

ColumnOf = Callable[[str], Column]
#: Shares that are named, and groups that have a clause of their own.
_NAMED, _CLAUSES = 3, 6
#: A factor from here on has no decimals.
_LARGE = 100


def answer_lines(
    specs: Sequence[AnswerSpec], cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf
) -> list[str]:
    """A sentence for each spec that the cells of one device have an answer to."""
    found = [text for spec in specs if (text := _KINDS[spec.kind](spec, cells, pairing, column_of))]
    ended = _out_of_memory(next((spec.x for spec in specs if spec.kind == "along"), ""), cells)
    return [*found, ended] if found and ended else found


def _against(spec: AnswerSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> str:
    """Each way that is no baseline beside its baseline, in the largest cell that has both."""
    if pairing.baseline is None:
        return ""
    column, ways = column_of(spec.y), [name for name in differing(cells) if name in pairing.baseline.facts]
    others = [name for name in differing(cells) if name not in ways]
    clauses = []
    for label, group in _grouped(cells, ways):
        for cell in reversed(in_order(group, others)):
            baseline = pairing.of(cell)
            if baseline is None or baseline is cell:
                continue
            clause = _ratio(cell, baseline, column, pairing)
            if clause:
                at = _told(cell, others)
                also = "".join(_also(cell, name, pairing, column_of) for name in spec.also)
                clauses.append(
                    f"{label} {clause}{f' at {at}' if at else ''} ({_figures(cell, baseline, column)}){also}"
                )
                break
    return _sentence(clauses)


def _ratio(cell: Cell, baseline: Cell, column: Column, pairing: Pairing) -> str:
    own, base = column.of(cell, pairing), column.of(baseline, pairing)
    if own is None or base is None or base.value <= 0:
        return ""
    noun, name = "time" if column.name == "step_s" else column.title, pairing.baseline.name if pairing.baseline else ""
    values = [numbers(each, column.of_run) if column.of_run is not None else [] for each in (baseline, cell)]
    limits = ratio_of(*values) if all(values) else None
    if limits is not None and limits.low is not None and limits.high is not None and limits.low <= 1 <= limits.high:
        return f"is not told from {name} by {noun}"
    return f"takes {TIMES.text(own.value / base.value)} the {noun} of {name}"


def _figures(cell: Cell, baseline: Cell, column: Column) -> str:
    own, base = (column.read(each, None) for each in (cell, baseline))
    return f"{_shown(column, own, False)} against {_shown(column, base)}"


def _also(cell: Cell, name: str, pairing: Pairing, column_of: ColumnOf) -> str:
    column = column_of(name)
    measure = column.of(cell, pairing)
    if measure is None:
        return ""
    title = column.title.partition(" vs ")[0].removesuffix(",")
    shown = _shown(column, measure)
    return f", never {title.partition(' ')[0]}" if shown == "never" else f", {title} {shown}"


def _along(spec: AnswerSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> str:
    """From the least to the largest of `x`, in the largest group that has both."""
    column, others = column_of(spec.y), [name for name in differing(cells) if name != spec.x]
    rows = []
    for _, group in _grouped(cells, others):
        row = in_order(group, [spec.x])
        known = [(cell, measure) for cell in row if cell.ok and (measure := column.of(cell, pairing)) is not None]
        if len(known) > 1:
            rows.append(known)
    if not rows:
        return ""
    # Of those that come as far as any, the last.
    furthest = max(sort_key(spec.x, known[-1][0].facts.get(spec.x)) for known in rows)
    chosen = [known for known in rows if sort_key(spec.x, known[-1][0].facts.get(spec.x)) == furthest][-1]
    return _sentence([_grown(chosen[0], chosen[-1], spec.x, others, column)])


def _out_of_memory(x: str, cells: Sequence[Cell]) -> str:
    """From which `x` on each group ran out of memory."""
    others = [name for name in differing(cells) if name != x]
    ends = []
    for _, group in _grouped(cells, others) if x else ():
        failed = [cell for cell in in_order(group, [x]) if cell.outcome == "oom"]
        if failed:
            ends.append(" ".join(filter(None, [_told(failed[0], others), f"from {told(failed[0], [x])} on"])))
    more = f"; and {len(ends) - _CLAUSES} more" if len(ends) > _CLAUSES else ""
    return f"Out of memory: {'; '.join(ends[:_CLAUSES])}{more}." if ends else ""


def _grown(
    first: tuple[Cell, Measure], last: tuple[Cell, Measure], x: str, others: Sequence[str], column: Column
) -> str:
    begin, end = first[1].value, last[1].value
    verb = "grows" if end > begin else "falls"
    places = [cell.facts.get(x) for cell, _ in (first, last)]
    factor = end / begin if begin > 0 else 0.0
    times = f"{factor:,.0f}x" if factor >= _LARGE else TIMES.text(factor) if factor else ""
    if times and all(isinstance(place, int | float) for place in places):
        times += f" for {float(str(places[1])) / float(str(places[0])):.4g}x the {heading(x)}"
    with_ = _told(last[0], others)
    values = (
        f"from {_shown(column, first[1])} at {told(first[0], [x])} to {_shown(column, last[1])} at {told(last[0], [x])}"
    )
    return f"{f'{with_}: ' if with_ else ''}{column.title} {verb} {values}{f' ({times})' if times else ''}"


def _best(spec: AnswerSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> str:
    """In each group, which `x` has the most, and the largest that ended well."""
    column = column_of(spec.y)
    others = [name for name in differing(cells) if name != spec.x]
    clauses = []
    for _, group in _grouped(cells, others):
        row = in_order(group, [spec.x])
        known = [(cell, measure) for cell in row if cell.ok and (measure := column.of(cell, pairing)) is not None]
        if not known:
            continue
        cell, measure = max(known, key=lambda each: each[1].value)
        label, at = _told(cell, others), f"most {column.title}" if len(known) > 1 else column.title
        text = f"{label}: {at}" if label else at[:1].upper() + at[1:]
        text += f" at {told(cell, [spec.x])} ({_shown(column, measure)})"
        if any(each.outcome == "oom" for each in row):
            text += f", the largest that fits is {told(known[-1][0], [spec.x])}"
        clauses.append(text)
    return _sentence(clauses[-_CLAUSES:])


def _fastest(spec: AnswerSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> str:
    """For how many shapes each way is the fastest, with the largest of those; and for how many none is told to be."""
    column, others = column_of(spec.y), [name for name in differing(cells) if name not in spec.among]
    found: dict[str, list[tuple[str, Verdict]]] = {}
    for _, group in _grouped(cells, others):
        verdict = verdict_among(group, spec.among, column)
        if verdict is not None and verdict.second is not None:
            found.setdefault(verdict.word or verdict.fastest, []).append((_told(group[0], others), verdict))
    count = sum(map(len, found.values()))
    # Shapes are in order of size; precisions have none.
    upto = "up to" if any(isinstance(cell.facts.get(name), int | float) for cell in cells for name in others) else "at"
    if not count:
        return ""
    clauses = []
    for name, wins in sorted(found.items(), key=lambda each: (each[0] in (UNDECIDED, SAME), -len(each[1]))):
        place, verdict = wins[-1]
        time = f"{column.unit.text(verdict.mean)} {column.unit.word}"
        beside = f"{time}; next {verdict.second}, {verdict.second_takes}"
        if verdict.word:
            beside = f"{', '.join([verdict.fastest, *verdict.untold])}: {time}"
        at = f" in {len(wins)} of {count}, {upto} {place}" if place else ""
        clauses.append(f"{name}{at} ({beside})")
    return _sentence([f"Fastest by {column.title}: {clauses[0]}", *clauses[1:]])


def _parts(spec: AnswerSpec, cells: Sequence[Cell], pairing: Pairing, column_of: ColumnOf) -> str:
    """The largest cell that has a value, with what most of it is."""
    column, names = column_of(spec.y), differing(cells)
    for cell in reversed(in_order(cells, names)):
        measure = column.of(cell, pairing)
        if measure is None:
            continue
        shares = _shares(cell, measure, column, [column_of(name) for name in spec.of], pairing)
        largest = sorted(shares.items(), key=lambda item: -item[1])[:_NAMED]
        of = ": " + ", ".join(f"{name} {percent(share)}" for name, share in largest) if largest else ""
        also = "".join(_also(cell, name, pairing, column_of) for name in spec.also)
        label = _told(cell, names)
        return _sentence([f"{f'{label}: ' if label else ''}{column.title} {_shown(column, measure)}{of}{also}"])
    return ""


def _shares(
    cell: Cell, whole: Measure, column: Column, parts: Sequence[Column], pairing: Pairing
) -> Mapping[str, float]:
    """Shares of the whole; a column of fractions is one already."""
    found = {}
    for part in parts:
        measure = part.of(cell, pairing)
        if measure is not None and measure.value > 0:
            is_share = part.name.endswith("_fraction")
            found[part.title] = measure.value if is_share else measure.value / whole.value
    return found


def _grouped(cells: Sequence[Cell], names: Sequence[str]) -> list[tuple[str, list[Cell]]]:
    """Cells that share these facts, in order, with how people call them."""
    ordered = in_order(cells, names)
    groups = groupby(ordered, key=lambda cell: [cell.facts.get(name) for name in names])
    return [(_label(same[0], names), same) for _, group in groups if (same := list(group))]


def _label(cell: Cell, names: Sequence[str]) -> str:
    return _compiled(cell) if list(names) == ["compile"] else in_short(cell, names)


def _told(cell: Cell, names: Sequence[str]) -> str:
    """The same as a line of facts, with a compiled cell called so."""
    words = [_compiled(cell) if name == "compile" else told(cell, [name]) for name in names]
    return ", ".join(filter(None, words))


def _compiled(cell: Cell) -> str:
    word = str(cell.facts.get("compile", ""))
    return word if word in ("", EAGER) else f"compiled {word}".removesuffix(" default")


def _shown(column: Column, measure: Measure | None, has_unit: bool = True) -> str:
    """A value with its spread and unit: `23.1 ± 0.1 ms`."""
    if measure is None:
        return "?"
    text = column.show(measure)
    if not column.has_spread and column.text is None and not column.in_words and measure.std:
        decimals = len(text.partition(".")[2])
        spread = f"{measure.std * column.unit.scale:,.{decimals}f}"
        text += f" ± {spread}" if spread.strip("0.") else ""
    return f"{text} {column.unit.word}".rstrip() if has_unit else text


def _sentence(clauses: Sequence[str]) -> str:
    return f"{'; '.join(clauses)}." if clauses else ""


_KINDS: Mapping[str, Callable[[AnswerSpec, Sequence[Cell], Pairing, ColumnOf], str]] = {
    "against": _against, "along": _along, "best": _best, "fastest": _fastest, "parts": _parts,
}  # fmt: skip
