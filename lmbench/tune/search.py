"""The search: one axis after the other, each value on top of the best so far, and what came of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import scipy  # type: ignore[import-untyped]

from lmbench.compare.sides import split_usable, typical_step_s
from lmbench.errors import unknown
from lmbench.records.load import Run
from lmbench.records.run import RunRecord
from lmbench.records.statistics import CONFIDENCE, geometric_mean, logs_of, ratio_from
from lmbench.sweep.file import Options
from lmbench.tune.space import Axis

#: A choice is taken where it is better by so much: what is smaller one run does not tell, and the plainer stays.
LEAST_GAIN_FRACTION = 0.005
#: So far behind the best one run may leave a trial that is measured again.
NEAR_FRACTION = 0.05
_DTYPE = re.compile("precision|dtype")


class Goal(NamedTuple):
    """What is looked for: the cost of a run, of which less is better."""

    name: str
    cost: Callable[[RunRecord], float | None]


def _seconds_per_token(run: RunRecord) -> float | None:
    """Of a module whose tokens nobody counts, seconds per step."""
    step_s = typical_step_s(run)
    return step_s and step_s / (run.window.step_tokens or 1)


def _joules_per_token(run: RunRecord) -> float | None:
    per_token_s, power_w = _seconds_per_token(run), run.device_state.mean_power_w
    return per_token_s * power_w if per_token_s and power_w else None


def peak_of(run: RunRecord) -> int | None:
    """Bytes that the allocator held at most, on a CPU the process."""
    return run.memory.run_peak_reserved_bytes or run.memory.host_peak_rss_bytes


GOALS = {
    goal.name: goal
    for goal in (
        Goal("tokens_per_s", _seconds_per_token),
        Goal("joules_per_token", _joules_per_token),
        Goal("peak", peak_of),
    )
}


def goal_of(name: str) -> Goal:
    """Raises UsageError for a goal that there is not."""
    if name not in GOALS:
        raise unknown("--for", name, GOALS)
    return GOALS[name]


class Choice(NamedTuple):
    """A value of an axis."""

    axis: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """The choice in words: `compile`, `precision fp8-tensorwise`, `batch_size 8, accumulate_grad_batches 2`."""
        words = []
        for name, value in self.options.items():
            last = name.rpartition(".")[2]
            parts = {f"{last} {key}": part for key, part in value.items()} if isinstance(value, dict) else {last: value}
            for key, part in parts.items():
                words.append(key if part is True else f"no {key}" if part is False else f"{key} {part}")
        return ", ".join(words)


@dataclass(frozen=True)
class Trial:
    """A configuration: the given one with choices, one of an axis at most."""

    choices: tuple[Choice, ...] = ()

    @property
    def key(self) -> frozenset[str]:
        """The same for the same choices."""
        return frozenset(map(str, self.choices))

    def with_choice(self, choice: Choice) -> Trial:
        return Trial((*(kept for kept in self.choices if kept.axis != choice.axis), choice))

    def fallbacks(self) -> Iterator[Trial]:
        """The same without one choice, without two, and so on: those first that change a dtype, then the last ones."""
        late = self.choices[::-1]
        suspects = sorted(late, key=lambda choice: not any(map(_DTYPE.search, choice.options)))
        for count in range(1, len(suspects) + 1):
            for dropped in combinations(suspects, count):
                yield Trial(tuple(choice for choice in self.choices if choice not in dropped))

    @property
    def options(self) -> Options:
        """What differs from the given configuration."""
        return {name: value for choice in self.choices for name, value in choice.options.items()}

    def __str__(self) -> str:
        return "; ".join(map(str, self.choices)) or "as given"


@dataclass
class Tried:
    """A trial with its runs. `before` is the trial that it adds its last choice to; `problem` says why it was not run,
    or cannot be the answer."""

    trial: Trial
    before: Trial | None = None
    runs: list[Run] = field(default_factory=list)
    predicted_bytes: int | None = None
    problem: str = ""

    @property
    def adds_one(self) -> bool:
        """Whether it is the trial before with its last choice."""
        return self.before is not None and self.before.key == Trial(self.trial.choices[:-1]).key

    def costs(self, goal: Goal) -> list[float]:
        """The cost of every run that counts; a guard that failed, and wrong attention, make one that does not."""
        usable, left_out = split_usable(self.runs, takes_failed=False)
        if left_out and not usable:
            self.problem = self.problem or left_out[0].reason
        costs = [goal.cost(run.record) for run in usable]
        return [cost for cost in costs if cost]

    def cost(self, goal: Goal) -> float:
        """Infinite where it cannot be the answer."""
        costs = self.costs(goal)
        return geometric_mean(costs) if costs and not self.problem else math.inf

    @property
    def record(self) -> RunRecord | None:
        """Of its last run that ended well."""
        return next((run.record for run in reversed(self.runs) if run.outcome == "ok"), None)


def search(
    axes: Sequence[Axis], given: Tried, goal: Goal, measure: Callable[[Axis, list[Tried]], None]
) -> tuple[list[Tried], Tried]:
    """Try the values of each axis on top of the best so far; returns all trials in their order, and the best.

    `measure` fills in the runs of the trials that it is given, or why one has none. One change at a time takes the sum
    of the axes' values and not their product, and finds the best where choices do not oppose each other.
    """
    tried, best = [given], given
    for axis in axes:
        trials = [Tried(best.trial.with_choice(Choice(axis.name, value)), best.trial) for value in axis.values]
        measure(axis, trials)
        tried += trials
        leader = min(trials, key=lambda each: each.cost(goal))
        if leader.cost(goal) < best.cost(goal) * (1 - LEAST_GAIN_FRACTION):
            best = leader
    return tried, best


def finalists(tried: Sequence[Tried], goal: Goal, most: int) -> list[Tried]:
    """The best of all trials, and those near it, the best first."""
    ranked = sorted(tried, key=lambda each: each.cost(goal))
    limit = ranked[0].cost(goal) * (1 + NEAR_FRACTION)
    return [each for each in ranked[:most] if math.isfinite(each.cost(goal)) and each.cost(goal) <= limit]


class Change(NamedTuple):
    """How many times a cost another one is, with its 95 % interval, None where no trial was run twice."""

    ratio: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.ratio:.3f}x{interval}"


@dataclass(frozen=True)
class Spread:
    """The spread between processes: standard deviation of the logarithms of their costs, pooled over trials that were
    run more than once, with its degrees of freedom."""

    std: float
    freedom: int

    def change(self, before: Sequence[float], after: Sequence[float]) -> Change | None:
        """How much the costs changed, by Student's t with the pooled spread; None where one side has none."""
        if not before or not after:
            return None
        difference = float(logs_of(after).mean() - logs_of(before).mean())
        if not self.freedom:
            return Change(ratio_from(difference))
        quantile = float(scipy.special.stdtrit(self.freedom, 0.5 + CONFIDENCE / 2))
        half = quantile * self.std * math.sqrt(1 / len(before) + 1 / len(after))
        return Change(ratio_from(difference), ratio_from(difference - half), ratio_from(difference + half))


def spread_of(groups: Sequence[Sequence[float]]) -> Spread:
    """The spread pooled over groups of costs, each of one configuration."""
    logs = [logs_of(costs) for costs in groups if len(costs) > 1]
    freedom = sum(each.size - 1 for each in logs)
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in logs)
    return Spread(math.sqrt(squares / freedom) if freedom else 0.0, freedom)


def standing(finalists: Sequence[Tried], goal: Goal, gate: float) -> tuple[list[Tried], list[Tried]]:
    """The best of trials with those that are the same, whose interval lies within the gate, and those that may be the
    same or slower; each the best first."""
    best, *others = sorted(finalists, key=lambda each: each.cost(goal))
    spread, alike, unclear = spread_of([each.costs(goal) for each in finalists]), [best], list[Tried]()
    for each in others:
        change = spread.change(best.costs(goal), each.costs(goal)) if math.isfinite(each.cost(goal)) else None
        if change is None:
            continue
        low, high = (math.nan if end is None else end for end in change[1:])
        if 1 - gate <= low and high <= 1 + gate:
            alike.append(each)
        elif not low > 1 + gate:
            unclear.append(each)
    return alike, unclear
