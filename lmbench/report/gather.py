"""Results from the disk: runs in groups (a sweep each, and the runs that belong to none), and what cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.records.load import Run, find_runs, load_run
from lmbench.records.store import RUNS_FOLDER, SWEEP_FILE
from lmbench.records.vocabulary import DAMAGED
from lmbench.report.sample import Sample, make_sample

#: Folder of one repeat of a cell: `<cell>-r<k>`.
_REPEAT = re.compile(r"(?P<cell>.+)-r(?P<repeat>\d+)")


@dataclass
class Group:
    """Runs that are shown together: those of one sweep, or all that belong to none (`name` is empty then).

    `missing_cells` are the cells of the sweep that have no run yet.
    """

    name: str
    view: str | None = None
    samples: list[Sample] = field(default_factory=list)
    axes: tuple[str, ...] = ()
    missing_cells: tuple[str, ...] = ()
    planned_cells: int = 0


@dataclass
class Gathered:
    """All that was found: groups in the order of their names, and a line for each result that cannot be shown."""

    groups: list[Group]
    unread: list[str]


def gather(paths: Iterable[str | Path]) -> Gathered:
    """Read every run at or below the paths, without its steps.

    A run that is damaged is kept as such; one of another schema version becomes a line in `unread`.

    Raises:
        UsageError: a path that does not exist or holds no result, or nothing that this lmbench can read.
    """
    found = find_runs(Path(path).parent if Path(path).name == SWEEP_FILE else path for path in paths)
    sweeps: dict[Path, Mapping[str, Any]] = {}
    groups: dict[Path | None, Group] = {}
    unread: list[str] = []
    for folder in found:
        home = _sweep_of(folder, sweeps)
        try:
            loaded = load_run(folder, with_steps=False)
        except UsageError as error:
            unread.append(str(error))
            continue
        group = groups.setdefault(home, _new_group(home, sweeps))
        group.samples.append(_sample(loaded, _place(folder, sweeps[home]) if home else None))
    if not groups:
        raise UsageError(unread[0])
    for home, group in groups.items():
        if home is not None:
            _note_missing(group, sweeps[home])
    return Gathered(sorted(groups.values(), key=lambda group: (not group.name, group.name)), unread)


def _sample(loaded: Run, place: dict[str, Any] | None) -> Sample:
    try:
        return make_sample(loaded, place)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        # Somebody changed the file by hand: it is JSON, but no record.
        damage = f"run.json is no record: {error}"
        return make_sample(replace(loaded, run={}, outcome=DAMAGED, damage=damage), place)


def _sweep_of(folder: Path, sweeps: dict[Path, Mapping[str, Any]]) -> Path | None:
    """The folder of the sweep that a run belongs to; its sweep.json is read once, {} where that is damaged."""
    home = folder.parent.parent
    if folder.parent.name != RUNS_FOLDER:
        return None
    if home not in sweeps:
        if not (home / SWEEP_FILE).is_file():
            return None
        try:
            content = json.loads((home / SWEEP_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {}
        sweeps[home] = {**content, "cells": _by_id(content.get("cells"))} if isinstance(content, dict) else {}
    return home


def _new_group(home: Path | None, sweeps: Mapping[Path, Mapping[str, Any]]) -> Group:
    if home is None:
        return Group("")
    sweep = sweeps[home]
    view = sweep.get("view")
    axes = sweep.get("axes")
    names = tuple(str(name) for name in axes) if isinstance(axes, list | dict) else ()
    return Group(str(sweep.get("name") or home.name), view if isinstance(view, str) else None, axes=names)


def _place(folder: Path, sweep: Mapping[str, Any]) -> dict[str, Any]:
    """A run's place in its sweep by its folder's name, for a run whose own record cannot tell."""
    match = _REPEAT.fullmatch(folder.name)
    if match is None:
        return {}
    planned = sweep.get("cells", {}).get(match["cell"], {})
    options = {"axes": planned.get("axes"), "options": planned.get("options")}
    return {"cell": match["cell"], "repeat": int(match["repeat"]), **options}


def _by_id(cells: Any) -> dict[str, Mapping[str, Any]]:
    """Every planned cell by its id."""
    planned = cells if isinstance(cells, list) else []
    return {str(cell["id"]): cell for cell in planned if isinstance(cell, dict) and "id" in cell}


def _note_missing(group: Group, sweep: Mapping[str, Any]) -> None:
    planned = sweep.get("cells", {})
    seen = {sample.cell for sample in group.samples}
    group.planned_cells = len(planned)
    group.missing_cells = tuple(cell for cell in planned if cell not in seen)
