"""The space of a tuning: its axes, which of them apply to a configuration, and how much each can shorten a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from lmbench.configs import converted, read_yaml
from lmbench.errors import UsageError, unknown
from lmbench.precision import find_precision
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.store import check_name
from lmbench.records.vocabulary import Values
from lmbench.sweep.file import Options

#: The axis whose values are computed from the batch size.
MICRO_BATCH = "micro_batch"
BATCH, ACCUMULATION = "data.batch_size", "trainer.accumulate_grad_batches"
_PRECISION, _DEVICES, _COMPILE = "trainer.precision", "trainer.devices", "trainer.compile"
_VARIANT = "model.optimizer_variant"
#: In a value that a CPU cannot gain by: fp8, and the mode of torch.compile that captures CUDA graphs.
_GPU_ONLY = re.compile("fp8|reduce-overhead")
#: An axis that can shorten a step by a smaller fraction than this is left out.
LEAST_SHARE_FRACTION = 0.01
#: The value of an option that a configuration lacks.
_LACKING = object()


class SpaceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a space file.

    `axes` has the values of each axis; null removes an axis of the shipped space. `acts_on` has the what-if that
    bounds what an axis can save. With `only`, the space has no axes but these.
    """

    axes: dict[str, list[Any] | None] = {}
    acts_on: dict[str, str] = {}
    only: bool = False


class Axis(NamedTuple):
    """An axis: its values exclude each other, and each is a mapping of the options that it sets."""

    name: str
    values: Sequence[Options]
    acts_on: str | None = None
    is_users: bool = False

    @property
    def compiles_whole(self) -> bool:
        """Whether a value compiles the whole network at once, which takes minutes before the first step."""
        compiled = [value[_COMPILE] for value in self.values if _COMPILE in value]
        return any(not settings.get("regional") if isinstance(settings, Mapping) else settings for settings in compiled)


def read_space(path: Path | None) -> list[Axis]:
    """The axes of the shipped space, changed by a user's space file if a path is given.

    Raises:
        UsageError: the file cannot be read, is not a space, takes away an unknown axis, or has one without values.
    """
    space = shipped = _read(Path(__file__).with_name("space.yaml"))
    if path is not None:
        user = _read(path)
        for name, values in user.axes.items():
            if values is None and name not in shipped.axes:
                raise unknown(f"axis in {path}", name, shipped.axes)
            if not values and values is not None and name != MICRO_BATCH:
                raise UsageError(f"{path}: axis {name} has no values; give some, or null to take it away")
        space = user if user.only else SpaceFile({**space.axes, **user.axes}, {**space.acts_on, **user.acts_on})
    axes = []
    for name, values in space.axes.items():
        if values is None:
            continue
        # The runs of an axis have a folder of its name.
        check_name("axis", name)
        is_option = "." in name
        if not is_option and not all(isinstance(value, dict) for value in values):
            raise UsageError(f"{path}: axis {name} is no option, and its values are no mappings of options")
        options = [{name: value} if is_option else value for value in values]
        axes.append(Axis(name, options, space.acts_on.get(name), is_users=name not in shipped.axes))
    return axes


def _read(path: Path) -> SpaceFile:
    label = f"space {str(path)!r}"
    return converted(read_yaml(path, label)[1], SpaceFile, label)


def _with_arguments(tree: Any) -> Any:
    """Settings in which the arguments of a class stand beside its `class_path`, and not in `init_args`."""
    if not isinstance(tree, Mapping):
        return tree
    settings = {key: _with_arguments(value) for key, value in tree.items()}
    arguments = settings.pop("init_args", None) or {}
    return {**settings, **arguments}


def settings_of(record: RunRecord) -> Values:
    """All settings of a run, with the variant of its optimizer where it was left to the optimizer's default."""
    settings: Values = _with_arguments(record.config)
    if value_at(settings, _VARIANT, _LACKING) is None:
        settings["model"]["optimizer_variant"] = str(record.model.optimizer).rpartition(" ")[2]
    return settings


def applicable(axes: Sequence[Axis], settings: Values, has_gpu: bool = True) -> list[Axis]:
    """The axes with those values that a configuration has options for, that differ from its own, and that do not widen
    its precision. Axes without such a value are left out.

    Args:
        settings: all settings of the configuration, as `settings_of` has them.
        has_gpu: without a GPU, values of the shipped space that need one are left out too.
    """
    narrowed = []
    for axis in axes:
        is_tried = has_gpu or axis.is_users
        values = [value for value in _values(axis, settings) if is_tried or not _GPU_ONLY.search(str(value))]
        narrowed.append(axis._replace(values=values))
    return [axis for axis in narrowed if axis.values]


def _values(axis: Axis, settings: Values) -> list[Options]:
    values = list(axis.values)
    if axis.name == MICRO_BATCH and not values:
        batch_size = value_at(settings, BATCH)
        # A loader of the user's own decides its batches.
        values = micro_batches(batch_size, value_at(settings, ACCUMULATION)) if batch_size else []
    if axis.name == "trainer.strategy" and value_at(settings, _DEVICES) in (1, "1", "auto"):
        return []
    if any(value_at(settings, name, _LACKING) is _LACKING for value in values for name in value):
        return []
    differing = [value for value in values if any(value_at(settings, name) != value[name] for name in value)]
    return [value for value in differing if not _widens(settings, value)]


def _widens(settings: Values, value: Options) -> bool:
    """Whether a value computes products in a wider dtype than the configuration does."""
    names = [str(precision or "32-true") for precision in (value_at(settings, _PRECISION), value.get(_PRECISION))]
    before, after = (precision.compute_bytes if (precision := find_precision(name)) else 0 for name in names)
    return _PRECISION in value and after > before


def micro_batches(batch_size: int, accumulated: int) -> list[Options]:
    """Splits of the sequences of a step into a single micro-batch, half as many and twice as many as now."""
    total = batch_size * accumulated
    sizes = dict.fromkeys(size for size in (total, 2 * batch_size, batch_size // 2) if size and total % size == 0)
    return [{BATCH: size, ACCUMULATION: total // size} for size in sizes if size != batch_size]


def share_of(axis: Axis, profiled: RunRecord | None) -> float | None:
    """The largest fraction of the step that an axis can save, by the what-if of a trace; None where it is unknown."""
    kernels = profiled.kernels if profiled else None
    if kernels is None or not kernels.path_s:
        return None
    change_s = kernels.what_if.get(axis.acts_on or "")
    return None if change_s is None else max(0.0, -change_s / kernels.path_s)
