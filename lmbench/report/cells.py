"""Cells: the runs of one point of a grid, what they have in common, and how they ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmbench.report.facts import FACT, Value, in_words, sort_key
from lmbench.report.gather import Group
from lmbench.report.sample import Sample

_OUTCOME_WORDS = {"oom": "OOM"}
#: Options of a shape that its label (layers x width) leaves out.
_DIMENSIONS = ("model.d_ff", "model.num_heads", "model.vocab_size")
#: Facts that name a cell where there is no table around it.
_NAMING = ("size", "mode", "batch", "context", "precision", "matmul", "compile")
UNKNOWN_DEVICE = "device unknown"


@dataclass
class Cell:
    """Runs of one configuration on one kind of device.

    `samples` are the timing runs, `passes` those whose step times are not the step's own (profiled, or synchronized at
    phase borders).
    """

    gpu: str
    facts: dict[str, Value] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    passes: list[Sample] = field(default_factory=list)

    @property
    def ok(self) -> list[Sample]:
        """The timing runs that ended well: all that statistics rest on."""
        return [sample for sample in self.samples if sample.outcome == "ok"]

    @property
    def has_ended_well(self) -> bool:
        """Whether any of its runs, timed or not, lived to tell all its facts."""
        return any(sample.outcome == "ok" for sample in (*self.samples, *self.passes))

    @property
    def outcome(self) -> str:
        """`ok` if a run was, else how the first one that was not ended."""
        bad = [sample for sample in self.samples if sample.outcome != "ok"]
        return "ok" if self.ok or not bad else bad[0].outcome

    @property
    def label(self) -> str:
        """The outcome as a table shows it: `OOM (forward)`."""
        bad = [sample for sample in self.samples if sample.outcome != "ok"]
        return "ok" if self.ok or not bad else outcome_label(bad[0])

    @property
    def name(self) -> str:
        """The cell in words, by what people choose first."""
        return ", ".join(in_words(name, self.facts[name]) for name in _NAMING if self.facts.get(name) is not None)


def of_profiled(cell: Cell) -> Cell:
    """The cell as a view of kernels sees it: its profiled runs are what is shown, timing runs stand beside them."""
    runs = [*cell.samples, *cell.passes]
    profiled = [sample for sample in runs if sample.is_profiled]
    return Cell(cell.gpu, cell.facts, profiled, [sample for sample in runs if not sample.is_profiled])


def outcome_label(sample: Sample) -> str:
    """How a run ended, with the phase in which it did: `OOM (forward)`, `timeout`, `killed`."""
    word = outcome_word(sample.outcome)
    return f"{word} ({sample.phase})" if sample.phase else word


def outcome_word(outcome: str) -> str:
    return _OUTCOME_WORDS.get(outcome, outcome)


def mixed_outcomes(cell: Cell) -> str | None:
    """What to say of a cell of which only some runs were ok: `1 of 3 runs: OOM (forward)`."""
    bad = Counter(outcome_label(sample) for sample in cell.samples if sample.outcome != "ok")
    if not cell.ok or not bad:
        return None
    return f"of {len(cell.samples)} runs, not counted: " + ", ".join(f"{n} {label}" for label, n in sorted(bad.items()))


def make_cells(group: Group) -> list[Cell]:
    """The group's runs as cells, in no particular order. Profiled and `sync` runs join the cell they belong to."""
    devices = {sample.gpu for sample in group.samples if sample.gpu}
    only = next(iter(devices)) if len(devices) == 1 else None
    by_cell: dict[str | None, set[str]] = {}
    for sample in group.samples:
        if sample.gpu:
            by_cell.setdefault(sample.cell, set()).add(sample.gpu)
    cells: dict[str, Cell] = {}
    for sample in sorted(group.samples, key=lambda s: (s.repeat or 0, s.run_id, str(s.path))):
        gpu = sample.gpu or _device_of(sample, by_cell) or only or UNKNOWN_DEVICE
        cell = cells.setdefault(_key(sample, gpu), Cell(gpu))
        for name, value in {**sample.facts, **sample.settings}.items():
            if cell.facts.get(name) is None:
                cell.facts[name] = value
        (cell.samples if sample.is_timing else cell.passes).append(sample)
    found = list(cells.values())
    if group.name:
        _settle_facts(found)
    return _join_passes(found)


def _key(sample: Sample, gpu: str) -> str:
    if sample.cell is not None:
        return json.dumps([gpu, sample.cell])
    return json.dumps([gpu, {**sample.facts, **sample.settings}], sort_keys=True)


def _device_of(sample: Sample, by_cell: Mapping[str | None, set[str]]) -> str | None:
    """The device of the same cell's other runs, for one that died before it could tell."""
    devices = by_cell.get(sample.cell, set()) if sample.cell is not None else set()
    return next(iter(devices)) if len(devices) == 1 else None


def _join_passes(cells: list[Cell]) -> list[Cell]:
    """Move runs that are no timing runs to the cell with the same facts, where there is one."""
    timed = [cell for cell in cells if cell.samples]
    alone = [cell for cell in cells if not cell.samples]
    by_facts = {_identity(cell): cell for cell in timed}
    left = []
    for cell in alone:
        home = by_facts.get(_identity(cell))
        if home is None:
            left.append(cell)
        else:
            home.passes.extend(cell.passes)
    return [*timed, *left]


def _identity(cell: Cell) -> str:
    return json.dumps([cell.gpu, cell.facts], sort_keys=True)


def _settle_facts(cells: Sequence[Cell]) -> None:
    """Within a sweep another host or commit makes no other row: the axes do. And what all cells share that can tell,
    those that died too early to tell it share too; one that lived and has no attention has none."""
    for cell in cells:
        cell.facts = {name: v for name, v in cell.facts.items() if name not in FACT or not FACT[name].is_environment}
    common = shared(cells, dict.fromkeys(name for cell in cells for name in cell.facts))
    for cell in cells:
        known = cell.facts if cell.has_ended_well else {**common, **cell.facts}
        cell.facts = {name: v for name, v in known.items() if v is not None}


def varying(cells: Sequence[Cell]) -> list[str]:
    """Facts that differ between cells, in the order of FACTS, then by name. What is unknown differs from nothing."""
    seen: dict[str, set[Value]] = {}
    for cell in cells:
        for name, value in cell.facts.items():
            if value is not None:
                seen.setdefault(name, set()).add(value)
    order = {name: index for index, name in enumerate(FACT)}
    names = [name for name, values in seen.items() if len(values) > 1 and not _is_told_by_size(name, cells)]
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def _is_told_by_size(name: str, cells: Sequence[Cell]) -> bool:
    """Whether a dimension of the model says no more than its size: there is one value of it for each size."""
    if name not in _DIMENSIONS:
        return False
    pairs = {(cell.facts.get("size"), cell.facts.get(name)) for cell in cells}
    return len(pairs) == len({size for size, _ in pairs})


def shared(cells: Sequence[Cell], names: Iterable[str]) -> dict[str, Value]:
    """Of these facts, those that all cells share as far as they know, in the order given."""
    found: dict[str, Value] = {}
    for name in names:
        values = {cell.facts.get(name) for cell in cells} - {None}
        if len(values) == 1:
            found[name] = values.pop()
    return found


def shared_by_all(cells: Sequence[Cell], names: Iterable[str]) -> dict[str, Value]:
    """The same without those that a cell lacks which lived to tell them: what has none does not share it."""
    missing = partly_known(cells)
    return {name: value for name, value in shared(cells, names).items() if name not in missing}


def partly_known(cells: Sequence[Cell]) -> set[str]:
    """Facts that some cells have and others do not have, though they lived to tell them: a model without attention."""
    known = {name for cell in cells for name, value in cell.facts.items() if value is not None}
    return {name for name in known for cell in cells if cell.has_ended_well and cell.facts.get(name) is None}


def in_order(cells: Iterable[Cell], names: Sequence[str]) -> list[Cell]:
    """Cells sorted by these facts, the first one first."""
    return sorted(cells, key=lambda cell: [sort_key(name, cell.facts.get(name)) for name in names])
