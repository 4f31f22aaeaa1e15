"""A sweep's file: what is measured, over which grid, how often."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from lmbench.configs import read_yaml
from lmbench.errors import UsageError, suggest
from lmbench.masking import is_secret
from lmbench.records.passes import PASS as PASSES
from lmbench.records.vocabulary import MODES, SIDE

#: Options by their dotted names, each with its value as YAML has it: `{"model.size": "small"}`.
Options = dict[str, Any]

#: Axes that stand beside the options, under keys of their own in the file.
MODE, PASS, ENVIRONMENT = "mode", "pass", "environment"
MOST_REPEATS = 1000
#: The option of `base` that names a configuration.
CONFIG = "config"

_SIDE = re.compile(r"[A-Za-z0-9]{1,40}")
_SET_BY_SWEEP = ("measure.mode", "measure.results_dir", "measure.run_id")
#: msgspec's words and a reader's.
_TYPES = {"Expected": "expected", "`object`": "a mapping", "`array`": "a list", "`int`": "a whole number",
          "`float`": "a number", "`str`": "text"}  # fmt: skip
#: Such as `unknown field `matrx` - at `$.environments[...]``: the message, and the place where it has one.
_COMPLAINT = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
#: Values that a kernel likes, where `largest` names the option alone.
_UNITS = {"data.context_length": 64}


class EnvironmentSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where cells run: another Python, another revision of a working tree, further environment variables.

    `tree` is a folder within a git repository, by default the working directory; it counts only with a `revision`.
    """

    python: str | None = None
    revision: str | None = None
    tree: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


class LargestSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What each cell looks for: the largest value of an option that fits, a multiple of `unit` and at most `most`."""

    option: str
    unit: Annotated[int, Meta(ge=1)] = 1
    most: Annotated[int, Meta(ge=1)] = 2**20


class SweepFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sweep as it was written.

    `base` are options of every cell (with `config`, a configuration by name or path); `matrix` are the axes: by an
    option's name a list of its values, by a name of their own a list of mappings of options. `largest` names an option
    of which each cell looks for the largest value that fits. `view` is the report's.
    `sides` are two cells that are measured in turn, to be compared: by name the options of each, with a `config` and an
    `environment` of its own where it has one.
    """

    base: Options = field(default_factory=dict)
    matrix: dict[str, Annotated[list[Any], Meta(min_length=1)]] = field(default_factory=dict)
    include: list[Options] = field(default_factory=list)
    exclude: list[Options] = field(default_factory=list)
    sides: dict[str, Options] = field(default_factory=dict)
    modes: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    environments: dict[str, EnvironmentSpec] = field(default_factory=dict)
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
        """The grid's axes: for each value the options that it sets, beside `side`, `mode`, `pass` and `environment`."""
        if self.sides:
            return [[{SIDE: name, **options} for name, options in self.sides.items()]]
        matrix = [
            [value if _is_named(axis, values) else {axis: value} for value in values]
            for axis, values in self.matrix.items()
        ]
        aside = ((MODE, self.modes), (PASS, self.passes), (ENVIRONMENT, self.environments))
        return matrix + [[{axis: value} for value in values] for axis, values in aside if values]

    def axis_options(self) -> set[str]:
        """Every option that differs from cell to cell."""
        values = [value for axis in self.axes() for value in axis]
        names = {option for options in (*values, *self.include) for option in options}
        names |= {option for name in self.passes for option in PASSES[name].options}
        return names - {SIDE, MODE, PASS, ENVIRONMENT, CONFIG}

    def changed(self, options: Options, repeats: int | None = None, timeout_s: float | None = None) -> SweepFile:
        """The file with what the command line gives for every cell.

        Raises:
            UsageError: an option that an axis sets, or a value out of its range.
        """
        for option in options:
            if option in self.axis_options():
                raise UsageError(f"--{option} is an axis of this sweep; change the file, or leave the option out")
        limits = {"repeats": repeats, "timeout_s": timeout_s}
        changes = {name: value for name, value in limits.items() if value is not None}
        return sweep_from({**self.as_mapping(), "base": {**self.base, **options}, **changes})

    def as_mapping(self) -> dict[str, Any]:
        """The file's content, as `sweep_from` takes it."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


def _is_named(axis: str, values: list[Any]) -> bool:
    """Whether an axis has a name of its own: its values are mappings of options then."""
    return "." not in axis and all(isinstance(value, dict) for value in values)


def read_sweep_file(path: Path) -> SweepFile:
    """Read a YAML file.

    Raises:
        UsageError: it cannot be read, or is no sweep.
    """
    _, content = read_yaml(path, f"sweep file {str(path)!r}")
    if isinstance(content, dict) and isinstance(content.get("view"), dict):
        # What is stored of the sweep still says whose view it is.
        content["view"].setdefault("name", path.stem)
    try:
        return sweep_from(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def sweep_from(content: Any) -> SweepFile:
    """A sweep from a file's content.

    Raises:
        UsageError: unknown keys, an empty matrix, or a value of the wrong form.
    """
    if not isinstance(content, dict):
        raise UsageError("a sweep is a mapping with `base`, `matrix` and so on")
    content = {key: value for key, value in content.items() if value is not None}
    if isinstance(environments := content.get("environments"), dict):
        content["environments"] = {str(name): _with_texts(spec or {}) for name, spec in environments.items()}
    if isinstance(option := content.get("largest"), str):
        content["largest"] = {"option": option, "unit": _UNITS.get(option, 1)}
    try:
        sweep = msgspec.convert(content, SweepFile)
    except msgspec.ValidationError as error:
        raise UsageError(_what_is_wrong(str(error))) from None
    _check(sweep)
    return sweep


def _with_texts(spec: Any) -> Any:
    """An environment's values as text: a revision `1234567`, a variable's `1`."""
    if isinstance(spec, dict):
        return {key: _with_texts(value) for key, value in spec.items() if value is not None}
    return str(spec) if isinstance(spec, int | float) else spec


def _what_is_wrong(complaint: str) -> str:
    """msgspec's complaint as one line that begins with the key: `repeats: expected a whole number >= 1`."""
    for name, words in _TYPES.items():
        complaint = complaint.replace(name, words)
    match = _COMPLAINT.fullmatch(complaint)
    assert match is not None
    message, place = match.groups()
    if "unknown field" in message:
        key = message.split("`")[1]
        kinds = {"environments[...]": EnvironmentSpec, "largest": LargestSpec}
        known = kinds.get(place, SweepFile).__struct_fields__
        message = f"unknown key {key!r}" + (suggest(key, known) or f"; known are {', '.join(known)}")
    return f"{place}: {message}" if place else message


def _check(sweep: SweepFile) -> None:
    """What the types do not say. Raises UsageError."""
    choices = {SIDE: sweep.sides, MODE: MODES, PASS: PASSES, ENVIRONMENT: sweep.environments}
    _check_options("base", sweep.base, {})
    for options in [*itertools.chain(*sweep.axes()), *sweep.include]:
        _check_options("the grid", options, choices)
        if CONFIG in options and not sweep.sides:
            raise UsageError("the grid: config is no axis; it belongs in base")
    if sweep.sides:
        for key in ("matrix", "include", "modes", "passes"):
            if getattr(sweep, key):
                raise UsageError(f"sides stand alone, and this sweep has {key} too; leave that out")
        if len(sweep.sides) != 2 or not all(map(_SIDE.fullmatch, sweep.sides)):
            raise UsageError(
                f"sides are {', '.join(sweep.sides)}; give two names of letters and digits, such as A and B"
            )
    if sweep.largest is not None:
        _check_largest(sweep, sweep.largest)
    for name, spec in sweep.environments.items():
        if spec.tree is not None and spec.revision is None:
            raise UsageError(f"environments: {name}: tree without revision does nothing; name a revision")
    if not (sweep.axes() or sweep.include):
        raise UsageError("the matrix is empty: give at least one axis, such as `matrix: {model.size: [small, medium]}`")


def _check_options(where: str, options: Options, choices: Mapping[str, Collection[str]]) -> None:
    """Refuse options that the sweep sets itself or that are secrets, and values that are not among `choices`."""
    for option, value in options.items():
        if option in choices and value not in list(choices[option]):
            known = ", ".join(choices[option])
            hint = f"choose among {known}" if known else f"there are no {option}s"
            raise UsageError(f"{option} {value!r} is unknown; {hint}")
        if option in _SET_BY_SWEEP:
            raise UsageError(
                f"{where}: {option} is set by the sweep; list modes under `modes`, give --results_dir to the command"
            )
        if where != "base" and is_secret(str(option)):
            raise UsageError(f"{where}: {option} looks like a secret, and cells go by what differs; give it in base")


def _check_largest(sweep: SweepFile, spec: LargestSpec) -> None:
    if sweep.sides or sweep.passes:
        raise UsageError(f"largest goes with neither {'sides' if sweep.sides else 'passes'}; leave one of them out")
    if spec.option in sweep.axis_options():
        raise UsageError(f"largest: {spec.option} is an axis of this sweep; take it out of the matrix")
    if not str(start := sweep.base.get(spec.option, 1)).isdecimal():
        raise UsageError(f"largest: {spec.option} begins at {start!r} in base; it must be a whole number")
