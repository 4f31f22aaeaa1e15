"""All results computed from one trace, the guards that say whether to believe them, and their summary in run.json.

The summary takes a few kB, so that a report never has to read the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd
from msgspec import convert

from lmbench.kernels.clocks import Clocks, phase_clocks
from lmbench.kernels.events import where
from lmbench.kernels.graph import Graph, build_graph
from lmbench.kernels.links import TOLERANCE_NS
from lmbench.kernels.matching import load_traces, traces_at
from lmbench.kernels.names import MATMUL, UNCLASSIFIED
from lmbench.kernels.sums import STEP, Work, annotation_times, attention_times, operator_times
from lmbench.kernels.trace import OUTSIDE, Trace, load_trace
from lmbench.kernels.verdicts import judge_phases
from lmbench.kernels.waits import find_waits
from lmbench.kernels.what_if import WhatIf
from lmbench.records.examined import AttentionTimes, KernelSummary
from lmbench.records.guards import make_guard
from lmbench.records.intervals import NONE
from lmbench.records.measured import Guard
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import DAMAGED, SPANS, Phase, Values
from lmbench.report.described import records
from lmbench.report.units import percent


@dataclass(frozen=True, eq=False)
class KernelFindings:
    """All results from one trace. Times and counts are means per step, or of the whole trace if its steps are unknown.

    `run` is None for a trace without a run, or whose run.json cannot be read. `completeness` has the counts of
    `count_missing`, over all steps. `waits` has the reasons why devices waited for the host, and `phases` the phases'
    clocks with their verdicts. A trace without kernels, as of a CPU, has only `operators`.
    """

    trace: Trace
    graph: Graph
    run: RunRecord | None
    completeness: Values
    work: Work
    clocks: Clocks
    waits: pd.DataFrame
    phases: pd.DataFrame
    annotations: pd.DataFrame

    @property
    def per(self) -> str:
        """The words for a caption that say whether times and counts are means per step or sums over the trace."""
        return "per step" if len(self.trace.timeline.step_ns) else "in the whole trace"

    @property
    def why_no_kernels(self) -> str:
        """The reason why the trace has no kernels; empty if it has some."""
        if self.completeness["captured_kernel_count"]:
            return ""
        if count := self.completeness["captured_launch_count"]:
            # PyTorch records the launch calls even with ProfilerActivity.CPU alone.
            return f"of {count:,} launches none has a kernel, as the device was not recorded"
        return "a trace of a CPU has operators and no kernels"

    @cached_property
    def operators(self) -> pd.DataFrame:
        return operator_times(self.graph)

    @property
    def attention(self) -> dict[Phase, AttentionTimes]:
        return attention_times(self.work, self.trace.record.model)

    @cached_property
    def guards(self) -> list[Guard]:
        """Checks of whether the trace can be believed; of one without kernels, whether it should have some."""
        trace = self.trace
        work = self.work
        counts = self.completeness
        guards = []
        if trace.run is not None and trace.run.damage:
            guards.append(make_guard("run_record", 1, damage=trace.run.damage))
        launches = counts["captured_launch_count"]
        if why := self.why_no_kernels:
            return [make_guard("device_recorded", launches or None, why=why), *guards]
        window_s = self.clocks.total.window_s * self.graph.steps
        figures = {
            "kernels_without_launch": counts["without_launch_fraction"],
            "launches_without_kernel": counts["launch_without_kernel_count"] / max(launches, 1),
            "kernels_before_launch": counts["before_launch_s"] / (window_s or 1.0),
            "unclassified_kind": work.fraction("kind", UNCLASSIFIED),
        }
        if trace.timeline.source == "lmbench":
            # Only lmbench's own recordings have the module ranges that parts need.
            figures["unclassified_part"] = work.fraction("part", UNCLASSIFIED)
        return [*guards, *(make_guard(key, value, share=percent(value), **counts) for key, value in figures.items())]


def examine(path: str | Path) -> KernelFindings:
    """Read a run's folder or a trace file and compute all results. Raises UsageError where no trace can be read."""
    return examine_trace(load_trace(path))


def examine_trace(trace: Trace) -> KernelFindings:
    """Compute all results of a trace."""
    record = trace.record
    work = Work.of(trace.kernels[trace.kernels.is_counted], trace.timeline.steps, record.matmul_precision)
    graph = build_graph({trace.rank or 0: trace})
    clocks = phase_clocks(graph)
    waits = find_waits(graph, clocks)
    phases = judge_phases(clocks, waits, work, record)
    run = None if record.outcome == DAMAGED else record
    return KernelFindings(trace, graph, run, count_missing(trace), work, clocks, waits, phases, annotation_times(trace))


def count_missing(trace: Trace) -> Values:
    """Counts of kernels without a launch, launches without a kernel, and kernels before their launch, over all steps.

    Kernels that were launched before the trace began, or outside of the traced steps, are not counted: `before_s` and
    `outside_steps_s` are their times. A launch that starts nothing is not missing its kernel: one whose stream is being
    captured into a graph, and a fill of no bytes. Traces do not tell the size of a fill, so no fill is counted.
    """
    kernels, calls = trace.kernels, trace.events.calls
    launches = calls[calls.is_launch]
    is_linked = kernels.launch != NONE
    is_counted = kernels.is_counted
    duration_ns = kernels.duration_ns
    is_lost, linked = ~is_linked & is_counted, kernels[is_linked]
    has_kernel = launches.index.isin(linked.launch)
    is_fill = where(launches.name, lambda name: "memset" in name.lower())
    early_ns = linked.launch_ns - linked.start_ns
    early_ns = early_ns[early_ns > TOLERANCE_NS]
    return {
        "captured_kernel_count": len(kernels),
        "captured_launch_count": len(launches),
        "kernel_without_launch_count": int(is_lost.sum()),
        "without_launch_fraction": float(duration_ns[is_lost].sum() / max(duration_ns.sum(), 1)),
        "before_s": float(duration_ns[~is_linked & ~is_counted].sum() / 1e9),
        "outside_steps_s": float(duration_ns[is_linked & ~is_counted].sum() / 1e9),
        "launch_without_kernel_count": int((~has_kernel & ~launches.is_captured & ~is_fill).sum()),
        "kernel_before_launch_count": len(early_ns),
        "before_launch_s": float(early_ns.sum() / 1e9),
    }


def summarize(findings: KernelFindings) -> KernelSummary:
    """The part `kernels` of run.json, in SI units.

    Of a trace without kernels it has the `reason`, the number of steps and the longest operators.
    """
    timeline, work, phases = findings.trace.timeline, findings.work, findings.phases
    simulation = WhatIf(findings.graph)
    step_s, shares = simulation.ask([])
    path = {
        "path_s": step_s,
        "path": {f"{cause.replace(' ', '_')}_s": share * step_s for cause, share in shares.items()},
        "what_if": simulation.recorded(),
    }
    if findings.why_no_kernels:
        return convert({"reason": findings.why_no_kernels, "steps": timeline.steps, **path}, KernelSummary)
    clocks = {row["phase"]: row for row in records(phases.reset_index())}
    clocks[STEP] = findings.clocks.total.to_dict()
    summaries = {}
    for span in SPANS:
        if span not in (STEP, *work.phases, *phases.index):
            continue
        kernels, clock = work.kernels(span), clocks.get(span, {})
        rows = records(kernels.assign(name=kernels.short_name))
        # `convert` ignores columns of the clock that the record does not have.
        summaries[span] = {
            **clock,
            "kernel_s": work.total_s(span),
            "kernel_count": sum(row["kernel_count"] for row in rows),
            "matmul_fraction": work.fraction("kind", MATMUL, span) if rows else None,
            **{
                f"{axis}s": {f"{name}_s": seconds for name, seconds in work.seconds(axis, span).items()}
                for axis in ("kind", "part")
            },
            "top_other": next((row for row in rows if row["kind"] != MATMUL), None),
        }
    summary = {
        **path,
        "steps": timeline.steps,
        "kernel_s": work.total_s(),
        "outside_s": work.total_s(OUTSIDE),
        "unclassified_part_fraction": work.fraction("part", UNCLASSIFIED),
        "phases": summaries,
        "attention": findings.attention,
    }
    return convert(summary, KernelSummary)


def examine_run(folder: Path) -> tuple[KernelSummary, list[Guard]]:
    """The summary and the guards of the trace in a run's folder. Raises UsageError for a trace that cannot be read."""
    findings = examine(folder)
    if 1 < len(traces_at([folder])) == findings.trace.events.distributed.world_size:
        # The other ranks have written their traces: a collective is then told from the wait for the last rank.
        findings = replace(findings, graph=build_graph(load_traces([folder])))
    return summarize(findings), findings.guards
