"""Processes that took far longer than the other one of their round says: named with the state of their host and device.

Nothing is dropped for it: `rounds` weighs what lies far out by a rule of its own, that knows no sides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmbench.compare.metrics import STEP
from lmbench.records.load import Run
from lmbench.records.run import RunRecord
from lmbench.records.statistics import STD_PER_MAD, ratio_from
from lmbench.report.units import percent_short

#: A process is slow from so many standard deviations on, of the differences of all rounds (from their median absolute
#: deviation), and from this share of the step.
_LIMIT_STDS = 4.0
_LIMIT_FRACTION = 0.01
_LEAST_ROUNDS = 4
#: Facts of its own within this of the other processes' median are not named as another state.
_USUAL_FRACTION = 0.03

_Fact = Callable[[RunRecord], float | None]


def _host(name: str) -> _Fact:
    return lambda record: getattr(record.environment.host, name) if record.environment else None


#: What may explain a slow process: its name, the figure, its unit and how many of it are one of the record's.
_STATE: tuple[tuple[str, _Fact, str, float], ...] = (
    ("SM clock", lambda record: record.device_state.close.sm_clock_hz, "MHz", 1e-6),
    ("power", lambda record: record.device_state.mean_power_w, "W", 1.0),
    ("temperature", lambda record: record.device_state.mean_temperature_c, "°C", 1.0),
    ("power-capped", lambda record: record.device_state.power_capped_fraction, "%", 100.0),
    ("thermal-capped", lambda record: record.device_state.thermal_capped_fraction, "%", 100.0),
    ("other processes on the GPU", lambda record: record.device_state.other_process_count, "", 1.0),
    ("load per core", lambda record: record.sweep.load_per_core if record.sweep else None, "", 1.0),
    ("a pure-Python loop", _host("python_iteration_s"), "ns", 1e9),
    ("issuing a kernel", _host("kernel_launch_s"), "us", 1e6),
)


@dataclass(frozen=True)
class SlowProcess:
    """A process of a round (from 1): how much longer it took than its pair says, and in which state it was."""

    side: str
    round: int
    run_id: str
    excess: float
    state: tuple[str, ...]
    is_last: bool

    def __str__(self) -> str:
        state = ", ".join(self.state) or "clock, power, load and host scores were as usual, where recorded"
        again = "no round came after it" if self.is_last else f"measured again in round {self.round + 1}"
        what = f"{self.side} took {percent_short(self.excess)} longer than its pair says"
        return f"round {self.round}: {what} ({state}); {again}"


def slow_processes(rounds: Sequence[tuple[Run, Run]]) -> list[SlowProcess]:
    """The slow ones among the processes of both sides, in the order of their rounds."""
    if len(rounds) < _LEAST_ROUNDS:
        return []
    steps = [(STEP.of(a.record), STEP.of(b.record)) for a, b in rounds]
    differences = [math.log(b) - math.log(a) if a and b else 0.0 for a, b in steps]
    middle = statistics.median(differences)
    spread = STD_PER_MAD * statistics.median(abs(each - middle) for each in differences)
    limit = max(_LIMIT_STDS * spread, math.log1p(_LIMIT_FRACTION))
    everyone = [run for pair in rounds for run in pair]
    found = []
    for pair, difference in zip(rounds, differences, strict=True):
        excess = abs(difference - middle)
        if excess > limit:
            # Of the two the one that took longer than the others' difference lets expect.
            at = int(difference > middle)
            run = pair[at]
            slow = ratio_from(excess) - 1
            state = _state(run, everyone)
            found.append(SlowProcess("AB"[at], _number(run), run.run_id, slow, state, pair is rounds[-1]))
    return found


def _number(run: Run) -> int:
    """Of its round, from 1."""
    place = run.record.sweep
    return 0 if place is None or place.repeat is None else place.repeat + 1


def one_sided(slow: Sequence[SlowProcess]) -> str | None:
    """The side that slow processes belong to, where chance would hardly have it so (two-sided sign test at 5 %)."""
    of_b = sum(each.side == "B" for each in slow)
    fewer, number = min(of_b, len(slow) - of_b), len(slow)
    p = min(1.0, 2 * sum(math.comb(number, k) for k in range(fewer + 1)) / 2**number)
    if p >= 0.05:
        return None
    return "B" if 2 * of_b > number else "A"


def _state(run: Run, everyone: Sequence[Run]) -> tuple[str, ...]:
    """Where its clock, power, load or host were other than those of the other processes."""
    found = []
    for name, fact, unit, scale in _STATE:
        mine = fact(run.record)
        others = [value for other in everyone if other is not run and (value := fact(other.record)) is not None]
        if mine is None or not others:
            continue
        usual = statistics.median(others)
        if abs(mine - usual) > _USUAL_FRACTION * abs(usual):
            shown, theirs = (f"{value * scale:.4g}{f' {unit}' if unit else ''}" for value in (mine, usual))
            found.append(f"{name} {shown}, others {theirs}")
    return tuple(found)
