"""One trace, completely computed: what every form of output shows, whether it can be believed, and the few kB of it
that go into run.json, so that a report never has to read the trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec import convert

from lmbench.kernels.clocks import Clocks, phase_clocks
from lmbench.kernels.events import where
from lmbench.kernels.names import MATMUL, UNCLASSIFIED
from lmbench.kernels.sums import STEP, Work, annotation_times, attention_times, operator_times
from lmbench.kernels.trace import OUTSIDE, Trace, load_trace
from lmbench.kernels.verdicts import judge_phases
from lmbench.kernels.waits import find_waits
from lmbench.records.guards import judge
from lmbench.records.intervals import NONE
from lmbench.records.measured import AttentionTimes, Guard, KernelSummary
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import DAMAGED, SPANS, Phase
from lmbench.report.described import Row, records
from lmbench.report.units import percent

#: Kernels of each phase that are kept in run.json, the longest first; the same of annotations.
TOP, TOP_ANNOTATIONS = 5, 20
# Clocks of host and device are aligned by the profiler to about a microsecond.
EARLY_TOLERANCE_NS = 1_000


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything that is said of a trace; times and numbers are means per step, of the whole trace where its number of
    steps is unknown. Without kernels (a CPU trace) there are only `operators`.

    `run` is None for a trace without a run, or whose run.json cannot be read; `completeness` are numbers of all steps,
    see `count_missing`. `waits` say why devices waited for the host. `phases` are the clocks' with their verdicts.
    """

    trace: Trace
    run: RunRecord | None
    completeness: dict[str, Any]
    work: Work
    clocks: Clocks
    waits: pd.DataFrame
    phases: pd.DataFrame
    annotations: pd.DataFrame

    @property
    def why_no_kernels(self) -> str:
        """Empty for a trace that has some."""
        if self.completeness["captured_kernel_count"]:
            return ""
        if number := self.completeness["captured_launch_count"]:
            # With ProfilerActivity.CPU alone PyTorch notes the calls, too.
            return f"of {number:,} launches none has a kernel, as the device was not recorded"
        return "a trace of a CPU has operators and no kernels"

    @cached_property
    def operators(self) -> pd.DataFrame:
        return operator_times(self.trace)

    @property
    def attention(self) -> dict[Phase, AttentionTimes]:
        return attention_times(self.work, self.trace.record.model)

    @cached_property
    def guards(self) -> list[Guard]:
        """Whether the trace can be believed; one without kernels has a guard on whether there should be some."""
        trace, work, count, guards = self.trace, self.work, self.completeness, list[Guard]()
        if trace.run is not None and trace.run.damage:
            guards.append(judge("run_record", 1, damage=trace.run.damage))
        launches = count["captured_launch_count"]
        if why := self.why_no_kernels:
            return [judge("device_recorded", launches or None, why=why), *guards]
        figures = {
            "kernels_without_launch": count["without_launch_fraction"],
            "launches_without_kernel": count["launch_without_kernel_count"] / max(launches, 1),
            "kernels_before_launch": count["before_launch_s"] / (self.clocks.total.window_s * self.clocks.steps or 1.0),
            "unclassified_kind": work.fraction("kind", UNCLASSIFIED),
            "unclassified_part": work.fraction("part", UNCLASSIFIED),
        }
        if trace.timeline.source != "lmbench":
            # What tells parts is in lmbench's own recordings.
            del figures["unclassified_part"]
        return [*guards, *(judge(key, value, share=percent(value), **count) for key, value in figures.items())]


def examine(path: str | Path) -> Findings:
    """Read a run's folder or a trace file and compute everything. Raises UsageError for what is no trace."""
    return examine_trace(load_trace(path))


def examine_trace(trace: Trace) -> Findings:
    """Compute everything that a trace tells."""
    record = trace.record
    work = Work.of(trace.kernels[trace.kernels.is_counted], trace.timeline.steps, record.matmul_precision)
    clocks = phase_clocks(trace.kernels, trace.timeline)
    waits = find_waits(trace, clocks)
    phases = judge_phases(clocks, waits, work, record)
    run = None if record.outcome == DAMAGED else record
    return Findings(trace, run, count_missing(trace), work, clocks, waits, phases, annotation_times(trace))


def count_missing(trace: Trace) -> dict[str, Any]:
    """Launches and kernels that lack each other, and kernels that start before their launch; numbers of all steps.

    Kernels without launch are those that should have one; `before_s` is the time of those that were launched before the
    trace began, `outside_steps_s` of those that were launched outside of the traced steps, neither of them counted.
    `launch_without_kernel_count` are those that should have one: a call while a stream is captured into a graph starts
    nothing, and a fill of no bytes neither (nor does the trace tell the sizes of fills).
    """
    kernels, launches = trace.kernels, trace.events.launches
    is_linked, is_counted, durations = kernels.launch != NONE, kernels.is_counted, kernels.duration_ns
    is_lost, linked = ~is_linked & is_counted, kernels[is_linked]
    is_alone = ~np.isin(np.arange(len(launches)), linked.launch)
    is_fill = where(launches.name, lambda name: "memset" in name.lower())
    early_ns = linked.launch_ns - linked.start_ns
    early_ns = early_ns[early_ns > EARLY_TOLERANCE_NS]
    return {
        "captured_kernel_count": len(kernels),
        "captured_launch_count": len(launches),
        "kernel_without_launch_count": int(is_lost.sum()),
        "without_launch_fraction": float(durations[is_lost].sum() / max(durations.sum(), 1)),
        "before_s": float(durations[~is_linked & ~is_counted].sum() / 1e9),
        "outside_steps_s": float(durations[is_linked & ~is_counted].sum() / 1e9),
        "launch_without_kernel_count": int((is_alone & ~launches.is_captured & ~is_fill).sum()),
        "kernel_before_launch_count": len(early_ns),
        "before_launch_s": float(early_ns.sum() / 1e9),
    }


def summarize(findings: Findings) -> KernelSummary:
    """The part `kernels` of run.json, in SI units; of a trace without kernels the number of steps, the `reason`, and
    the longest operators."""
    timeline, work, phases = findings.trace.timeline, findings.work, findings.phases
    if findings.why_no_kernels:
        operators = records(findings.operators.groupby("phase", sort=False).head(TOP))
        known = {"reason": findings.why_no_kernels, "steps": timeline.steps, "operators": operators}
        return convert(known, KernelSummary)
    clocks: dict[str, Row] = {row["phase"]: row for row in records(phases.reset_index())}
    clocks[STEP] = findings.clocks.total.to_dict()
    summaries = {}
    for span in SPANS:
        if span not in (STEP, *work.phases, *phases.index):
            continue
        kernels, clock = work.kernels(span), clocks.get(span, {})
        rows = records(kernels.assign(name=kernels.short_name))
        # More columns than the record has.
        summaries[span] = {
            **clock,
            "kernel_s": work.total_s(span),
            "kernel_count": sum(row["kernel_count"] for row in rows),
            "launch_count": clock.get("launches"),
            "matmul_fraction": work.fraction("kind", MATMUL, span) if rows else None,
            "kinds": {f"{kind}_s": seconds for kind, seconds in work.seconds("kind", span).items()},
            "parts": {f"{part}_s": seconds for part, seconds in work.seconds("part", span).items()},
            "top": rows[:TOP],
            "top_other": next((row for row in rows if row["kind"] != MATMUL), None),
        }
    known = {
        **findings.completeness,
        "steps": timeline.steps,
        "clock_steps": findings.clocks.steps,
        "phase_source": timeline.source,
        "inferred_phases": timeline.inferred,
        "kernel_s": work.total_s(),
        "outside_s": work.total_s(OUTSIDE),
        "unclassified_kind_fraction": work.fraction("kind", UNCLASSIFIED),
        "unclassified_part_fraction": work.fraction("part", UNCLASSIFIED),
        "phases": summaries,
        "annotations": records(findings.annotations[:TOP_ANNOTATIONS]),
        "attention": findings.attention,
    }
    return convert(known, KernelSummary)


def examine_run(folder: Path) -> tuple[KernelSummary, list[Guard]]:
    """The summary of the trace in a run's folder and its guards. Raises UsageError for a trace that cannot be read."""
    findings = examine(folder)
    return summarize(findings), findings.guards
