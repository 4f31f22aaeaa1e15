"""What `lmbench overhead` measures of its arms, what follows from it, and the layout of its JSON.

Nothing here needs torch: the control arms, which do, leave `ArmFigures` or `HookFigures` as JSON in a file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from msgspec import Struct

from lmbench.records.environment import Environment
from lmbench.records.run import Data, Model, RunRecord
from lmbench.records.statistics import mean_interval
from lmbench.records.vocabulary import Mode

Arm = Literal["bare", "trainer", "harness", "hooks"]
ARMS: tuple[Arm, ...] = get_args(Arm)
OVERHEAD_SCHEMA_VERSION = 1


class HookTime(Struct):
    """One of lmbench's hooks, a step."""

    step_mean_s: float
    calls: float


class HookFigures(Struct):
    """All of lmbench's hooks in the window of one process, a step; times with the clock's own `clocking_s` in them."""

    step_mean_s: float
    step_median_s: float
    calls: float
    nested_calls: float
    clocking_s: float
    by_name: dict[str, HookTime]


class ArmFigures(Struct):
    """The window of one process, its pauses included. Peaks are None where the device has no such counter, losses where
    they are not finite; `excluded_s` (the pauses) is known of the harness and of the hooks' arm, `hooks` of that one.
    """

    steps: int
    wall_s: float
    steady_peak_allocated_bytes: int | None
    run_peak_allocated_bytes: int | None
    host_peak_rss_bytes: int | None
    first_loss: float | None
    last_loss: float | None
    excluded_s: float | None = None
    hooks: HookFigures | None = None


class Measurement(ArmFigures, kw_only=True):
    """An arm in one round."""

    arm: Arm
    round: int

    @property
    def step_s(self) -> float:
        return self.wall_s / self.steps


class Spread(Struct):
    """Of one value a round."""

    mean: float
    min: float
    max: float


class Interval(Struct, frozen=True):
    """A mean over rounds with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Student's t interval of the mean of one value a round (two rounds at least)."""
        return cls(statistics.fmean(values), *mean_interval(values))

    def against(self, limit: float) -> str:
        """Is it at most the limit? `yes`, `no`, or `undecided` where the interval has both."""
        if self.high <= limit:
            return "yes"
        return "no" if self.low > limit else "undecided"


class ArmSummary(Struct):
    """An arm over all rounds: its step, by how much that is over bare's, the highest peaks, and how far those are over
    bare's."""

    step_s: Spread
    over_bare_s: Interval
    over_bare_fraction: Interval
    run_peak_allocated_bytes: int | None
    over_bare_run_peak_allocated_bytes: int | None
    steady_peak_allocated_bytes: int | None
    over_bare_steady_peak_allocated_bytes: int | None
    host_peak_rss_bytes: int | None
    over_bare_host_peak_rss_bytes: int | None


class HookCost(Struct):
    """lmbench's own hooks, a step, over all rounds; `step_s` and `median_step_s` without the clock's `clocking_s`."""

    step_s: Interval
    clocking_s: float
    median_step_s: float
    calls: float


class Overhead(Struct):
    """Everything that `lmbench overhead` found: what was measured (from the first run's record), and what it cost."""

    schema_version: int
    environment: Environment
    config: dict[str, Any] | None
    model: Model
    data: Data
    mode: Mode | None
    precision: str | None
    matmul_precision: str | None
    device_type: str | None
    rounds: int
    steps: int
    warmup_steps: int | None
    bottleneck: str
    verdicts: dict[str, str]
    arms: dict[Arm, ArmSummary]
    hooks: HookCost
    harness_over_trainer_s: Interval
    pause_s: float
    first_loss: float | None
    last_loss: float | None
    measurements: list[Measurement]
    command: str


def overhead_of(pilot: RunRecord, measurements: list[Measurement], command: str) -> Overhead:
    """What complete rounds of measurements say of the run that `pilot` describes."""
    probed = pilot.probe.verdicts.items() if pilot.probe.verdicts else ()
    verdicts = {str(phase): str(found.verdict) for phase, found in probed}
    harness = _of_arm(measurements, "harness")
    return Overhead(
        schema_version=OVERHEAD_SCHEMA_VERSION,
        environment=pilot.environment or Environment(),
        config=pilot.config,
        model=pilot.model,
        data=pilot.data,
        mode=pilot.mode,
        precision=pilot.precision,
        matmul_precision=pilot.matmul_precision,
        device_type=pilot.device_type,
        rounds=len(harness),
        steps=harness[0].steps,
        warmup_steps=pilot.window.warmup_steps,
        bottleneck=bottleneck(pilot.device_type, verdicts),
        verdicts=verdicts,
        arms=summarize_arms(measurements),
        hooks=_hook_cost(measurements),
        harness_over_trainer_s=_over(harness, _of_arm(measurements, "trainer")),
        pause_s=statistics.fmean((found.excluded_s or 0.0) / found.steps for found in harness),
        first_loss=harness[0].first_loss,
        last_loss=harness[0].last_loss,
        measurements=measurements,
        command=command,
    )


def bottleneck(device_type: str | None, verdicts: dict[str, str]) -> str:
    """What a step waits for: `device` where every phase has work queued, `host` where one waits for the host,
    `cpu` where both are the same, `mixed` or `unknown` where the lag probes were undecided or did not run.

    Args:
        device_type: `cuda` or `cpu`.
        verdicts: of the lag probes, by phase.
    """
    if device_type == "cpu":
        return "cpu"
    if not verdicts:
        return "unknown"
    if "host-bound" in verdicts.values():
        return "host"
    return "mixed" if "mixed" in verdicts.values() else "device"


def summarize_arms(measurements: Sequence[Measurement]) -> dict[Arm, ArmSummary]:
    """Every arm over all rounds; differences to bare are paired by round."""
    bare = _of_arm(measurements, "bare")
    return {arm: _summary(_of_arm(measurements, arm), bare) for arm in ARMS}


def _of_arm(measurements: Sequence[Measurement], arm: Arm) -> list[Measurement]:
    return sorted((found for found in measurements if found.arm == arm), key=lambda found: found.round)


def _over(arm: Sequence[Measurement], base: Sequence[Measurement]) -> Interval:
    """Seconds a step that one arm takes longer than another, paired by round."""
    return Interval.of([a.step_s - b.step_s for a, b in zip(arm, base, strict=True)])


def _summary(arm: Sequence[Measurement], bare: Sequence[Measurement]) -> ArmSummary:
    times = [found.step_s for found in arm]
    run, bare_run = (_highest(found.run_peak_allocated_bytes for found in side) for side in (arm, bare))
    steady, bare_steady = (_highest(found.steady_peak_allocated_bytes for found in side) for side in (arm, bare))
    host, bare_host = (_highest(found.host_peak_rss_bytes for found in side) for side in (arm, bare))
    return ArmSummary(
        step_s=Spread(statistics.fmean(times), min(times), max(times)),
        over_bare_s=_over(arm, bare),
        over_bare_fraction=Interval.of([a.step_s / b.step_s - 1.0 for a, b in zip(arm, bare, strict=True)]),
        run_peak_allocated_bytes=run,
        over_bare_run_peak_allocated_bytes=_beyond(run, bare_run),
        steady_peak_allocated_bytes=steady,
        over_bare_steady_peak_allocated_bytes=_beyond(steady, bare_steady),
        host_peak_rss_bytes=host,
        over_bare_host_peak_rss_bytes=_beyond(host, bare_host),
    )


def _highest(peaks: Iterable[int | None]) -> int | None:
    found = list(peaks)
    known = [peak for peak in found if peak is not None]
    return max(known) if len(known) == len(found) else None


def _beyond(peak: int | None, base: int | None) -> int | None:
    return None if peak is None or base is None else peak - base


def _hook_cost(measurements: Sequence[Measurement]) -> HookCost:
    found = [each.hooks for each in _of_arm(measurements, "hooks") if each.hooks is not None]
    return HookCost(
        step_s=Interval.of([hooks.step_mean_s - hooks.clocking_s for hooks in found]),
        clocking_s=statistics.fmean(hooks.clocking_s for hooks in found),
        median_step_s=statistics.fmean(hooks.step_median_s - hooks.clocking_s for hooks in found),
        calls=statistics.fmean(hooks.calls for hooks in found),
    )
