"""The space of a tuning: its axes, which of them apply to a configuration, and which of those can help at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from lmbench.configs import read_yaml
from lmbench.errors import UsageError
from lmbench.precision import find_precision
from lmbench.records.measured import PhaseKernels
from lmbench.records.run import RunRecord
from lmbench.sweep.file import Options

#: The axis whose values follow from the batch size.
MICRO_BATCH = "micro_batch"
BATCH, ACCUMULATION = "data.batch_size", "trainer.accumulate_grad_batches"
_PRECISION, _DEVICES = "trainer.precision", "trainer.devices"
#: An axis that can shorten the step by less than this is left out.
LEAST_SHARE_FRACTION = 0.01


class SpaceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A space as it was written: values by axis, null takes an axis away; with `only` nothing but these axes."""

    axes: dict[str, list[Any] | None] = {}
    acts_on: dict[str, str] = {}
    only: bool = False


class Axis(NamedTuple):
    """Choices of which a configuration has one, each as the options that it sets."""

    name: str
    values: Sequence[Options]
    acts_on: str | None = None


def read_space(path: Path | None) -> list[Axis]:
    """The space that ships with lmbench, with what a file adds to it and takes away.

    Raises:
        UsageError: the file cannot be read, or is no space.
    """
    space = _read(Path(__file__).with_name("space.yaml"))
    if path is not None:
        own = _read(path)
        space = own if own.only else SpaceFile({**space.axes, **own.axes}, {**space.acts_on, **own.acts_on})
    axes = []
    for name, values in space.axes.items():
        is_own_name = "." not in name
        if is_own_name and not all(isinstance(value, dict) for value in values or ()):
            raise UsageError(f"{path}: axis {name} is no option, and its values are no mappings of options")
        options = [value if is_own_name else {name: value} for value in values or ()]
        if values is not None:
            axes.append(Axis(name, options, space.acts_on.get(name)))
    return axes


def _read(path: Path) -> SpaceFile:
    problem = f"space {str(path)!r}"
    try:
        return msgspec.convert(read_yaml(path, problem)[1], SpaceFile)
    except msgspec.ValidationError as error:
        raise UsageError(f"{problem}: {error}; it has `axes` (values by option), `acts_on` and `only`") from None


def setting(tree: Any, name: str) -> Any:
    """A configuration's value of an option by its dotted name; raises KeyError where it has no such option."""
    for key in name.split("."):
        arguments = tree.get("init_args") if isinstance(tree, Mapping) else None
        tree = (arguments if isinstance(arguments, Mapping) and key in arguments else tree) if tree else {}
        if not isinstance(tree, Mapping):
            raise KeyError(name)
        tree = tree[key]
    return tree


def applicable(axes: Sequence[Axis], given: Mapping[str, Any]) -> list[Axis]:
    """Of each axis what the given configuration has options for, is not already, and is not a step back in precision;
    axes without such a value are left out.

    Args:
        given: all settings of the given configuration, as its run keeps them.
    """
    return [left for axis in axes if (left := axis._replace(values=_values(axis, given))).values]


def _values(axis: Axis, given: Mapping[str, Any]) -> list[Options]:
    values = list(axis.values)
    try:
        if axis.name == MICRO_BATCH and not values:
            values = micro_batches(setting(given, BATCH), setting(given, ACCUMULATION))
        if axis.name == "trainer.strategy" and setting(given, _DEVICES) in (1, "1", "auto"):
            return []
        differing = [value for value in values if any(setting(given, name) != value[name] for name in value)]
        return [value for value in differing if not _is_wider(given, value)]
    except KeyError:
        return []


def _is_wider(given: Mapping[str, Any], value: Options) -> bool:
    """Whether it takes a wider dtype for its products than the given configuration has."""
    names = [str(precision or "32-true") for precision in (setting(given, _PRECISION), value.get(_PRECISION))]
    now, then = (known.compute_bytes if (known := find_precision(name)) else 0 for name in names)
    return _PRECISION in value and then > now


def micro_batches(batch_size: int, accumulated: int) -> list[Options]:
    """The same sequences a step, in one part, in half as many or in twice as many."""
    total = batch_size * accumulated
    sizes = dict.fromkeys(size for size in (total, 2 * batch_size, batch_size // 2) if size and total % size == 0)
    return [{BATCH: size, ACCUMULATION: total // size} for size in sizes if size != batch_size]


def share_of(axis: Axis, profiled: RunRecord | None) -> float | None:
    """What part of the step an axis can shorten at most, None where nobody knows."""
    phases = None if profiled is None or profiled.kernels is None else profiled.kernels.phases
    step = None if phases is None else phases.step
    if phases is None or step is None or not step.window_s or axis.acts_on is None:
        return None
    if axis.acts_on == "host_wait":
        return (step.host_wait_s or 0.0) / step.window_s
    phase: PhaseKernels | None = getattr(phases, axis.acts_on, None)
    times = [step.kinds.get(f"{axis.acts_on}_s"), step.parts.get(f"{axis.acts_on}_s"), phase and phase.kernel_s]
    return max((time for time in times if time), default=0.0) / step.window_s
