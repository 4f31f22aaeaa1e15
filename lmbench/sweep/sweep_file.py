"""A sweep's file: what is measured, over which grid, how often."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lmbench.errors import UsageError
from lmbench.records.vocabulary import MODES
from lmbench.report.view import read_view

#: Options by their dotted names, each with its value: `{"model.size": "small"}`.
Options = dict[str, Any]

#: How a cell's process is started; where nothing is said the first, or the last where a file names environments.
ENGINES = ("forkserver", "exec")

#: What a pass sets. `timing` is the measurement itself; the others look at the same cell with another instrument, in a
#: process of their own, once.
PASSES: dict[str, Options] = {
    "timing": {},
    "sync": {"timer.clock": "sync"},
    "kernels": {"trainer.profiler": "kernels"},
}
#: Axes that stand beside the options, under keys of their own in the file.
MODE, PASS, ENVIRONMENT = "mode", "pass", "environment"

# Letters, digits and dots: `trainer.precision`, `trainer.callbacks+`.
_OPTION = re.compile(r"[A-Za-z_][\w.]*\+?")
# What the sweep itself sets, and what to write instead.
_OWN = {
    "measure.mode": "list modes under `modes`",
    "measure.results_dir": "give --results_dir to the command",
    "measure.run_id": "the sweep names its runs itself",
}
_SECRET = {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS"}


@dataclass(frozen=True)
class EnvironmentSpec:
    """Where cells run: another Python, another revision of a working tree, further environment variables.

    `tree` is a folder within a git repository, by default the working directory; it counts only with a `revision`.
    """

    python: str | None = None
    revision: str | None = None
    tree: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepFile:
    """A sweep as it was written.

    `base` are options of every cell (with `config`, a configuration by name or path); `matrix` are the axes, by an
    option's name or by a name of their own, and for each value of an axis the options that it sets.
    """

    base: Options
    matrix: dict[str, list[Options]]
    include: list[Options] = field(default_factory=list)
    exclude: list[Options] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    environments: dict[str, EnvironmentSpec] = field(default_factory=dict)
    repeats: int = 3
    timeout_s: float = 600.0
    engine: str | None = None
    view: str | dict[str, Any] | None = None

    def axis_options(self) -> set[str]:
        """Every option that differs from cell to cell."""
        values = [value for values in self.matrix.values() for value in values]
        passes = [PASSES[name] for name in self.passes]
        found = {option for options in (*values, *passes, *self.include) for option in options}
        return found - {MODE, PASS, ENVIRONMENT}

    def used_engine(self) -> str:
        """The engine that was asked for; environments need interpreters of their own."""
        return self.engine or (ENGINES[-1] if self.environments else ENGINES[0])

    def changed(
        self, options: Options, repeats: int | None = None, timeout_s: float | None = None, engine: str | None = None
    ) -> SweepFile:
        """The file with what the command line gives for every cell.

        Raises:
            UsageError: an option that an axis sets, or a value out of its range.
        """
        for option in options:
            if option in self.axis_options():
                raise UsageError(f"--{option} is an axis of this sweep; change the file, or leave the option out")
        given = {"repeats": repeats, "timeout_s": timeout_s, "engine": engine}
        changes = {name: value for name, value in given.items() if value is not None}
        _check_options("the command line", options)
        changed = replace(self, base={**self.base, **options}, **changes)  # type: ignore[arg-type]
        _check(changed)
        return changed

    def as_mapping(self) -> dict[str, Any]:
        """The file's content, as `sweep_from` takes it."""
        matrix = {
            axis: [options[axis] if set(options) == {axis} else options for options in values]
            for axis, values in self.matrix.items()
        }
        return {**asdict(self), "matrix": matrix}


def read_sweep_file(path: Path) -> SweepFile:
    """Read a YAML file.

    Raises:
        UsageError: it cannot be read, or is no sweep.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise UsageError(f"sweep file {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"sweep file {str(path)!r} is no YAML: {' '.join(str(error).split())}") from error
    try:
        if isinstance(content, dict) and isinstance(content.get("view"), dict):
            # What is stored of the sweep still says whose view it is.
            content["view"].setdefault("name", path.stem)
        return sweep_from(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def sweep_from(content: Any) -> SweepFile:
    """A sweep from a file's content.

    Raises:
        UsageError: unknown keys, an empty matrix, or a value of the wrong form.
    """
    if not isinstance(content, Mapping):
        raise UsageError("a sweep is a mapping with `base`, `matrix` and so on")
    _check_keys("", content, [f.name for f in fields(SweepFile)])
    given = {name: value for name, value in content.items() if value is not None}
    sweep = SweepFile(
        base=_options("base", given.get("base", {})),
        matrix={str(name): _axis(str(name), values) for name, values in _mapping(given, "matrix").items()},
        include=[_included(entry) for entry in _list(given, "include")],
        exclude=[dict(_as_mapping("exclude", entry)) for entry in _list(given, "exclude")],
        modes=[_one_of("modes", mode, MODES) for mode in _list(given, "modes")],
        passes=[_one_of("passes", name, PASSES) for name in _list(given, "passes")],
        environments={_name(name): _environment(name, spec) for name, spec in _mapping(given, "environments").items()},
        **{name: given[name] for name in ("repeats", "timeout_s", "engine", "view") if name in given},
    )
    _check(sweep)
    if not (sweep.matrix or sweep.include or sweep.modes or sweep.passes or sweep.environments):
        raise UsageError("the matrix is empty: give at least one axis, such as `matrix: {model.size: [small, medium]}`")
    return sweep


def _axis(name: str, values: Any) -> list[Options]:
    """The options that each value of an axis sets.

    Under the name of an option stands a list of its values; under any other name a list of mappings of options.
    """
    if not isinstance(values, list) or not values:
        raise UsageError(f"matrix: {name} is {values!r}; an axis is a list of at least one value")
    where = f"matrix: {name}"
    if name in (MODE, PASS, ENVIRONMENT, "modes", "passes", "environments", "config"):
        raise UsageError(
            f"{where} is no axis; modes, passes and environments have keys of their own, config belongs in base"
        )
    if "." not in name and all(isinstance(value, Mapping) for value in values):
        return [_options(where, value) for value in values]
    _check_options("matrix", [name])
    return [{name: value} for value in values]


def _options(where: str, given: Any, names: Iterable[str] = ()) -> Options:
    options = {str(name): value for name, value in _as_mapping(where, given).items()}
    _check_options(where, set(options) - set(names))
    return options


def _check_options(where: str, options: Iterable[str]) -> None:
    for option in options:
        if option in _OWN:
            raise UsageError(f"{where}: {option} is set by the sweep; {_OWN[option]}")
        if not _OPTION.fullmatch(option):
            raise UsageError(f"{where}: {option!r} is no option's name; write it as in `lmbench fit -h`: model.size")


def _name(name: Any) -> str:
    if name is None or isinstance(name, bool):
        raise UsageError(f"environments: {name!r} is no name to YAML; write it in quotes")
    return str(name)


def _environment(name: object, spec: Any) -> EnvironmentSpec:
    where = f"environments: {name}"
    content = _as_mapping(where, {} if spec is None else spec)
    _check_keys(f"{where}: ", content, [f.name for f in fields(EnvironmentSpec)])
    content = {key: value for key, value in content.items() if value is not None}
    variables = {str(key): str(value) for key, value in _mapping(content, "variables").items()}
    for variable in variables:
        if _SECRET & set(variable.upper().split("_")):
            raise UsageError(f"{where}: {variable} looks like a secret, and this file is stored; export it instead")
    texts = {key: str(value) for key, value in content.items() if key != "variables"}
    if "tree" in texts and "revision" not in texts:
        raise UsageError(f"{where}: tree without revision does nothing; name a revision, such as HEAD~1")
    return EnvironmentSpec(**texts, variables=variables)


def _included(entry: Any) -> Options:
    options = _options("include", entry, {MODE, PASS, ENVIRONMENT})
    for axis, allowed in ((MODE, MODES), (PASS, PASSES)):
        if axis in options:
            _one_of(f"include: {axis}", options[axis], allowed)
    return options


def _one_of(where: str, given: Any, allowed: Iterable[str]) -> str:
    if given not in list(allowed):
        raise UsageError(f"{where}: {given!r} is unknown; choose among {', '.join(allowed)}")
    return str(given)


def _check(sweep: SweepFile) -> None:
    if not isinstance(sweep.repeats, int) or isinstance(sweep.repeats, bool) or sweep.repeats < 1:
        raise UsageError(f"repeats is {sweep.repeats!r}; it must be a whole number of at least 1")
    is_number = isinstance(sweep.timeout_s, int | float) and not isinstance(sweep.timeout_s, bool)
    if not is_number or not 0 < sweep.timeout_s < math.inf:
        raise UsageError(f"timeout_s is {sweep.timeout_s!r}; it must be a number of seconds above 0")
    if sweep.engine is not None:
        _one_of("engine", sweep.engine, ENGINES)
    if sweep.engine == "forkserver" and sweep.environments:
        raise UsageError("environments need interpreters of their own: engine forkserver cannot be; leave it out")
    if sweep.view is not None:
        read_view(sweep.view, sweep.matrix)


def _check_keys(where: str, content: Mapping[Any, Any], known: list[str]) -> None:
    for key in content:
        if key not in known:
            near = get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise UsageError(f"{where}unknown key {key!r}; {hint}")


def _mapping(content: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    return _as_mapping(key, content.get(key, {}))


def _as_mapping(where: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} is {value!r}; it must be a mapping, such as {{model.size: small}}")
    return value


def _list(content: Mapping[Any, Any], key: str) -> list[Any]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise UsageError(f"{key} is {value!r}; it must be a list")
    return value
