"""From a sweep's file to what it runs: its cells (the grid, without what is excluded, with what is included), each with
its repeats, and the environments that they run in."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from lmbench.configs import find_shipped, read_yaml, shipped_configs, shipped_studies
from lmbench.errors import UsageError
from lmbench.masking import MASK, keep_secret, masked_whole, secrets_of, to_fill_in
from lmbench.records.passes import PASS as PASSES
from lmbench.records.passes import TIMING
from lmbench.records.vocabulary import SIDE
from lmbench.sweep.environments import HERE, Environment, EnvironmentFacts, resolve
from lmbench.sweep.file import CONFIG, ENVIRONMENT, MODE, PASS, Options, SweepFile

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
_DIGEST_DIGITS = 8
_MAX_NAME = 70
# More would be a slip: they take seconds and megabytes to lay out, and years to run.
_MOST_CELLS = 100_000


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
    environment: str | None = None
    config: str | None = None

    @property
    def is_timing(self) -> bool:
        """Whether it is the measurement itself: other passes are made once, whatever the repeats."""
        return self.axes.get(PASS) in (None, TIMING)

    def words(self) -> list[str]:
        """The words after `lmbench`, without `--config`; what is no text or number stands there as JSON."""
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.options.items()}
        # One word each, so that a value may begin with a dash.
        return [self.command, *(f"--{name}={text}" for name, text in texts.items())]


@dataclass(frozen=True)
class Job:
    """One repeat of a cell; `name` is that of its run's folder."""

    cell: GridCell
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.cell.id}-r{self.repeat}"


@dataclass(frozen=True)
class Plan:
    """Everything about a sweep that is known before it runs. `configs` are the texts of configurations, by the names
    that they were given by."""

    name: str
    file: SweepFile
    cells: list[GridCell]
    environments: Mapping[str, Environment]
    configs: Mapping[str, str]

    def rounds(self) -> Iterator[list[Job]]:
        """Every repeat of every cell, repeats interleaved: what drifts with time meets all cells alike. Of two sides
        the other one is the first in every other round."""
        for repeat in range(self.file.repeats):
            is_turned = bool(self.file.sides) and repeat % 2 == 1
            cells = reversed(self.cells) if is_turned else self.cells
            yield [Job(cell, repeat) for cell in cells if repeat < self.repeats_of(cell)]

    def jobs(self) -> Iterator[Job]:
        """All rounds one after the other."""
        return itertools.chain.from_iterable(self.rounds())

    def repeats_of(self, cell: GridCell) -> int:
        return self.file.repeats if cell.is_timing else 1

    @property
    def job_count(self) -> int:
        return sum(map(self.repeats_of, self.cells))

    def measurements(self) -> dict[str, str]:
        """By the id of each cell that is another pass, that of the cell which is the measurement itself."""
        places = {
            cell.id: json.dumps([{**cell.axes, PASS: None}, cell.environment, cell.config], sort_keys=True, default=str)
            for cell in self.cells
        }
        timed = {places[cell.id]: cell.id for cell in self.cells if cell.is_timing}
        return {
            cell.id: timed[places[cell.id]] for cell in self.cells if not cell.is_timing and places[cell.id] in timed
        }

    def environment_of(self, cell: GridCell) -> Environment:
        return self.environments[cell.environment] if cell.environment is not None else HERE


def make_plan(name: str, file: SweepFile, makes_checkouts: bool = True) -> Plan:
    """Find what a sweep's file names, and lay out its cells.

    Raises:
        UsageError: something that it names is not there, or the grid is none.
    """
    file = _filled_in(file)
    names = [str(options[CONFIG]) for options in (file.base, *file.sides.values()) if options.get(CONFIG) is not None]
    read = {name: _read_config(name) for name in names}
    contents = {name: content for name, (_, content) in read.items()}
    keep_secret(value for _, value in secrets_of([file.as_mapping(), *contents.values()]))
    environments = resolve(file.environments, makes_checkouts)
    cells = expand(file, contents, {name: environment.facts for name, environment in environments.items()})
    return Plan(name, file, cells, environments, {name: text for name, (text, _) in read.items()})


def _filled_in(file: SweepFile) -> SweepFile:
    """The file of a sweep that is gone on with: its folder keeps no secrets, so that they have to come anew.

    Raises:
        UsageError: a secret is missing.
    """
    lost = "is not stored in a sweep's folder"
    for options in (file.base, *file.sides.values()):
        for name in filter(lambda name: to_fill_in(options[name]), options):
            raise UsageError(f"{name} {lost}; go on with --{name} VALUE, or with its file")
    environments = {}
    for environment, spec in file.environments.items():
        variables = {
            key: os.environ.get(key, MASK) if value == MASK else value for key, value in spec.variables.items()
        }
        for variable in to_fill_in(variables):
            raise UsageError(f"environment {environment}: {variable} {lost}; export it, or go on with the sweep's file")
        environments[environment] = replace(spec, variables=variables)
    return replace(file, environments=environments)


def find_sweep(given: str) -> Path:
    """A sweep's file by path, or by the name of a shipped study; `configs/sweeps/NAME.yaml` finds it too.

    Raises:
        UsageError: neither.
    """
    complaint = f"sweep {given!r} is no file, no sweep's folder and no study"
    return find_shipped(given, shipped_studies(), "sweeps", complaint)


def _read_config(given: str) -> tuple[str, dict[str, Any]]:
    what = f"base: config {given!r}"
    path = find_shipped(given, shipped_configs(), "configs", f"{what} is no file and no shipped configuration")
    text, content = read_yaml(path, what)
    if not isinstance(content, dict):
        raise UsageError(f"{what} is no configuration: it holds no mapping")
    return text, content


# the grid


def expand(sweep: SweepFile, configs: Mapping[str, Any], facts: Mapping[str, EnvironmentFacts]) -> list[GridCell]:
    """The cells in order: the matrix (its last axis varies fastest), then the included ones.

    `configs` are the contents of configurations by their names, `facts` what makes up each environment: both are part
    of a cell's identity.

    Raises:
        UsageError: an exclude that fits no cell, nothing left, two cells that are the same, or too many.
    """
    axes = sweep.axes()
    if math.prod(map(len, axes)) + len(sweep.include) > _MOST_CELLS:
        raise UsageError(f"the matrix has more than {_MOST_CELLS:,} cells; take out axes or values")
    points = [_point(values) for values in itertools.product(*axes)] if axes else []
    points = [*_without_excluded(sweep, points), *map(dict, sweep.include)]
    if not points:
        raise UsageError("exclude leaves no cell")
    varying = [
        axis for axis in axes_of(points) if axis != CONFIG and len({_text(point.get(axis)) for point in points}) > 1
    ]
    cells = [_cell(sweep, point, varying, configs, facts) for point in points]
    known: dict[tuple[str, Any], GridCell] = {}
    for cell in cells:
        # Sides may be the same.
        identity = cell.id[-_DIGEST_DIGITS:], cell.axes.get(SIDE)
        if identity in known:
            raise UsageError(f"two cells are the same: {known[identity].axes} and {cell.axes}; remove one of them")
        known[identity] = cell
    return cells


def axes_of(points: list[Options]) -> dict[str, list[Any]]:
    """Every axis in order, with its values in order of appearance."""
    axes: dict[str, dict[str, Any]] = {}
    for point in points:
        for axis, value in point.items():
            axes.setdefault(axis, {}).setdefault(json.dumps(value, default=str), value)
    return {axis: list(values.values()) for axis, values in axes.items()}


def _point(values: tuple[Options, ...]) -> Options:
    """A point of the grid from a value of each axis."""
    point: Options = {}
    for options in values:
        if both := set(point) & set(options):
            raise UsageError(f"matrix: two axes set {both.pop()}")
        point |= options
    return point


def _without_excluded(sweep: SweepFile, points: list[Options]) -> list[Options]:
    names = axes_of(points)
    for rule in sweep.exclude:
        if unknown := set(rule) - set(names):
            raise UsageError(f"exclude: {unknown.pop()} is no axis of the matrix; axes are {', '.join(names)}")
        wanted = {axis: values if isinstance(values, list) else [values] for axis, values in rule.items()}
        kept = [point for point in points if any(point.get(axis) not in values for axis, values in wanted.items())]
        if len(kept) == len(points):
            raise UsageError(f"exclude: {rule} fits no cell")
        points = kept
    return points


def _cell(
    sweep: SweepFile,
    point: Options,
    varying: list[str],
    configs: Mapping[str, Any],
    facts: Mapping[str, EnvironmentFacts],
) -> GridCell:
    mode, environment, of_pass = point.get(MODE), point.get(ENVIRONMENT), PASSES[point.get(PASS, TIMING)].options
    options = {option: value for option, value in point.items() if option not in (SIDE, MODE, PASS, ENVIRONMENT)}
    if both := set(options) & set(of_pass):
        raise UsageError(f"pass {point[PASS]} sets {both.pop()}, and so does the matrix")
    options = {**sweep.base, **options, **of_pass}
    config = options.pop(CONFIG, None)
    content = None
    if config is not None:
        config = str(config)
        content = configs[config]
        # The copy that the cell's process reads has none.
        options = {**_secrets_of_config(config, content), **options}
        for name in to_fill_in(options):
            raise UsageError(f"{name} is not stored in a sweep's folder; go on with --{name} VALUE")
    if mode not in (None, "inference"):
        options["measure.mode"] = mode
    command = "validate" if mode == "inference" else "fit"
    facts_of_place = None if environment is None else to_builtins(facts[environment])
    # A secret's value is no part of the identity: a new one measures the same.
    kept = {option: MASK if to_fill_in(value) else value for option, value in masked_whole(options).items()}
    identity = [command, masked_whole(content), sorted(kept.items()), masked_whole(facts_of_place)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:_DIGEST_DIGITS]
    name = "-".join(filter(None, (_part(axis, point.get(axis)) for axis in varying)))[:_MAX_NAME].strip("-.")
    axes = {axis: value for axis, value in point.items() if axis != CONFIG}
    return GridCell(f"{name or command}-{digest}", axes, command, options, environment, config)


def _secrets_of_config(config: str, content: Any) -> Options:
    """A configuration's secrets as options."""
    secrets: Options = {}
    for name, _ in secrets_of(content):
        value = content
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None or isinstance(value, list):
            raise UsageError(
                f"config {config!r}: {name} is a secret in a list, which no option sets; export it instead"
            )
        secrets[name] = value
    return secrets


def _part(axis: str, value: Any) -> str:
    """A value as it stands in a cell's id; numbers and flags with their option's name."""
    if value is None or (axis, value) == (PASS, TIMING):
        return ""
    text = _UNFIT.sub("-", _text(value)).strip("-.")
    return text if isinstance(value, str) else f"{axis.rpartition('.')[2]}-{text}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
