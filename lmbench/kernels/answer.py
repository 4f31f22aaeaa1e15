"""The answer of `lmbench kernels` for one trace: was the device working and what took the time, then tables and notes.

Times and counts are means per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
import pandas as pd

from lmbench.kernels.ceiling import attained_bus, roofline
from lmbench.kernels.findings import KernelFindings
from lmbench.kernels.frameworks import framework_lines
from lmbench.kernels.names import KINDS, MATMUL, NAMES, UNCLASSIFIED, part_order
from lmbench.kernels.pieces import DATA, HOST_CODE
from lmbench.kernels.sums import STEP, host_times
from lmbench.kernels.trace import OUTSIDE, PHASE_ORDER, PhaseTimeline, Trace
from lmbench.kernels.verdicts import idle_reason, verdict_of
from lmbench.kernels.waits import cause_text, largest_causes
from lmbench.report.answer import Answer, Column, Line, Table, guard_lines, labelled
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.described import records, table
from lmbench.report.frame import frame_of
from lmbench.report.units import milliseconds, percent

# The headline names this many phases, parts, kinds or operators, and lists at most this many kernels.
_TOP, _TOP_KERNELS = 3, 5
# The headline names parts only where less kernel time than this is unclassified.
_MAX_UNCLASSIFIED_FRACTION = 0.25
# The headline leaves out phases below this share of the device's time, and causes below this share of its idle time.
_LARGE_FRACTION = 0.05
# The settings of a run that its line names, by the names of a report's facts.
_SETTINGS = (
    "size", "attention", "optimizer", "mode", "batch", "context", "precision", "matmul", "compile", "ranks", "gpu",
)  # fmt: skip
# Phases with a smaller share of the step's kernel time get no column and no table of kernels.
_LONG_FRACTION = 0.005


def kernels_answer(findings: KernelFindings) -> Answer:
    """The answer for one trace."""
    trace, timeline, roof = findings.trace, findings.trace.timeline, roofline(findings)
    path = Line("trace", str(trace.path), is_whole=True)
    settings, costs = run_lines(findings), [*framework_lines([trace])]
    # A run is named by its settings, and its trace stands below.
    headline, notes = (settings, [path]) if settings else ([path], [])
    if findings.why_no_kernels:
        lines: Iterable[Line] = _host_lines(findings)
        tables = [
            table("kernels/operators", rows, per=findings.per, phase=phase)
            for phase, rows in findings.operators.groupby("phase", sort=False)
        ]
    else:
        # A cost takes two of the first screen's 24 lines.
        lines, tables = _headline(findings, max(1, _TOP_KERNELS - 2 * len(costs))), _tables(findings)
    figures = {
        "trace": str(trace.path), "phase_source": timeline.source, "steps": len(timeline.step_ns) or None,
        "kernel_s": findings.work.total_s(), "completeness": findings.completeness,
        "devices": records(findings.clocks.devices.reset_index()), "phases": records(findings.phases.reset_index()),
        "guards": findings.guards,
    }  # fmt: skip
    return Answer(
        [*headline, *_step_lines(timeline), *costs, *lines, *guard_lines(findings.guards)],
        [*tables, *roof.tables],
        [*notes, *_notes(trace), *roof.notes],
        figures=figures,
        data=lambda: _data(findings),
        first=(),
    )


def _step_lines(timeline: PhaseTimeline) -> Iterator[Line]:
    """A line on the host's time for each step, if lmbench did not record them: it measured those of its own runs."""
    step_s = np.diff(timeline.step_ns) / 1e9
    if timeline.source != "lmbench" and len(step_s) > 1:
        slowest = f"the slowest {milliseconds(step_s.max())} ms, number {step_s.argmax() + 1} of {len(step_s)}"
        if len({*timeline.step_names}) == 1:
            slowest += f"; each ends with {timeline.step_names[0]}"
        yield Line("steps", f"{milliseconds(step_s.mean())} ms each on the host, {slowest}")


def _notes(trace: Trace) -> Iterator[Line]:
    """Lines on other ranks, and on what tells the phases."""
    if (ranks := trace.events.distributed.world_size or 1) > 1:
        yield Line("ranks", f"one of {ranks}; give the traces of all, and lmbench tells which one they wait for")
    if trace.timeline.source == "foreign":
        inferred = " and ".join(trace.timeline.inferred) or "none"
        yield Line("phases", f"by the trace's ranges; {inferred} inferred from what autograd runs")
    elif trace.timeline.source == "none":
        yield Line("phases", "unknown: everything is outside")


def run_lines(findings: KernelFindings, label: str = "run") -> list[Line]:
    """One line with the settings of a trace's run, worded as in a report; no line for a trace without a run."""
    run = findings.trace.run
    return [Line(label, frame_of([run], None).cells[0].describe(_SETTINGS))] if run and findings.run else []


def communication_table(findings: Sequence[KernelFindings]) -> Table:
    """Communication by phase and kind of collective, as means over the ranks that `findings` are of."""
    rows = pd.concat([rank.clocks.collectives for rank in findings])
    rows = rows.groupby(["phase", "collective"]).sum(min_count=1).reindex(PHASE_ORDER, level="phase") / len(findings)
    rows = rows.assign(
        hidden_s=rows.comm_s - rows.comm_exposed_s,
        algorithm_bytes_per_s=rows.message_bytes / rows.cost_s,
        bus_bytes_per_s=rows.bus_bytes / rows.cost_s,
    ).reset_index()
    rows = attained_bus(findings[0], rows)
    total = {"phase": "all", **rows[["calls", "comm_s", "hidden_s", "comm_exposed_s", "rank_wait_s"]].sum()}
    waits, when = "waits: of exposed, until the last rank came; ", "once the last rank came"
    if len(findings) == 1:
        rows, waits, when = rows.drop(columns="rank_wait_s"), "", "waits for other ranks included"
    attained = "; attained: of the bus rate that the ceiling has" if "bus_fraction" in rows else ""
    words = {"per": findings[0].per, "waits": waits, "when": when, "attained": attained}
    return table("kernels/communication", rows, [total], **words)


def _headline(findings: KernelFindings, top: int) -> Iterator[Line]:
    """Lines for each device's idle time, long phases with advice, shares of kernel time, and the `top` kernels."""
    total, work = findings.clocks.total, findings.work
    for device, clock in findings.clocks.devices.iterrows():
        yield Line(f"device {device}", f"{findings.per} {verdict_of(clock)}: {idle_reason(clock)}")
        if clock.comm_s:
            exposed = f"communication: {milliseconds(clock.comm_exposed_s)} ms exposed"
            yield Line("", f"{exposed}, {milliseconds(clock.comm_s - clock.comm_exposed_s)} ms beside computing")
    for period, key in (("before the trace", "before_s"), ("outside the traced steps", "outside_steps_s")):
        if uncounted_s := findings.completeness[key]:
            yield Line("", f"{period}: {milliseconds(uncounted_s)} ms, not counted")
    yield from _wait_lines(findings)
    phases = findings.phases.dropna(subset="verdict")
    phases = phases[phases.window_s >= _LARGE_FRACTION * total.window_s].nlargest(_TOP, "window_s")
    for phase, clock in phases.iterrows():
        is_same = clock.lag_verdict in (None, clock.verdict)
        lag = "" if is_same else f" (without the profiler {clock.lag_verdict})"
        busy = f"busy {milliseconds(clock.busy_s)} of {milliseconds(clock.window_s)} ms"
        yield Line(str(phase), f"{clock.verdict}{lag}, {busy}: {clock.advice}")
    yield Line("kinds", _shares(without_hidden(findings, "kind"), "kind"))
    yield from labelled("products", _shares(work.by("precision").query("precision != ''"), "precision"))
    if work.fraction("part", UNCLASSIFIED) < _MAX_UNCLASSIFIED_FRACTION:
        yield Line("parts", _shares(without_hidden(findings, "part"), "part"))
    if OUTSIDE in phases.index and len(findings.annotations):
        yield Line("ranges", _shares(findings.annotations.nlargest(_TOP, "own_s"), "name"))
    for position, kernel in enumerate(work.kernels()[:top].itertuples()):
        share = percent(kernel.share_fraction)
        name = shortened(kernel.short_name, KERNEL_WIDTH)
        text = f"{milliseconds(kernel.kernel_s):>6} ms {share:>6}  {name}, {kernel.kind}"
        yield Line("" if position else "longest", text)


def _host_lines(findings: KernelFindings) -> Iterator[Line]:
    """Lines of a trace without kernels: the reason, and the operators of each longer phase, with a function beside."""
    yield Line("note", f"no kernels in this trace: {findings.why_no_kernels}")
    times = host_times(findings.graph)
    times["s"] = times.ns / 1e9 / findings.graph.steps
    phases_s = times.groupby("phase").s.sum().sort_values(ascending=False)
    for phase, host_s in phases_s[phases_s >= _LARGE_FRACTION * phases_s.sum()].items():
        rows, operators = (frame[frame.phase == phase] for frame in (times, findings.operators))
        operators_s = operators.self_s.sum()
        text = f"operators {milliseconds(operators_s)} of {milliseconds(host_s)} ms"
        if len(operators):
            text += f": {_shares(operators, 'name')}"
        function = rows[rows.function != ""].nlargest(1, "s")
        if function.s.sum() >= _LARGE_FRACTION * host_s:
            text += f"; {milliseconds(function.s.iat[0])} ms in {function.function.iat[0]}"
        elif operators_s < host_s / 2:
            text += f"; beside them Python: {NAMES.causes[HOST_CODE].remedy}"
        if phase == "data":
            text += f"; {NAMES.causes[DATA].remedy}"
        yield Line(str(phase), text)


def _wait_lines(findings: KernelFindings) -> Iterator[Line]:
    """Lines for the two largest causes of waits for the host, where devices idle for long."""
    total, waits, label = findings.clocks.total, findings.waits, "idle"
    if total.idle_s < _LARGE_FRACTION * total.window_s:
        return
    for cause, wait_s in largest_causes(waits)[:2].items():
        if wait_s >= _LARGE_FRACTION * total.idle_s:
            at_ms = milliseconds(waits.at_s[waits.cause == cause].iat[0])
            text = f"{milliseconds(wait_s)} of {milliseconds(total.idle_s)} ms in {cause_text(waits, str(cause))}"
            yield Line(label, f"{text}, most at {at_ms} ms")
            label = ""


def _shares(rows: pd.DataFrame, key: str) -> str:
    """The first rows' names, from the column `key`, with their shares."""
    shares = rows[[key, "share_fraction"]][:_TOP].itertuples(index=False)
    return ", ".join(f"{name} {percent(share)}" for name, share in shares)


def without_hidden(findings: KernelFindings, axis: str) -> pd.DataFrame:
    """Rows of `Work.by` by kind or part, less the communication beside computing: what is left fits into the step."""
    rows, total = findings.work.by(axis), findings.clocks.total
    hidden_s = np.where(rows[axis] == "comm", total.comm_s - total.comm_exposed_s, 0.0)
    kernel_s = (rows.kernel_s - hidden_s).clip(lower=0.0)
    rows = rows.assign(kernel_s=kernel_s, share_fraction=kernel_s / (kernel_s.sum() or 1.0))
    return rows.sort_values("kernel_s", ascending=False, kind="stable")


def _data(findings: KernelFindings) -> Table:
    """The table for CSV: kernels by phase, name, kind and part; of a trace without kernels, operators by phase."""
    name, rows = "all_kernels", findings.work.by("phase", "name", "short_name", "kind", "part")
    if findings.why_no_kernels:
        name, rows = "all_operators", findings.operators
    return Table(name, "", [*map(Column, rows)], rows.astype(object).to_numpy().tolist())


def _tables(findings: KernelFindings) -> list[Table]:
    """The tables of a trace with kernels."""
    work = findings.work
    per = findings.per
    clocks = findings.clocks
    phases = findings.phases
    sums = work.by("phase").set_index("phase").reindex(work.phases)
    sums = sums.assign(matmul_fraction=[work.fraction("kind", MATMUL, phase) for phase in sums.index])
    step = {
        "phase": STEP, **sums[["kernel_s", "share_fraction", "kernel_count"]].sum(), "busy_s": clocks.total.busy_s,
        "matmul_fraction": work.fraction("kind", MATMUL),
    }  # fmt: skip
    long = sums[sums.share_fraction >= _LONG_FRACTION]
    tables = [table("kernels/phases", sums.join(phases).reset_index(), [step], per=per)]
    for axis in ("kind", "part"):
        times = pd.DataFrame({f"{phase}_s": work.seconds(axis, phase) for phase in [*long.index, STEP]})
        times = times.assign(share_fraction=times.step_s / work.total_s()).rename_axis(axis)
        order = sorted(times.index, key=KINDS.index if axis == "kind" else part_order)
        rows = times.loc[order].reset_index()
        tables.append(table("kernels/axes", rows, name=f"{axis}s", title="Kernel time", axis=axis, per=per))
    tables += [table("kernels/kernels", work.kernels(phase), per=per, phase=phase) for phase in long.index]
    if len(findings.annotations):
        tables.append(table("kernels/annotations", findings.annotations, per=per))
    total = {**clocks.total, "phase": "all"}
    clock_rows = phases.reset_index()
    if not total["comm_s"]:
        clock_rows = clock_rows.drop(columns="comm_exposed_s")
    tables += [
        table("kernels/clocks", clock_rows, [total], per=per, steps=findings.graph.steps, devices=len(clocks.devices)),
        table("kernels/waits", findings.waits, per=per),
    ]
    if total["comm_s"]:
        tables.append(communication_table([findings]))
    if attention := findings.attention:
        rows = pd.DataFrame([{"phase": phase, **asdict(times)} for phase, times in attention.items()])
        tables.append(table("kernels/attention", rows))
    return tables
