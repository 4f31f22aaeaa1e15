"""What the steps of a window say about a long training: growth of memory, the cost of checkpoints, changes of pace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lmbench.records.endurance import BESIDE, Growth, Saving, StepChange
from lmbench.records.statistics import level_changes, mean_interval, ratio_from, slope
from lmbench.records.step import StepRecord, values_of

#: A slope takes at least so many readings, half of them in each half of the window.
_LEAST_READINGS = 12
#: Steps before and after those beside a checkpoint's writing that they are compared with. On a busy CPU, whose steps
#: spread by 30 %, +10 % in three steps was found in 90 % of 20 checkpoints, and in 75 % by medians of whole cycles.
_LEAST_AROUND = 4
#: Changes of pace are looked for in the medians of at most so many blocks of steps, each of at least `_BLOCK_STEPS`.
_MAX_BLOCKS, _BLOCK_STEPS = 200, 5
#: Changes of pace are told in windows of this length, from this size on.
_LEAST_WINDOW_S, _LEAST_CHANGE = 30.0, 0.02


def growth_of(steps: Sequence[StepRecord], name: str) -> Growth:
    """The growth of a field of step records, such as `host_bytes`, over the steps that have it."""
    readings = np.array([(s.step, getattr(s, name)) for s in steps if getattr(s, name) is not None], dtype=float)
    if len(readings) < _LEAST_READINGS:
        return Growth()
    slopes = [slope(*part.T) for part in (readings, *np.array_split(readings, 2))]
    return Growth(slopes[0][0], min(low for _, low in slopes))


def saving_of(steps: Sequence[StepRecord], saving: Saving) -> None:
    """Fill in, from the window's steps, what checkpoints cost; a step with `checkpoint_s` ends with a checkpoint.

    A cycle begins with the step of a checkpoint, and ends before that of the next one, or at the window's end. The last
    cycle is cut short, and tells no cost unless it is the only one. Each step has a `step_s` above 0.
    """
    saves = [index for index, step in enumerate(steps) if step.checkpoint_s]
    saving.count = len(saves)
    if not saves:
        return
    saving.blocked_s = statistics.fmean(steps[index].checkpoint_s or 0.0 for index in saves)
    if saving.checkpoint_bytes:
        saving.written_bytes_per_s = saving.checkpoint_bytes / max(saving.blocked_s, saving.written_s or 0.0)
    ratios, costs = list[float](), list[float]()
    for first, end in pairwise([*saves, len(steps)]):
        cycle = steps[first:end]
        alone_s = [step.step_s or 0.0 for step in cycle[1:] if not step.is_saving]
        beside = [index for index in range(first + 1, end) if steps[index].is_saving]
        if beside:
            reach = max(_LEAST_AROUND, 2 * len(beside))
            around = steps[max(0, beside[0] - reach) : beside[-1] + 1 + reach]
            slowed = statistics.fmean(math.log(steps[index].step_s or 1.0) for index in beside)
            others = [math.log(step.step_s or 1.0) for step in around if not step.is_saving]
            if others:
                ratios.append(slowed - statistics.fmean(others))
        if alone_s and (end < len(steps) or len(saves) == 1):
            taken_s = sum((step.step_s or 0.0) + (step.checkpoint_s or 0.0) for step in cycle)
            costs.append(taken_s / (len(cycle) * statistics.median(alone_s)) - 1)
    if len(saves) > 1:
        saving.interval_steps = (saves[-1] - saves[0]) / (len(saves) - 1)
    if len(ratios) > 1:
        saving.slowed_fraction = ratio_from(statistics.fmean(ratios)) - 1
        saving.slowed_interval = [ratio_from(end) - 1 for end in mean_interval(ratios)]
    if costs:
        saving.cost_fraction = statistics.fmean(costs)
    if len(costs) > 1:
        saving.cost_interval = list(mean_interval(costs))


def changes_of(steps: Sequence[StepRecord]) -> list[StepChange]:
    """The changes of the step time within the window, by 2 % at least, each with what else changed.

    Args:
        steps: the window's steps, each with a `step_s` above 0.
    """
    count = min(len(steps) // _BLOCK_STEPS, _MAX_BLOCKS)
    if count < 4 or math.fsum(step.step_s or 0.0 for step in steps) < _LEAST_WINDOW_S:
        return []
    borders = np.linspace(0, len(steps), count + 1).astype(int).tolist()
    levels = level_changes([statistics.median(s.step_s or 0.0 for s in steps[a:b]) for a, b in pairwise(borders)])
    edges = [0, *(borders[change.index] for change in levels), len(steps)]
    changes = []
    for change, before, at, after in zip(levels, edges, edges[1:], edges[2:], strict=False):
        if abs(change.point - 1) >= _LEAST_CHANGE:
            elapsed_s = math.fsum((s.step_s or 0.0) + (s.excluded_s or 0.0) for s in steps[:at])
            sides = (_beside(steps[before:at]), _beside(steps[at:after]))
            changes.append(StepChange(steps[at].step or 0, elapsed_s, change.point, change.low, change.high, *sides))
    return changes


def _beside(steps: Sequence[StepRecord]) -> dict[str, float]:
    """The mean of each field of `BESIDE` over the steps that have it."""
    series = {name: values_of(steps, name) for name in BESIDE}
    return {name: statistics.fmean(values) for name, values in series.items() if values}
