"""The runs of a group by their cells: the source of a report's tables, charts and sentences."""

from __future__ import annotations

import math
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.records.load import StoredRun, process_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.settings import as_text
from lmbench.report.answer import Value
from lmbench.report.facts import (
    CONSEQUENCES,
    ENVIRONMENT,
    FACT,
    OF_SHAPE,
    Facts,
    describe,
    first_known,
    is_notable,
    plain,
    sort_key,
)
from lmbench.report.groups import Group, ReportedRun, reported

#: A number of a run: the dotted name of a field of its record, a sum of fields (`a + b`), or a function of the record.
Expression = str | Callable[[RunRecord], float | None]


def number_of(record: RunRecord, expression: Expression) -> float | None:
    """The number of a run; None where it has none, or nan."""
    if isinstance(expression, str):
        terms = [value_at(record, name) for name in expression.split(" + ")]
        value = None if None in terms else math.fsum(terms)
    else:
        value = expression(record)
    return None if value is None or math.isnan(value) else value


@dataclass(eq=False)
class MeasuredCell:
    """A cell with its runs in all passes and its facts as far as they are known.

    `base` is the cell that it is compared with, None without one.
    """

    runs: Sequence[ReportedRun]
    facts: Facts
    base: MeasuredCell | None = None

    @cached_property
    def shown(self) -> list[ReportedRun]:
        """The runs whose times are shown."""
        return [run for run in self.runs if run.is_shown]

    @cached_property
    def ok(self) -> list[ReportedRun]:
        """The shown runs that ended well."""
        return [run for run in self.shown if run.outcome == "ok"]

    @cached_property
    def samples(self) -> list[ReportedRun]:
        """The shown runs that ended well, the first of each process, on which all statistics rest."""
        first_of = dict[tuple[object, ...], ReportedRun]()
        for run in self.ok:
            first_of.setdefault(process_of(run), run)
        return [*first_of.values()]

    @property
    def by_seed(self) -> dict[Any, ReportedRun]:
        """The first ok run for each seed of weights and data."""
        return {run.seed: run for run in reversed(self.ok) if run.seed is not None}

    @property
    def outcome(self) -> str:
        """`ok` if one of the runs ended well, else the outcome of the first run as tables show it."""
        return "ok" if self.ok else next((run.outcome_label for run in self.shown), "ok")

    def numbers(self, expression: Expression) -> list[float]:
        """The number of each sample that has it."""
        values = (number_of(run.record, expression) for run in self.samples)
        return [value for value in values if value is not None]

    def first(self, name: str) -> Any:
        """The first value that one of the runs, of any pass and outcome, has under this dotted name."""
        return first_known(*(value_at(run.record, name) for run in self.runs))

    def describe(self, names: Sequence[str]) -> str:
        """The named facts, as people say them; a precision without its float32 matmul as tables have it."""
        return describe(self.facts, names, has_matmul="matmul" in names)

    @property
    def name(self) -> str:
        """The cell in words, by the facts that people choose first."""
        return self.describe(("size", "mode", "batch", "context", "precision", "matmul", "compile"))


@dataclass(frozen=True, eq=False)
class Frame:
    """The runs of a group by their cells.

    `baseline` are the facts that cells are compared with. `course` has the values, in order, of the fact over which
    configurations are followed (`commit` or `time`), and of environments.
    """

    cells: Sequence[MeasuredCell]
    baseline: Facts = field(default_factory=dict)
    course: Mapping[str, Sequence[Value]] = field(default_factory=dict)

    @property
    def base_name(self) -> str:
        # A number after a word, so that it is not taken for a part of it.
        names = sorted(self.baseline, key=lambda name: not isinstance(self.baseline[name], str))
        return describe(self.baseline, names).replace(",", "")

    @property
    def runs(self) -> list[ReportedRun]:
        return [run for cell in self.cells for run in cell.runs]

    @property
    def samples(self) -> list[ReportedRun]:
        """The samples of all cells."""
        return [run for cell in self.cells for run in cell.samples]

    @property
    def compared(self) -> list[tuple[MeasuredCell, MeasuredCell]]:
        """The cells that have another cell as their base, each with that base."""
        return [(cell, cell.base) for cell in self.cells if cell.base is not None and cell.base != cell]

    def select(self, cells: Iterable[MeasuredCell]) -> Frame:
        """The frame of these cells, in their order."""
        return replace(self, cells=[*cells])

    def by(self, names: Sequence[str]) -> Iterator[Frame]:
        """A frame for each combination of these facts, in order."""
        for _, cells in groupby(self.ordered(names), lambda cell: [cell.facts.get(name) for name in names]):
            yield self.select(cells)

    def ordered(self, names: Sequence[str]) -> list[MeasuredCell]:
        """The cells sorted by these facts, the first fact first."""

        def key(name: str, value: Value) -> Any:
            return self.course[name].index(value) if name in self.course else sort_key(name, value)

        return sorted(self.cells, key=lambda cell: [key(name, cell.facts.get(name)) for name in names])

    @cached_property
    def values(self) -> dict[str, set[Value]]:
        """The known values of each fact: first the facts of FACT in its order, then others by name."""
        values = defaultdict[str, set[Value]](set)
        for cell in self.cells:
            for name, value in cell.facts.items():
                values[name].add(value)
        return {name: values[name] for name in in_order(values.keys())}

    def varying(self) -> list[str]:
        """Facts that differ between cells, or that are missing in a cell with an ok run (no attention).

        A fact that is missing because all runs of a cell died early does not differ.
        """
        recorded = [cell.facts for cell in self.cells if any(run.outcome == "ok" for run in cell.runs)]
        return [
            name
            for name, (value, *others) in self.values.items()
            if others or (is_notable(name, value) and any(name not in facts for facts in recorded))
        ]

    def differing(self, left_out: Container[str] = ()) -> list[str]:
        """Facts that differ between cells and do not follow from others: those that labels name."""

        def count(*names: str) -> int:
            return len({tuple(map(cell.facts.get, names)) for cell in self.cells})

        follow = CONSEQUENCES | {name for name in OF_SHAPE if count("size", name) == count("size")}
        return [name for name in self.varying() if name not in follow and name not in left_out]

    def shared(self) -> Facts:
        """Facts that all cells share; a cell whose runs died before they were known counts as sharing them."""
        varying = self.varying()
        return {name: next(iter(values)) for name, values in self.values.items() if name not in varying}

    def against(self, baseline: Facts) -> Frame:
        """The frame, each cell with its base: the cell with the baseline's facts whose other facts are the same.

        A fact that one of the two lacks counts as the same: only some cells may have an axis, and a run may have died
        early. Of several such cells, the one with most of the facts is taken.
        """
        if not baseline:
            return self
        ignored = dict.fromkeys(CONSEQUENCES - baseline.keys())
        compared = {cell: cell.facts | ignored for cell in self.cells}
        candidates = [cell for cell, facts in compared.items() if baseline.items() <= facts.items()]
        for cell, facts in compared.items():
            wanted = {**facts, **baseline}.items()
            agreeing = [other for other in candidates if all(compared[other].get(name, v) == v for name, v in wanted)]
            shared = {other: len(wanted & compared[other].items()) for other in agreeing}
            cell.base = max(agreeing, key=shared.__getitem__, default=None)
        return replace(self, baseline=baseline)


def make_frame(group: Group, is_profiled: bool = False) -> Frame:
    """The frame of a group. A sweep's cells are told apart by their axes, cells outside sweeps by their facts.

    The way in which a run is observed (a profiler, a clock) is neither, so that a cell has the runs of all its passes.

    Args:
        is_profiled: show the profiled runs instead of the timed ones.
    """
    runs = [replace(run, is_shown=run.is_profiled) for run in group.runs] if is_profiled else group.runs
    gpus = {run.facts["gpu"] for run in runs if "gpu" in run.facts}
    # A run that died before it recorded its device counts for the only device that there is.
    default_gpu = gpus.pop() if len(gpus) == 1 else "device unknown"
    members = defaultdict[Any, list[ReportedRun]](list)
    for run in sorted(runs, key=lambda run: (run.repeat, run.run_id, str(run.path))):
        facts = {"gpu": default_gpu, **run.facts}
        members[facts["gpu"], run.row if group.home else as_text(facts)].append(run)
    cells = list[MeasuredCell]()
    # Within a sweep, runs on another host or commit belong to the same cell.
    left_out = ENVIRONMENT if group.home else ()
    for (gpu, _), of_cell in members.items():
        # The first run that is ok counts. One that died early has facts as they were planned, such as `auto`.
        known = ChainMap(*(run.facts for run in sorted(of_cell, key=lambda run: run.outcome != "ok")))
        facts = {name: fact for name, fact in known.items() if name not in left_out}
        cells.append(MeasuredCell(of_cell, {"gpu": gpu, **facts}))
    listed_facts = [*(cell.axes or {} for cell in group.sweep.cells), *(cell.facts for cell in cells)]
    environments = dict.fromkeys(plain(facts.get("environment")) for facts in listed_facts)
    return Frame(cells, course={"environment": [*environments]})


def frame_of(runs: Iterable[StoredRun], home: Path | None) -> Frame:
    """The frame of runs by their records alone; `home` is their sweep's folder, None outside sweeps."""
    group = Group(home)
    group.runs += [reported(run, group) for run in runs]
    return make_frame(group)


def in_order(names: Set[str]) -> list[str]:
    """Names of facts in the order of FACT, then the others by name."""
    return [*(name for name in FACT if name in names), *sorted(names - FACT.keys())]


def parse_baseline(text: str, frame: Frame) -> Facts:
    """A baseline from `precision=32-true,matmul=highest`.

    Raises:
        UsageError: no cell has this fact or this value.
    """
    facts = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in frame.values:
            raise UsageError(f"baseline fact {name!r} is unknown here; choose among {', '.join(sorted(frame.values))}")
        # `highest` matches `highest (fp32)`, and `default` itself before `default regional`.
        matching = [known for known in frame.values[name] if f"{known} ".startswith(f"{value} ")]
        if not matching:
            choices = ", ".join(sorted(map(str, frame.values[name])))
            raise UsageError(f"baseline {name}={value}: no run has it; choose among {choices}")
        facts[name] = min(matching, key=str)
    return facts
