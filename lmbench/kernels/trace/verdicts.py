"""Was the device working? The trace's verdict by phase, beside the lag's from unprofiled steps, with advice: what would
make the phase faster, by its verdict, by what its kernels show, and by what the run does already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lmbench.kernels.trace.clocks import Clocks, PhaseClock
from lmbench.kernels.trace.compiled import TRITON
from lmbench.kernels.trace.kinds import UNCLASSIFIED
from lmbench.kernels.trace.phases import OUTSIDE, TracePhase
from lmbench.kernels.trace.shares import PhaseShares
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import DAMAGED, PHASES

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
_SLOW_LAUNCH_S = 300e-6
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
        steps = [one for one in steps if one.step is not None and first + clocks.skipped <= one.step < first + count]
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
    advice = ""
    if verdict and share:
        # For the run as it is without the profiler, which slows the host and not the device.
        is_slowed = lag.verdict == "queued" and verdict in ("host-bound", "mixed")
        advice = _advise("queued" if is_slowed else verdict, clock, share, run)
        advice = f"without the profiler it is queued, and {advice}" if is_slowed else advice
    return PhaseVerdict(
        clock=clock,
        verdict=verdict,
        reason=_reason(verdict, clock) if verdict else "",
        advice=advice,
        device_span_s=device_s,
        host_span_s=host_s,
        lag_verdict=lag.verdict,
        min_lag_s=lag.min_lag_s,
        agreement=_agreement(verdict, clock, lag),
    )


def _verdict(clock: PhaseClock) -> TraceWord | None:
    wait, other, idle = clock.wait_fraction, clock.other_fraction, clock.idle_fraction
    if not clock.kernels or wait is None or other is None or idle is None:
        return None
    if wait >= HOST_BOUND_FRACTION and wait >= other:
        return "host-bound"
    if other >= STALLED_FRACTION or idle > IDLE_FRACTION:
        return "stalled"
    return "queued" if wait <= QUEUED_FRACTION else "mixed"


def _reason(verdict: TraceWord, clock: PhaseClock) -> str:
    if verdict != "stalled":
        idle = _percent(clock.idle_fraction)
        return f"the device waits for the host in {_waiting(clock)} of the phase, and idles in {idle}"
    kinds = (
        f"{_waiting(clock)} for the host, {_percent(clock.gap_fraction)} between queued kernels, "
        f"{_percent(clock.other_fraction)} for something else"
    )
    return f"the device idles in {_percent(clock.idle_fraction)} of the phase: {kinds}"


def _waiting(clock: PhaseClock) -> str:
    return _percent(clock.wait_fraction)


def _percent(share: float | None) -> str:
    return f"{100 * (share or 0.0):.1f} %"


def _agreement(verdict: str | None, clock: PhaseClock, lag: LagVerdict) -> str:
    """How the trace's verdict goes together with the lag's."""
    if verdict is None or lag.verdict is None or lag.min_lag_s is None:
        return ""
    if verdict == lag.verdict:
        return "agree"
    if (verdict, lag.verdict) == ("stalled", "queued"):
        return "agree: it is not the host that the device waits for"
    least = f"{lag.min_lag_s * 1e3:.2f} ms"
    if (verdict, lag.verdict) in (("host-bound", "queued"), ("host-bound", "mixed"), ("mixed", "queued")):
        launch_us = (clock.host_s_per_launch or 0.0) * 1e6
        return (
            f"differ: the profiler slows the host ({launch_us:.1f} us a launch with it); without it at least {least} "
            "of work lay in the queue"
        )
    if verdict in ("queued", "stalled"):
        return (
            f"differ: the queue ran low at a mark (lag {least}), yet the device waited in only {_waiting(clock)} of "
            "the phase: the host catches up within it"
        )
    return f"close: {_waiting(clock)} of the phase is waiting, smallest lag {least}"


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, None where one is missing."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


def _advise(verdict: str, clock: PhaseClock, share: PhaseShares, run: RunRecord) -> str:
    """Advice for a phase that was judged; `run` is blank for a foreign trace."""
    if verdict == "host-bound":
        return _host_bound(clock, share, run)
    if verdict == "stalled":
        return _stalled(clock, share, run)
    if verdict == "mixed" and clock.stopped_s > clock.host_s / 2:
        stopped = _percent(clock.stopped_s / clock.host_s)
        return f"the host has time to spare: it waits itself until the device is done in {stopped} of the phase"
    if verdict == "mixed":
        return "the host is just fast enough: a slower one, or a faster device, makes this phase host-bound"
    return _queued(clock, share, run)


def _queued(clock: PhaseClock, share: PhaseShares, run: RunRecord) -> str:
    gap = clock.queued_gap_s / clock.window_s if clock.window_s else 0.0
    if gap > _MANY_GAPS_FRACTION and gap > share.matmul_fraction / 2:
        return f"{clock.kernels:,.0f} short kernels with gaps between them: {_fewer(clock, share, run)}"
    products, attention = share.matmul_fraction, _fraction(share, "attention")
    memory = sum(_fraction(share, kind) for kind in _MEMORY_KINDS)
    unknown = _fraction(share, UNCLASSIFIED)
    exposed = clock.comm_exposed_s / clock.busy_s if clock.busy_s else 0.0
    if exposed > max(memory, products + attention):
        return f"{_exposed(clock)}: what computes beside it would save as much at most"
    if unknown > max(memory, products + attention):
        return f"{100 * unknown:.0f} % are kernels of unknown kind: what bounds them the trace does not say"
    if products + attention > _MATMUL_BOUND_FRACTION * (products + attention + memory):
        fused = f", fused attention {100 * attention:.0f} %" if attention else ""
        return f"matrix products take {100 * products:.0f} %{fused}: {_faster_products(run)}"
    return f"{100 * memory:.0f} % are kernels bound by memory{_fewer_bytes(share, run, memory)}"


def _stalled(clock: PhaseClock, share: PhaseShares, run: RunRecord) -> str:
    if clock.queued_gap_s >= clock.other_idle_s:
        return f"{clock.kernels:,.0f} short kernels with gaps between them: {_fewer(clock, share, run)}"
    found = "launched kernels wait for something: another stream, a copy, another rank; the trace does not say what"
    if _is_pause(clock):
        found = (
            f"most of it is a pause, the longest of {clock.longest_idle_s * 1e3:,.1f} ms, before a kernel that had "
            "been launched: it waited for another stream, a copy, another rank, or the profiler; the trace does not say"
        )
    return f"{found}; {_exposed(clock)}" if clock.comm_exposed_s else found


def _exposed(clock: PhaseClock) -> str:
    return (
        f"communication takes {clock.comm_s * 1e3:,.2f} ms, {clock.comm_exposed_s * 1e3:,.2f} of them beside nothing "
        "that computes"
    )


def _is_pause(clock: PhaseClock) -> bool:
    return clock.longest_idle_s >= max(_PAUSE_S, clock.idle_s / 2)


def _host_bound(clock: PhaseClock, share: PhaseShares, run: RunRecord) -> str:
    if _is_pause(clock):
        return (
            f"most of it is a pause, the longest of {clock.longest_idle_s * 1e3:,.1f} ms: the host does something else "
            "there than launching, such as loading, compiling, or waiting for a result"
        )
    if clock.first_wait_s > clock.host_wait_s / 2 and clock.phase == OUTSIDE:
        return (
            "most of it comes before a first kernel: outside of the phases the host launches nothing for long, such as "
            "while it loads data or logs"
        )
    if clock.first_wait_s > clock.host_wait_s / 2:
        return (
            f"most of it comes before the first kernel: the phase before leaves nothing in the queue; "
            f"what keeps the device busy there helps {clock.phase}, too"
        )
    if (per_launch_s := clock.host_s_per_launch or 0.0) > _SLOW_LAUNCH_S:
        return (
            f"{clock.launches:,.0f} launches in {(clock.host_s - clock.stopped_s) * 1e3:,.1f} ms of the host, "
            f"{per_launch_s * 1e6:,.0f} us for each: it does something else there than launching, such as Python, "
            "allocating, loading or compiling"
        )
    cost = f"{clock.launches:,.0f} launches of {(clock.host_s_per_launch or 0.0) * 1e6:.1f} us each"
    busy = f"{cost} keep the host busy: {_fewer(clock, share, run)}; faster kernels would only wait longer"
    share_of_stops = clock.stop_wait_s / clock.host_wait_s
    if share_of_stops <= _MANY_STOPS_FRACTION:
        return busy
    times = f"{clock.stops:,.0f} times" if clock.stops > 1 else "once"
    stops = (
        f"{times} the host stops until the device is done ({clock.stopped_s * 1e3:,.2f} ms in all), which can have "
        f"cost up to {_percent(share_of_stops)} of the waiting: fewer copies to the host, .item(), .cpu() and "
        "synchronizing let it launch ahead"
    )
    return f"{busy}; {stops}"


def _fewer(clock: PhaseClock, share: PhaseShares, run: RunRecord) -> str:
    """How to start fewer kernels for the same work, as far as the run does not do so already."""
    if clock.phase == "optimizer" and not _is_fused(share):
        return "a fused optimizer is one kernel or a few"
    if clock.phase in ("optimizer", "clip"):
        return "fewer parameters, or a larger batch per step"
    if clock.graph_launches and clock.launches > clock.kernels / 2:
        return f"CUDA graphs for more of it ({clock.graph_launches:,.0f} of the calls launch one), or a larger batch"
    if not _is_compiled(share, run):
        return f"compile ({_compile(run)}), or give each kernel more to do with a larger batch"
    if run.compile.mode != "reduce-overhead" and clock.launches > clock.kernels / 2:
        return "CUDA graphs (compile mode reduce-overhead), or a larger batch"
    return "a larger batch gives each kernel more to do"


def _faster_products(run: RunRecord) -> str:
    if (run.precision or "").startswith("32") and run.matmul_precision == "highest":
        return "bf16-mixed or TF32 (--measure.matmul_precision high) makes them faster; compile does not"
    if run.outcome == DAMAGED:
        return "what is left is their efficiency, which the trace does not tell"
    return "what is left is their efficiency: `lmbench ceiling` measures what the device attains"


def _fewer_bytes(share: PhaseShares, run: RunRecord, memory: float) -> str:
    """What moves fewer bytes, behind the sentence that memory is the bound."""
    if share.phase == "optimizer":
        fused = _is_fused(share)
        return ": each byte is moved once already" if fused else ": a fused optimizer reads and writes each byte once"
    if share.phase == "clip":
        return ": every gradient is read for the norm, and read and written once to be scaled"
    if sum(_fraction(share, kind) for kind in _MOVING_KINDS) > memory / 2:
        most = max(_MOVING_KINDS, key=lambda kind: _fraction(share, kind))
        return f", most of it moves data ({most} {100 * _fraction(share, most):.0f} %), which no compiler fuses away"
    softmax_s = sum(seconds for part, seconds in share.parts_s.items() if "softmax" in part.split("+"))
    has_much = softmax_s > _MUCH_SOFTMAX_FRACTION * share.kernel_s
    tail = "; a fused attention saves the scores' traffic" if has_much else ""
    if _is_compiled(share, run):
        return f", fused already: fewer bytes (a lower precision of what they read and write) is what helps{tail}"
    return f": compile ({_compile(run)}) fuses them{tail}"


def _compile(run: RunRecord) -> str:
    """How compiling is called where the trace comes from."""
    return "torch.compile" if run.outcome == DAMAGED else "--trainer.compile"


def _fraction(share: PhaseShares, kind: str) -> float:
    return share.kinds_s.get(kind, 0.0) / share.kernel_s if share.kernel_s else 0.0


def _is_fused(share: PhaseShares) -> bool:
    return any(_FUSED_OPTIMIZER.search(row.name) for row in share.rows)


def _is_compiled(share: PhaseShares, run: RunRecord) -> bool:
    return bool(run.compile.is_enabled) or any(row.name.startswith(TRITON) for row in share.rows)
