"""One trace, completely computed: what every form of output shows, its record for JSON, and the few kB of it that go
into run.json, so that a report never has to read the trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from lmbench.kernels.trace.annotations import Annotated, annotation_times
from lmbench.kernels.trace.clocks import Clocks, DeviceTime, phase_clocks
from lmbench.kernels.trace.completeness import Completeness, completeness, device_guards, trace_guards, why_no_kernels
from lmbench.kernels.trace.kernels import Trace, load_trace
from lmbench.kernels.trace.phases import OUTSIDE
from lmbench.kernels.trace.shares import (
    AttentionTimes,
    KernelRow,
    OperatorRow,
    PhaseShares,
    attention_times,
    captured_s,
    matmul_fractions,
    operator_times,
    shares_by_phase,
    unclassified_s,
    whole_step,
)
from lmbench.kernels.trace.step_timeline import step_timeline, write_timeline
from lmbench.kernels.trace.verdicts import PhaseVerdict, judge_phases
from lmbench.records.field import PerPhase
from lmbench.records.guard import Guard
from lmbench.records.instruments import AnnotationKernels, KernelSummary, PhaseKernels, TopKernel, TopOperator
from lmbench.records.instruments import AttentionTimes as InsideAttention
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import DAMAGED, SPANS, Phase

#: Kernels of each phase that are kept in run.json, the longest first.
TOP = 5
#: The same of annotations.
TOP_ANNOTATIONS = 20


@dataclass(frozen=True)
class Findings:
    """Everything that is said of a trace. Without kernels (a CPU trace) there are only `operators`, by phase.

    `run` is None for a trace without a run, or whose run.json cannot be read; `why_no_kernels` is empty for a trace
    that has some.
    """

    path: Path
    run: RunRecord | None
    why_no_kernels: str
    phase_source: str
    inferred_phases: tuple[Phase, ...]
    steps: int
    has_step_count: bool
    has_modules: bool
    captured_s: float
    completeness: Completeness
    phases: list[PhaseShares]
    step: PhaseShares
    matmul_fractions: dict[str, float]
    clocks: Clocks
    verdicts: list[PhaseVerdict]
    attention: list[AttentionTimes]
    annotations: Annotated
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
    run, steps = trace.run, trace.source.run.steps if trace.source.run else []
    shares = shares_by_phase(trace.kernels)
    step = whole_step(shares)
    clocks = phase_clocks(trace.kernels, trace.events, trace.timeline)
    verdicts = judge_phases(clocks, shares, run, steps)
    has_kernels, count = trace.events.has_kernels, completeness(trace)
    return Findings(
        path=trace.source.path,
        run=None if run.outcome == DAMAGED else run,
        why_no_kernels=why_no_kernels(trace),
        phase_source=trace.timeline.source,
        inferred_phases=trace.timeline.inferred,
        steps=trace.timeline.steps,
        has_step_count=trace.timeline.has_step_count,
        has_modules=trace.finder.has_modules or bool(trace.source.notes.compiled_graphs),
        captured_s=captured_s(trace.kernels),
        completeness=count,
        phases=shares,
        step=step,
        matmul_fractions=matmul_fractions(shares, step, run.mode) if has_kernels else {},
        clocks=clocks,
        verdicts=verdicts,
        annotations=annotation_times(trace),
        attention=attention_times(trace.kernels, trace.timeline.steps, run.model),
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
        "inferred_phases": list(found.inferred_phases),
        "steps": found.steps,
        "has_modules": found.has_modules,
        "captured_s": found.captured_s,
        "completeness": asdict(found.completeness),
        "matmul_fractions": found.matmul_fractions,
        "phases": [_phase(share) for share in found.phases],
        "step": _phase(found.step) if found.has_kernels else None,
        "clocks": {
            "steps": found.clocks.steps,
            "skipped_steps": found.clocks.skipped,
            "is_whole_trace": found.clocks.is_whole_trace,
            "devices": [{**asdict(one), **_derived(one)} for one in found.clocks.devices],
            "phases": [_verdict(one) for one in found.verdicts],
        },
        "attention": [asdict(times) for times in found.attention],
        "annotations": [asdict(row) for row in found.annotations.rows],
        "not_annotated_s": found.annotations.none_s,
        "operators": {phase: [asdict(row) for row in rows] for phase, rows in found.operators.items()},
        "guards": msgspec.to_builtins(found.guards),
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
    return {**clock, **derived, **_derived(one.clock), **record}


def _derived(time: DeviceTime) -> dict[str, float | None]:
    return {"idle_s": time.idle_s, "idle_fraction": time.idle_fraction, "comm_exposed_s": time.comm_exposed_s}


def summarize(found: Findings) -> KernelSummary:
    """The part `kernels` of run.json, in SI units; times, launches and kernels are means per step.

    Of a trace without kernels only the number of steps and the `reason`.
    """
    if not found.has_kernels:
        return KernelSummary(
            reason=found.why_no_kernels,
            steps=found.steps,
            operators=[
                TopOperator(phase, row.name, row.self_s / found.steps, row.calls / found.steps, row.share_fraction)
                for phase, rows in found.operators.items()
                for row in rows[:TOP]
            ],
        )
    total, steps = found.captured_s, found.steps
    no_kind, no_part = unclassified_s(found.phases)
    count = found.completeness
    return KernelSummary(
        steps=steps,
        clock_steps=found.clocks.steps,
        phase_source=found.phase_source,
        inferred_phases=list(found.inferred_phases),
        kernel_s=total / steps,
        outside_s=sum(share.kernel_s for share in found.phases if share.phase == OUTSIDE) / steps,
        unclassified_kind_fraction=no_kind / total if total else 0.0,
        unclassified_part_fraction=no_part / total if total else 0.0,
        captured_kernel_count=count.kernels,
        captured_launch_count=count.launches,
        kernel_without_launch_count=count.kernels_without_launch,
        launch_without_kernel_count=count.launches_without_kernel,
        kernel_before_launch_count=count.kernels_before_launch,
        phases=_phases(found),
        attention=_attention(found),
        annotations=[
            AnnotationKernels(
                row.name, row.calls / steps, row.kernel_s / steps, row.own_s / steps, row.instances / steps
            )
            for row in found.annotations.rows[:TOP_ANNOTATIONS]
        ],
    )


def _phases(found: Findings) -> PerPhase[PhaseKernels]:
    """Every phase with kernels or a clock, and the whole step: all phases, and what lies outside of them."""
    shares = {share.phase: share for share in found.phases} | {"step": found.step}
    verdicts: dict[str, PhaseVerdict] = {one.phase: one for one in found.verdicts}
    per_phase = PerPhase[PhaseKernels]()
    for span in SPANS:
        share, one = shares.get(span), verdicts.get(span)
        if share is None and one is None:
            continue
        summary = PhaseKernels(kernel_s=0.0, kernel_count=0.0)
        if share is not None:
            summary = PhaseKernels(
                kernel_s=share.kernel_s / found.steps,
                kernel_count=share.instances / found.steps,
                matmul_fraction=share.matmul_fraction,
                kinds={f"{kind}_s": seconds / found.steps for kind, seconds in share.kinds_s.items()},
                parts={f"{part}_s": seconds / found.steps for part, seconds in share.parts_s.items()},
                top=[_top_kernel(row, found.steps) for row in share.rows[:TOP]],
                top_other=_top_kernel(share.top_other, found.steps) if share.top_other else None,
            )
        if one is not None:
            _set_times(summary, one.clock)
            summary.host_s, summary.launch_count = one.clock.host_s, one.clock.launches
            summary.median_kernel_s, summary.verdict = one.clock.median_kernel_s, one.verdict
        elif span == "step" and found.clocks.phases:
            _set_times(summary, found.clocks.whole)
        per_phase.set(span, summary)
    return per_phase


def _set_times(summary: PhaseKernels, time: DeviceTime) -> None:
    summary.window_s, summary.busy_s, summary.queued_gap_s = time.window_s, time.busy_s, time.queued_gap_s
    summary.host_wait_s, summary.other_idle_s = time.host_wait_s, time.other_idle_s
    summary.comm_s, summary.comm_exposed_s = time.comm_s, time.comm_exposed_s


def _top_kernel(row: KernelRow, steps: int) -> TopKernel:
    return TopKernel(row.short_name, row.kind, row.part, row.total_s / steps, row.instances / steps, row.share_fraction)


def _attention(found: Findings) -> PerPhase[InsideAttention]:
    per_phase = PerPhase[InsideAttention]()
    for times in found.attention:
        summary = InsideAttention(
            scores_s=times.parts_s["scores"],
            mask_s=times.parts_s["mask"],
            softmax_s=times.parts_s["softmax"],
            values_s=times.parts_s["values"],
            matmul_s=times.matmul_s,
            softmax_matmul_time_ratio=times.time_ratio,
            softmax_matmul_flop_ratio=times.flop_ratio,
        )
        per_phase.set(times.phase, summary)
    return per_phase


def examine_run(folder: Path) -> tuple[KernelSummary, list[Guard]]:
    """The summary of the trace in a run's folder and its guards; writes the step's timeline beside it.

    Raises UsageError for a trace that cannot be read, OSError where the timeline cannot be written.
    """
    trace = load_trace(folder)
    found = findings_of(trace)
    if (timeline := step_timeline(trace)) is not None:
        write_timeline(timeline, folder)
    return summarize(found), found.guards
