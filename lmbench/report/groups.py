"""The runs of a report, with their facts, in the groups that are shown together: sweeps, or all runs outside sweeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from lmbench.files import is_file
from lmbench.masking import leaves, shown
from lmbench.records.codec import find_packed
from lmbench.records.load import StoredRun, find_runs, load_known
from lmbench.records.named import sweep_of
from lmbench.records.passes import TIMING, pass_of
from lmbench.records.settings import as_text
from lmbench.records.store import SWEEP_FILE, TUNING_FILE
from lmbench.records.vocabulary import INCORRECT, Values
from lmbench.report.facts import NO_FACTS, NO_ROWS, SEEDS, Facts, other_facts, planned, read_facts


class _PlannedCell(Struct):
    """A cell in sweep.json."""

    id: str
    axes: Values | None = None


class _Plan(Struct):
    """The repeats in sweep.json. A sweep of two sides ends with its verdict, and a search takes what it needs."""

    repeats: int = 3
    sides: Any = None
    largest: Any = None


class SweepSummary(Struct):
    """The parts of sweep.json that a report needs."""

    name: str | None = None
    command: str = ""
    view: Any = None
    axes: list[str] = []
    cells: list[_PlannedCell] = []
    file: _Plan | None = None

    def missing(self, count: int) -> str:
        """A text for a sweep that has fewer runs than its cells and repeats make; empty if none is missing."""
        if self.file is None or self.file.sides or self.file.largest:
            return ""
        passes = [(cell.axes or {}).get("pass", TIMING) for cell in self.cells]
        total = sum(self.file.repeats if name == TIMING else 1 for name in passes)
        return f"{count} of {total} runs measured" if count < total else ""


@dataclass(frozen=True, kw_only=True)
class ReportedRun(StoredRun):
    """A run with its facts.

    `row` identifies its cell in a sweep: the axes without seeds and pass. `seed` has the seeds of weights and data.
    `is_shown` says that the run's times are shown: normally those of the timing pass.
    """

    facts: Facts
    row: str | None
    repeat: int
    seed: tuple[Any, ...] | None
    is_profiled: bool
    is_shown: bool

    @property
    def outcome_word(self) -> str:
        return "OOM" if self.outcome == "oom" else self.outcome

    @property
    def outcome_label(self) -> str:
        """How the run ended, with the phase if known: `OOM (forward)`, `timeout`, `killed`; `error: incorrect` if
        attention gave wrong results."""
        error = self.record.failure
        if error.is_incorrect:
            return f"{self.outcome_word}: {INCORRECT}"
        return f"{self.outcome_word} ({shown(error.phase)})" if error.phase else self.outcome_word


@dataclass(eq=False)
class Group:
    """Runs that are shown together: those of one sweep, or all runs outside sweeps, for which `name` is empty.

    `copies` are names of folders with copies of these runs, which do not count.
    """

    home: Path | None
    sweep: SweepSummary = field(default_factory=SweepSummary)
    runs: list[ReportedRun] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return (self.sweep.name or self.home.name) if self.home else ""


def read_groups(paths: Iterable[str | Path], is_by_sweep: bool) -> list[Group]:
    """Read every run at or below the paths, without its steps; an unreadable run is kept as damaged.

    Groups are in the order in which they began, and the runs of no sweep come last.

    Args:
        is_by_sweep: make a group of each sweep's runs; otherwise all runs are one group.

    Raises:
        UsageError: a path does not exist or holds no result.
    """
    groups, seen, trials = dict[Path | None, Group](), set(), set()
    for folder in find_runs(paths):
        home = sweep_of(folder) if is_by_sweep else None
        run = load_known(folder)
        if home not in groups:
            groups[home] = _group_of(home, groups.values())
        group = groups[home]
        identity = home, run.record.run_id, run.record.started_at, run.record.pid
        if None not in identity[2:] and identity in seen:
            group.copies.append(folder.name)
            continue
        # The trials of a search are not cells. With a higher `most`, the largest value of before is a trial, and its
        # further repeats, which come behind it, are no cell either.
        cell = folder.parent, run.record.place.cell
        if run.record.place.search == "trial":
            trials.add(cell)
        elif cell not in trials:
            seen.add(identity)
            group.runs.append(reported(run, group))
            # The facts cover these large fields, without which thousands of runs fit into memory.
            run.record.config = run.record.argv = None

    def order(group: Group) -> tuple[bool, str, str]:
        starts = (run.record.started_at for run in group.runs if run.record.started_at)
        return not group.name, min(starts, default=""), group.name

    return sorted(dict.fromkeys(groups.values()), key=order)


def _group_of(home: Path | None, others: Iterable[Group]) -> Group:
    """The group of a sweep's runs; one of the `others` where both are of one stage of a tuning, which has a folder for
    each set of cells that it measured."""
    if home is None:
        return Group(None)
    sweep, tuning = read_sweep_summary(home), home.parent
    if not is_file(tuning / TUNING_FILE):
        return Group(home, sweep)
    sweep.name = f"{sweep.name or home.name} of {tuning.name}"
    for other in others:
        if other.home is not None and (other.home.parent, other.name) == (tuning, sweep.name):
            other.sweep.cells += sweep.cells
            return other
    # It measures what its budget has time for: nothing is missing.
    sweep.file = None
    return Group(home, sweep)


def read_sweep_summary(home: Path) -> SweepSummary:
    """What sweep.json in a sweep's folder tells a report; nothing if it is damaged: its runs are shown all the same."""
    return find_packed(home / SWEEP_FILE, SweepSummary) or SweepSummary()


def reported(run: StoredRun, group: Group) -> ReportedRun:
    """The run with its facts. Its cell in the sweep is stated by the record, or else by the folder's name and
    sweep.json."""
    record, place = run.record, run.record.place
    cell = (place.cell or run.path.name.rpartition("-r")[0]) if group.home else None
    axes = place.axes
    if axes is None:
        axes = next((planned_cell.axes for planned_cell in group.sweep.cells if planned_cell.id == cell), None) or {}
    # Runs of a user's own script have no configuration; the parameter count still tells models of two sizes apart.
    size = record.model.parameter_count
    config = record.config or ({"model.parameter_count": size} if size is not None else {})
    plan = (axes, config)
    settings, left_out = (axes, NO_ROWS) if group.home else (dict(leaves(config)), NO_FACTS)
    row_axes = {axis: value for axis, value in axes.items() if axis not in NO_ROWS}
    seeds = [planned(plan, seed) for seed in SEEDS]
    profiler = planned(plan, "trainer.profiler")
    return ReportedRun(
        **vars(run),
        facts=read_facts(record, plan) | other_facts(settings, left_out),
        row=as_text(row_axes) if axes else cell,
        repeat=place.repeat or 0,
        seed=None if None in seeds else (*seeds, record.data.source),
        is_profiled=bool(profiler if record.is_profiled is None else record.is_profiled),
        is_shown=pass_of(record, axes).name == TIMING,
    )
