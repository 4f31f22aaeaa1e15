"""Verdicts on whether the device was working, by phase, with advice on what would make the phase faster.

Beside the trace's verdict stands that of the lag from unprofiled steps. The advice follows from the verdict, the
phase's kernels, and the options that the run uses already.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
import pandas as pd

from lmbench.kernels.clocks import Clocks
from lmbench.kernels.compiled import TRITON
from lmbench.kernels.names import FULL_FP32, NAMES, PRODUCTS, UNCLASSIFIED
from lmbench.kernels.sums import Work
from lmbench.kernels.trace import OUTSIDE
from lmbench.kernels.waits import LAUNCHING, largest_causes, remedy
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import DAMAGED
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import milliseconds, percent

# Other phases have no verdict: in `data` the device waits for the host by definition, and `other` is the host's work.
_JUDGED = ("forward", "backward", "clip", "optimizer", OUTSIDE)
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
_FUSED_OPTIMIZER = re.compile(r"fused_?(?:adam|sgd|adagrad|lamb|lion)", re.IGNORECASE)


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
    lag_verdicts = dict(run.probe.verdicts.items()) if run.probe.verdicts else {}
    lags = [lag_verdicts.get(phase, LagVerdict()) for phase in phases.index]
    is_long = (phases.kernels > 0) & (phases.window_s >= _LONG_FRACTION * phases.window_s.sum()) & (phases.window_s > 0)
    verdicts, advice = list[TraceWord | None](), list[str | None]()
    is_judged = is_long & phases.index.isin(_JUDGED)
    for (phase, clock), lag in zip(phases.iterrows(), lags, strict=True):
        verdict = verdict_of(clock) if is_judged[phase] else None
        is_slowed = lag.verdict == "queued" and verdict in ("host-bound", "mixed")
        word = "queued" if is_slowed else verdict
        sentence = _advice(word, str(phase), clock, waits[waits.phase == phase], work, run) if word else None
        verdicts.append(verdict)
        advice.append(f"without the profiler it is queued, and {sentence}" if is_slowed else sentence)
    return phases.assign(
        lag_verdict=[lag.verdict for lag in lags],
        min_lag_s=np.array([lag.min_lag_s for lag in lags], dtype=float), verdict=verdicts, advice=advice
    )  # fmt: skip


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
    names = ("host_wait_s", "other_idle_s", "idle_s", "comm_exposed_s")
    wait, other, idle, exposed = (clock[name] / (clock.window_s or 1.0) for name in names)
    if exposed >= max(COMMUNICATION_BOUND_FRACTION, wait):
        return "waits for other ranks" if clock.rank_wait_s > clock.comm_exposed_s / 2 else "communication-bound"
    if wait >= HOST_BOUND_FRACTION and wait >= other:
        return "host-bound"
    if other >= STALLED_FRACTION or idle > IDLE_FRACTION:
        return "stalled"
    return "queued" if wait <= QUEUED_FRACTION else "mixed"


def _advice(verdict: TraceWord, phase: str, clock: pd.Series, waits: pd.DataFrame, work: Work, run: RunRecord) -> str:
    """The advice on what would make a phase faster: the first sentence whose condition holds."""
    kernels, parts = work.kernels(phase), work.by("part", phase=phase)
    kinds = work.by("kind", phase=phase).set_index("kind").share_fraction
    products, attention, unknown, memory = (
        float(kinds.reindex(names).sum()) for names in (PRODUCTS, ["attention"], [UNCLASSIFIED], NAMES["memory_kinds"])
    )
    names, is_network = kernels.name, phase not in ("clip", "optimizer")
    computed = products + attention
    fp32 = sum(work.fraction("precision", name, phase) for name in FULL_FP32)
    layout = kernels.share_fraction[names.str.contains(_LAYOUT)].sum()
    softmax = parts.share_fraction[parts.part.str.contains(r"\bsoftmax\b")].sum()
    communication = shortened(next(iter(kernels.short_name[kernels.kind == "comm"]), "communication"), KERNEL_WIDTH)
    can_fuse_update = phase == "optimizer" and not names.str.contains(_FUSED_OPTIMIZER).any()
    can_compile = is_network and not (run.compile.is_enabled or names.str.startswith(TRITON).any())
    compiling = "torch.compile" if run.outcome == DAMAGED else "--trainer.compile"
    can_replay = run.compile.mode != "reduce-overhead" and clock.launches > clock.kernels / 2
    fewer = _first(
        (can_fuse_update, "a fused optimizer is one kernel or a few"),
        (can_compile, f"compile ({compiling}), or a larger batch"),
        (is_network and can_replay, "CUDA graphs (compile mode reduce-overhead), or a larger batch"),
        (True, "a larger batch gives each kernel more to do"),
    )
    fewer_bytes = _first(
        (can_fuse_update, "a fused optimizer reads and writes each byte once"),
        (softmax > _MUCH_SOFTMAX_FRACTION, "a fused attention saves the scores' traffic"),
        (can_compile, f"compile ({compiling}) fuses them"),
        (True, "fused already, a lower precision moves fewer bytes"),
    )
    short_kernels = f"{clock.kernels:,.0f} short kernels with gaps between them: {fewer}"
    exposed = f"{milliseconds(clock.comm_exposed_s)} ms of {communication} exposed"
    waiting = "launched kernels wait for another stream, a copy or another rank"
    faster = "bf16-mixed or TF32 (--measure.matmul_precision high)"
    if run.outcome == DAMAGED:
        faster = "16-bit autocast or TF32 (torch.backends.*.allow_tf32)"
    cause = next(iter(largest_causes(waits).index), LAUNCHING)
    is_host_bound = verdict == "host-bound"
    is_stalled = verdict == "stalled"
    return _first(
        (is_stalled and clock.queued_gap_s >= clock.other_idle_s, short_kernels),
        (is_stalled and clock.comm_exposed_s >= _MUCH_COMMUNICATION_FRACTION * clock.window_s, f"{exposed}; {waiting}"),
        (is_stalled, waiting),
        (is_host_bound and cause != LAUNCHING, remedy(waits, cause)),
        (is_host_bound,
         f"{clock.launches:,.0f} launches, one every {clock.launch_interval_s * 1e6:.1f} us: {fewer}"),
        (verdict == "waits for other ranks",
         f"{exposed}, {milliseconds(clock.rank_wait_s)} ms of it before the last rank came: see what that one does"),
        (verdict == "communication-bound",
         f"{exposed}: overlap it, send less, or find the rank that comes late"),
        (clock.queued_gap_s > max(_MANY_GAPS_FRACTION, products / 2) * clock.window_s, short_kernels),
        (unknown > max(memory, computed), f"{percent(unknown)} are kernels of unknown kind"),
        (fp32 >= _MUCH_FP32_FRACTION,
         f"{percent(fp32)} are products in float32: {faster}; compile does not help them"),
        (layout >= _MUCH_LAYOUT_FRACTION,
         f"{percent(layout)} change the layout for convolutions: memory_format=torch.channels_last saves that"),
        (computed > _MATMUL_BOUND_FRACTION * (computed + memory),
         f"matrix products and fused attention take {percent(computed)}: what is left is their efficiency (`lmbench "
         "ceiling`)"),
        (True, f"{percent(memory)} are kernels bound by memory: {fewer_bytes}"),
    )  # fmt: skip


def _first(*rules: tuple[Any, str]) -> str:
    """The first sentence whose condition holds; the last condition is always true."""
    return next(sentence for is_true, sentence in rules if is_true)
