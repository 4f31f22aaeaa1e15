"""Results from the disk: runs in groups (a sweep each, and the runs that belong to none), and what cannot be read."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.files import Unreadable, is_file, read_file
from lmbench.records.codec import DamagedRecord, decode
from lmbench.records.guard import Guard
from lmbench.records.load import Run, find_runs, load_run, read_steps
from lmbench.records.passes import TIMING, pass_of
from lmbench.records.run import RunRecord, SweepPlace
from lmbench.records.step import StepRecord
from lmbench.records.store import MAX_SWEEP_BYTES, RUNS_FOLDER, STEPS_FILE, SWEEP_FILE
from lmbench.report.facts import SEEDS, Planned, Value, other_axes, other_settings, read_facts
from lmbench.text import shown

#: Folder of one repeat of a cell: `<cell>-r<k>`.
_REPEAT = re.compile(r"(?P<cell>.+)-r(?P<repeat>\d+)")


@dataclass(frozen=True)
class Sample:
    """One run.

    `record` is what was read, without the configuration and the command line, which are large and told by the rest:
    `facts` tell its cell, `settings` are the options that no fact stands for, `seeds` are those of weights and data.
    `cell` and `repeat` say its place in a sweep, None for a run of its own. `row` is what it shares with the runs of
    its row: the cell, or where seeds are an axis, what the cell is but for its seed.
    """

    path: Path
    outcome: str
    record: RunRecord
    facts: Mapping[str, Value]
    settings: Mapping[str, Value]
    seeds: tuple[Any, Any]
    is_timing: bool
    is_profiled: bool
    cell: str | None = None
    repeat: int | None = None
    row: str | None = None
    damage: str | None = None

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def gpu(self) -> str | None:
        """The GPU's name, or the processor's where the run was on it; None where it ended before it could look."""
        environment = self.record.environment
        if environment is None:
            return None
        if environment.gpu.name:
            return shown(environment.gpu.name)
        if self.record.device_type != "cpu":
            return None
        model = environment.host.cpu_model
        return shown(f"CPU ({re.sub(' +', ' ', model)})") if model else "CPU"

    @property
    def phase(self) -> str | None:
        """The phase in which it ended, where it did not end well."""
        return (shown(self.record.error.phase or "") or None) if self.record.error else None

    def guards(self, status: str) -> list[Guard]:
        """Its guards of that status."""
        return [guard for guard in self.record.guards if guard.status == status]

    def first_steps(self, count: int) -> list[StepRecord]:
        """Its first step records, warm-up included; read from the disk now, and no further than asked."""
        records: list[StepRecord] = []
        # What a torn or missing file still tells is before that.
        with suppress(Unreadable):
            for _, step in itertools.islice(read_steps(self.path / STEPS_FILE), count):
                if step is None:
                    break
                records.append(step)
        return records


@dataclass
class Group:
    """Runs that are shown together: those of one sweep, or all that belong to none (`name` is empty then).

    `view` is what its sweep.json says of the view: a study's name, or a mapping. `missing_cells` are the cells of the
    sweep that have no run yet.
    """

    name: str
    view: Any = None
    samples: list[Sample] = field(default_factory=list)
    axes: tuple[str, ...] = ()
    missing_cells: tuple[str, ...] = ()
    planned_cells: int = 0
    #: Runs that only looked for the largest value that fits.
    trials: int = 0


@dataclass
class Gathered:
    """All that was found: groups in the order of their names, and a line for each result that cannot be shown."""

    groups: list[Group]
    unread: list[str]


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


def gather(paths: Iterable[str | Path]) -> Gathered:
    """Read every run at or below the paths, without its steps.

    A run that is damaged is kept as such; one of another schema version becomes a line in `unread`.

    Raises:
        UsageError: a path that does not exist or holds no result, or nothing that this lmbench can read.
    """
    found = find_runs(Path(path).parent if Path(path).name == SWEEP_FILE else path for path in paths)
    plans: dict[Path | None, dict[str, _PlannedCell]] = {}
    groups: dict[Path | None, Group] = {}
    unread: list[str] = []
    searched: set[str] = set()
    for folder in found:
        home = _sweep_of(folder)
        try:
            loaded = load_run(folder, with_steps=False)
        except UsageError as error:
            unread.append(str(error))
            continue
        if home not in groups:
            sweep = _read_sweep(home) if home else _Sweep()
            name = (sweep.name or home.name) if home else ""
            groups[home] = Group(name, sweep.view, axes=tuple(sweep.axes or ()), planned_cells=len(sweep.cells))
            plans[home] = {cell.id: cell for cell in sweep.cells}
        sample = _sample(loaded, plans[home] if home else None, groups[home].axes)
        place = sample.record.sweep
        if place is not None and place.searched_cell is not None:
            searched.add(place.searched_cell)
        if place is not None and place.search == "trial":
            groups[home].trials += 1
        else:
            groups[home].samples.append(sample)
    if not groups:
        raise UsageError(unread[0])
    for home, group in groups.items():
        seen = {sample.cell for sample in group.samples} | searched
        group.missing_cells = tuple(cell for cell in plans[home] if cell not in seen)
    return Gathered(sorted(groups.values(), key=lambda group: (not group.name, group.name)), unread)


def _sweep_of(folder: Path) -> Path | None:
    """The folder of the sweep that a run belongs to."""
    home = folder.parent.parent
    return home if folder.parent.name == RUNS_FOLDER and is_file(home / SWEEP_FILE) else None


def _read_sweep(home: Path) -> _Sweep:
    """What its sweep.json says; nothing where that is damaged."""
    try:
        return decode(read_file(home / SWEEP_FILE, MAX_SWEEP_BYTES), _Sweep)
    except (Unreadable, DamagedRecord):
        return _Sweep()


def _sample(loaded: Run, plan: Mapping[str, _PlannedCell] | None, swept: Collection[str]) -> Sample:
    """A run as it was read, with the plan of its sweep by the cells' ids, None if it belongs to none, and its axes.

    Its place is what its record says, or its folder's name where that cannot tell.
    """
    run = loaded.record
    match = _REPEAT.fullmatch(loaded.path.name) if plan is not None else None
    planned = (plan or {}).get(match["cell"]) if match else None
    own = run.sweep or SweepPlace()
    cell = own.cell or (match["cell"] if match else None)
    repeat = int(match["repeat"]) if match and own.repeat is None else own.repeat
    axes = own.axes if own.axes is not None else (planned and planned.axes) or {}
    # A script of somebody's has no configuration; a module of another size is another one all the same.
    size = run.model.parameter_count
    config = run.config or ({"model.parameter_count": size} if size is not None else {})
    told = Planned(axes, (planned and planned.options) or {}, config)
    is_profiled = bool(told.get("trainer.profiler")) if run.is_profiled is None else run.is_profiled
    facts = read_facts(run, told)
    if plan is not None:
        facts.update(other_axes(axes))
    # Large, and told by facts and settings: thousands of runs are to fit into memory.
    run.config = run.argv = None
    return Sample(
        path=loaded.path,
        outcome=loaded.outcome,
        record=run,
        facts=facts,
        settings=other_settings(config) if plan is None else {},
        seeds=(told.get(SEEDS[0]), told.get(SEEDS[1])),
        is_timing=pass_of(run, axes).name == TIMING,
        is_profiled=is_profiled,
        cell=cell if plan is not None else None,
        repeat=repeat,
        row=_row(cell, axes, swept) if plan is not None else None,
        damage=loaded.damage,
    )


def _row(cell: str | None, axes: Mapping[str, Any], swept: Collection[str]) -> str | None:
    """What tells a cell's row: itself, or in a sweep over seeds all of its axes but these."""
    if not axes or not any(seed in swept for seed in SEEDS):
        return cell
    others = {axis: value for axis, value in axes.items() if axis not in SEEDS}
    return json.dumps(others, sort_keys=True, default=str)
