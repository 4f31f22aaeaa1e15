"""A sweep's file: which options are measured, over which grid, and how often."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from lmbench.configs import converted, lines_of, placed, read_yaml
from lmbench.errors import UsageError, unknown
from lmbench.masking import is_secret
from lmbench.records.passes import PASS as PASSES
from lmbench.records.vocabulary import MODES, SIDE, Values

#: Values of options, as YAML has them, by the options' dotted names: `{"model.size": "small"}`.
Options = Values

#: Axes that are not options, and have their own keys in the file.
MODE, PASS, ENVIRONMENT = "mode", "pass", "environment"
#: The most rounds of two sides, whatever the budget.
MOST_ROUNDS = 200
#: The option of `base` that names a configuration.
CONFIG = "config"

_SET_BY_SWEEP = {
    "measure.mode": "list it under `modes`",
    "measure.results_dir": "give --results_dir to the command",
    "measure.run_id": "leave it out: a run has the name of its cell",
}


def with_options(settings: Values, options: Options) -> Values:
    """Nested settings in which options are set by their dotted names.

    Arguments of a class go into its `init_args`. The name of a class alone, such as `model: my_module.MyModule`, stands
    for the class without arguments; another value gives way to the settings below it.
    """
    tree = copy.deepcopy(settings)
    for name, value in options.items():
        parts, node = name.split("."), tree
        for group, following in itertools.pairwise(parts):
            inner = node.get(group)
            if isinstance(inner, str):
                inner = {"class_path": inner}
            elif not isinstance(inner, dict):
                inner = {}
            node[group] = inner
            is_argument = "class_path" in inner and following not in ("class_path", "init_args")
            node = inner.setdefault("init_args", {}) if is_argument else inner
        node[parts[-1]] = value
    return tree


class EnvironmentSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where cells run: path of a Python, revision of the repository here, and additional environment variables."""

    python: str | None = None
    revision: str | None = None
    variables: dict[str, str] = {}


class LargestSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The option of which each cell searches the largest value that fits, up to `most`."""

    option: str
    most: Annotated[int, Meta(ge=1)] = 2**20


class SweepFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a sweep's file.

    Attributes:
        base: options of every cell; `config` names a configuration or its path.
        matrix: the axes. Under an option's name stands a list of its values, under any other name a list of mappings
            of options.
        include: points added to the grid.
        exclude: rules that remove points from the grid, each a value or a list of values by axis.
        sides: options of the two cells of a comparison, which are measured in turn. A side may have its own `config`
            and `environment`.
        coin_seed: seed of the coins that decide which side begins a round.
        largest: the option of which each cell searches the largest value that fits.
        view: the view that reports show, or the name or path of a study that has one.
    """

    base: Options = {}
    matrix: dict[str, Annotated[list[Any], Meta(min_length=1)]] = {}
    include: list[Options] = []
    exclude: list[Options] = []
    sides: dict[Literal["A", "B"], Options] = {}
    coin_seed: int = 0
    modes: list[str] = []
    passes: list[str] = []
    environments: dict[str, EnvironmentSpec] = {}
    repeats: Annotated[int, Meta(ge=1, le=1000)] = 3
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    largest: LargestSpec | None = None
    view: Any = None

    @property
    def study(self) -> str | None:
        """Name of the study whose view shows the sweep."""
        name = self.view.get("name") if isinstance(self.view, dict) else self.view
        return str(name) if name else None

    def axes(self) -> list[list[Options]]:
        """The grid's axes, each a list of values. A value is a mapping of options, `side`, `mode`, `pass` or
        `environment`."""
        if self.sides:
            return [[{SIDE: name, **options} for name, options in self.sides.items()]]
        axes = []
        for axis, values in self.matrix.items():
            is_named = "." not in axis and all(isinstance(value, dict) for value in values)
            axes.append(values if is_named else [{axis: value} for value in values])
        special_axes = ((MODE, self.modes), (PASS, self.passes), (ENVIRONMENT, self.environments))
        return axes + [[{axis: value} for value in values] for axis, values in special_axes if values]

    def varying_options(self) -> set[str]:
        """Every option that differs from cell to cell."""
        options = [*itertools.chain(*self.axes()), *self.include, *(PASSES[name].options for name in self.passes)]
        return set().union(*options) - {SIDE, MODE, PASS, ENVIRONMENT, CONFIG}

    def changed(self, options: Options, repeats: int | None = None, timeout_s: float | None = None) -> SweepFile:
        """The file with the command line's options for every cell, and its repeats and time limit if given.

        Raises:
            UsageError: an axis sets one of the options, or a value is out of its range.
        """
        if varying := self.varying_options() & set(options):
            raise UsageError(f"--{varying.pop()} is an axis of this sweep; change the file, or leave the option out")
        changes = {"base": {**self.base, **options}, "repeats": repeats, "timeout_s": timeout_s}
        return sweep_from(self.as_mapping() | {key: value for key, value in changes.items() if value is not None})

    def as_mapping(self) -> Values:
        """The file's content in the form that `sweep_from` reads."""
        content: Values = msgspec.to_builtins(self)
        return content


def read_sweep_file(path: Path) -> tuple[SweepFile, dict[str, str]]:
    """Read a sweep from a YAML file; returns it with the place of each setting in the file.

    Raises:
        UsageError: the file cannot be read, or holds no sweep.
    """
    text, content = read_yaml(path, f"sweep file {str(path)!r}")
    if isinstance(content, dict) and isinstance(content.get("view"), dict):
        # The sweep's stored copy keeps the name of the study that the view belongs to.
        content["view"].setdefault("name", path.stem)
    places = lines_of(text, str(path))
    try:
        return sweep_from(content, places), places
    except UsageError as error:
        raise UsageError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def sweep_from(content: Any, places: Mapping[str, str] = {}) -> SweepFile:
    """A sweep from a file's content. `places` says where each setting stands in the file.

    Raises:
        UsageError: unknown keys, an empty matrix, or a value of the wrong form.
    """
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
        if isinstance(option := content.get("largest"), str):
            content["largest"] = {"option": option}
        mistakes = []
        for key, value in content.items():
            # One axis after the other, since msgspec does not say which one is wrong.
            has_axes = key == "matrix" and isinstance(value, dict)
            parts = {f".{axis}": {axis: values} for axis, values in value.items()} if has_axes else {"": value}
            for name, part in parts.items():
                try:
                    converted({key: part}, SweepFile)
                except UsageError as error:
                    line = str(error).replace("matrix[...]", f"matrix{name}", 1)
                    mistakes.append(placed(line, places, f"{key}{name}"))
        if mistakes:
            raise UsageError("; ".join(mistakes))
    sweep = converted(content, SweepFile)
    _check(sweep)
    return sweep


def _check(sweep: SweepFile) -> None:
    """Raises UsageError for a content that the types allow and no sweep can mean."""
    choices = {SIDE: sweep.sides, MODE: MODES, PASS: PASSES, ENVIRONMENT: sweep.environments}
    points = [*itertools.chain(*sweep.axes()), *sweep.include]
    for option in itertools.chain(sweep.base, *points):
        if not isinstance(option, str) or (option == CONFIG and not isinstance(sweep.base.get(CONFIG, ""), str)):
            raise UsageError(f"option {option!r}: name one such as data.batch_size; config takes a name or a path")
        if option in _SET_BY_SWEEP:
            raise UsageError(f"{option} is set by the sweep; {_SET_BY_SWEEP[option]}")
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
