"""The answer to a view's question in a sentence: what a lower precision buys, how a step grows, which batch is best.

A sentence is about the largest cells that can tell, by the order in which tables sort them; figures have their spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import stdev

from lmbench.report.columns import Column, ratio, values_of
from lmbench.report.facts import EAGER, heading, sort_key
from lmbench.report.frame import Frame
from lmbench.report.tables import SAME, UNDECIDED, Verdict, verdict
from lmbench.report.units import TIMES, change_percent, percent
from lmbench.report.view import AnswerSpec

ColumnOf = Callable[[str], Column]
#: Shares that are named, and groups that have a clause of their own.
_NAMED, _CLAUSES = 3, 6


def sentences(specs: Sequence[AnswerSpec], frame: Frame, column_of: ColumnOf) -> list[str]:
    """A sentence for each spec that the cells of one device have an answer to."""
    found = [_Teller(spec, frame, column_of) for spec in specs]
    texts = [f"{'; '.join(clauses)}." for teller in found if (clauses := getattr(teller, teller.spec.kind)())]
    along = next((teller for teller in found if teller.spec.kind == "along"), None)
    ended = along.out_of_memory() if along is not None else ""
    return [*texts, ended] if texts and ended else texts


class _Teller:
    """Tells one sentence: `column` is what it is about, `others` are the facts that differ beside those it compares."""

    def __init__(self, spec: AnswerSpec, frame: Frame, column_of: ColumnOf) -> None:
        self.spec, self.frame, self.column_of = spec, frame, column_of
        self.column, self.values = column_of(spec.y), column_of(spec.y).of(frame)
        differing = frame.differing()
        compared = frame.baseline.facts if spec.kind == "against" and frame.baseline else (spec.x, *spec.among)
        self.ways = [name for name in differing if name in compared]
        self.others = [name for name in differing if name not in self.ways]

    def against(self) -> list[str]:
        """Each way that is no baseline beside its baseline, in the largest cell that has both."""
        frame, clauses = self.frame, []
        if frame.baseline is None:
            return []
        for part in frame.by(self.ways):
            first = part.facts.index[0]
            label = self._told(first, ["compile"]) if self.ways == ["compile"] else frame.in_short(first, self.ways)
            for cell in reversed(part.ordered(self.others)):
                base = frame.base.get(cell, cell)
                clause = self._beside(cell, base) if base != cell else ""
                if clause:
                    place = self._told(cell, self.others)
                    figures = f"{self._text(cell, has_unit=False)} against {self._text(base)}"
                    clauses.append(f"{label} {clause}{f' at {place}' if place else ''} ({figures}){self._also(cell)}")
                    break
        return clauses

    def _beside(self, cell: int, base: int) -> str:
        if cell not in self.values or base not in self.values or not self.values[base].value:
            return ""
        noun, name = ("time" if self.column.name == "step_s" else self.column.title), self.frame.base_name
        numbers = self.column.numbers(self.frame)
        limits = ratio(values_of(numbers, base), values_of(numbers, cell)) if self.column.is_of_one_process else None
        if limits is not None and limits.low is not None and limits.high is not None and limits.low <= 1 <= limits.high:
            return f"is not told from {name} by {noun}"
        return f"takes {TIMES.text(self._value(cell) / self._value(base))} the {noun} of {name}"

    def along(self) -> list[str]:
        """From the least to the largest of `x`, in the last of the groups that come as far as any."""
        x, rows = self.spec.x, []
        for part in self.frame.by(self.others):
            known = [cell for cell in part.ordered([x]) if cell in self.values and cell in part.ok_cells]
            if len(known) > 1:
                rows.append((known[0], known[-1]))
        if not rows:
            return []
        places = [sort_key(x, self.frame.known[last].get(x)) for _, last in rows]
        first, last = [row for row, place in zip(rows, places, strict=True) if place == max(places)][-1]
        begin, end = self._value(first), self._value(last)
        factor = end / begin if begin > 0 else 0.0
        times = f"{factor:,.0f}x" if factor >= 100 else TIMES.text(factor) if factor else ""
        ends = [self.frame.known[cell].get(x) for cell in (first, last)]
        if times and all(isinstance(place, int | float) for place in ends):
            times += f" for {float(str(ends[1])) / float(str(ends[0])):.4g}x the {heading(x)}"
        label, verb = self._told(last, self.others), "grows" if end > begin else "falls"
        begin_text, end_text = (f"{self._text(cell)} at {self.frame.told(cell, [x])}" for cell in (first, last))
        text = f"{self.column.title} {verb} from {begin_text} to {end_text}{f' ({times})' if times else ''}"
        return [f"{label}: {text}" if label else text]

    def out_of_memory(self) -> str:
        """From which `x` on each group ran out of memory."""
        ends = []
        for part in self.frame.by(self.others):
            failed = [cell for cell in part.ordered([self.spec.x]) if part.label(cell).startswith("OOM")]
            if failed:
                place = f"from {part.told(failed[0], [self.spec.x])} on"
                ends.append(" ".join(filter(None, [self._told(failed[0], self.others), place])))
        more = f"; and {len(ends) - _CLAUSES} more" if len(ends) > _CLAUSES else ""
        return f"Out of memory: {'; '.join(ends[:_CLAUSES])}{more}." if ends else ""

    def best(self) -> list[str]:
        """In each group, which `x` has the most, and the largest that ended well."""
        clauses, x = [], self.spec.x
        for part in self.frame.by(self.others):
            known = [cell for cell in part.ordered([x]) if cell in self.values and cell in part.ok_cells]
            if not known:
                continue
            cell = max(known, key=self._value)
            label, title = self._told(cell, self.others), self.column.title
            title = f"most {title}" if len(known) > 1 else title
            text = f"{label}: {title}" if label else title[:1].upper() + title[1:]
            text += f" at {part.told(cell, [x])} ({self._text(cell)})"
            if any(part.label(other).startswith("OOM") for other in part.facts.index):
                text += f", the largest that fits is {part.told(known[-1], [x])}"
            clauses.append(text)
        return clauses[-_CLAUSES:]

    def fastest(self) -> list[str]:
        """For how many shapes each way is the fastest, with the largest of those; and for how many none is."""
        wins: dict[str, list[tuple[str, Verdict]]] = {}
        for part in self.frame.by(self.others):
            found = verdict(part, self.spec.among, self.column)
            if found is not None and found.second:
                place = self._told(part.facts.index[0], self.others)
                wins.setdefault(found.word or found.fastest, []).append((place, found))
        count, clauses = sum(map(len, wins.values())), []
        # Shapes are in order of size; precisions have none.
        facts = self.frame.known.values()
        has_sizes = any(isinstance(known.get(name), int | float) for known in facts for name in self.others)
        for name, won in sorted(wins.items(), key=lambda each: (each[0] in (UNDECIDED, SAME), -len(each[1]))):
            place, last = won[-1]
            time = f"{self.column.text(last.time)} {self.column.unit.word}"
            beside = f"{time}; next {last.second}, {change_percent(float(str(last.change.value)))}"
            if last.word:
                beside = f"{', '.join([last.fastest, *last.untold])}: {time}"
            upto = f" in {len(won)} of {count}, {'up to' if has_sizes else 'at'} {place}" if place else ""
            clauses.append(f"{name}{upto} ({beside})")
        return [f"Fastest by {self.column.title}: {clauses[0]}", *clauses[1:]] if clauses else []

    def parts(self) -> list[str]:
        """The largest cell that has a value, with what most of it is; a column of fractions is a share already."""
        cell = next((cell for cell in reversed(self.frame.ordered(self.others)) if cell in self.values), None)
        if cell is None:
            return []
        shares = {}
        for column in map(self.column_of, self.spec.of):
            part = column.of(self.frame).get(cell)
            if part is not None and isinstance(part.value, int | float) and part.value > 0:
                is_share = column.name.endswith("_fraction")
                shares[column.title] = part.value if is_share else part.value / self._value(cell)
        largest = sorted(shares.items(), key=lambda item: -item[1])[:_NAMED]
        parts = ": " + ", ".join(f"{name} {percent(share)}" for name, share in largest) if largest else ""
        label = self._told(cell, self.others)
        return [f"{f'{label}: ' if label else ''}{self.column.title} {self._text(cell)}{parts}{self._also(cell)}"]

    def _also(self, cell: int) -> str:
        """Columns told with the sentence."""
        told = ""
        for column in map(self.column_of, self.spec.also):
            entry = column.of(self.frame).get(cell)
            title = column.title.partition(" vs ")[0].removesuffix(",")
            if entry is not None and entry.text == "never":
                told += f", never {title.partition(' ')[0]}"
            elif entry is not None:
                told += f", {title} {column.text(entry)} {column.unit.word}".rstrip()
        return told

    def _value(self, cell: int) -> float:
        return float(str(self.values[cell].value))

    def _text(self, cell: int, has_unit: bool = True) -> str:
        """A value with its spread and unit: `23.1 ± 0.1 ms`."""
        column, text = self.column, self.column.text(self.values[cell])
        numbers = values_of(column.numbers(self.frame), cell) if column.over is not None else []
        if column.within is None and len(numbers) > 1:
            spread = f"{stdev(numbers) * column.unit.scale:,.{len(text.partition('.')[2])}f}"
            text += f" ± {spread}" if spread.strip("0.") else ""
        return f"{text} {column.unit.word}".rstrip() if has_unit else text

    def _told(self, cell: int, names: Sequence[str]) -> str:
        """A line of facts, with a compiled cell called so."""
        compiled = str(self.frame.known[cell].get("compile", ""))
        word = compiled if compiled in ("", EAGER) else f"compiled {compiled}".removesuffix(" default")
        return ", ".join(filter(None, (word if n == "compile" else self.frame.told(cell, [n]) for n in names)))
