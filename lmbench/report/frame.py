"""Runs as a long pandas frame: a row for each run, and a row for each cell with the facts that tell it from others.

Whatever groups, pivots, or joins a baseline or a published figure works on this frame. It is pandas because facts mix
words and numbers in one axis (`compile: [false, max-autotune]`), which pandas keeps as objects and polars refuses, and
because `lmbench.to_frame` gives a user pandas. Measured in November 2026: `import pandas` takes 0.50 s and 84 MB of
disk, `import polars` 0.30 s and 181 MB; a report of 15 cells takes 0.9 s either way.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file
from lmbench.records.codec import DamagedRecord, decode
from lmbench.records.load import Run, find_runs, load_run
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
    other_axes,
    other_settings,
    planned,
    read_facts,
    sort_key,
)
from lmbench.text import shown

#: A number of a run: a field of its record by its dotted name, an arithmetic expression of fields, or a function.
Expression = str | Callable[[RunRecord], float | None]

#: Options of a shape that its label (layers x width) leaves out.
_DIMENSIONS = ("model.d_ff", "model.num_heads", "model.vocab_size")


class _PlannedCell(Struct):
    """A cell in sweep.json."""

    id: str
    axes: dict[str, Any] | None = None
    options: dict[str, Any] | None = None


class _Sweep(Struct):
    """What the report takes from sweep.json."""

    name: str | None = None
    view: Any = None
    axes: dict[str, Any] | list[str] | None = None
    cells: list[_PlannedCell] = []


@dataclass
class Group:
    """Runs that are shown together: those of one sweep, or all that belong to none (`name` is empty then).

    `rows` are the runs, as `Frame.runs` has them, without those that only looked for the largest value that fits.
    """

    home: Path | None
    sweep: _Sweep
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return (self.sweep.name or self.home.name) if self.home else ""


def read_groups(paths: Iterable[str | Path], is_by_sweep: bool = True) -> tuple[list[Group], list[str]]:
    """Read every run at or below the paths, without its steps, and a line for each that cannot be shown.

    A run that is damaged is kept as such; one of another schema version becomes a line.

    Args:
        is_by_sweep: whether the runs of a sweep are a group; all runs are one otherwise.

    Raises:
        UsageError: a path that does not exist or holds no result, or nothing that this lmbench can read.
    """
    groups: dict[Path | None, Group] = {}
    unread: list[str] = []
    for folder in find_runs(Path(path).parent if Path(path).name == SWEEP_FILE else path for path in paths):
        home = sweep_of(folder) if is_by_sweep else None
        try:
            run = load_run(folder, with_steps=False)
        except UsageError as error:
            unread.append(str(error))
            continue
        if home not in groups:
            groups[home] = Group(home, _read_sweep(home))
        groups[home].rows.append(_row(run, groups[home]))
    if not groups:
        raise UsageError(unread[0])
    return sorted(groups.values(), key=lambda group: (not group.name, group.name)), unread


def _read_sweep(home: Path | None) -> _Sweep:
    """What its sweep.json says; nothing where that is damaged."""
    try:
        return decode(read_file(home / SWEEP_FILE, MAX_SWEEP_BYTES), _Sweep) if home else _Sweep()
    except (Unreadable, DamagedRecord):
        return _Sweep()


def _row(run: Run, group: Group) -> dict[str, Any]:
    """The run's row. Its place in the sweep is what its record says, or its folder's name where that cannot tell."""
    record, place = run.record, run.record.sweep or SweepPlace()
    cell = (place.cell or run.path.name.rpartition("-r")[0]) if group.home else None
    plan = next((entry for entry in group.sweep.cells if entry.id == cell), _PlannedCell(""))
    axes = (plan.axes or {}) if place.axes is None else place.axes
    # A script of somebody's has no configuration; a module of another size is another one all the same.
    size = record.model.parameter_count
    config = record.config or ({"model.parameter_count": size} if size is not None else {})
    settings = (axes, plan.options or {}, config)
    others = {axis: value for axis, value in axes.items() if axis not in NO_ROWS}
    seeds = [planned(settings, seed) for seed in SEEDS]
    is_profiled = record.is_profiled
    row = {
        "run": run,
        "outcome": run.outcome,
        "gpu": _device_of(record),
        "place": cell,
        "searched": place.searched_cell,
        "is_trial": place.search == "trial",
        "repeat": place.repeat or 0,
        # A row of a table is what a cell is but for its seed and how it is looked at.
        "row": json.dumps(others, sort_keys=True, default=str) if axes else cell,
        "is_profiled": bool(planned(settings, "trainer.profiler")) if is_profiled is None else is_profiled,
        "is_shown": pass_of(record, axes).name == TIMING,
        "seed": None if None in seeds else (*seeds, record.data.source),
        "facts": read_facts(record, settings) | (other_axes(axes) if group.home else other_settings(config)),
    }
    # Large, and told by the facts: thousands of runs are to fit into memory.
    record.config = record.argv = None
    return row


def _device_of(record: RunRecord) -> str | None:
    """The GPU's name, or the processor's where the run was on it; None where it ended before it could look."""
    environment = record.environment
    if environment is None or not (environment.gpu.name or record.device_type == "cpu"):
        return None
    model = environment.host.cpu_model
    return shown(environment.gpu.name or (f"CPU ({re.sub(' +', ' ', model)})" if model else "CPU"))


@dataclass(frozen=True, eq=False)
class Frame:
    """The runs of a group and the cells that they make.

    `runs` has a row for each run: `run`, `outcome`, `cell` (the index of its row in `facts`), `seed`, `is_profiled`,
    and `is_shown`, which is false for another pass of the cell, whose times are not the step's own. `facts` has a row
    for each cell: its device as `gpu`, and its facts, None where one is unknown. `baseline` is what cells are compared
    with, `base` the cell of it for each cell that has one. `course` has the values, in their order, of the fact that
    configurations are followed over.
    """

    runs: pd.DataFrame
    facts: pd.DataFrame
    baseline: Mapping[str, Value] = field(default_factory=dict)
    base: Mapping[int, int] = field(default_factory=dict)
    course: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    _numbers: dict[Expression, pd.Series] = field(default_factory=dict)

    # runs

    @property
    def base_name(self) -> str:
        return in_words(self.baseline, list(self.baseline)).replace(",", "")

    @cached_property
    def ok(self) -> pd.DataFrame:
        """The shown runs that ended well: all that statistics rest on."""
        return self.runs[self.runs.is_shown & (self.runs.outcome == "ok")]

    @cached_property
    def ok_cells(self) -> frozenset[int]:
        return frozenset(self.ok.cell)

    @cached_property
    def _by_cell(self) -> dict[int, list[Any]]:
        rows = defaultdict[int, list[Any]](list)
        for row in self.runs.itertuples(index=False):
            rows[row.cell].append(row)
        return rows

    def runs_of(self, cell: int, outcome: str | None = None, is_shown: bool | None = True) -> list[Run]:
        """The cell's runs of that outcome, of any where it is None; with `is_shown` None its other passes too."""
        rows = (row for row in self._by_cell[cell] if is_shown is None or row.is_shown == is_shown)
        return [row.run for row in rows if outcome is None or row.outcome == outcome]

    def by_seed(self, cell: int) -> dict[Any, Run]:
        """The cell's first ok run of each seed of weights and data."""
        rows = [row for row in self._by_cell[cell] if row.is_shown and row.outcome == "ok" and row.seed is not None]
        return {row.seed: row.run for row in reversed(rows)}

    def label(self, cell: int) -> str:
        """How the cell ended: `ok` if a run did, else how the first one ended, as a table shows it."""
        return "ok" if cell in self.ok_cells else next(map(outcome_label, self.runs_of(cell)), "ok")

    def numbers(self, expression: Expression) -> pd.Series:
        """A number of each ok run that has it, by its cell."""
        if expression not in self._numbers:
            records = [run.record for run in self.ok.run]
            if isinstance(expression, str):
                names = dict.fromkeys(re.findall(r"[a-z_][\w.]*", expression))
                # Names of fields have dots, which an expression of pandas takes for attributes.
                fields = {name.replace(".", "__"): [value_at(record, name) for record in records] for name in names}
                table = pd.DataFrame(fields, dtype=float)
                values = table.eval(expression.replace(".", "__")) if len(names) > 1 else table.iloc[:, 0]
            else:
                values = pd.Series(map(expression, records), dtype=float)
            self._numbers[expression] = values.set_axis(self.ok.cell).dropna()
        return self._numbers[expression]

    # cells

    @cached_property
    def known(self) -> dict[int, dict[str, Value]]:
        """The facts that are known of each cell."""
        rows = self.facts.drop(columns="gpu").to_dict("index")
        return {cell: {name: value for name, value in row.items() if not pd.isna(value)} for cell, row in rows.items()}

    def select(self, cells: Iterable[int]) -> Frame:
        """Some of the cells, in that order."""
        cells = list(cells)
        part = replace(self, runs=self.runs[self.runs.cell.isin(cells)], facts=self.facts.loc[cells], _numbers={})
        # Worked out once: views ask hundreds of groups of 1,000 cells.
        vars(part)["known"] = {cell: self.known[cell] for cell in cells}
        return part

    def by(self, names: Sequence[str]) -> Iterator[Frame]:
        """The cells that share these facts, in order."""
        for _, cells in groupby(self.ordered(names), lambda cell: [self.known[cell].get(name) for name in names]):
            yield self.select(cells)

    def by_device(self) -> list[Frame]:
        return [self.select(part.index) for _, part in self.facts.groupby("gpu")]

    def shows(self, is_profiled: bool) -> Frame:
        """With `is_profiled`, the profiled runs instead of those that are timed."""
        runs = self.runs.assign(is_shown=self.runs.is_profiled)
        return replace(self, runs=runs, _numbers={}) if is_profiled else self

    def timed(self) -> Frame:
        """The cells that have a run which is shown."""
        return self.select(cell for cell in self.facts.index if self.runs_of(cell))

    def ordered(self, names: Sequence[str]) -> list[int]:
        """The cells sorted by these facts, the first one first."""
        known = self.known

        def place(name: str, cell: int) -> Any:
            value = known[cell].get(name)
            return self.course[name].index(value) if name in self.course else sort_key(name, value)

        return sorted(known, key=lambda cell: [place(name, cell) for name in names])

    def varying(self) -> list[str]:
        """Facts that differ between cells, in the order of FACTS, then by name; the unknown differs from nothing."""
        facts = self.facts.drop(columns="gpu")
        told = facts.groupby("size", dropna=False).nunique(dropna=False).eq(1).all() if "size" in facts else {}
        names = in_order(facts.columns[facts.nunique() > 1])
        return [name for name in names if name not in _DIMENSIONS or not told.get(name)]

    def differing(self) -> list[str]:
        """Facts that differ between cells and do not follow from others: what labels say."""
        return [name for name in self.varying() if name not in CONSEQUENCES]

    def partly_known(self) -> list[str]:
        """Facts that some cells have, and others not although a run of theirs lived to tell (no attention)."""
        facts = self.facts.drop(columns="gpu")
        lived = self.runs.cell[self.runs.outcome == "ok"]
        return in_order(facts.columns[facts.notna().any() & facts[facts.index.isin(lived)].isna().any()])

    def shared(self) -> dict[str, Value]:
        """Facts that all cells share; cells that died too early to tell share what the others do."""
        names = self.facts.columns[self.facts.nunique() == 1].difference(["gpu", *self.partly_known()])
        return {name: self.facts[name].dropna().iloc[0] for name in in_order(names)}

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
        told = {
            cell: {"gpu": self.facts.gpu[cell]} | {name: facts[name] for name in facts if name not in CONSEQUENCES}
            for cell, facts in self.known.items()
        }
        baselines = [cell for cell in told if baseline.items() <= told[cell].items()]
        same = {frozenset(told[cell].items()): cell for cell in reversed(baselines)}
        base = {}
        for cell, facts in told.items():
            wanted = {**facts, **baseline}.items()
            agreeing = (other for other in baselines if all(told[other].get(name, v) == v for name, v in wanted))
            known = frozenset(wanted)
            other = same[known] if known in same else next(agreeing, None)
            if other is not None:
                base[cell] = other
        return replace(self, baseline=baseline, base=base)


def make_frame(group: Group) -> Frame:
    """The group's runs and cells. A cell is what its axes or, without a sweep, its facts are; how it is looked at (a
    profiler, a clock) is neither, so that every pass of a cell belongs to it."""
    rows = [row for row in group.rows if not row["is_trial"]]
    runs = pd.DataFrame(sorted(rows, key=lambda row: (row["repeat"], row["run"].run_id, str(row["run"].path))))
    # A run that died before it could tell was on the device of its cell's other runs, or on the only one.
    of_cell = runs.groupby("place").gpu.transform(_only) if group.home else runs.gpu
    runs["gpu"] = runs.gpu.fillna(of_cell).fillna(_only(runs.gpu)).fillna("device unknown")
    names = runs.row if group.home else runs.facts.map(lambda facts: json.dumps(facts, sort_keys=True))
    runs["cell"] = pd.factorize(runs.gpu + "\0" + names.fillna(""))[0]
    facts = pd.DataFrame(runs.facts.tolist(), dtype=object).groupby(runs.cell).first()
    facts = facts.where(facts.notna(), None).assign(gpu=runs.groupby("cell").gpu.first())
    if group.home:
        # Within a sweep another host or commit makes no other row: the axes do.
        facts = facts.drop(columns=[*ENVIRONMENT], errors="ignore")
    return Frame(runs.drop(columns="facts"), facts)


def _only(values: pd.Series) -> Any:
    """The only value that there is, else nan."""
    known = values.dropna().unique()
    return known[0] if len(known) == 1 else float("nan")


def in_order(names: Iterable[str]) -> list[str]:
    """Names of facts in the order of FACTS, others by name after them."""
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
    """A baseline from `precision=32-true,matmul=highest`; a value may be the beginning of the one meant.

    Raises:
        UsageError: no `fact=value`, a fact that no cell has, or a value that none of them has.
    """
    facts: dict[str, Value] = {}
    names = in_order(frame.facts.columns.drop("gpu"))
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not value:
            raise UsageError(f"baseline {part.strip()!r}; give fact=value, such as precision=32-true,matmul=highest")
        if name not in names:
            raise UsageError(f"baseline fact {name!r} is unknown here; choose among {', '.join(sorted(names))}")
        values = {str(known): known for known in frame.facts[name].dropna()}
        begun = [known for label, known in values.items() if label.startswith(value)]
        if value not in values and len(begun) != 1:
            raise UsageError(f"baseline {name}={value}: no run has it; choose among {', '.join(sorted(values))}")
        facts[name] = values.get(value, begun[0])
    return facts
