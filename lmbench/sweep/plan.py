"""The plan of a sweep, made from its file: the cells of the grid, their repeats, and the environments they run in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmbench.configs import read_config
from lmbench.errors import UsageError
from lmbench.files import short_digest
from lmbench.fit_options import option_words
from lmbench.masking import MASK, keep_secret, masked_whole, secrets_of, to_fill_in
from lmbench.records.passes import PASS as PASSES
from lmbench.records.passes import TIMING
from lmbench.records.schema import value_at
from lmbench.records.settings import as_text
from lmbench.records.store import file_name
from lmbench.records.vocabulary import SIDE, Values
from lmbench.sweep.environments import HERE, Environment, resolve
from lmbench.sweep.file import CONFIG, ENVIRONMENT, MODE, PASS, Options, SweepFile

_MAX_NAME = 70
_COMPILED_ALIKE = (PASS, SIDE, "seed_everything")


@dataclass(frozen=True)
class GridCell:
    """One point of the grid.

    Attributes:
        id: begins the names of its run folders; the values that differ from other cells, and a digest of all settings.
        axes: its values by axis: options by their names, `side`, `mode`, `pass` and `environment`.
        command: `fit` or `validate`.
        options: options of the command line, without `config`.
        config: name or path of its configuration, as the sweep's file has it.
    """

    id: str
    axes: Values
    command: str
    options: Options
    environment: Environment = HERE
    config: str | None = None

    @property
    def compiled_as(self) -> str:
        """A digest that cells share if they compile the same code: they differ in pass, side or seed at most."""
        return digest({axis: value for axis, value in self.axes.items() if axis not in _COMPILED_ALIKE}, self.config)

    def words(self, copy: Path | None = None) -> list[str]:
        """The words after `lmbench`. `copy` is the path of a copy of the cell's configuration, to name instead."""
        config = {} if self.config is None else {CONFIG: str(copy or self.config)}
        return [self.command, *option_words({**config, **self.options})]


@dataclass(frozen=True)
class Job:
    """One repeat of a cell. Repeat 0 is a trial where the sweep searches a largest value."""

    cell: GridCell
    repeat: int

    @property
    def name(self) -> str:
        """The name of its run's folder."""
        return f"{self.cell.id}-r{self.repeat}"


@dataclass(frozen=True)
class Plan:
    """Everything about a sweep that is known before it runs.

    Attributes:
        configs: text and parsed content of each configuration, by its name or path in the sweep's file.
        chosen: the rounds of repeats that are measured here.
        is_part: whether the user chose rounds (`--rounds`), so that others may be measured elsewhere.
        command: the words after `lmbench` that repeat the sweep anywhere; empty where they are not known.
    """

    name: str
    file: SweepFile
    cells: list[GridCell]
    configs: Mapping[str, tuple[str, Any]]
    chosen: Sequence[int]
    is_part: bool = False
    command: Sequence[str] = ()

    def round(self, repeat: int) -> list[Job]:
        """One repeat of every cell, so that a drift over time affects all cells alike.

        A coin decides which of two sides begins. Passes other than timing are measured in repeat 0 alone.
        """
        is_turned = self.file.sides and random.Random(f"{self.file.coin_seed} {repeat}").random() < 0.5
        cells = self.cells[::-1] if is_turned else self.cells
        return [Job(cell, repeat) for cell in cells if cell.axes.get(PASS, TIMING) == TIMING or not repeat]

    def position(self, job: Job) -> int | None:
        """The place of a job's side in its round, None without sides."""
        return self.round(job.repeat).index(job) if self.file.sides else None

    def option(self, cell: GridCell, name: str) -> Any:
        """A cell's value of an option such as `trainer.devices`, from its options or else from its configuration."""
        _, content = ("", None) if cell.config is None else self.configs[cell.config]
        return cell.options.get(name, value_at(content, name))

    def ranks(self, cell: GridCell) -> tuple[int, int]:
        """The number of nodes of a cell, and of ranks on each; 1 rank where devices are `auto` or -1 (all)."""
        devices, nodes = self.option(cell, "trainer.devices"), self.option(cell, "trainer.num_nodes") or 1
        if isinstance(devices, str) and "," in devices:
            devices = list(filter(None, devices.split(",")))
        count = str(len(devices) if isinstance(devices, list) else devices)
        if not str(nodes).isdecimal():
            raise UsageError(f"trainer.num_nodes is {nodes!r}; give a whole number")
        return int(nodes), int(count) if count.isdecimal() else 1

    def jobs(self) -> list[Job]:
        """The jobs of all rounds that are measured here, round by round."""
        return list(itertools.chain.from_iterable(map(self.round, self.chosen)))


def digest(*parts: object) -> str:
    """A short digest of values that JSON can hold."""
    return short_digest(as_text(parts))


def make_plan(name: str, file: SweepFile, chosen: str | None = None) -> Plan:
    """Plan a sweep: read the configurations that its file names, and lay out its cells.

    `chosen` lists the rounds to measure here, such as `2,5`; None stands for all.

    Raises:
        UsageError: a configuration, an environment or a secret is missing, the grid has no cells, or there is no such
            round.
    """
    rounds: Sequence[int] = range(file.repeats)
    if chosen is not None:
        words = chosen.split(",")
        if not all(word.isdecimal() and int(word) < file.repeats for word in words):
            raise UsageError(
                f"--rounds is {chosen!r}; this sweep has rounds 0 to {file.repeats - 1}: give some of them"
            )
        rounds = sorted({int(word) for word in words})
        if file.largest is not None and len(rounds) < file.repeats:
            raise UsageError(f"--rounds: this sweep looks for the largest {file.largest.option}, on one machine")
    named = filter(None, (options.get(CONFIG) for options in (file.base, *file.sides.values())))
    configs = {config: read_config(config) for config in map(str, named)}
    contents = {config: content for config, (_, content) in configs.items()}
    keep_secret(value for _, value in secrets_of([file.as_mapping(), *contents.values()]))
    return Plan(name, file, _cells(file, contents), configs, rounds, chosen is not None)


def axes_of(points: Iterable[Options]) -> list[str]:
    """The names of all axes, in the order in which they first appear."""
    return [*dict.fromkeys(itertools.chain.from_iterable(points))]


def _points(file: SweepFile) -> list[Options]:
    """The values of each cell by axis: points of the matrix without excluded ones, then included points.

    The last axis of the matrix varies fastest.

    Raises:
        UsageError: two axes set the same option, an exclude fits no cell, or no cell is left.
    """
    axes = file.axes()
    points: list[Options] = [{}] if axes else []
    for axis in axes:
        if both := set().union(*points) & set().union(*axis):
            raise UsageError(f"matrix: two axes set {both.pop()}")
        points = [{**point, **options} for point in points for options in axis]
    for rule in file.exclude:
        excluded = {axis: values if isinstance(values, list) else [values] for axis, values in rule.items()}
        kept = [point for point in points if any(point.get(axis) not in values for axis, values in excluded.items())]
        if len(kept) == len(points):
            names = ", ".join(axes_of(points)) or "those of the matrix, and there is none"
            raise UsageError(f"exclude: {rule} fits no cell; axes are {names}")
        points = kept
    points += file.include
    if not points:
        raise UsageError("exclude leaves no cell")
    return points


def _cells(file: SweepFile, configs: Values) -> list[GridCell]:
    """The cells in order. A cell's id depends on the content of its configuration and on its environment, too.

    Raises:
        UsageError: two cells are the same, or a secret has no value or stands in a list.
    """
    points, environments = _points(file), resolve(file.environments)
    varying = [axis for axis in axes_of(points) if len({as_text([point.get(axis)]) for point in points}) > 1]
    cells: dict[tuple[str, Any], GridCell] = {}
    for point in points:
        axes = {axis: value for axis, value in point.items() if axis != CONFIG}
        options = {option: value for option, value in point.items() if option not in (SIDE, MODE, PASS, ENVIRONMENT)}
        options = {**file.base, **options, **PASSES[point.get(PASS, TIMING)].options}
        config = options.pop(CONFIG, None)
        content = None if config is None else configs[str(config)]
        # The cell's process reads a masked copy of the configuration, so options give it the secrets.
        secrets = dict(secrets_of(content))
        for name, secret in secrets.items():
            if value_at(content, name) != secret:
                raise UsageError(f"config: {name} is a secret in a list, which no option sets; export it instead")
        options = {**secrets, **options}
        for name in to_fill_in(options):
            raise UsageError(f"{name} is not stored in a sweep's folder; go on with --{name} VALUE, or with its file")
        mode = point.get(MODE)
        command = "validate" if mode == "inference" else "fit"
        if mode is not None and command == "fit":
            options["measure.mode"] = mode
        # The digest leaves out values of secrets: a new one measures the same.
        public = {option: MASK if to_fill_in(value) else value for option, value in masked_whole(options).items()}
        environment = environments.get(point.get(ENVIRONMENT, ""), HERE)
        spec = environment.spec
        facts = masked_whole({"python": spec.python, "commit": spec.revision, "variables": spec.variables})
        own = digest(command, masked_whole(content), sorted(public.items()), None if environment is HERE else facts)
        name = "-".join(filter(None, (_part(axis, point.get(axis)) for axis in varying if axis != CONFIG)))
        cell_id = f"{name[:_MAX_NAME].strip('-.') or command}-{own}"
        cell = GridCell(cell_id, axes, command, options, environment, None if config is None else str(config))
        # Only sides A and B may be equal.
        if (equal := cells.setdefault((own, axes.get(SIDE)), cell)) is not cell:
            raise UsageError(f"two cells are the same: {equal.axes} and {axes}; remove one of them")
    return list(cells.values())


def _part(axis: str, value: Any) -> str:
    """A value as a part of a cell's id; a number or flag follows its option's name."""
    if value is None or (axis, value) == (PASS, TIMING):
        return ""
    text = file_name(as_text(value))
    return text if isinstance(value, str) else f"{axis.rpartition('.')[2]}-{text}"
