"""What would make a phase faster: by its verdict, by what its kernels show, and by what the run does already."""

from __future__ import annotations

import re

from lmbench.kernels.trace.clocks import PhaseClock
from lmbench.kernels.trace.graphs import TRITON
from lmbench.kernels.trace.shares import PhaseShares
from lmbench.records.paths import lookup
from lmbench.records.vocabulary import Record

# Below this share of gaps, fewer kernels would change little.
_MANY_GAPS_FRACTION = 0.05
_MATMUL_BOUND_FRACTION = 0.6
# From this share on, a softmax of its own is worth a fused attention.
_MUCH_SOFTMAX_FRACTION = 0.05
_FUSED_OPTIMIZER = re.compile(r"fused_?(adam|sgd|adagrad|lamb|lion)", re.IGNORECASE)


def advise(verdict: str, clock: PhaseClock, share: PhaseShares, run: Record) -> str:
    """Advice for a phase that was judged `host-bound`, `mixed` or `queued`; `run` is empty for a foreign trace."""
    if verdict == "host-bound":
        return _host_bound(clock, share, run)
    if verdict == "mixed":
        return "the host is just fast enough: a slower one, or a faster device, makes this phase host-bound"
    return _queued(clock, share, run)


def _queued(clock: PhaseClock, share: PhaseShares, run: Record) -> str:
    gap = clock.queued_gap_s / clock.window_s if clock.window_s else 0.0
    if gap > _MANY_GAPS_FRACTION and gap > share.matmul_fraction / 2:
        return f"{clock.kernels:,.0f} short kernels with gaps between them: {_fewer(clock, share, run)}"
    products, attention, traffic = share.matmul_fraction, _fraction(share, "attention"), _fraction(share, "comm")
    memory = 1 - products - attention - traffic
    if traffic > max(memory, products + attention):
        return f"communication takes {100 * traffic:.0f} %: more work per step, such as a larger batch, hides it"
    if products + attention > _MATMUL_BOUND_FRACTION:
        fused = f", fused attention {100 * attention:.0f} %" if attention else ""
        return f"matrix products take {100 * products:.0f} %{fused}: {_faster_products(run)}"
    return f"{100 * memory:.0f} % are kernels bound by memory{_fewer_bytes(share, run)}"


def _host_bound(clock: PhaseClock, share: PhaseShares, run: Record) -> str:
    if clock.first_wait_s > clock.host_wait_s / 2:
        return (
            f"most of it comes before the first kernel: the phase before leaves nothing in the queue; "
            f"what keeps the device busy there helps {clock.phase}, too"
        )
    cost = f"{clock.launches:,.0f} launches of {(clock.host_s_per_launch or 0.0) * 1e6:.1f} us each"
    return f"{cost} keep the host busy: {_fewer(clock, share, run)}; faster kernels would only wait longer"


def _fewer(clock: PhaseClock, share: PhaseShares, run: Record) -> str:
    """How to start fewer kernels for the same work, as far as the run does not do so already."""
    if clock.phase == "optimizer" and not _is_fused(share):
        return "a fused optimizer is one kernel or a few"
    if clock.phase in ("optimizer", "clip"):
        return "fewer parameters, or a larger batch per step"
    if not _is_compiled(share, run):
        return "compile (--trainer.compile), or give each kernel more to do with a larger batch"
    if lookup(run, "compile.mode") != "reduce-overhead" and clock.launches > clock.kernels / 2:
        return "CUDA graphs (compile mode reduce-overhead), or a larger batch"
    return "a larger batch gives each kernel more to do"


def _faster_products(run: Record) -> str:
    precision = str(run.get("precision") or "")
    if precision.startswith("32") and run.get("matmul_precision") == "highest":
        return "bf16-mixed or TF32 (--measure.matmul_precision high) makes them faster; compile does not"
    return "what is left is their efficiency: larger batches, sizes that are multiples of 64 or 128"


def _fewer_bytes(share: PhaseShares, run: Record) -> str:
    """What moves fewer bytes, behind the sentence that memory is the bound."""
    if share.phase == "optimizer":
        fused = _is_fused(share)
        return ": each byte is moved once already" if fused else ": a fused optimizer reads and writes each byte once"
    if share.phase == "clip":
        return ": every gradient is read for the norm, and read and written once to be scaled"
    softmax_s = sum(seconds for part, seconds in share.parts_s.items() if "softmax" in part.split("+"))
    has_much = softmax_s > _MUCH_SOFTMAX_FRACTION * share.kernel_s
    tail = "; a fused attention saves the scores' traffic" if has_much else ""
    if _is_compiled(share, run):
        return f", fused already: fewer bytes (a lower precision of what they read and write) is what helps{tail}"
    return f": compile (--trainer.compile) fuses them{tail}"


def _fraction(share: PhaseShares, kind: str) -> float:
    return share.kinds_s.get(kind, 0.0) / share.kernel_s if share.kernel_s else 0.0


def _is_fused(share: PhaseShares) -> bool:
    return any(_FUSED_OPTIMIZER.search(row.name) for row in share.rows)


def _is_compiled(share: PhaseShares, run: Record) -> bool:
    return bool(lookup(run, "compile.is_enabled")) or any(row.name.startswith(TRITON) for row in share.rows)
