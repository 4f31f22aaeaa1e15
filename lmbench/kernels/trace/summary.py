"""A trace's findings in a few kB for run.json: means per step, so that a report never has to read the trace."""

from __future__ import annotations

from lmbench.kernels.trace.findings import Findings
from lmbench.kernels.trace.phases import OUTSIDE
from lmbench.kernels.trace.shares import KernelRow, PhaseShares, unclassified_s
from lmbench.kernels.trace.verdicts import PhaseVerdict
from lmbench.records.vocabulary import PHASES, Record

#: Kernels kept of each phase, the longest first.
TOP = 5


def summarize(found: Findings) -> Record:
    """The part `kernels` of run.json, in SI units; times, launches and kernels are means per step.

    Of a trace without kernels only the number of steps and the `reason`.
    """
    if not found.has_kernels:
        return without_kernels(found.why_no_kernels, found.steps)
    total, steps = found.captured_s, found.steps
    no_kind, no_part = unclassified_s(found.phases)
    count = found.completeness
    return {
        "reason": None,
        "steps": steps,
        "clock_steps": found.clocks.steps,
        "phase_source": found.phase_source,
        "kernel_s": total / steps,
        "outside_s": sum(share.kernel_s for share in found.phases if share.phase == OUTSIDE) / steps,
        "unclassified_kind_fraction": no_kind / total if total else 0.0,
        "unclassified_part_fraction": no_part / total if total else 0.0,
        "captured_kernel_count": count.kernels,
        "captured_launch_count": count.launches,
        "kernel_without_launch_count": count.kernels_without_launch,
        "launch_without_kernel_count": count.launches_without_kernel,
        "kernel_before_launch_count": count.kernels_before_launch,
        "phases": _phases(found),
        "attention": {
            times.phase: {
                **{f"{part}_s": seconds for part, seconds in times.parts_s.items()},
                "matmul_s": times.matmul_s,
                "softmax_matmul_time_ratio": times.time_ratio,
                "softmax_matmul_flop_ratio": times.flop_ratio,
            }
            for times in found.attention
        },
    }


def without_kernels(reason: str, steps: int | None = None) -> Record:
    """The part `kernels` of a run of whose kernels nothing is known."""
    return {"reason": reason, "steps": steps}


def _phases(found: Findings) -> Record:
    """Every phase with kernels or a clock, and the whole step: all phases, without what lies outside of them."""
    shares = {share.phase: share for share in found.phases} | {"step": found.step}
    clocks = {one.phase: one for one in found.verdicts}
    return {
        phase: {**_clocks(clocks.get(phase)), **_shares(shares.get(phase), found.steps)}
        for phase in (*PHASES, "step")
        if phase in shares or phase in clocks
    }


def _shares(share: PhaseShares | None, steps: int) -> Record:
    if share is None:
        return {"kernel_s": 0.0, "kernel_count": 0.0, "kinds": {}, "parts": {}, "top": []}
    return {
        "kernel_s": share.kernel_s / steps,
        "kernel_count": share.instances / steps,
        "matmul_fraction": share.matmul_fraction,
        "kinds": {f"{kind}_s": seconds / steps for kind, seconds in share.kinds_s.items()},
        "parts": {f"{part}_s": seconds / steps for part, seconds in share.parts_s.items()},
        "top": [_kernel(row, steps) for row in share.rows[:TOP]],
        "top_other": _kernel(share.top_other, steps) if share.top_other else None,
    }


def _kernel(row: KernelRow, steps: int) -> Record:
    return {
        "name": row.short_name,
        "kind": row.kind,
        "part": row.part,
        "kernel_s": row.total_s / steps,
        "kernel_count": row.instances / steps,
        "share_fraction": row.share_fraction,
    }


def _clocks(one: PhaseVerdict | None) -> Record:
    if one is None:
        return {}
    clock = one.clock
    return {
        "window_s": clock.window_s,
        "busy_s": clock.busy_s,
        "queued_gap_s": clock.queued_gap_s,
        "host_wait_s": clock.host_wait_s,
        "host_s": clock.host_s,
        "launch_count": clock.launches,
        "median_kernel_s": clock.median_kernel_s,
        "verdict": one.verdict,
    }
