"""The search of `lmbench tune`: it takes one axis after the other and adds each value to the best trial so far."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from lmbench.compare.sides import split_usable, typical_step_s
from lmbench.errors import unknown
from lmbench.records.load import StoredRun
from lmbench.records.run import RunRecord
from lmbench.records.settings import as_text
from lmbench.records.statistics import geometric_mean, logs_of, pooled_std, ratio_from, student_quantile
from lmbench.report.units import COUNT, GIB, MILLIJOULES, Unit
from lmbench.sweep.file import Options
from lmbench.tune.space import Axis

#: The least gain for which a choice is taken. One run cannot show a smaller gain, and the simpler trial stays.
LEAST_GAIN_FRACTION = 0.005
#: A choice that loses by more than this is not tried again, and one that gains by more is not left out again.
_CLEAR_FRACTION = 0.1
#: Trials whose one run is within this of the best are measured again.
NEAR_FRACTION = 0.05
#: The seeds of the trainings that baseline and candidate are compared by.
SEEDS = (0, 1, 2)
_DTYPE = re.compile("precision|dtype")


class Goal(NamedTuple):
    """The goal of a tuning: a cost of a run, the lower the better, and the figure that is shown for it.

    The figure has a title and a unit; `is_inverse` says that it is 1 / cost.
    """

    name: str
    cost: Callable[[RunRecord], float | None]
    title: str
    unit: Unit
    is_inverse: bool = False


def _seconds_per_token(run: RunRecord) -> float | None:
    """Seconds per token of a typical step, or per step for a module whose tokens nobody counts."""
    step_s = typical_step_s(run)
    return step_s and step_s / (run.window.step_tokens or 1)


def _joules_per_token(run: RunRecord) -> float | None:
    per_token_s, power_w = _seconds_per_token(run), run.device_state.mean_power_w
    return per_token_s * power_w if per_token_s and power_w else None


def peak_of(run: RunRecord) -> int | None:
    """Peak bytes that the GPU's allocator reserved; on a CPU the peak memory of the process."""
    return run.memory.run_peak_reserved_bytes or run.memory.host_peak_rss_bytes


GOALS = {
    goal.name: goal
    for goal in (
        Goal("tokens_per_s", _seconds_per_token, "tokens/s", COUNT, is_inverse=True),
        Goal("joules_per_token", _joules_per_token, "energy per token (mJ)", MILLIJOULES),
        Goal("peak", peak_of, "peak", GIB),
    )
}


def goal_of(name: str) -> Goal:
    """The goal of this name. Raises UsageError for an unknown name."""
    if name not in GOALS:
        raise unknown("--for", name, [*GOALS, "memory"])
    return GOALS[name]


class Choice(NamedTuple):
    """One value of an axis, as the options that it sets."""

    axis: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """The choice in words: `compile`, `precision fp8-tensorwise`, `batch_size 8, accumulate_grad_batches 2`."""
        words = []
        for name, value in self.options.items():
            last = name.rpartition(".")[2]
            parts = {f"{last} {key}": part for key, part in value.items()} if isinstance(value, dict) else {last: value}
            for key, part in parts.items():
                if isinstance(part, bool):
                    words.append(key if part else f"no {key}")
                else:
                    words.append(f"{key} {part}")
        return ", ".join(words)


@dataclass(frozen=True)
class Trial:
    """The given configuration with choices, at most one of each axis."""

    choices: tuple[Choice, ...] = ()

    @property
    def key(self) -> frozenset[str]:
        """Equal for trials with the same options."""
        return frozenset(f"{name}={as_text(value)}" for name, value in self.options.items())

    def with_choice(self, choice: Choice) -> Trial:
        """This trial with a choice added, in place of another one of the same axis, or of the same options."""
        others = [other for other in self.choices if other.axis != choice.axis]
        return Trial((*(other for other in others if not other.options.keys() <= choice.options.keys()), choice))

    def fallbacks(self) -> Iterator[Trial]:
        """The trials without one choice, then without two, and so on. Choices of a dtype are dropped first, then the
        latest."""
        latest_first = self.choices[::-1]
        suspects = sorted(latest_first, key=lambda choice: not any(map(_DTYPE.search, choice.options)))
        for count in range(1, len(suspects) + 1):
            for dropped in combinations(suspects, count):
                yield Trial(tuple(choice for choice in self.choices if choice not in dropped))

    @property
    def options(self) -> Options:
        """The options in which the trial differs from the given configuration."""
        return {name: value for choice in self.choices for name, value in choice.options.items()}

    def __str__(self) -> str:
        return "; ".join(map(str, self.choices)) or "as given"


@dataclass(eq=False)
class Candidate:
    """A trial with its runs.

    `before` is the candidate whose trial this one changes. `problem` says why the trial was not run, or why it cannot
    be the answer.
    """

    trial: Trial
    before: Candidate | None = None
    runs: list[StoredRun] = field(default_factory=list)
    predicted_bytes: int | None = None
    problem: str = ""

    def costs(self, goal: Goal) -> list[float]:
        """The costs of all runs that count. A run with a failed guard, such as wrong attention, does not count."""
        usable, left_out = split_usable(self.runs, takes_failed=False)
        if left_out and not usable:
            # Repeats that were skipped for the first one's failure never started, and come before it.
            self.problem = self.problem or left_out[-1].reason
        return [cost for run in usable if (cost := goal.cost(run.record))]

    def cost(self, goal: Goal) -> float:
        """The geometric mean of the costs; infinite for a candidate that cannot be the answer."""
        costs = self.costs(goal)
        return geometric_mean(costs) if costs and not self.problem else math.inf

    @property
    def record(self) -> RunRecord | None:
        """The record of the last run that ended well."""
        return next((run.record for run in reversed(self.runs) if run.outcome == "ok"), None)


def search(
    axes: Sequence[Axis], baseline: Candidate, goal: Goal, measure: Callable[[Axis, list[Candidate]], None]
) -> tuple[list[Candidate], Candidate]:
    """Try the values of each axis on top of the best so far, twice; returns all candidates in order, and the best.

    Axes that compile the whole network come last, and once: each trial on top of theirs would compile as long.

    `baseline` is the given configuration without choices. `measure` fills in the runs of candidates, or their problems.
    The number of trials is about the sum of the axes' numbers of values, not their product. The second pass tries
    again what lost by less than 10 %, and the given value of an axis whose choice gained by less: a choice may help
    only beside a later one, or no longer. In simulated spaces with mild interactions this finds the best to 2 % in 95
    of 100, the first pass alone in 69 (`tests/experiments/simulated_tuning.py`).
    """
    candidates, best, lost, kept = [baseline], baseline, set[str](), set[str]()
    repeated = [axis for axis in axes if not axis.compiles_whole]
    for number, axis in enumerate([*repeated, *repeated, *(axis for axis in axes if axis.compiles_whole)]):
        choices = [Choice(axis.name, value) for value in axis.values]
        trials = [best.trial.with_choice(choice) for choice in choices if str(choice) not in lost]
        if number >= len(repeated) and axis.name not in kept:
            trials.append(Trial(tuple(choice for choice in best.trial.choices if choice.axis != axis.name)))
        known = {candidate.trial.key for candidate in candidates}
        new = {trial.key: trial for trial in trials if trial.key not in known}
        added = [Candidate(trial, best) for trial in new.values()]
        if not added:
            continue
        measure(axis, added)
        candidates += added
        if number < len(repeated):
            limit = best.cost(goal) * (1 + _CLEAR_FRACTION)
            lost |= {str(candidate.trial.choices[-1]) for candidate in added if candidate.cost(goal) > limit}
        leader = min(added, key=lambda candidate: candidate.cost(goal))
        if leader.cost(goal) < best.cost(goal) * (1 - _CLEAR_FRACTION):
            kept.add(axis.name)
        if leader.cost(goal) < best.cost(goal) * (1 - LEAST_GAIN_FRACTION):
            best = leader
    return candidates, best


def finalists(candidates: Sequence[Candidate], goal: Goal, count: int) -> list[Candidate]:
    """The best candidate and those near it, at most `count`, the best first."""
    ranked = sorted(candidates, key=lambda candidate: candidate.cost(goal))
    limit = ranked[0].cost(goal) * (1 + NEAR_FRACTION)
    return [candidate for candidate in ranked[:count] if math.isfinite(cost := candidate.cost(goal)) and cost <= limit]


class Change(NamedTuple):
    """The ratio of two costs with its 95 % interval, which is None if no trial was run twice."""

    ratio: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.ratio:.3f}x{interval}"


@dataclass(frozen=True)
class Spread:
    """The spread between processes: the standard deviation of the logarithms of costs, pooled over all trials that were
    run more than once, with its degrees of freedom."""

    std: float
    freedom: int

    def change(self, before: Sequence[float], after: Sequence[float]) -> Change | None:
        """The ratio of costs after to before, by Student's t with the pooled spread; None if either has no costs."""
        if not before or not after:
            return None
        difference = float(logs_of(after).mean() - logs_of(before).mean())
        if not self.freedom:
            return Change(ratio_from(difference))
        half = student_quantile(self.freedom) * self.std * math.sqrt(1 / len(before) + 1 / len(after))
        return Change(ratio_from(difference), ratio_from(difference - half), ratio_from(difference + half))


def spread_of(groups: Sequence[Sequence[float]]) -> Spread:
    """The spread pooled over groups of costs, one group for each configuration."""
    return Spread(*pooled_std([logs_of(costs) for costs in groups if costs]))


def standing(candidates: Sequence[Candidate], goal: Goal, gate: float) -> tuple[list[Candidate], list[Candidate]]:
    """The best candidate and those that are the same, then those that may be the same or slower, each best first.

    A candidate is the same if the interval of its change from the best lies within the gate.
    """
    best, *others = sorted(candidates, key=lambda candidate: candidate.cost(goal))
    spread = spread_of([candidate.costs(goal) for candidate in candidates])
    alike, unclear = [best], list[Candidate]()
    for candidate in others:
        change = spread.change(best.costs(goal), candidate.costs(goal)) if math.isfinite(candidate.cost(goal)) else None
        if change is None:
            continue
        low, high = (math.nan if end is None else end for end in change[1:])
        if 1 - gate <= low and high <= 1 + gate:
            alike.append(candidate)
        elif not low > 1 + gate:
            unclear.append(candidate)
    return alike, unclear
