"""From a sweep's file to its cells: the grid, without what is excluded, with what is included."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmbench.errors import UsageError
from lmbench.sweep.sweep_file import ENVIRONMENT, MODE, PASS, PASSES, Options, SweepFile

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")
_DIGEST_DIGITS = 8
_MAX_NAME = 70


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    `axes` are its values by axis: options by their names, `mode`, `pass`, `environment`. `options` is what the command
    line gets beside the command (`fit` or `validate`), without `config`. `id` names its run folders: the values that
    tell it from other cells, and a digest of everything that makes it up.
    """

    id: str
    axes: dict[str, Any]
    command: str
    options: Options
    environment: str | None = None

    @property
    def is_timing(self) -> bool:
        """Whether it is the measurement itself: other passes are made once, whatever the repeats."""
        return self.axes.get(PASS) in (None, "timing")

    def words(self) -> list[str]:
        """The words after `lmbench`, without `--config`."""
        return [self.command, *option_words(self.options)]


def option_words(options: Options) -> list[str]:
    """Options as words of a command line; what is no text or number goes as JSON."""
    words = []
    for option, value in options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        # One word, so that a value may begin with a dash.
        words.append(f"--{option}={text}")
    return words


def expand(sweep: SweepFile, base_config: Any, facts: Mapping[str, Any]) -> list[Cell]:
    """The cells in order: the matrix (its last axis varies fastest), then the included ones.

    `base_config` is the content of base's `config`, `facts` what makes up each environment: both are part of a cell's
    identity.

    Raises:
        UsageError: an exclude that fits no cell, nothing left, or two cells that are the same.
    """
    points = [*_without_excluded(sweep, list(_matrix(sweep))), *map(dict, sweep.include)]
    if not points:
        raise UsageError("exclude leaves no cell")
    varying = [axis for axis in axes_of(points) if len({_text(point.get(axis)) for point in points}) > 1]
    cells = [_cell(sweep, point, varying, base_config, facts) for point in points]
    _refuse_twins(cells)
    return cells


def axes_of(points: list[Options]) -> dict[str, list[Any]]:
    """Every axis in order, with its values in order of appearance."""
    axes: dict[str, list[Any]] = {}
    for point in points:
        for axis, value in point.items():
            values = axes.setdefault(axis, [])
            if value not in values:
                values.append(value)
    return axes


def _matrix(sweep: SweepFile) -> Iterator[Options]:
    axes = list(sweep.matrix.values())
    if sweep.modes:
        axes.append([{MODE: mode} for mode in sweep.modes])
    if sweep.passes:
        axes.append([{PASS: name} for name in sweep.passes])
    if sweep.environments:
        axes.append([{ENVIRONMENT: name} for name in sweep.environments])
    if not axes:
        return
    for values in itertools.product(*axes):
        point: Options = {}
        for options in values:
            if both := set(point) & set(options):
                raise UsageError(f"matrix: two axes set {both.pop()}")
            point.update(options)
        yield point


def _without_excluded(sweep: SweepFile, points: list[Options]) -> list[Options]:
    names = axes_of(points)
    for rule in sweep.exclude:
        for axis in rule:
            if axis not in names:
                raise UsageError(f"exclude: {axis} is no axis of the matrix; axes are {', '.join(names)}")
        kept = [point for point in points if not _fits(point, rule)]
        if len(kept) == len(points):
            raise UsageError(f"exclude: {rule} fits no cell")
        points = kept
    return points


def _fits(point: Options, rule: Options) -> bool:
    return all(point.get(axis) in (wanted if isinstance(wanted, list) else [wanted]) for axis, wanted in rule.items())


def _cell(sweep: SweepFile, point: Options, varying: list[str], base_config: Any, facts: Mapping[str, Any]) -> Cell:
    mode, environment = point.get(MODE), point.get(ENVIRONMENT)
    if environment is not None and environment not in sweep.environments:
        raise UsageError(f"include: environment {environment!r} is none of {', '.join(sweep.environments) or 'any'}")
    own = {option: value for option, value in point.items() if option not in (MODE, PASS, ENVIRONMENT)}
    of_pass = PASSES[point.get(PASS, "timing")]
    if both := set(own) & set(of_pass):
        raise UsageError(f"pass {point[PASS]} sets {both.pop()}, and so does the matrix")
    options = {**sweep.base, **own, **of_pass}
    options.pop("config", None)
    if mode not in (None, "inference"):
        options["measure.mode"] = mode
    command = "validate" if mode == "inference" else "fit"
    identity = [command, base_config, sorted(options.items()), facts.get(environment) if environment else None]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:_DIGEST_DIGITS]
    name = "-".join(filter(None, (_part(axis, point.get(axis)) for axis in varying)))[:_MAX_NAME].strip("-.")
    return Cell(f"{name or command}-{digest}", point, command, options, environment)


def _part(axis: str, value: Any) -> str:
    """A value as it stands in a cell's id; numbers and flags with their option's name."""
    if value is None or (axis, value) == (PASS, "timing"):
        return ""
    text = _UNFIT.sub("-", _text(value)).strip("-.")
    return text if isinstance(value, str) else f"{axis.rpartition('.')[2]}-{text}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _refuse_twins(cells: list[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        identity = json.dumps([cell.command, sorted(cell.options.items()), cell.environment], default=str)
        if identity in seen:
            raise UsageError(f"two cells are the same: {seen[identity].axes} and {cell.axes}; remove one of them")
        seen[identity] = cell
