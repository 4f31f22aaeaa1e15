"""A sweep's file: what is measured, over which grid, how often."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from lmbench.configs import lines_of, placed, read_yaml
from lmbench.errors import UsageError, unknown
from lmbench.masking import is_secret
from lmbench.records.passes import PASS as PASSES
from lmbench.records.vocabulary import MODES, SIDE

#: Options by their dotted names, each with its value as YAML has it: `{"model.size": "small"}`.
Options = dict[str, Any]

#: Axes that stand beside the options, under keys of their own in the file.
MODE, PASS, ENVIRONMENT = "mode", "pass", "environment"
MOST_REPEATS = 1000
#: More rounds of two sides than this are never made, whatever the budget.
MOST_ROUNDS = 200
#: The option of `base` that names a configuration.
CONFIG = "config"

_SET_BY_SWEEP = ("measure.mode", "measure.results_dir", "measure.run_id")


class EnvironmentSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where cells run: another Python, another revision of the repository here, further environment variables."""

    python: str | None = None
    revision: str | None = None
    variables: dict[str, str] = {}


class LargestSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What each cell looks for: the largest value of an option that fits, at most `most`."""

    option: str
    most: Annotated[int, Meta(ge=1)] = 2**20


class SweepFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sweep as it was written.

    `base` are options of every cell (with `config`, a configuration by name or path); `matrix` are the axes: by an
    option's name a list of its values, by a name of their own a list of mappings of options. `largest` names an option
    of which each cell looks for the largest value that fits. `view` is the report's.
    `sides` are two cells that are measured in turn, to be compared: by name the options of each, with a `config` and an
    `environment` of its own where it has one.
    """

    base: Options = {}
    matrix: dict[str, Annotated[list[Any], Meta(min_length=1)]] = {}
    include: list[Options] = []
    exclude: list[Options] = []
    sides: dict[Literal["A", "B"], Options] = {}
    modes: list[str] = []
    passes: list[str] = []
    environments: dict[str, EnvironmentSpec] = {}
    repeats: Annotated[int, Meta(ge=1, le=MOST_REPEATS)] = 3
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    largest: LargestSpec | None = None
    view: Any = None

    @property
    def study(self) -> str | None:
        """Name of the study whose view shows the sweep."""
        name = self.view.get("name") if isinstance(self.view, dict) else self.view
        return str(name) if name else None

    def axes(self) -> list[list[Options]]:
        """The grid's axes: for each value the options that it sets, beside `side`, `mode`, `pass` and `environment`.

        The values of an axis with a name of its own are mappings of options.
        """
        if self.sides:
            return [[{SIDE: name, **options} for name, options in self.sides.items()]]
        axes: list[list[Options]] = []
        for axis, values in self.matrix.items():
            is_named = "." not in axis and all(isinstance(value, dict) for value in values)
            axes.append(values if is_named else [{axis: value} for value in values])
        others = ((MODE, self.modes), (PASS, self.passes), (ENVIRONMENT, self.environments))
        return axes + [[{axis: value} for value in values] for axis, values in others if values]

    def varying_options(self) -> set[str]:
        """Every option that differs from cell to cell."""
        options = [*itertools.chain(*self.axes()), *self.include, *(PASSES[name].options for name in self.passes)]
        return set().union(*options) - {SIDE, MODE, PASS, ENVIRONMENT, CONFIG}

    def changed(self, options: Options, repeats: int | None = None, timeout_s: float | None = None) -> SweepFile:
        """The file with what the command line gives for every cell.

        Raises:
            UsageError: an option that an axis sets, or a value out of its range.
        """
        if varying := self.varying_options() & set(options):
            raise UsageError(f"--{varying.pop()} is an axis of this sweep; change the file, or leave the option out")
        changes = {"base": {**self.base, **options}, "repeats": repeats, "timeout_s": timeout_s}
        return sweep_from(self.as_mapping() | {key: value for key, value in changes.items() if value is not None})

    def as_mapping(self) -> dict[str, Any]:
        """The file's content, as `sweep_from` takes it."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


def read_sweep_file(path: Path) -> SweepFile:
    """Read a YAML file.

    Raises:
        UsageError: it cannot be read, or is no sweep.
    """
    text, content = read_yaml(path, f"sweep file {str(path)!r}")
    if isinstance(content, dict) and isinstance(content.get("view"), dict):
        # What is stored of the sweep still says whose view it is.
        content["view"].setdefault("name", path.stem)
    try:
        return sweep_from(content, lines_of(text, str(path)))
    except UsageError as error:
        raise UsageError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def sweep_from(content: Any, places: Mapping[str, str] = {}) -> SweepFile:
    """A sweep from a file's content; `places` is where each of its settings stands.

    Raises:
        UsageError: unknown keys, an empty matrix, or a value of the wrong form.
    """
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
        if isinstance(option := content.get("largest"), str):
            content["largest"] = {"option": option}
    try:
        sweep = msgspec.convert(content, SweepFile)
    except msgspec.ValidationError as error:
        raise UsageError("; ".join(_mistakes(content, places)) or str(error)) from None
    _check(sweep)
    return sweep


def _mistakes(content: Any, places: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with each key of a file, with its place where that is known."""
    for key, value in content.items() if isinstance(content, dict) else ():
        try:
            msgspec.convert({key: value}, SweepFile)
        except msgspec.ValidationError as error:
            yield placed(str(error), places, str(key))


def _check(sweep: SweepFile) -> None:
    """Refuse what the types allow and no sweep can mean. Raises UsageError."""
    choices = {SIDE: sweep.sides, MODE: MODES, PASS: PASSES, ENVIRONMENT: sweep.environments}
    points = [*itertools.chain(*sweep.axes()), *sweep.include]
    for option in itertools.chain(sweep.base, *points):
        if option in _SET_BY_SWEEP:
            raise UsageError(f"{option} is set by the sweep; list `modes`, give --results_dir to the command")
    for option, value in itertools.chain.from_iterable(point.items() for point in points):
        if option in choices and value not in list(choices[option]):
            raise unknown(option, str(value), choices[option])
        if option == CONFIG and not sweep.sides:
            raise UsageError("config is no axis; it belongs in base")
        if is_secret(str(option)):
            raise UsageError(f"{option} looks like a secret, and cells go by what differs; give it in base")
    if not points:
        raise UsageError("the matrix is empty: give at least one axis, such as `matrix: {model.size: [small, medium]}`")
    if (spec := sweep.largest) is not None:
        if spec.option in sweep.varying_options():
            raise UsageError(f"largest: {spec.option} is an axis of this sweep; take it out of the matrix")
        if not str(start := sweep.base.get(spec.option, 1)).isdecimal():
            raise UsageError(f"largest: {spec.option} begins at {start!r} in base; it must be a whole number")
