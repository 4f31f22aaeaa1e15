"""A sweep that is ready to run: its file, its cells, the environments they run in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from lmbench.errors import UsageError
from lmbench.sweep.environments import HERE, Environment, resolve
from lmbench.sweep.grid import Cell, expand
from lmbench.sweep.sweep_file import SweepFile

CONFIG = "config"


@dataclass(frozen=True)
class Job:
    """One repeat of a cell; `name` is that of its run's folder."""

    cell: Cell
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.cell.id}-r{self.repeat}"


@dataclass(frozen=True)
class Plan:
    """Everything about a sweep that is known before it runs. `base_config` is the text of base's `config`."""

    name: str
    file: SweepFile
    cells: list[Cell]
    environments: Mapping[str, Environment]
    base_config: str | None

    def jobs(self) -> Iterator[Job]:
        """Every repeat of every cell, repeats interleaved: what drifts with time meets all cells alike."""
        for repeat in range(self.file.repeats):
            for cell in self.cells:
                if repeat < self.repeats_of(cell):
                    yield Job(cell, repeat)

    def repeats_of(self, cell: Cell) -> int:
        return self.file.repeats if cell.is_timing else 1

    @property
    def job_count(self) -> int:
        return sum(map(self.repeats_of, self.cells))

    def environment_of(self, cell: Cell) -> Environment:
        return self.environments[cell.environment] if cell.environment is not None else HERE


def make_plan(name: str, file: SweepFile, makes_checkouts: bool = True) -> Plan:
    """Find what a sweep's file names, and lay out its cells.

    Raises:
        UsageError: something that it names is not there, or the grid is none.
    """
    text = None if file.base.get(CONFIG) is None else _read_config(str(file.base[CONFIG]))
    environments = resolve(file.environments, makes_checkouts)
    facts = {name: environment.facts for name, environment in environments.items()}
    cells = expand(file, None if text is None else yaml.safe_load(text), facts)
    return Plan(name, file, cells, environments, text)


def shipped(folder: str) -> dict[str, Path]:
    """YAML files that ship with lmbench below `configs/`, by name: `""` for configurations, `sweeps` for studies."""
    root = Path(str(files("lmbench.configs"))) / folder
    return {path.stem: path for path in sorted(root.glob("*.yaml"))}


def find_sweep(given: str) -> Path:
    """A sweep's file by path, or by the name of a shipped study; `configs/sweeps/NAME.yaml` finds it too.

    Raises:
        UsageError: neither.
    """
    found = _find(given, "sweeps")
    if found is not None:
        return found
    studies = shipped("sweeps")
    near = get_close_matches(Path(given).stem, studies, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"sweep {given!r} is no file, no sweep's folder and no study ({', '.join(studies)}){hint}")


def _read_config(given: str) -> str:
    path = _find(given, "")
    if path is None:
        near = get_close_matches(Path(given).stem, shipped(""), 1)
        hint = f"; did you mean {near[0]}?" if near else f" ({', '.join(shipped(''))})"
        raise UsageError(f"base: config {given!r} is no file and no shipped configuration{hint}")
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = yaml.safe_load(text)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"base: config {given!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"base: config {given!r} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"base: config {given!r} is no configuration: it holds no mapping")
    return text


def _find(given: str, folder: str) -> Path | None:
    """A file of the user's own comes first."""
    path = Path(given).expanduser()
    if path.is_file():
        return path
    is_named = not path.is_absolute() and path.parent.name in ("", Path(folder).name or "configs")
    return shipped(folder).get(path.stem) if is_named and path.suffix in ("", ".yaml") else None
