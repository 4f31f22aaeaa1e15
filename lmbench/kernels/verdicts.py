"""Was the device working? The trace's verdict by phase, beside the lag's from unprofiled steps, with advice: what would
make the phase faster, by its verdict, by what its kernels show, and by what the run does already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lmbench.kernels.clocks import Clocks, PhaseClock
from lmbench.kernels.compiled import TRITON
from lmbench.kernels.kinds import MATMUL
from lmbench.kernels.parts import UNCLASSIFIED
from lmbench.kernels.phases import OUTSIDE, TracePhase
from lmbench.kernels.sums import PhaseShares
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import DAMAGED, PHASES
from lmbench.report.units import percent

# Waiting for data is the host's by definition, `other` is its own work; for phases shorter than this nobody decides.
_JUDGED = ("forward", "backward", "clip", "optimizer", OUTSIDE)
_LONG_FRACTION = 0.002
# Share of a phase in which the device waits for the host.
HOST_BOUND_FRACTION = 0.10
QUEUED_FRACTION = 0.02
# Share of a phase in which the device idles though the host was there and more than a short gap before; and in which it
# idles for whatever reason. Above them no phase is queued.
STALLED_FRACTION = 0.10
IDLE_FRACTION = 0.30
# A single idle time of this length, and half of a step's, is a pause, and no matter of many kernels.
_PAUSE_S = 1e-3
# A launch that takes the host longer has something else before it: in eager mode it is tens of us, and up to 250 where
# the profiler notes stacks.
_SLOW_LAUNCH_US = 300
# Stops of the host that can have cost less than this share of its waiting are not told.
_MANY_STOPS_FRACTION = 0.1
# Below this share of gaps, fewer kernels would change little.
_MANY_GAPS_FRACTION = 0.05
_MATMUL_BOUND_FRACTION = 0.6
# From this share on, a softmax of its own is worth a fused attention.
_MUCH_SOFTMAX_FRACTION = 0.05
#: `stalled`: the device idles, and neither for the host nor in single short gaps.
TraceWord = Literal[LagWord, "stalled"]

# Kinds that do little with what they read and write, and those of them that do nothing else.
_MEMORY_KINDS = ("softmax", "norm", "pooling", "reduction", "elementwise", "index", "optimizer", "memcpy")
_MOVING_KINDS = ("index", "memcpy")
_FUSED_OPTIMIZER = re.compile(r"fused_?(adam|sgd|adagrad|lamb|lion)", re.IGNORECASE)


@dataclass(frozen=True)
class PhaseVerdict:
    """A phase's clocks with what they mean.

    `verdict` is None for a phase that is not judged; `reason` has the figures that it rests on: `host-bound` from
    `HOST_BOUND_FRACTION` of waiting for the host on, if that is more than other idle time; else `stalled` from
    `STALLED_FRACTION` of other idle time or above `IDLE_FRACTION` of any; else `queued` up to `QUEUED_FRACTION` of
    waiting for the host, and `mixed` above it. `device_span_s` and `host_span_s` are means over the same steps by the
    run's own clocks, `lag_verdict` and `min_lag_s` from its probe steps, all None without a run. `agreement` says in
    words how both verdicts go together.
    """

    clock: PhaseClock
    verdict: TraceWord | None
    reason: str
    advice: str
    device_span_s: float | None
    host_span_s: float | None
    lag_verdict: LagWord | None
    min_lag_s: float | None
    agreement: str

    @property
    def phase(self) -> TracePhase:
        return self.clock.phase

    @property
    def wait_fraction(self) -> float | None:
        """Share of the window in which the device waited for the host."""
        return self.clock.share(self.clock.host_wait_s)


def judge_phases(
    clocks: Clocks, shares: Sequence[PhaseShares], run: RunRecord, steps: Sequence[StepRecord]
) -> list[PhaseVerdict]:
    """A verdict for each phase; `run` and `steps` are the run's records, blank and empty for a trace without one."""
    shares_of = {share.phase: share for share in shares}
    long_s = _LONG_FRACTION * sum(clock.window_s for clock in clocks.phases)
    # The steps that the clocks of the trace are over.
    first, count = (run.profile.first_step, run.profile.steps) if run.profile else (None, None)
    if first is None or count is None:
        steps = []
    else:
        steps = [
            each for each in steps if each.step is not None and first + clocks.skipped <= each.step < first + count
        ]
    return [_judge(clock, shares_of.get(clock.phase), run, steps, long_s) for clock in clocks.phases]


def _judge(
    clock: PhaseClock, share: PhaseShares | None, run: RunRecord, steps: Sequence[StepRecord], long_s: float
) -> PhaseVerdict:
    verdict = _verdict(clock) if clock.phase in _JUDGED and clock.window_s >= long_s else None
    lag, device_s, host_s = None, None, None
    phase = next((phase for phase in PHASES if phase == clock.phase), None)
    if phase is not None:
        lag = run.probe.verdicts.get(phase) if run.probe.verdicts else None
        device_s = _mean([step.span_s(phase) for step in steps])
        host_s = _mean([step.host_s(phase) for step in steps])
    lag = lag or LagVerdict()
    advice, reason = "", ""
    if verdict is not None:
        waits, gaps, other = (
            percent(clock.share(idle_s)) for idle_s in (clock.host_wait_s, clock.queued_gap_s, clock.other_idle_s)
        )
        idle = percent(clock.idle_fraction)
        reason = f"the device waits for the host in {waits} of the phase, and idles in {idle}"
        if verdict == "stalled":
            kinds = f"{waits} for the host, {gaps} between queued kernels, {other} for something else"
            reason = f"the device idles in {idle} of the phase: {kinds}"
    if verdict and share:
        # For the run as it is without the profiler, which slows the host and not the device.
        is_slowed = lag.verdict == "queued" and verdict in ("host-bound", "mixed")
        advice = _Case(clock, share, run).advice("queued" if is_slowed else verdict)
        advice = f"without the profiler it is queued, and {advice}" if is_slowed else advice
    agreement = _agreement(verdict, clock, lag)
    return PhaseVerdict(clock, verdict, reason, advice, device_s, host_s, lag.verdict, lag.min_lag_s, agreement)


def _verdict(clock: PhaseClock) -> TraceWord | None:
    if not clock.kernels or clock.window_s <= 0:
        return None
    wait, other, idle = (idle_s / clock.window_s for idle_s in (clock.host_wait_s, clock.other_idle_s, clock.idle_s))
    if wait >= HOST_BOUND_FRACTION and wait >= other:
        return "host-bound"
    if other >= STALLED_FRACTION or idle > IDLE_FRACTION:
        return "stalled"
    return "queued" if wait <= QUEUED_FRACTION else "mixed"


def _agreement(verdict: str | None, clock: PhaseClock, lag: LagVerdict) -> str:
    """How the trace's verdict goes together with the lag's."""
    if verdict is None or lag.verdict is None or lag.min_lag_s is None:
        return ""
    if verdict == lag.verdict:
        return "agree"
    if (verdict, lag.verdict) == ("stalled", "queued"):
        return "agree: it is not the host that the device waits for"
    waits, least = percent(clock.share(clock.host_wait_s)), f"{lag.min_lag_s * 1e3:.2f} ms"
    if (verdict, lag.verdict) in (("host-bound", "queued"), ("host-bound", "mixed"), ("mixed", "queued")):
        launch_us = (clock.host_s_per_launch or 0.0) * 1e6
        return (
            f"differ: the profiler slows the host ({launch_us:.1f} us a launch with it); without it at least {least} "
            "of work lay in the queue"
        )
    if verdict in ("queued", "stalled"):
        return (
            f"differ: the queue ran low at a mark (lag {least}), yet the device waited in only {waits} of the phase: "
            "the host catches up within it"
        )
    return f"close: {waits} of the phase is waiting, smallest lag {least}"


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, None where one is missing."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


@dataclass(frozen=True)
class _Case:
    """A phase to advise on: its clock, its kernels and the run's record, which is blank for a foreign trace."""

    clock: PhaseClock
    share: PhaseShares
    run: RunRecord

    def advice(self, verdict: TraceWord) -> str:
        """What would make the phase faster."""
        if verdict == "host-bound":
            return self._host_bound()
        if verdict == "stalled":
            return self._stalled()
        if verdict == "queued":
            return self._queued()
        if self.clock.stopped_s > self.clock.host_s / 2:
            stopped = percent(self.clock.stopped_s / self.clock.host_s)
            return f"the host has time to spare: it waits itself until the device is done in {stopped} of the phase"
        return "the host is just fast enough: a slower one, or a faster device, makes this phase host-bound"

    def _queued(self) -> str:
        clock, share = self.clock, self.share
        gaps = clock.share(clock.queued_gap_s) or 0.0
        products, attention, unknown, memory = (
            share.fraction_of(*kinds) for kinds in ((MATMUL,), ("attention",), (UNCLASSIFIED,), _MEMORY_KINDS)
        )
        if gaps > max(_MANY_GAPS_FRACTION, products / 2):
            return self._short_kernels()
        computed, exposed = products + attention, clock.comm_exposed_s / (clock.busy_s or 1.0)
        if exposed > max(memory, computed):
            return f"{self._exposed()}: what computes beside it would save as much at most"
        if unknown > max(memory, computed):
            return f"{100 * unknown:.0f} % are kernels of unknown kind: what bounds them the trace does not say"
        if computed > _MATMUL_BOUND_FRACTION * (computed + memory):
            fused = f", fused attention {100 * attention:.0f} %" if attention else ""
            return f"matrix products take {100 * products:.0f} %{fused}: {self._faster_products()}"
        return f"{100 * memory:.0f} % are kernels bound by memory{self._fewer_bytes(memory)}"

    def _stalled(self) -> str:
        clock = self.clock
        if clock.queued_gap_s >= clock.other_idle_s:
            return self._short_kernels()
        cause = "another stream, a copy, another rank"
        reason = f"launched kernels wait for something: {cause}; the trace does not say what"
        if self._is_pause:
            reason = (
                f"most of it is a pause, the longest of {clock.longest_idle_s * 1e3:,.1f} ms, before a kernel that had "
                f"been launched: it waited for {cause}, or the profiler; the trace does not say"
            )
        return f"{reason}; {self._exposed()}" if clock.comm_exposed_s else reason

    def _short_kernels(self) -> str:
        return f"{self.clock.kernels:,.0f} short kernels with gaps between them: {self._fewer_launches()}"

    def _exposed(self) -> str:
        comm_ms, exposed_ms = self.clock.comm_s * 1e3, self.clock.comm_exposed_s * 1e3
        return f"communication takes {comm_ms:,.2f} ms, {exposed_ms:,.2f} of them beside nothing that computes"

    @property
    def _is_pause(self) -> bool:
        return self.clock.longest_idle_s >= max(_PAUSE_S, self.clock.idle_s / 2)

    def _host_bound(self) -> str:
        clock = self.clock
        if self._is_pause:
            return (
                f"most of it is a pause, the longest of {clock.longest_idle_s * 1e3:,.1f} ms: the host does something "
                "else there than launching, such as loading, compiling, or waiting for a result"
            )
        if clock.first_wait_s > clock.host_wait_s / 2:
            if clock.phase == OUTSIDE:
                return (
                    "most of it comes before a first kernel: outside of the phases the host launches nothing for long, "
                    "such as while it loads data or logs"
                )
            return (
                f"most of it comes before the first kernel: the phase before leaves nothing in the queue; "
                f"what keeps the device busy there helps {clock.phase}, too"
            )
        per_launch_us = (clock.host_s_per_launch or 0.0) * 1e6
        if per_launch_us > _SLOW_LAUNCH_US:
            return (
                f"{clock.launches:,.0f} launches in {(clock.host_s - clock.stopped_s) * 1e3:,.1f} ms of the host, "
                f"{per_launch_us:,.0f} us for each: it does something else there than launching, such as Python, "
                "allocating, loading or compiling"
            )
        busy = (
            f"{clock.launches:,.0f} launches of {per_launch_us:.1f} us each keep the host busy: "
            f"{self._fewer_launches()}; faster kernels would only wait longer"
        )
        share_of_stops = clock.stop_wait_s / clock.host_wait_s
        if share_of_stops <= _MANY_STOPS_FRACTION:
            return busy
        times = f"{clock.stops:,.0f} times" if clock.stops > 1 else "once"
        return (
            f"{busy}; {times} the host stops until the device is done ({clock.stopped_s * 1e3:,.2f} ms in all), which "
            f"can have cost up to {percent(share_of_stops)} of the waiting: fewer copies to the host, .item(), .cpu() "
            "and synchronizing let it launch ahead"
        )

    def _fewer_launches(self) -> str:
        """How to start fewer kernels for the same work, as far as the run does not do so already."""
        clock = self.clock
        if clock.phase == "optimizer" and not self._is_fused:
            return "a fused optimizer is one kernel or a few"
        if clock.phase in ("optimizer", "clip"):
            return "fewer parameters, or a larger batch per step"
        has_few_graphs = clock.launches > clock.kernels / 2
        if clock.graph_launches and has_few_graphs:
            launching = f"{clock.graph_launches:,.0f} of the calls launch one"
            return f"CUDA graphs for more of it ({launching}), or a larger batch"
        if not self._is_compiled:
            return f"compile ({self._compile}), or give each kernel more to do with a larger batch"
        if self.run.compile.mode != "reduce-overhead" and has_few_graphs:
            return "CUDA graphs (compile mode reduce-overhead), or a larger batch"
        return "a larger batch gives each kernel more to do"

    def _faster_products(self) -> str:
        if (self.run.precision or "").startswith("32") and self.run.matmul_precision == "highest":
            return "bf16-mixed or TF32 (--measure.matmul_precision high) makes them faster; compile does not"
        if self.run.outcome == DAMAGED:
            return "what is left is their efficiency, which the trace does not tell"
        return "what is left is their efficiency: `lmbench ceiling` measures what the device attains"

    def _fewer_bytes(self, memory: float) -> str:
        """What moves fewer bytes, behind the sentence that memory is the bound."""
        share = self.share
        if share.phase == "optimizer" and self._is_fused:
            return ": each byte is moved once already"
        if share.phase == "optimizer":
            return ": a fused optimizer reads and writes each byte once"
        if share.phase == "clip":
            return ": every gradient is read for the norm, and read and written once to be scaled"
        if share.fraction_of(*_MOVING_KINDS) > memory / 2:
            most = max(_MOVING_KINDS, key=share.fraction_of)
            moved = f"{most} {100 * share.fraction_of(most):.0f} %"
            return f", most of it moves data ({moved}), which no compiler fuses away"
        softmax_s = sum(seconds for part, seconds in share.parts_s.items() if "softmax" in part.split("+"))
        has_much = share.share(softmax_s) > _MUCH_SOFTMAX_FRACTION
        tail = "; a fused attention saves the scores' traffic" if has_much else ""
        if self._is_compiled:
            return f", fused already: fewer bytes (a lower precision of what they read and write) is what helps{tail}"
        return f": compile ({self._compile}) fuses them{tail}"

    @property
    def _compile(self) -> str:
        """How compiling is called where the trace comes from."""
        return "torch.compile" if self.run.outcome == DAMAGED else "--trainer.compile"

    @property
    def _is_fused(self) -> bool:
        return any(_FUSED_OPTIMIZER.search(row.name) for row in self.share.rows)

    @property
    def _is_compiled(self) -> bool:
        return bool(self.run.compile.is_enabled) or any(row.name.startswith(TRITON) for row in self.share.rows)
