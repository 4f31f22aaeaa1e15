"""The runs of a group and the cells that they make: what tables, charts and sentences of a report are read from."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file
from lmbench.masking import shown
from lmbench.records.codec import DamagedRecord, decode
from lmbench.records.load import Run, find_runs, load_known
from lmbench.records.named import sweep_of
from lmbench.records.passes import TIMING, pass_of
from lmbench.records.run import RunRecord, SweepPlace
from lmbench.records.schema import value_at
from lmbench.records.store import MAX_SWEEP_BYTES, SWEEP_FILE
from lmbench.records.vocabulary import INCORRECT
from lmbench.report.facts import (
    CONSEQUENCES,
    ENVIRONMENT,
    FACT,
    NO_ROWS,
    SEEDS,
    Value,
    in_words,
    is_said,
    other_axes,
    other_settings,
    planned,
    read_facts,
    sort_key,
)

#: A number of a run: a field of its record by its dotted name, a sum of fields, or a function.
Expression = str | Callable[[RunRecord], float | None]


class _PlannedCell(Struct):
    """A cell in sweep.json."""

    id: str
    axes: dict[str, Any] | None = None


class _Sweep(Struct):
    """What the report takes from sweep.json."""

    name: str | None = None
    view: Any = None
    axes: dict[str, Any] | list[str] | None = None
    cells: list[_PlannedCell] = []


class RunRow(NamedTuple):
    """A run with what a report asks of it. Its cell in a sweep, without seed and pass, is `row`. It is shown
    (`is_shown`) if its times are the step's own."""

    run: Run
    facts: dict[str, Value]
    row: str | None
    repeat: int
    seed: tuple[Any, ...] | None
    is_profiled: bool
    is_shown: bool


@dataclass
class Group:
    """Runs that are shown together: those of one sweep, or all that belong to none (`name` is empty then)."""

    home: Path | None
    sweep: _Sweep
    rows: list[RunRow] = field(default_factory=list)

    @property
    def name(self) -> str:
        return (self.sweep.name or self.home.name) if self.home else ""


def read_groups(paths: Iterable[str | Path], is_by_sweep: bool = True) -> list[Group]:
    """Read every run at or below the paths, without its steps; one that cannot be read is kept as damaged.

    Args:
        is_by_sweep: whether the runs of a sweep are a group; all runs are one otherwise.

    Raises:
        UsageError: a path that does not exist or holds no result.
    """
    groups: dict[Path | None, Group] = {}
    for folder in find_runs(paths):
        home = sweep_of(folder) if is_by_sweep else None
        run = load_known(folder)
        if home not in groups:
            sweep = _Sweep()
            # What is damaged tells nothing.
            with suppress(Unreadable, DamagedRecord):
                sweep = decode(read_file(home / SWEEP_FILE, MAX_SWEEP_BYTES), _Sweep) if home else sweep
            groups[home] = Group(home, sweep)
        # What a search tried on its way is no cell.
        if value_at(run.record, "sweep.search") != "trial":
            groups[home].rows.append(_row(run, groups[home]))
    return sorted(groups.values(), key=lambda group: (not group.name, group.name))


def _row(run: Run, group: Group) -> RunRow:
    """The run's row. Its place in the sweep is what its record says, or its folder's name where that cannot tell."""
    record, place = run.record, run.record.sweep or SweepPlace()
    cell = (place.cell or run.path.name.rpartition("-r")[0]) if group.home else None
    plan = next((entry for entry in group.sweep.cells if entry.id == cell), _PlannedCell(""))
    axes = (plan.axes or {}) if place.axes is None else place.axes
    # A script of somebody's has no configuration; a module of another size is another one all the same.
    size = record.model.parameter_count
    config = record.config or ({"model.parameter_count": size} if size is not None else {})
    settings = (axes, config)
    others = {axis: value for axis, value in axes.items() if axis not in NO_ROWS}
    seeds = [planned(settings, seed) for seed in SEEDS]
    profiler = planned(settings, "trainer.profiler")
    row = RunRow(
        run,
        read_facts(record, settings) | (other_axes(axes) if group.home else other_settings(config)),
        json.dumps(others, sort_keys=True, default=str) if axes else cell,
        place.repeat or 0,
        None if None in seeds else (*seeds, record.data.source),
        is_profiled=bool(profiler if record.is_profiled is None else record.is_profiled),
        is_shown=pass_of(record, axes).name == TIMING,
    )
    # Large, and told by the facts: thousands of runs are to fit into memory.
    record.config = record.argv = None
    return row


@dataclass(frozen=True, eq=False)
class Frame:
    """The runs of a group by the cells that they make, which are numbered.

    `rows` are the runs of each cell, those of other passes among them; `known` its facts as far as they are known.
    `baseline` is what cells are compared with, `base` the cell of it for each cell that has one. `course` has the
    values, in their order, of the fact that configurations are followed over.
    """

    rows: Mapping[int, Sequence[RunRow]]
    known: Mapping[int, Mapping[str, Value]]
    baseline: Mapping[str, Value] = field(default_factory=dict)
    base: Mapping[int, int] = field(default_factory=dict)
    course: Mapping[str, Sequence[Value]] = field(default_factory=dict)

    # runs

    @property
    def base_name(self) -> str:
        return in_words(self.baseline, list(self.baseline)).replace(",", "")

    @property
    def runs(self) -> list[RunRow]:
        return [row for rows in self.rows.values() for row in rows]

    @cached_property
    def ok(self) -> dict[int, list[Run]]:
        """By cell the shown runs that ended well, all that statistics rest on; cells without one are not in it."""
        ok = {cell: self.runs_of(cell, "ok") for cell in self.rows}
        return {cell: runs for cell, runs in ok.items() if runs}

    def runs_of(self, cell: int, outcome: str | None = None, is_shown: bool | None = True) -> list[Run]:
        """The cell's runs of that outcome, of any where it is None; with `is_shown` None its other passes too."""
        rows = (row for row in self.rows[cell] if is_shown is None or row.is_shown == is_shown)
        return [row.run for row in rows if outcome is None or row.run.outcome == outcome]

    def by_seed(self, cell: int) -> dict[Any, Run]:
        """The cell's first ok run of each seed of weights and data."""
        rows = [row for row in self.rows[cell] if row.is_shown and row.run.outcome == "ok" and row.seed is not None]
        return {row.seed: row.run for row in reversed(rows)}

    def label(self, cell: int) -> str:
        """How the cell ended: `ok` if a run did, else how the first one ended, as a table shows it."""
        return "ok" if cell in self.ok else next(map(outcome_label, self.runs_of(cell)), "ok")

    def numbers(self, cell: int, expression: Expression) -> list[float]:
        """A number of each of the cell's ok runs that has it."""
        records = [run.record for run in self.ok.get(cell, ())]
        if isinstance(expression, str):
            terms = [[value_at(record, name) for name in expression.split(" + ")] for record in records]
            values = [None if None in numbers else math.fsum(numbers) for numbers in terms]
        else:
            values = list(map(expression, records))
        return [value for value in values if value is not None and not math.isnan(value)]

    # cells

    def select(self, cells: Iterable[int]) -> Frame:
        """Some of the cells, in that order."""
        cells = list(cells)
        return replace(self, rows={cell: self.rows[cell] for cell in cells}, known={n: self.known[n] for n in cells})

    def by(self, names: Sequence[str]) -> Iterator[Frame]:
        """The cells that share these facts, in order."""
        for _, cells in groupby(self.ordered(names), lambda cell: [self.known[cell].get(name) for name in names]):
            yield self.select(cells)

    def ordered(self, names: Sequence[str]) -> list[int]:
        """The cells sorted by these facts, the first one first."""

        def place(name: str, cell: int) -> Any:
            value = self.known[cell].get(name)
            return self.course[name].index(value) if name in self.course else sort_key(name, value)

        return sorted(self.known, key=lambda cell: [place(name, cell) for name in names])

    @cached_property
    def values(self) -> dict[str, set[Value]]:
        """The known values of each fact, in the order of FACT, then by name."""
        values = defaultdict[str, set[Value]](set)
        for facts in self.known.values():
            for name, value in facts.items():
                values[name].add(value)
        return {name: values[name] for name in in_order(values)}

    def varying(self) -> list[str]:
        """Facts that differ between cells, or that some lack although a run of theirs lived to tell (no attention).
        Otherwise the unknown differs from nothing."""
        lived = [self.known[cell] for cell in self.rows if self.runs_of(cell, "ok", is_shown=None)]
        return [
            name
            for name, (value, *others) in self.values.items()
            if others or (is_said(name, value) and any(name not in facts for facts in lived))
        ]

    def differing(self) -> list[str]:
        """Facts that differ between cells and do not follow from others: what labels say."""
        return [name for name in self.varying() if name not in CONSEQUENCES]

    def shared(self) -> dict[str, Value]:
        """Facts that all cells share; cells that died too early to tell share what the others do."""
        varying = self.varying()
        return {name: next(iter(values)) for name, values in self.values.items() if name not in varying}

    def in_words(self, cell: int, names: Sequence[str]) -> str:
        """These facts of the cell, as people say them."""
        return in_words(self.known[cell], names)

    def name(self, cell: int) -> str:
        """The cell in words, by what people choose first."""
        return self.in_words(cell, ("size", "mode", "batch", "context", "precision", "matmul", "compile"))

    def against(self, baseline: Mapping[str, Value]) -> Frame:
        """The frame with the baseline of each cell: the cell whose facts are the same but for those of the baseline.

        Where no cell has the same facts, what a cell does not tell agrees: an axis that only some cells have, or a run
        that died early.
        """
        if not baseline:
            return self
        untold = dict.fromkeys(CONSEQUENCES)
        told = {cell: dict(facts, **untold) for cell, facts in self.known.items()}
        baselines = [cell for cell in told if baseline.items() <= told[cell].items()]
        base = {}
        for cell, facts in told.items():
            wanted = {**facts, **baseline}.items()
            agreeing = [other for other in baselines if all(told[other].get(name, v) == v for name, v in wanted)]
            # The one that tells most of it.
            shared = [len(wanted & told[other].items()) for other in agreeing]
            if shared:
                base[cell] = agreeing[shared.index(max(shared))]
        return replace(self, baseline=baseline, base=base)


def make_frame(group: Group, is_profiled: bool = False) -> Frame:
    """The group's runs and cells. A cell is what its axes or, without a sweep, its facts are; how it is looked at (a
    profiler, a clock) is neither, so that every pass of a cell belongs to it.

    Args:
        is_profiled: show the profiled runs instead of those that are timed.
    """
    gpus = {row.facts["gpu"] for row in group.rows if "gpu" in row.facts}
    # A run that died before it could tell was on the only device.
    only = gpus.pop() if len(gpus) == 1 else "device unknown"
    numbers = dict[Any, int]()
    cells, known = defaultdict[int, list[RunRow]](list), defaultdict[int, dict[str, Value]](dict)
    for row in sorted(group.rows, key=lambda row: (row.repeat, row.run.run_id, str(row.run.path))):
        facts = {"gpu": only, **row.facts}
        place = row.row if group.home else json.dumps(facts, sort_keys=True)
        cell = numbers.setdefault((facts["gpu"], place), len(numbers))
        cells[cell].append(row._replace(is_shown=row.is_profiled) if is_profiled else row)
        # Within a sweep another host or commit makes no other row: the axes do.
        known[cell] = {n: fact for n, fact in facts.items() if not group.home or n not in ENVIRONMENT} | known[cell]
    return Frame(cells, known)


def frame_of(runs: Iterable[Run], home: Path | None) -> Frame:
    """Runs and the cells that they make, by their records alone; `home` is their sweep's folder, if they have one."""
    group = Group(home, _Sweep())
    group.rows += [_row(run, group) for run in runs]
    return make_frame(group)


def in_order(names: Iterable[str]) -> list[str]:
    """Names of facts in the order of FACT, others by name after them."""
    order = list(FACT)
    return sorted(names, key=lambda name: (order.index(name) if name in FACT else len(order), name))


def outcome_label(run: Run) -> str:
    """How a run ended, with the phase in which it did: `OOM (forward)`, `timeout`, `killed`; `error: incorrect` of
    attention that was found wrong."""
    word, error = outcome_word(run.outcome), run.record.error
    if error is not None and error.is_incorrect:
        return f"{word}: {INCORRECT}"
    return f"{word} ({shown(error.phase)})" if error is not None and error.phase else word


def outcome_word(outcome: str) -> str:
    return "OOM" if outcome == "oom" else outcome


def parse_baseline(text: str, frame: Frame) -> dict[str, Value]:
    """A baseline from `precision=32-true,matmul=highest`.

    Raises:
        UsageError: a fact that no cell has, or a value that none of them has.
    """
    facts: dict[str, Value] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in frame.values:
            raise UsageError(f"baseline fact {name!r} is unknown here; choose among {', '.join(sorted(frame.values))}")
        # `highest` is that of `highest (fp32)`.
        meant = [known for known in frame.values[name] if f"{known} ".startswith(f"{value} ")]
        if not meant:
            choices = ", ".join(sorted(map(str, frame.values[name])))
            raise UsageError(f"baseline {name}={value}: no run has it; choose among {choices}")
        facts[name] = meant[0]
    return facts
