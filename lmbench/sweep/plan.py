"""From a sweep's file to what it runs: its cells (the grid, without what is excluded, with what is included), each with
its repeats, and the environments that they run in."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmbench.configs import find_shipped, read_yaml, shipped_configs, shipped_studies
from lmbench.errors import UsageError
from lmbench.masking import MASK, keep_secret, masked_whole, secrets_of, to_fill_in
from lmbench.records.passes import PASS as PASSES
from lmbench.records.passes import TIMING
from lmbench.records.vocabulary import SIDE
from lmbench.sweep.environments import HERE, Environment, resolve
from lmbench.sweep.file import CONFIG, ENVIRONMENT, MODE, PASS, Options, SweepFile

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
_DIGEST_DIGITS = 8
_MAX_NAME = 70
_COMPILED_ALIKE = (PASS, SIDE, "seed_everything")


@dataclass(frozen=True)
class GridCell:
    """One point of the grid.

    `axes` are its values by axis: options by their names, `side`, `mode`, `pass`, `environment`. `options` is what the
    command line gets beside the command (`fit` or `validate`), without `config`, which is as it was given. `id` names
    its run folders: the values that tell it from other cells, and a digest of everything that makes it up.
    """

    id: str
    axes: dict[str, Any]
    command: str
    options: Options
    environment: Environment = HERE
    config: str | None = None

    @property
    def compiled_as(self) -> str:
        """The same for all that compile the same: another pass, side or seed runs what the measurement has compiled."""
        return _digest({axis: value for axis, value in self.axes.items() if axis not in _COMPILED_ALIKE}, self.config)

    def words(self, config: Path | str | None = None) -> list[str]:
        """The words after `lmbench`, with a file as the cell's configuration; what is no text or number stands there as
        JSON."""
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.options.items()}
        if config is not None:
            texts = {CONFIG: str(config), **texts}
        # One word each, so that a value may begin with a dash.
        return [self.command, *(f"--{name}={text}" for name, text in texts.items())]


@dataclass(frozen=True)
class Job:
    """One repeat of a cell, or a trial for the planned cell whose largest value is `searched`; `name` is that of its
    run's folder."""

    cell: GridCell
    repeat: int
    searched: str | None = None

    @property
    def name(self) -> str:
        return f"{self.cell.id}-r{self.repeat}"


@dataclass(frozen=True)
class Plan:
    """Everything about a sweep that is known before it runs. `configs` are the texts of configurations, by the names
    that they were given by, and `contents` what they hold. Of its rounds of repeats those in `chosen` are measured
    here, which `is_part` says were asked for."""

    name: str
    file: SweepFile
    cells: list[GridCell]
    configs: Mapping[str, str]
    contents: Mapping[str, Any]
    chosen: Sequence[int]
    is_part: bool = False

    def round(self, repeat: int) -> list[Job]:
        """A repeat of every cell: what drifts with time meets all cells alike. Of two sides the other one is the first
        in every other round."""
        cells = self.cells[:: -1 if self.file.sides and repeat % 2 else 1]
        return [Job(cell, repeat) for cell in cells if cell.axes.get(PASS, TIMING) == TIMING or not repeat]

    def option(self, cell: GridCell, name: str) -> Any:
        """A cell's value of an option such as `trainer.devices`, its own or its configuration's."""
        value = {} if cell.config is None else self.contents[cell.config]
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return cell.options.get(name, value)

    def ranks(self, cell: GridCell) -> tuple[int, int]:
        """How many nodes a cell takes, and how many ranks on each; 1 where it says `auto`, or all that there are."""
        devices = self.option(cell, "trainer.devices")
        count = str(len(devices) if isinstance(devices, list) else devices)
        return int(self.option(cell, "trainer.num_nodes") or 1), int(count) if count.isdecimal() else 1

    def jobs(self) -> list[Job]:
        """All rounds that are measured here, one after the other."""
        return list(itertools.chain.from_iterable(map(self.round, self.chosen)))


def as_json(value: object) -> str:
    """The same text for equal values, which need not be hashable."""
    return json.dumps(value, sort_keys=True, default=str)


def _digest(*parts: object) -> str:
    return hashlib.sha256(as_json(parts).encode()).hexdigest()[:_DIGEST_DIGITS]


def make_plan(name: str, file: SweepFile, chosen: str | None = None) -> Plan:
    """Find what a sweep's file names, and lay out its cells; of its rounds those that are listed, such as `2,5`.

    Raises:
        UsageError: something that it names is not there (also a secret that no folder keeps), or the grid is none.
    """
    rounds: Sequence[int] = range(file.repeats)
    if chosen is not None:
        rounds = sorted({int(word) for word in chosen.split(",") if word.isdecimal()})
        if not all(word.isdecimal() for word in chosen.split(",")) or rounds[-1] >= file.repeats:
            raise UsageError(
                f"--rounds is {chosen!r}; this sweep has rounds 0 to {file.repeats - 1}: give some of them"
            )
        if file.largest is not None and len(rounds) < file.repeats:
            raise UsageError(f"--rounds: this sweep looks for the largest {file.largest.option}, on one machine")
    configs, contents = {}, {}
    for config in map(str, filter(None, (options.get(CONFIG) for options in (file.base, *file.sides.values())))):
        problem = f"base: config {config!r}"
        missing = f"{problem} is no file and no shipped configuration"
        path = find_shipped(config, shipped_configs(), "configs", missing)
        configs[config], contents[config] = read_yaml(path, problem)
        if not isinstance(contents[config], dict):
            raise UsageError(f"{problem} is no configuration: it holds no mapping")
    keep_secret(value for _, value in secrets_of([file.as_mapping(), *contents.values()]))
    return Plan(name, file, _cells(file, contents), configs, contents, rounds, chosen is not None)


def find_sweep(study: str) -> Path:
    """A sweep's file by path, or by the name of a shipped study; `configs/sweeps/NAME.yaml` finds it too.

    Raises:
        UsageError: neither.
    """
    problem = f"sweep {study!r} is no file, no sweep's folder and no study"
    return find_shipped(study, shipped_studies(), "sweeps", problem)


# the grid


def axes_of(points: list[Options]) -> dict[str, list[Any]]:
    """Every axis in order, with its values in order of appearance."""
    axes: dict[str, dict[str, Any]] = {}
    for axis, value in itertools.chain.from_iterable(point.items() for point in points):
        axes.setdefault(axis, {}).setdefault(as_json(value), value)
    return {axis: list(values.values()) for axis, values in axes.items()}


def _points(file: SweepFile) -> list[Options]:
    """What each cell sets: the matrix (its last axis varies fastest) without what is excluded, then what is included.

    Raises:
        UsageError: an exclude that fits no cell, or nothing left.
    """
    axes = file.axes()
    points: list[Options] = [{}] if axes else []
    for axis in axes:
        if both := set().union(*points) & set().union(*axis):
            raise UsageError(f"matrix: two axes set {both.pop()}")
        points = [{**point, **options} for point in points for options in axis]
    for rule in file.exclude:
        allowed = {axis: values if isinstance(values, list) else [values] for axis, values in rule.items()}
        kept = [point for point in points if any(point.get(axis) not in values for axis, values in allowed.items())]
        if len(kept) == len(points):
            raise UsageError(f"exclude: {rule} fits no cell; axes are {', '.join(axes_of(points))}")
        points = kept
    if not points + file.include:
        raise UsageError("exclude leaves no cell")
    return points + file.include


def _cells(file: SweepFile, configs: Mapping[str, Any]) -> list[GridCell]:
    """The cells in order. Contents of configurations and what makes up each environment are part of their identity.

    Raises:
        UsageError: two cells that are the same, or an option that is set twice.
    """
    points, environments = _points(file), resolve(file.environments)
    varying = [axis for axis in axes_of(points) if len({as_json(point.get(axis)) for point in points}) > 1]
    cells: dict[tuple[str, Any], GridCell] = {}
    for point in points:
        axes = {axis: value for axis, value in point.items() if axis != CONFIG}
        options = {option: value for option, value in point.items() if option not in (SIDE, MODE, PASS, ENVIRONMENT)}
        of_pass = PASSES[point.get(PASS, TIMING)].options
        options = {**file.base, **options, **of_pass}
        config = options.pop(CONFIG, None)
        content = None if config is None else configs[str(config)]
        # The copy of the configuration that the cell's process reads has no secrets.
        secrets = dict(secrets_of(content))
        for name, secret in secrets.items():
            value = content
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value != secret:
                raise UsageError(f"config: {name} is a secret in a list, which no option sets; export it instead")
        options = {**secrets, **options}
        for name in to_fill_in(options):
            raise UsageError(f"{name} is not stored in a sweep's folder; go on with --{name} VALUE, or with its file")
        mode = point.get(MODE)
        command = "validate" if mode == "inference" else "fit"
        if mode is not None and command == "fit":
            options["measure.mode"] = mode
        # A secret's value is no part of the identity: a new one measures the same.
        kept = {option: MASK if to_fill_in(value) else value for option, value in masked_whole(options).items()}
        environment = environments.get(point.get(ENVIRONMENT, ""), HERE)
        spec = environment.spec
        facts = masked_whole({"python": spec.python, "commit": spec.revision, "variables": spec.variables})
        digest = _digest(command, masked_whole(content), sorted(kept.items()), None if environment is HERE else facts)
        name = "-".join(filter(None, (_part(axis, point.get(axis)) for axis in varying if axis != CONFIG)))
        cell_id = f"{name[:_MAX_NAME].strip('-.') or command}-{digest}"
        cell = GridCell(cell_id, axes, command, options, environment, None if config is None else str(config))
        # Sides may be the same.
        if (same := cells.setdefault((digest, axes.get(SIDE)), cell)) is not cell:
            raise UsageError(f"two cells are the same: {same.axes} and {axes}; remove one of them")
    return list(cells.values())


def _part(axis: str, value: Any) -> str:
    """A value as it stands in a cell's id; numbers and flags with their option's name."""
    if value is None or (axis, value) == (PASS, TIMING):
        return ""
    text = _UNFIT.sub("-", value if isinstance(value, str) else as_json(value)).strip("-.")
    return text if isinstance(value, str) else f"{axis.rpartition('.')[2]}-{text}"
