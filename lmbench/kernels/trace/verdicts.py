"""Was the device working? The trace's verdict by phase, beside the lag's from unprofiled steps, with advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmbench.kernels.trace.advice import advise
from lmbench.kernels.trace.clocks import Clocks, PhaseClock
from lmbench.kernels.trace.phases import OUTSIDE
from lmbench.kernels.trace.shares import PhaseShares
from lmbench.records.paths import lookup, number
from lmbench.records.vocabulary import Record

# Waiting for data is the host's by definition, `other` is its own work; for phases shorter than this nobody decides.
_JUDGED = ("forward", "backward", "clip", "optimizer", OUTSIDE)
_LONG_FRACTION = 0.002
# Share of a phase in which the device waits for the host.
HOST_BOUND_FRACTION = 0.10
QUEUED_FRACTION = 0.02


@dataclass(frozen=True)
class PhaseVerdict:
    """A phase's clocks with what they mean.

    `verdict` is `host-bound`, `queued` or `mixed`, None for a phase that is not judged; `reason` is the figure that it
    rests on. `device_span_s` and `host_span_s` are means over the same steps by the run's own clocks, `lag_verdict` and
    `min_lag_s` from its probe steps, all None without a run. `agreement` says in words how both verdicts go together.
    """

    clock: PhaseClock
    verdict: str | None
    reason: str
    advice: str
    device_span_s: float | None
    host_span_s: float | None
    lag_verdict: str | None
    min_lag_s: float | None
    agreement: str

    @property
    def phase(self) -> str:
        return self.clock.phase


def judge_phases(clocks: Clocks, shares: list[PhaseShares], run: Record, steps: list[Record]) -> list[PhaseVerdict]:
    """A verdict for each phase; `run` and `steps` are the run's records, empty for a trace without one."""
    shares_of = {share.phase: share for share in shares}
    profiled = _profiled(run, steps, clocks.skipped)
    long_s = _LONG_FRACTION * sum(clock.window_s for clock in clocks.phases)
    return [_judge(clock, shares_of.get(clock.phase), run, profiled, long_s) for clock in clocks.phases]


def _judge(
    clock: PhaseClock, share: PhaseShares | None, run: Record, steps: list[Record], long_s: float
) -> PhaseVerdict:
    verdict = _verdict(clock) if clock.phase in _JUDGED and clock.window_s >= long_s else None
    lag = lookup(run, f"probe.verdicts.{clock.phase}")
    lag = lag if isinstance(lag, dict) else {}
    return PhaseVerdict(
        clock=clock,
        verdict=verdict,
        reason=_reason(clock) if verdict else "",
        advice=_advice(verdict, lag.get("verdict"), clock, share, run) if verdict and share else "",
        device_span_s=_mean(steps, f"{clock.phase}_s"),
        host_span_s=_mean(steps, f"{clock.phase}_host_s"),
        lag_verdict=lag.get("verdict"),
        min_lag_s=number(lag, "min_lag_s"),
        agreement=_agreement(verdict, clock, lag),
    )


def _verdict(clock: PhaseClock) -> str | None:
    wait = clock.wait_fraction
    if not clock.kernels or wait is None:
        return None
    if wait >= HOST_BOUND_FRACTION:
        return "host-bound"
    return "queued" if wait <= QUEUED_FRACTION else "mixed"


def _reason(clock: PhaseClock) -> str:
    return f"the device waits for the host in {100 * (clock.wait_fraction or 0.0):.1f} % of the phase"


def _advice(verdict: str, lag_verdict: object, clock: PhaseClock, share: PhaseShares, run: Record) -> str:
    """Advice for the run as it is without the profiler, which slows the host and not the device."""
    if lag_verdict == "queued" and verdict != "queued":
        return f"without the profiler it is queued, and {advise('queued', clock, share, run)}"
    return advise(verdict, clock, share, run)


def _agreement(verdict: str | None, clock: PhaseClock, lag: Record) -> str:
    """How the trace's verdict goes together with the lag's."""
    other, least = lag.get("verdict"), number(lag, "min_lag_s")
    if verdict is None or other is None or least is None:
        return ""
    if verdict == other:
        return "agree"
    if (verdict, other) in (("host-bound", "queued"), ("host-bound", "mixed"), ("mixed", "queued")):
        launch_us = (clock.host_s_per_launch or 0.0) * 1e6
        return (
            f"differ: the profiler slows the host ({launch_us:.1f} us a launch with it); without it at least "
            f"{least * 1e3:.2f} ms of work lay in the queue"
        )
    if verdict == "queued":
        return (
            f"differ: the queue ran low at a mark (lag {least * 1e3:.2f} ms), yet the device waited in only "
            f"{100 * (clock.wait_fraction or 0.0):.1f} % of the phase: the host catches up within it"
        )
    return (
        f"close: {100 * (clock.wait_fraction or 0.0):.1f} % of the phase is waiting, smallest lag {least * 1e3:.2f} ms"
    )


def _profiled(run: Record, steps: list[Record], skipped: int) -> list[Record]:
    """The records of the steps that the clocks of the trace are over."""
    first, count = number(run, "profile.first_step"), number(run, "profile.steps")
    if first is None or count is None:
        return []
    return [step for step in steps if first + skipped <= _index(step) < first + count]


def _index(step: Record) -> float:
    found = number(step, "step")
    return -1.0 if found is None else found


def _mean(steps: list[Record], name: str) -> float | None:
    values: list[Any] = [step.get(name) for step in steps]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None
