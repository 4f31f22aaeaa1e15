"""A sweep's file: what is measured, over which grid, how often."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from lmbench.configs import read_yaml
from lmbench.errors import UsageError, suggest
from lmbench.masking import is_secret
from lmbench.records.passes import PASS as PASSES
from lmbench.records.vocabulary import MODES, Mode

#: Options by their dotted names, each with its value as YAML has it: `{"model.size": "small"}`.
Options = dict[str, Any]

#: Axes that stand beside the options, under keys of their own in the file.
MODE, PASS, ENVIRONMENT = "mode", "pass", "environment"
MOST_REPEATS = 1000
#: The option of `base` that names a configuration.
CONFIG = "config"

# Letters, digits and dots: `trainer.precision`, `trainer.callbacks+`.
_OPTION = re.compile(r"[A-Za-z_][\w.]*\+?")
_SIDE = re.compile(r"[A-Za-z0-9]{1,40}")
# What the sweep itself sets, and what to write instead.
_OWN = {
    "measure.mode": "list modes under `modes`",
    "measure.results_dir": "give --results_dir to the command",
    "measure.run_id": "the sweep names its runs itself",
}
_COMMAND_LINE = "the command line"
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
    modes: list[Mode] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    environments: dict[str, EnvironmentSpec] = field(default_factory=dict)
    repeats: Annotated[int, Meta(ge=1, le=MOST_REPEATS)] = 3
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    largest: LargestSpec | None = None
    view: Any = None

    @property
    def study(self) -> str | None:
        """Name of the study whose view shows the sweep."""
        found = self.view.get("name") if isinstance(self.view, dict) else self.view
        return str(found) if found else None

    def axes(self) -> list[list[Options]]:
        """The matrix's axes: for each value the options that it sets."""
        return [
            [value if _is_named(axis, values) else {axis: value} for value in values]
            for axis, values in self.matrix.items()
        ]

    def axis_options(self) -> set[str]:
        """Every option that differs from cell to cell."""
        values = [value for axis in self.axes() for value in axis]
        passes = [PASSES[name].options for name in self.passes]
        found = {option for options in (*values, *passes, *self.include, *self.sides.values()) for option in options}
        return found - {MODE, PASS, ENVIRONMENT, CONFIG}

    def changed(self, options: Options, repeats: int | None = None, timeout_s: float | None = None) -> SweepFile:
        """The file with what the command line gives for every cell.

        Raises:
            UsageError: an option that an axis sets, or a value out of its range.
        """
        for option in options:
            if option in self.axis_options():
                raise UsageError(f"--{option} is an axis of this sweep; change the file, or leave the option out")
        _check_options(_COMMAND_LINE, options)
        given = {"repeats": repeats, "timeout_s": timeout_s}
        changes = {name: value for name, value in given.items() if value is not None}
        return sweep_from({**self.as_mapping(), "base": {**self.base, **options}, **changes})

    def as_mapping(self) -> dict[str, Any]:
        """The file's content, as `sweep_from` takes it."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


def _is_named(axis: str, values: list[Any]) -> bool:
    """Whether an axis has a name of its own: its values are mappings of options then."""
    return "." not in axis and all(isinstance(value, dict) for value in values)


_OPTIONS_FORM = "a mapping, such as {model.size: small}"
#: What each key takes, to follow `KEY is VALUE; it must be`.
_FORMS = {
    "base": _OPTIONS_FORM,
    "matrix": "a mapping of axes, each with a list of at least one value, such as {model.size: [small, medium]}",
    "include": f"a list, each entry {_OPTIONS_FORM}",
    "exclude": f"a list, each entry {_OPTIONS_FORM}",
    "sides": f"a mapping of two names, each to {_OPTIONS_FORM}",
    "modes": f"a list of some of {', '.join(MODES)}",
    "passes": f"a list of some of {', '.join(PASSES)}",
    "environments": "a mapping of names, each to a mapping of python, revision, tree, variables",
    "largest": "an option, or {option: data.context_length, unit: 64, most: 65536}",
    "repeats": f"a whole number from 1 to {MOST_REPEATS}",
    "timeout_s": "a number of seconds above 0",
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.(.*)`)?", re.DOTALL)
_PLACE = re.compile(r" - at `\$\.(\w+).*`", re.DOTALL)


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
    given = {key: value for key, value in _with_texts(content).items() if value is not None}
    if isinstance(environments := given.get("environments"), dict):
        given["environments"] = {name: _environment(spec or {}) for name, spec in environments.items()}
    if isinstance(option := given.get("largest"), str):
        given["largest"] = {"option": option, "unit": _UNITS.get(option, 1)}
    try:
        sweep = msgspec.convert(given, SweepFile)
    except msgspec.ValidationError as error:
        raise UsageError(_what_is_wrong(str(error), given)) from None
    if not PASSES.keys() >= {*sweep.passes}:
        raise UsageError(f"passes is {sweep.passes}; it must be {_FORMS['passes']}")
    if not math.isfinite(sweep.timeout_s):
        raise UsageError(f"timeout_s is {sweep.timeout_s!r}; it must be {_FORMS['timeout_s']}")
    _check_options("base", sweep.base)
    for axis, values in sweep.matrix.items():
        _check_axis(axis, values)
    for entry in sweep.include:
        _check_options("include", set(entry) - {MODE, PASS, ENVIRONMENT})
        _check_choice(entry, MODE, MODES)
        _check_choice(entry, PASS, PASSES)
        _check_choice(entry, ENVIRONMENT, sweep.environments)
    _check_sides(sweep)
    _check_largest(sweep)
    for name, spec in sweep.environments.items():
        _check_environment(name, spec)
    if not (sweep.sides or sweep.matrix or sweep.include or sweep.modes or sweep.passes or sweep.environments):
        raise UsageError("the matrix is empty: give at least one axis, such as `matrix: {model.size: [small, medium]}`")
    return sweep


def _with_texts(content: Any) -> Any:
    """The content with keys as text, whatever YAML makes of them; raises UsageError for `null:` and `yes:`."""
    if isinstance(content, list):
        return [_with_texts(item) for item in content]
    if not isinstance(content, dict):
        return content
    for key in content:
        if key is None or isinstance(key, bool):
            raise UsageError(f"{key!r} is no name to YAML; write it in quotes")
    return {str(key): _with_texts(value) for key, value in content.items()}


def _environment(spec: Any) -> Any:
    """An environment's values as text: a revision `1e5`, a variable's `1`."""
    if isinstance(spec, dict):
        return {key: _environment(value) for key, value in spec.items() if value is not None}
    return str(spec) if isinstance(spec, int | float) else spec


def _what_is_wrong(message: str, content: dict[str, Any]) -> str:
    """msgspec's complaint as one line: what was given, what is allowed."""
    if unknown := _UNKNOWN.fullmatch(message):
        key, where = unknown.groups()
        known = (EnvironmentSpec if where else SweepFile).__struct_fields__
        hint = suggest(key, known) or f"; known are {', '.join(known)}"
        return f"{'environments: ' if where else ''}unknown key {key!r}{hint}"
    place = _PLACE.search(message)
    assert place is not None, message
    return f"{place[1]} is {reprlib.repr(content[place[1]])}; it must be {_FORMS[place[1]]}"


def _check_axis(axis: str, values: list[Any]) -> None:
    if axis in (MODE, PASS, ENVIRONMENT, "modes", "passes", "environments", CONFIG):
        raise UsageError(
            f"matrix: {axis} is no axis; modes, passes and environments have keys of their own, config belongs in base"
        )
    for options in values if _is_named(axis, values) else [[axis]]:
        _check_options(f"matrix: {axis}", options)


def _check_options(where: str, options: Iterable[object]) -> None:
    for option in options:
        if option in _OWN:
            raise UsageError(f"{where}: {option} is set by the sweep; {_OWN[str(option)]}")
        if where not in ("base", _COMMAND_LINE) and is_secret(str(option)):
            raise UsageError(f"{where}: {option} looks like a secret, and cells go by what differs; give it in base")
        if not _OPTION.fullmatch(str(option)):
            raise UsageError(f"{where}: {option!r} is no option's name; write it as in `lmbench fit -h`: model.size")


def _check_choice(entry: Options, axis: str, allowed: Collection[str]) -> None:
    if axis in entry and entry[axis] not in list(allowed):
        known = f"choose among {', '.join(allowed)}" if allowed else f"there are no {axis}s"
        raise UsageError(f"{axis} {entry[axis]!r} is unknown; {known}")


def _check_sides(sweep: SweepFile) -> None:
    others = {"matrix": sweep.matrix, "include": sweep.include, "modes": sweep.modes, "passes": sweep.passes}
    if not sweep.sides:
        return
    if given := [name for name, value in others.items() if value]:
        raise UsageError(f"sides stand alone, and this sweep has {given[0]} too; leave that out")
    if len(sweep.sides) != 2:
        raise UsageError(f"sides are {', '.join(sweep.sides)}; there must be two of them")
    for name, options in sweep.sides.items():
        if not _SIDE.fullmatch(name):
            raise UsageError(f"sides: {name!r} is no name; take letters and digits, such as A and B")
        _check_options(f"sides: {name}", set(options) - {ENVIRONMENT, MODE})
        _check_choice(options, MODE, MODES)
        _check_choice(options, ENVIRONMENT, sweep.environments)


def _check_largest(sweep: SweepFile) -> None:
    spec = sweep.largest
    if spec is None:
        return
    _check_options("largest", [spec.option])
    if sweep.sides or sweep.passes:
        raise UsageError(f"largest goes with neither {'sides' if sweep.sides else 'passes'}; leave one of them out")
    if spec.option in sweep.axis_options():
        raise UsageError(f"largest: {spec.option} is an axis of this sweep; take it out of the matrix")
    if not str(start := sweep.base.get(spec.option, 1)).isdecimal():
        raise UsageError(f"largest: {spec.option} begins at {start!r} in base; it must be a whole number")
    if spec.most < spec.unit:
        raise UsageError(f"largest: most is {spec.most}, less than unit {spec.unit}; give a larger one")


def _check_environment(name: str, spec: EnvironmentSpec) -> None:
    if spec.tree is not None and spec.revision is None:
        raise UsageError(f"environments: {name}: tree without revision does nothing; name a revision, such as HEAD~1")
