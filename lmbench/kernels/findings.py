"""One trace, completely computed: what every form of output shows, whether it can be believed, and the few kB of it
that go into run.json, so that a report never has to read the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmbench.kernels.clocks import Clocks, DeviceTime, phase_clocks
from lmbench.kernels.parts import UNCLASSIFIED
from lmbench.kernels.phases import OUTSIDE, UNLINKED
from lmbench.kernels.step_timeline import step_timeline, write_timeline
from lmbench.kernels.sums import (
    AnnotationTimes,
    AttentionTimes,
    KernelRow,
    OperatorRow,
    PhaseShares,
    annotation_times,
    attention_times,
    operator_times,
    shares_by_phase,
    shares_of,
    work_of,
)
from lmbench.kernels.trace import Trace, load_trace
from lmbench.kernels.verdicts import PhaseVerdict, judge_phases
from lmbench.records.field import PerPhase
from lmbench.records.guard import Guard, Status, at_most, not_applicable
from lmbench.records.instruments import AnnotationKernels, KernelSummary, PhaseKernels, TopKernel, TopOperator
from lmbench.records.instruments import AttentionTimes as InsideAttention
from lmbench.records.intervals import NONE
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import DAMAGED, SPANS

#: Kernels of each phase that are kept in run.json, the longest first; the same of annotations.
TOP, TOP_ANNOTATIONS = 5, 20
UNCLASSIFIED_LIMIT = 0.05
OUTSIDE_LIMIT = 0.01
SUM_LIMIT = 0.001
SPAN_LIMIT = 0.01
# Clocks of host and device are aligned by the profiler to about a microsecond.
EARLY_TOLERANCE_NS = 1_000
_AGAIN = "record the trace again, with fewer steps if it is large"


@dataclass(frozen=True)
class Completeness:
    """Launches and kernels that lack each other, and kernels that start before their launch; numbers of all steps.

    Of the kernels without launch `launched_before` were launched before the trace began, as their ids tell.
    `launches_without_kernel` are those that should have one: a call while a stream is captured into a graph starts
    nothing (`captured_launches`), and a fill of no bytes neither (`empty_fills`: all fills that the device shows
    nothing of, as the trace does not tell their sizes).
    """

    kernels: int
    launches: int
    kernels_without_launch: int
    without_launch_fraction: float
    launched_before: int
    launches_without_kernel: int
    captured_launches: int
    empty_fills: int
    shared_launches: int
    kernels_before_launch: int
    worst_early_s: float


@dataclass(frozen=True)
class Findings:
    """Everything that is said of a trace; times and numbers are means per step, of the whole trace where its number of
    steps is unknown. Without kernels (a CPU trace) there are only `operators`, by phase.

    `run` is None for a trace without a run, or whose run.json cannot be read; `why_no_kernels` is empty for a trace
    that has some. `annotations` are with the time in none of them.
    """

    trace: Trace
    run: RunRecord | None
    why_no_kernels: str
    completeness: Completeness
    phases: list[PhaseShares]
    step: PhaseShares
    clocks: Clocks
    verdicts: list[PhaseVerdict]
    attention: list[AttentionTimes]
    annotations: list[AnnotationTimes]
    no_annotation_s: float
    operators: dict[str, list[OperatorRow]]
    guards: list[Guard]

    @property
    def has_kernels(self) -> bool:
        return not self.why_no_kernels

    @property
    def has_modules(self) -> bool:
        """Whether ranges of modules, or compiled graphs, tell parts; else only operators do."""
        return self.trace.host.has_modules or bool(self.trace.notes.compiled_graphs)

    @property
    def matmul_fractions(self) -> dict[str, float]:
        """Share of matrix products in kernel time: of inference or forward, of backward, and of the whole step."""
        forward = "inference" if self.run is not None and self.run.mode == "inference" else "forward"
        named = {"forward": forward, "backward": "backward"}
        shares = {named[share.phase]: share.matmul_fraction for share in self.phases if share.phase in named}
        return {**shares, "step": self.step.matmul_fraction}


def examine(path: str | Path) -> Findings:
    """Read a run's folder or a trace file and compute everything. Raises UsageError for what is no trace."""
    return findings_of(load_trace(path))


def findings_of(trace: Trace) -> Findings:
    """Compute everything that follows from a trace."""
    steps, record = trace.timeline.steps, trace.record
    work = work_of(trace.kernels)
    phases, step = shares_by_phase(work, steps), shares_of("step", work, steps)
    clocks = phase_clocks(trace.kernels, trace.events, trace.timeline)
    verdicts = judge_phases(clocks, phases, record, trace.run.steps if trace.run else [])
    count = _completeness(trace)
    why = ""
    if not count.kernels:
        # With ProfilerActivity.CPU alone PyTorch notes the calls, too.
        launched = f"there are {count.launches:,} launches and not one kernel, as the device was not recorded"
        why = launched if count.launches else "a trace of a CPU has operators and no kernels"
    annotations, none_s = annotation_times(trace)
    return Findings(
        trace,
        None if record.outcome == DAMAGED else record,
        why,
        count,
        phases,
        step,
        clocks,
        verdicts,
        attention_times(work, steps, record.model),
        annotations,
        none_s,
        operator_times(trace) if why else {},
        _guards(trace, why, count, phases, step, verdicts),
    )


def _completeness(trace: Trace) -> Completeness:
    kernels, launches = trace.kernels, trace.events.launches
    is_linked = kernels.is_linked
    used = np.unique(kernels.launch[is_linked])
    early_ns = launches.start_ns[kernels.launch[is_linked]] - kernels.events.start_ns[is_linked]
    early_ns = early_ns[early_ns > EARLY_TOLERANCE_NS]
    is_alone = np.ones(len(launches), dtype=np.bool_)
    is_alone[used] = False
    is_captured = is_alone & trace.events.is_captured
    is_fill = is_alone & ~is_captured & launches.where(lambda name: "memset" in name.lower())
    is_missing = is_alone & ~is_captured & ~is_fill
    # Correlation ids rise with the calls; launches without a kernel can have the id of one that has.
    known = launches.correlation[launches.correlation != NONE]
    first_id = known.min(initial=2**62)
    unlinked, without = kernels.events.correlation[~is_linked], launches.correlation[is_missing]
    return Completeness(
        kernels=len(kernels),
        launches=len(launches),
        kernels_without_launch=int((~is_linked).sum()),
        without_launch_fraction=float(kernels.duration_ns[~is_linked].sum() / max(kernels.duration_ns.sum(), 1)),
        launched_before=int(((unlinked != NONE) & (unlinked < first_id)).sum()) if len(known) else 0,
        launches_without_kernel=int(is_missing.sum()),
        captured_launches=int(is_captured.sum()),
        empty_fills=int(is_fill.sum()),
        shared_launches=int((np.isin(without, launches.correlation[used]) & (without != NONE)).sum()),
        kernels_before_launch=len(early_ns),
        worst_early_s=float(early_ns.max(initial=0)) / 1e9,
    )


def _guards(
    trace: Trace,
    why_no_kernels: str,
    count: Completeness,
    phases: Sequence[PhaseShares],
    step: PhaseShares,
    verdicts: Sequence[PhaseVerdict],
) -> list[Guard]:
    """Whether the trace can be believed; one without kernels has a guard on whether there should be some."""
    unfinished = []
    if number := trace.events.unfinished:
        message = f"{number:,} events have no duration, or one below zero, and are left out"
        unfinished.append(
            Guard("unfinished_events", "warn", number, 0, "1", message, "the profiler stopped while they ran")
        )
    if why_no_kernels and not count.launches:
        return [not_applicable("device_recorded", why_no_kernels), *unfinished]
    if why_no_kernels:
        advice = (
            "record it with ProfilerActivity.CUDA among the activities; if it was, PyTorch lacked permission for CUPTI "
            "(NVIDIA's error ERR_NVGPUCTRPERM) or had lost it to another profiler"
        )
        return [Guard("device_recorded", "fail", count.launches, 0, "1", why_no_kernels, advice)]
    early = f"{count.kernels_before_launch:,} kernels start before their launch, by up to"
    sum_error = abs(step.share(sum(share.kernel_s for share in phases)) - 1) if step.kernel_s else 0.0
    guards = [
        _kernels_without_launch(count),
        _launches_without_kernel(count),
        at_most(
            "kernels_before_launch", count.kernels_before_launch, 0, "1",
            f"{early} {count.worst_early_s * 1e6:.1f} us",
            advice=f"the clocks of host and device do not fit, so that gaps and waits are wrong; {_AGAIN}",
            otherwise="fail",
        ),
        at_most(
            "phase_sum", sum_error, SUM_LIMIT, "fraction",
            f"the phases' kernel times sum to the captured time within {100 * sum_error:.2f} %",
            advice="a fault of lmbench", otherwise="fail",
        ),
        _outside(trace, phases, step),
        _classified("kind", step.kinds_s, step),
        _classified("part", step.parts_s, step),
        _spans(verdicts),
        *unfinished,
    ]  # fmt: skip
    if trace.run is not None and trace.run.damage:
        advice = "the trace is shown without what the run knows: settings, event spans, lag, FLOPs"
        guards.append(Guard("run_record", "warn", message=f"the run's record: {trace.run.damage}", advice=advice))
    return guards


def _kernels_without_launch(count: Completeness) -> Guard:
    share, before = count.without_launch_fraction, count.launched_before
    message = f"{count.kernels_without_launch:,} of {count.kernels:,} kernels have no launch in the trace"
    advice = f"their phase and part are unknown and shown as {UNLINKED}, {UNCLASSIFIED}"
    # Nothing was lost where all are the end of what came before.
    is_lost = before < count.kernels_without_launch
    if before:
        message += f", {f'{before:,}' if is_lost else 'all'} of them launched before it began"
        advice += "; synchronize the device before the profiler starts"
    advice += f"; {_AGAIN}" if is_lost else ""
    status: Status = "fail" if is_lost and share > UNCLASSIFIED_LIMIT else "warn"
    return at_most("kernels_without_launch", share, 0.0, "fraction", message, advice=advice, otherwise=status)


def _launches_without_kernel(count: Completeness) -> Guard:
    share = count.launches_without_kernel / max(count.launches, 1)
    message = f"{count.launches_without_kernel:,} of {count.launches:,} launches have no kernel in the trace"
    advice = f"kernels are missing, so that times are too short; {_AGAIN}"
    if count.shared_launches:
        message += f", {count.shared_launches:,} share the correlation id of another"
        advice = "whose kernel is whose is a guess by time; give a trace as torch.profiler wrote it"
    status: Status = "fail" if share > UNCLASSIFIED_LIMIT else "warn"
    return at_most("launches_without_kernel", share, 0.0, "fraction", message, advice=advice, otherwise=status)


def _outside(trace: Trace, phases: Sequence[PhaseShares], step: PhaseShares) -> Guard:
    if trace.timeline.source == "none":
        return not_applicable("outside", "the trace has no ranges of phases; all kernels are outside")
    share = step.share(sum(each.kernel_s for each in phases if each.phase == OUTSIDE))
    message = f"{100 * share:.1f} % of kernel time lies outside of every phase"
    return at_most("outside", share, OUTSIDE_LIMIT, "fraction", message, advice="it is shown as a phase of its own")


def _classified(axis: str, sums: dict[str, float], step: PhaseShares) -> Guard:
    share = step.share(sums.get(UNCLASSIFIED, 0.0))
    message = f"{100 * share:.1f} % of kernel time has no {axis}"
    advice = f"read shares by {axis} with that in mind"
    if axis == "part":
        advice += "; parts need lmbench's own recording (module ranges), and for a compiled model one that compiled it"
    return at_most(f"unclassified_{axis}", share, UNCLASSIFIED_LIMIT, "fraction", message, advice=advice)


def _spans(verdicts: Sequence[PhaseVerdict]) -> Guard:
    """Event span against the trace's window, for phases that are long and queued: elsewhere borders may differ."""
    errors = [
        (abs(each.clock.window_s / each.device_span_s - 1), each.phase)
        for each in verdicts
        if each.verdict == "queued" and each.device_span_s and each.device_span_s > 1e-3
    ]
    if not errors:
        return not_applicable("device_span", "no phase of a millisecond or more is queued, or there are no event spans")
    worst, phase = max(errors)
    message = f"{phase}'s time by events and by the trace differ by {100 * worst:.2f} %"
    advice = "the trace may lack steps, or another stream was busy"
    return at_most("device_span", worst, SPAN_LIMIT, "fraction", message, advice=advice)


def summarize(findings: Findings) -> KernelSummary:
    """The part `kernels` of run.json, in SI units; of a trace without kernels the number of steps, the `reason`, and
    the longest operators."""
    timeline, step, count = findings.trace.timeline, findings.step, findings.completeness
    if not findings.has_kernels:
        return KernelSummary(
            reason=findings.why_no_kernels,
            steps=timeline.steps,
            operators=[
                TopOperator(row.phase, row.name, row.self_s, row.calls, row.share_fraction)
                for rows in findings.operators.values()
                for row in rows[:TOP]
            ],
        )
    summary = KernelSummary(
        steps=timeline.steps,
        clock_steps=findings.clocks.steps,
        phase_source=timeline.source,
        inferred_phases=list(timeline.inferred),
        kernel_s=step.kernel_s,
        outside_s=sum(share.kernel_s for share in findings.phases if share.phase == OUTSIDE),
        unclassified_kind_fraction=step.share(step.kinds_s.get(UNCLASSIFIED, 0.0)),
        unclassified_part_fraction=step.share(step.parts_s.get(UNCLASSIFIED, 0.0)),
        captured_kernel_count=count.kernels,
        captured_launch_count=count.launches,
        kernel_without_launch_count=count.kernels_without_launch,
        launch_without_kernel_count=count.launches_without_kernel,
        kernel_before_launch_count=count.kernels_before_launch,
        phases=_phases(findings),
        annotations=[
            AnnotationKernels(row.name, row.calls, row.kernel_s, row.own_s, row.instances)
            for row in findings.annotations[:TOP_ANNOTATIONS]
        ],
    )
    for times in findings.attention:
        parts = {f"{part}_s": seconds for part, seconds in times.parts_s.items()}
        inside = InsideAttention(
            **parts,
            matmul_s=times.matmul_s,
            softmax_matmul_time_ratio=times.time_ratio,
            softmax_matmul_flop_ratio=times.flop_ratio,
        )
        summary.attention.set(times.phase, inside)
    return summary


_TIMES = (
    "window_s", "busy_s", "queued_gap_s", "host_wait_s", "other_idle_s", "comm_s", "comm_exposed_s", "host_s",
    "median_kernel_s",
)  # fmt: skip


def _phases(findings: Findings) -> PerPhase[PhaseKernels]:
    """Every phase with kernels or a clock, and the whole step: all phases, and what lies outside of them."""
    shares = {share.phase: share for share in [*findings.phases, findings.step]}
    verdicts: dict[str, PhaseVerdict] = {each.phase: each for each in findings.verdicts}
    per_phase = PerPhase[PhaseKernels]()
    for span in SPANS:
        share, verdict = shares.get(span), verdicts.get(span)
        if share is None and verdict is None:
            continue
        kernels = PhaseKernels(kernel_s=0.0, kernel_count=0.0)
        if share is not None:
            kernels = PhaseKernels(
                kernel_s=share.kernel_s,
                kernel_count=share.instances,
                matmul_fraction=share.matmul_fraction,
                kinds={f"{kind}_s": seconds for kind, seconds in share.kinds_s.items()},
                parts={f"{part}_s": seconds for part, seconds in share.parts_s.items()},
                top=[_top_kernel(row) for row in share.rows[:TOP]],
                top_other=_top_kernel(share.top_other) if share.top_other else None,
            )
        clock: DeviceTime | None = findings.clocks.whole if span == "step" and findings.clocks.phases else None
        if verdict is not None:
            clock, kernels.launch_count, kernels.verdict = verdict.clock, verdict.clock.launches, verdict.verdict
        for name in _TIMES if clock is not None else ():
            setattr(kernels, name, getattr(clock, name, None))
        per_phase.set(span, kernels)
    return per_phase


def _top_kernel(row: KernelRow) -> TopKernel:
    return TopKernel(row.short_name, row.kind, row.part, row.kernel_s, row.instances, row.share_fraction)


def examine_run(folder: Path) -> tuple[KernelSummary, list[Guard]]:
    """The summary of the trace in a run's folder and its guards; writes the step's timeline beside it.

    Raises UsageError for a trace that cannot be read, OSError where the timeline cannot be written.
    """
    findings = examine(folder)
    if (timeline := step_timeline(findings.trace)) is not None:
        write_timeline(timeline, folder)
    return summarize(findings), findings.guards
