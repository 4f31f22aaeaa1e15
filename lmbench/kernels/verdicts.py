"""Verdicts on whether the device was working, by phase, with advice on what would make the phase faster.

Beside the trace's verdict stands that of the lag from unprofiled steps. The advice follows from the verdict, the
phase's kernels, and the options that the run uses already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import pandas as pd

from lmbench.kernels.clocks import Clocks
from lmbench.kernels.compiled import TRITON
from lmbench.kernels.names import FULL_FP32, KINDS, NAMES, PRODUCTS, UNCLASSIFIED
from lmbench.kernels.pieces import LAUNCHING
from lmbench.kernels.sums import Work
from lmbench.kernels.trace import OUTSIDE, UNLINKED
from lmbench.kernels.waits import largest_causes, remedy
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import DAMAGED
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import milliseconds, percent

# Phases with a smaller share of the window have no verdict.
_LONG_FRACTION = 0.002
# Shares of a phase in which the device waits for the host: from the first on it is host-bound, up to the second queued.
HOST_BOUND_FRACTION = 0.10
QUEUED_FRACTION = 0.02
# A phase is stalled from this share of other idle time on, or above this share of idle time for any reason.
STALLED_FRACTION = 0.10
IDLE_FRACTION = 0.30
# A phase is communication-bound from this share on in which communication runs and nothing computes.
COMMUNICATION_BOUND_FRACTION = 0.25
# Reasons for idle time with a smaller share are not named.
_MIN_REASON_FRACTION = 0.001
# With a smaller share of gaps, fewer kernels would change little.
_MANY_GAPS_FRACTION = 0.05
_MATMUL_BOUND_FRACTION = 0.6
# With a larger share of separate softmax kernels, fused attention is worth it.
_MUCH_SOFTMAX_FRACTION = 0.05
_MUCH_FP32_FRACTION = 0.2
_MUCH_LAYOUT_FRACTION = 0.08
_MUCH_COMMUNICATION_FRACTION = 0.05
#: `stalled` says that the device idles for another reason than the host, or in very many gaps.
TraceWord = Literal[LagWord, "stalled", "communication-bound", "waits for other ranks"]

# Kernels that only change the memory layout of images for a convolution.
_LAYOUT = re.compile(r"nchw_?to_?nhwc|nhwc_?to_?nchw|^batched_transpose_\d", re.IGNORECASE)
# Phases that run the network.
_NETWORK = ("forward", "backward", OUTSIDE)
# Copies between the host and the device, as CUDA and ROCm name them.
_TO_DEVICE, _TO_HOST = r"HtoD|HostToDevice", r"DtoH|DeviceToHost"
_LESS_COPYING = "send less, keep data on the device, overlap both directions and computing (pinned, non_blocking=True)"
#: Kernels of optimizers that update all weights at once.
FUSED_OPTIMIZER = re.compile(r"fused_?(?:adam|sgd|adagrad|lamb|lion)", re.IGNORECASE)


def judge_phases(clocks: Clocks, waits: pd.DataFrame, work: Work, run: RunRecord) -> pd.DataFrame:
    """The phases' clocks with `verdict`, `advice`, and `lag_verdict` and `min_lag_s` from the run's probe steps.

    `verdict` is that of `verdict_of`, or None for a phase that is not judged. `advice` says what would make the phase
    faster in a run without the profiler, which slows the host but not the device. So where the lag says `queued`, the
    advice is for a queued phase.

    Args:
        clocks: the clocks of the trace.
        waits: the reasons why devices waited for the host, by phase.
        work: the kernels of the trace.
        run: the run's record; an empty one for a trace without a run.
    """
    phases = clocks.phases
    if phases.empty:
        return phases
    # Nothing tells why kernels without launches ran.
    is_judged = (phases.window_s > _LONG_FRACTION * phases.window_s.sum()) & (phases.index != UNLINKED)
    rows = []
    for phase, clock in phases.iterrows():
        lag, verdict, advice = run.probe.lags.get(phase, LagVerdict()), None, None
        if is_judged[phase]:
            verdict, case = verdict_of(clock), _Case(str(phase), clock, waits[waits.phase == phase], work, run)
            advice = _advice(verdict, case)
            if lag.verdict == "queued" and verdict in ("host-bound", "mixed"):
                advice = f"without the profiler it is queued, and {_advice('queued', case)}"
        rows.append((lag.verdict, lag.min_lag_s, verdict, advice))
    judged = pd.DataFrame(rows, phases.index, ["lag_verdict", "min_lag_s", "verdict", "advice"])
    return phases.join(judged.astype({"min_lag_s": float}))


def idle_reason(clock: pd.Series) -> str:
    """Text on how long a device was busy, or a phase on it, and the reasons for its idle time."""
    words = {"host_wait_s": "waiting for the host", "queued_gap_s": "in short gaps", "other_idle_s": "other"}
    shares = {word: clock[name] / (clock.window_s or 1.0) for name, word in words.items()}
    reasons = ", ".join(f"{percent(share)} {word}" for word, share in shares.items() if share >= _MIN_REASON_FRACTION)
    busy = f"busy {milliseconds(clock.busy_s)} of {milliseconds(clock.window_s)} ms"
    return f"{busy}, idle {percent(sum(shares.values()))}" + (f": {reasons}" if reasons else "")


def verdict_of(clock: pd.Series) -> TraceWord:
    """The verdict on a device, or on a phase on it; the first that holds, with shares of the window:

    - `communication-bound`: exposed communication has `COMMUNICATION_BOUND_FRACTION` or more, and no less than waiting
      for the host; or `waits for other ranks`, if more than half of it is before the last rank came.
    - `host-bound`: waiting for the host has `HOST_BOUND_FRACTION` or more, and no less than other idle time.
    - `stalled`: other idle time has `STALLED_FRACTION` or more, or all idle time more than `IDLE_FRACTION`.
    - `queued`: waiting for the host has at most `QUEUED_FRACTION`.
    - `mixed`: everything else.
    """
    share = clock / (clock.window_s or 1.0)
    if share.comm_exposed_s >= max(COMMUNICATION_BOUND_FRACTION, share.host_wait_s):
        return "waits for other ranks" if share.rank_wait_s > share.comm_exposed_s / 2 else "communication-bound"
    if share.host_wait_s >= max(HOST_BOUND_FRACTION, share.other_idle_s):
        return "host-bound"
    if share.other_idle_s >= STALLED_FRACTION or share.idle_s > IDLE_FRACTION:
        return "stalled"
    return "queued" if share.host_wait_s <= QUEUED_FRACTION else "mixed"


@dataclass(frozen=True, eq=False)
class _Case:
    """A phase to advise on: its clock, its waits for the host, all kernels of the trace, and the run's record."""

    phase: str
    clock: pd.Series
    waits: pd.DataFrame
    work: Work
    run: RunRecord

    @cached_property
    def kernels(self) -> pd.DataFrame:
        return self.work.kernels(self.phase)

    def share(self, kinds: Iterable[str]) -> float:
        """The share of the phase's kernel time in kernels of these kinds."""
        return float(self.kernels.share_fraction[self.kernels.kind.isin(kinds)].sum())

    @property
    def can_fuse_update(self) -> bool:
        return self.phase == "optimizer" and not self.kernels.name.str.contains(FUSED_OPTIMIZER).any()

    @property
    def can_compile(self) -> bool:
        is_compiled = self.run.compile.is_enabled or self.kernels.name.str.startswith(TRITON).any()
        return self.phase in _NETWORK and not is_compiled

    @property
    def compiling(self) -> str:
        return f"compile ({'torch.compile' if self.run.outcome == DAMAGED else '--trainer.compile'})"

    @property
    def exposed(self) -> str:
        names = self.kernels.short_name[self.kernels.kind == "comm"]
        name = shortened(next(iter(names), "communication"), KERNEL_WIDTH)
        return f"{milliseconds(self.clock.comm_exposed_s)} ms of {name} exposed"


def _advice(verdict: TraceWord, case: _Case) -> str:
    """The advice on what would make a phase faster: the first sentence whose condition holds."""
    if verdict == "stalled":
        return _advice_on_stalls(case)
    if verdict == "host-bound":
        return _advice_on_host(case)
    if verdict == "waits for other ranks":
        waited = f"{milliseconds(case.clock.rank_wait_s)} ms of it before the last rank came"
        return f"{case.exposed}, {waited}: see what that one does"
    if verdict == "communication-bound":
        return f"{case.exposed}: overlap it, send less, or find the rank that comes late"
    return _advice_on_copies(case) or _advice_on_kernels(case)


def _advice_on_stalls(case: _Case) -> str:
    """The advice for a phase that idles for another reason than the host."""
    clock, waiting = case.clock, "launched kernels wait for another stream, a copy or another rank"
    if clock.queued_gap_s >= clock.other_idle_s:
        return _short_kernels(case)
    if clock.comm_exposed_s >= _MUCH_COMMUNICATION_FRACTION * clock.window_s:
        return f"{case.exposed}; {waiting}"
    return waiting


def _advice_on_host(case: _Case) -> str:
    """The advice for a phase in which the device waits for the host."""
    cause = largest_causes(case.waits).index[0]
    if cause != LAUNCHING or case.phase == "data":
        return remedy(case.waits, cause, case.phase == "data")
    if case.phase not in (*_NETWORK, "clip", "optimizer") or not case.clock.launches:
        return f"{milliseconds(case.clock.host_wait_s)} ms of the host's own work"
    interval_us = case.clock.launch_interval_s * 1e6
    return f"{case.clock.launches:,.0f} launches, one every {interval_us:.1f} us: {_fewer_kernels(case)}"


def _advice_on_copies(case: _Case) -> str:
    """The advice for a phase that mostly copies between host and device; empty for another phase."""
    names, kernels = case.kernels.name, case.kernels
    to_device_s, back_s = (kernels.kernel_s[names.str.contains(way)].sum() for way in (_TO_DEVICE, _TO_HOST))
    if to_device_s + back_s <= kernels.kernel_s.sum() / 2:
        return ""
    ways = f"{milliseconds(to_device_s)} ms to the device and {milliseconds(back_s)} back"
    computing = "" if case.share(KINDS) - case.share(["memcpy"]) else ", no kernel computes"
    return f"bound by copies between host and device, {ways}{computing}: {_LESS_COPYING}"


def _advice_on_kernels(case: _Case) -> str:
    """The advice for a phase whose own kernels limit it."""
    products, unknown, memory = case.share(PRODUCTS), case.share([UNCLASSIFIED]), case.share(NAMES.memory_kinds)
    computed = products + case.share(["attention"])
    if case.clock.queued_gap_s > max(_MANY_GAPS_FRACTION, products / 2) * case.clock.window_s:
        return _short_kernels(case)
    if unknown > max(memory, computed):
        return f"{percent(unknown)} are kernels of unknown kind"
    fp32 = sum(case.work.fraction("precision", name, case.phase) for name in FULL_FP32)
    if fp32 >= _MUCH_FP32_FRACTION:
        faster = "bf16-mixed or TF32 (--measure.matmul_precision high)"
        if case.run.outcome == DAMAGED:
            faster = "16-bit autocast or TF32 (torch.backends.*.allow_tf32)"
        return f"{percent(fp32)} are products in float32: {faster}; compile does not help them"
    layout = case.kernels.share_fraction[case.kernels.name.str.contains(_LAYOUT)].sum()
    if layout >= _MUCH_LAYOUT_FRACTION:
        saving = "memory_format=torch.channels_last saves that"
        return f"{percent(layout)} change the layout for convolutions: {saving}"
    if computed > _MATMUL_BOUND_FRACTION * (computed + memory):
        left = "what is left is their efficiency (`lmbench ceiling`)"
        return f"matrix products and fused attention take {percent(computed)}: {left}"
    return f"{percent(memory)} are kernels bound by memory: {_fewer_bytes(case)}"


def _short_kernels(case: _Case) -> str:
    return f"{case.clock.kernels:,.0f} short kernels with gaps between them: {_fewer_kernels(case)}"


def _fewer_kernels(case: _Case) -> str:
    """The way to fewer launches of kernels."""
    if case.can_fuse_update:
        return "a fused optimizer is one kernel or a few"
    if case.can_compile:
        return f"{case.compiling}, or a larger batch"
    is_replayed = case.run.compile.mode == "reduce-overhead" or case.clock.launches <= case.clock.kernels / 2
    if case.phase in _NETWORK and not is_replayed:
        return "CUDA graphs (compile mode reduce-overhead), or a larger batch"
    return "a larger batch gives each kernel more to do"


def _fewer_bytes(case: _Case) -> str:
    """The way to less traffic with the device's memory."""
    if case.can_fuse_update:
        return "a fused optimizer reads and writes each byte once"
    parts = case.work.by("part", phase=case.phase)
    if parts.share_fraction[parts.part.str.contains(r"\bsoftmax\b")].sum() > _MUCH_SOFTMAX_FRACTION:
        return "a fused attention saves the scores' traffic"
    if case.can_compile:
        return f"{case.compiling} fuses them"
    return "fused already, a lower precision moves fewer bytes"
