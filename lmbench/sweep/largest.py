"""The largest value of an option that fits: which one to try next, and the cell that tries it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from lmbench.records.run import RunRecord
from lmbench.sweep.file import LargestSpec
from lmbench.sweep.plan import GridCell

#: How far from the first value the next one is tried, as a part of it; twice as far each time until the border is met.
_FIRST_STRIDE = 1 / 16


def next_value(tried: Mapping[int, bool], first: int, spec: LargestSpec) -> int | None:
    """The value to try next, by which of those that were tried fit; None when the border is known.

    Starts at `first`, strides away from it, each time twice as far, until one value fits and a larger one does not,
    and halves what lies between. All values are multiples of `spec.unit`, from it to `spec.most`.
    """
    unit, most = spec.unit, spec.most // spec.unit * spec.unit
    if not tried:
        return min(max(first // unit * unit, unit), most)
    fits = max((value for value, does in tried.items() if does), default=0)
    fails = min((value for value, does in tried.items() if not does and value > fits), default=None)
    stride = max(1, round(first * _FIRST_STRIDE / unit)) * unit << (len(tried) - 1)
    if fails is None:
        return None if fits >= most else min(fits + stride, most)
    if fails - fits <= unit:
        return None
    if fits == 0 and fails > stride:
        return fails - stride
    return (fits + fails) // 2 // unit * unit


def trial_of(cell: GridCell, value: int, spec: LargestSpec) -> GridCell:
    """The cell with a value of the option that is looked for."""
    return replace(
        cell,
        id=f"{cell.id}-{spec.option.rpartition('.')[2]}-{value}",
        axes={**cell.axes, spec.option: value},
        options={**cell.options, spec.option: value},
    )


def trial_pattern(spec: LargestSpec) -> str:
    """What the ids of all trials of a cell look like, as a regular expression with the cell's as group `cell`."""
    return rf"(?P<cell>.+)-{re.escape(spec.option.rpartition('.')[2])}-\d+"


def does_fit(run: RunRecord) -> bool | None:
    """Whether a trial shows that its value fits: it ran, and the allocator never had to give back what it held to go
    on. None where it shows nothing, since it ended for another reason."""
    if run.outcome == "oom":
        return False
    return not run.memory.run_alloc_retry_count if run.outcome == "ok" else None
