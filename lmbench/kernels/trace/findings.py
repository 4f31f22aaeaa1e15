"""One trace, completely computed: what every form of output shows, and its record for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmbench.kernels.trace.analysis import Trace, load_trace
from lmbench.kernels.trace.attention import AttentionTimes, attention_times
from lmbench.kernels.trace.clocks import Clocks, phase_clocks
from lmbench.kernels.trace.completeness import Completeness, completeness, device_guards, trace_guards, why_no_kernels
from lmbench.kernels.trace.operator_times import OperatorRow, operator_times
from lmbench.kernels.trace.shares import (
    KernelRow,
    PhaseShares,
    captured_s,
    matmul_fractions,
    shares_by_phase,
    whole_step,
)
from lmbench.kernels.trace.verdicts import PhaseVerdict, judge_phases
from lmbench.records.guard import Guard
from lmbench.records.vocabulary import Record


@dataclass(frozen=True)
class Findings:
    """Everything that is said of a trace. Without kernels (a CPU trace) there are only `operators`, by phase.

    `why_no_kernels` is empty for a trace that has some.
    """

    path: Path
    run: Record
    why_no_kernels: str
    phase_source: str
    steps: int
    has_step_count: bool
    captured_s: float
    completeness: Completeness
    phases: list[PhaseShares]
    step: PhaseShares
    matmul_fractions: dict[str, float]
    clocks: Clocks
    verdicts: list[PhaseVerdict]
    attention: list[AttentionTimes]
    operators: dict[str, list[OperatorRow]]
    guards: list[Guard]

    @property
    def has_kernels(self) -> bool:
        return not self.why_no_kernels


def examine(path: str | Path) -> Findings:
    """Read and compute everything. Raises UsageError for what is no trace."""
    return findings_of(load_trace(path))


def findings_of(trace: Trace) -> Findings:
    """Compute everything that follows from a trace."""
    run = trace.source.run.run if trace.source.run else {}
    steps = trace.source.run.steps if trace.source.run else []
    shares = shares_by_phase(trace.kernels)
    step = whole_step(shares)
    clocks = phase_clocks(trace.kernels, trace.events.launches, trace.timeline)
    verdicts = judge_phases(clocks, shares, run, steps)
    has_kernels, count = trace.events.has_kernels, completeness(trace)
    return Findings(
        path=trace.source.path,
        run=run,
        why_no_kernels=why_no_kernels(trace),
        phase_source=trace.timeline.source,
        steps=trace.timeline.steps,
        has_step_count=trace.timeline.has_step_count,
        captured_s=captured_s(trace.kernels),
        completeness=count,
        phases=shares,
        step=step,
        matmul_fractions=matmul_fractions(shares, step, trace.mode) if has_kernels else {},
        clocks=clocks,
        verdicts=verdicts,
        attention=attention_times(trace.kernels, trace.timeline.steps, run),
        operators={} if has_kernels else operator_times(trace),
        guards=trace_guards(trace, count, shares, verdicts) if has_kernels else device_guards(trace),
    )


def as_record(found: Findings) -> dict[str, Any]:
    """Everything as plain JSON values, in SI units; kernel and operator times are over the whole trace, the clocks and
    attention's are means per step."""
    return {
        "schema_version": 1,
        "trace": str(found.path),
        "has_kernels": found.has_kernels,
        "why_no_kernels": found.why_no_kernels,
        "phase_source": found.phase_source,
        "steps": found.steps,
        "captured_s": found.captured_s,
        "completeness": asdict(found.completeness),
        "matmul_fractions": found.matmul_fractions,
        "phases": [_phase(share) for share in found.phases],
        "step": _phase(found.step) if found.has_kernels else None,
        "clocks": {
            "steps": found.clocks.steps,
            "skipped_steps": found.clocks.skipped,
            "phases": [_verdict(one) for one in found.verdicts],
        },
        "attention": [asdict(times) for times in found.attention],
        "operators": {phase: [asdict(row) for row in rows] for phase, rows in found.operators.items()},
        "guards": [guard.as_dict() for guard in found.guards],
    }


def _phase(share: PhaseShares) -> dict[str, Any]:
    return {
        "phase": share.phase,
        "kernel_s": share.kernel_s,
        "instances": share.instances,
        "matmul_fraction": share.matmul_fraction,
        "top_non_matmul": share.top_other.name if share.top_other else None,
        "kinds_s": share.kinds_s,
        "parts_s": share.parts_s,
        "kernels": [kernel_record(row) for row in share.rows],
    }


def kernel_record(row: KernelRow) -> dict[str, Any]:
    """One kernel's row with both of its names."""
    return {**asdict(row), "short_name": row.short_name}


def _verdict(one: PhaseVerdict) -> dict[str, Any]:
    record = asdict(one)
    clock = record.pop("clock")
    derived = {"host_s_per_launch": one.clock.host_s_per_launch, "wait_fraction": one.clock.wait_fraction}
    return {**clock, **derived, **record}
