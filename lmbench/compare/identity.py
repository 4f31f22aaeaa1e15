"""What makes a run's cell: its place on the axes of its sweep, or else its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmbench.records.load import Run
from lmbench.records.paths import leaves, lookup
from lmbench.records.vocabulary import Record

#: Settings that say where a result goes or which random numbers it sees, not what is measured.
_NOT_MEASURED = (
    "measure.results_dir", "measure.run_id", "measure.strict", "seed_everything", "data.seed", "data.cache_dir",
    "trainer.default_root_dir", "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.logger",
    "trainer.compile.cache", "wandb",
)  # fmt: skip

#: What stands for the configuration of a run that a user's own script made, where none is recorded.
_FACTS = (
    "precision", "matmul_precision", "zero_grad", "clock", "gc_policy", "world_size", "model", "data",
    "compile.is_enabled", "compile.mode", "compile.backend", "compile.fullgraph", "compile.dynamic", "compile.regional",
    "window.warmup_steps", "window.micro_batches",
)  # fmt: skip

Identity = Mapping[str, str]
_ABSENT = "(none)"


@dataclass
class Cell:
    """Runs of both sides at one point: `name` tells it by what differs between cells, empty where there is one."""

    name: str
    a: list[Run] = field(default_factory=list)
    b: list[Run] = field(default_factory=list)


def settings(run: Record) -> dict[str, Any]:
    """The run's settings by dotted name: the mode and the configuration, or facts where no configuration is known."""
    config = run.get("config")
    if not isinstance(config, dict):
        known = {path: lookup(run, path) for path in _FACTS}
        return {"mode": run.get("mode"), **dict(leaves({path: v for path, v in known.items() if v is not None}))}
    found = {path: value for path, value in leaves(config) if not _is_under(path, _NOT_MEASURED)}
    logger = lookup(config, "trainer.logger")
    # A logger costs time, whatever the names that its run goes by.
    return {"mode": run.get("mode"), **found, "trainer.logger": bool(logger)}


def as_text(value: Any) -> str:
    """A setting as it is compared and shown."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def join_cells(a: Sequence[Run], b: Sequence[Run]) -> list[Cell]:
    """Runs of both sides by cell, in the order in which the cells were first measured.

    A cell's identity are the axes of its sweep (with its environment) where every run has some, else its settings.
    What is constant on each side and differs between them is the thing compared, and separates no cells: so two
    single runs, two sweeps over the same grid, or two columns of one grid meet.
    """
    in_sweeps = all(isinstance(lookup(run.run, "sweep.axes"), dict) for run in (*a, *b))
    identify = _axes if in_sweeps else _settings_text
    mine, theirs = [identify(run.run) for run in a], [identify(run.run) for run in b]
    names = [name for name in _names(mine + theirs) if not _is_compared(name, mine, theirs)]
    cells: dict[tuple[str, ...], Cell] = {}
    order = sorted(
        [*zip(a, mine, ["a"] * len(a), strict=True), *zip(b, theirs, ["b"] * len(b), strict=True)],
        key=lambda entry: (str(entry[0].run.get("started_at")), str(entry[0].path)),
    )
    varying = [name for name in names if len({identity.get(name) for identity in mine + theirs}) > 1]
    shown = [_short(name, varying) for name in varying]
    for run, identity, side in order:
        key = tuple(identity.get(name, _ABSENT) for name in varying)
        cell = cells.setdefault(key, Cell(", ".join(f"{n} {v}" for n, v in zip(shown, key, strict=True))))
        (cell.a if side == "a" else cell.b).append(run)
    return list(cells.values())


def _short(name: str, names: Sequence[str]) -> str:
    """The last part of a dotted name, where no other one ends in it."""
    last = name.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in names].count(last) == 1 else name


def _is_compared(name: str, mine: Sequence[Identity], theirs: Sequence[Identity]) -> bool:
    ours, others = ({identity.get(name) for identity in side} for side in (mine, theirs))
    return len(ours) == len(others) == 1 and ours != others


def _axes(run: Record) -> Identity:
    place = {name: as_text(value) for name, value in run["sweep"]["axes"].items()}
    environment = lookup(run, "sweep.environment")
    return place if environment is None else {**place, "environment": as_text(environment)}


def _settings_text(run: Record) -> Identity:
    return {name: as_text(value) for name, value in settings(run).items()}


def _names(identities: Sequence[Identity]) -> list[str]:
    """Every name once, in the order of their first appearance."""
    return list(dict.fromkeys(name for identity in identities for name in identity))


def _is_under(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)
