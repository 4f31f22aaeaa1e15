"""Cells: the runs of one point of a grid, what they have in common, how they ended, and who is whose baseline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lmbench.errors import UsageError
from lmbench.precision import short_label
from lmbench.records.vocabulary import INCORRECT
from lmbench.report.facts import EAGER, FACT, HOW_LONG, Value, captioned, in_words, is_consequence, plain, sort_key
from lmbench.report.gather import Group, Sample
from lmbench.report.view import Baseline

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
        return told(self, _NAMING)


def of_profiled(cell: Cell) -> Cell:
    """The cell as a view of kernels sees it: its profiled runs are what is shown, timing runs stand beside them."""
    runs = [*cell.samples, *cell.passes]
    profiled = [sample for sample in runs if sample.is_profiled]
    return Cell(cell.gpu, cell.facts, profiled, [sample for sample in runs if not sample.is_profiled])


def outcome_label(sample: Sample) -> str:
    """How a run ended, with the phase in which it did: `OOM (forward)`, `timeout`, `killed`; `error: incorrect` of
    attention that was found wrong."""
    word, error = outcome_word(sample.outcome), sample.record.error
    if error is not None and error.is_incorrect:
        return f"{word}: {INCORRECT}"
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
    if sample.row is not None:
        return json.dumps([gpu, sample.row])
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
    left_out = {name for name, fact in FACT.items() if fact.is_environment}
    left_out.update(HOW_LONG if _differ_without(cells, HOW_LONG) else ())
    for cell in cells:
        cell.facts = {name: v for name, v in cell.facts.items() if name not in left_out}
    common = shared(cells, dict.fromkeys(name for cell in cells for name in cell.facts))
    for cell in cells:
        known = cell.facts if cell.has_ended_well else {**common, **cell.facts}
        cell.facts = {name: v for name, v in known.items() if v is not None}


def _differ_without(cells: Sequence[Cell], names: Sequence[str]) -> bool:
    """Whether facts beside these tell cells apart that differ in these."""
    seen: dict[str, str] = {}
    for cell in cells:
        rest = {name: value for name, value in cell.facts.items() if name not in names}
        own = json.dumps([cell.facts.get(name) for name in names])
        if seen.setdefault(json.dumps([cell.gpu, rest], sort_keys=True), own) != own:
            return False
    return True


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


def differing(cells: Sequence[Cell]) -> list[str]:
    """The same without facts that follow from others: what labels say."""
    return [name for name in varying(cells) if not is_consequence(name)]


def told(cell: Cell, names: Sequence[str]) -> str:
    """These facts of the cell, as far as it knows them, in a line."""
    return ", ".join(in_words(name, cell.facts[name]) for name in names if cell.facts.get(name) is not None)


def in_short(cell: Cell, names: Sequence[str]) -> str:
    """The same as people say it in a word: `TF32` for a pair of precisions, `naive compiled`."""
    parts: list[str] = []
    for name in names:
        value = cell.facts.get(name)
        if value is None or (name == "matmul" and "precision" in names):
            continue
        if name == "precision":
            parts.append(short_label(str(value), str(cell.facts.get("matmul"))))
        elif name == "compile" and parts:
            parts[-1] += {EAGER: "", "default": " compiled"}.get(str(value), f" compiled {value}")
        else:
            parts.append(in_words(name, value))
    return ", ".join(filter(None, parts))


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


class Pairing:
    """Finds each cell's baseline among the cells (a cell that is one is its own), and its neighbours."""

    def __init__(self, baseline: Baseline | None, cells: Sequence[Cell]) -> None:
        self.baseline = baseline
        self._cells = cells
        #: Cells that differ in one numeric fact alone, by its name and then by their other facts.
        self._rows: dict[str, dict[object, list[tuple[float, Cell]]]] = {}
        self._candidates = [cell for cell in cells if baseline and baseline.is_met_by(cell.facts)]
        self._exact = {_pair_key(cell, cell.facts): cell for cell in reversed(self._candidates)}

    def of(self, cell: Cell) -> Cell | None:
        """The baseline of a cell, None where none fits."""
        if self.baseline is None:
            return None
        wanted = {**cell.facts, **self.baseline.facts}
        found = self._exact.get(_pair_key(cell, wanted))
        return found or next((other for other in self._candidates if _fits(cell, wanted, other)), None)

    def before(self, cell: Cell, name: str) -> Cell | None:
        """The ok cell with the next smaller value of a numeric fact, all others being the same."""
        own = cell.facts.get(name)
        if not isinstance(own, int | float):
            return None
        smaller = [(value, other) for value, other in self._alike(cell, name) if value < own and other.ok]
        return max(smaller, key=lambda found: found[0])[1] if smaller else None

    def _alike(self, cell: Cell, name: str) -> list[tuple[float, Cell]]:
        """Every cell that differs in this numeric fact alone, with its value."""
        if name not in self._rows:
            rows = self._rows.setdefault(name, {})
            for other in self._cells:
                value = other.facts.get(name)
                if isinstance(value, int | float):
                    rows.setdefault(_pair_key(other, {**other.facts, name: None}), []).append((value, other))
        return self._rows[name].get(_pair_key(cell, {**cell.facts, name: None}), [])


def _pair_key(cell: Cell, facts: Mapping[str, Value]) -> tuple[object, ...]:
    return (cell.gpu, *sorted((name, str(value)) for name, value in facts.items() if not is_consequence(name)))


def _fits(cell: Cell, wanted: Mapping[str, Value], other: Cell) -> bool:
    names = [name for name in {*wanted, *other.facts} if not is_consequence(name)]
    return other.gpu == cell.gpu and all(_agree(wanted.get(name), other.facts.get(name)) for name in names)


def _agree(wanted: Value, found: Value) -> bool:
    # A run that died early cannot tell everything.
    return wanted is None or found is None or wanted == found


def parse_baseline(text: str, cells: Sequence[Cell]) -> Baseline:
    """A baseline from `precision=32-true,matmul=highest`; a value may be the beginning of the one meant.

    Raises:
        UsageError: no `fact=value`, a fact that no cell has, or a value that none of them has.
    """
    facts: dict[str, Value] = {}
    known = sorted({name for cell in cells for name in cell.facts}, key=lambda n: (n not in FACT, n))
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UsageError(f"baseline {part.strip()!r}; give fact=value, such as precision=32-true,matmul=highest")
        if name not in known:
            raise UsageError(f"baseline fact {name!r} is unknown here; choose among {', '.join(known)}")
        facts[name] = _value_of(name, value, cells)
    return Baseline(facts, ", ".join(captioned(name, value) for name, value in facts.items()))


def _value_of(name: str, text: str, cells: Sequence[Cell]) -> Value:
    values = {str(cell.facts[name]): cell.facts[name] for cell in cells if cell.facts.get(name) is not None}
    begun = [value for shown, value in values.items() if shown.startswith(text)]
    if text in values:
        return plain(values[text])
    if len(begun) == 1:
        return begun[0]
    raise UsageError(f"baseline {name}={text}: no run has it; choose among {', '.join(sorted(values))}")
