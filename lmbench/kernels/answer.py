"""What `lmbench kernels` says of a trace: first the answer (was the device working, and what took the time), then
tables and what was recorded. Times and numbers are means per step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from lmbench.kernels.ceiling import roofline
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.names import KINDS, MATMUL, UNCLASSIFIED, part_order, short_name
from lmbench.kernels.sums import STEP
from lmbench.kernels.trace import OUTSIDE, PHASE_ORDER
from lmbench.kernels.verdicts import idle_reason, verdict_of
from lmbench.kernels.waits import cause_text, largest_causes
from lmbench.report.answer import Answer, Line, Table, guard_lines
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.described import records, table
from lmbench.report.frame import frame_of
from lmbench.report.units import milliseconds, percent

# Parts, kinds and operators that are named in the answer; kernels that are named there.
_NAMED, _LONGEST = 3, 5
# Of the names of kernels around a pause, on one line of a narrow screen.
_PAUSE_WIDTH = 16
# Parts of a foreign model that are not known for more than this are left to the tables.
_LEAST_KNOWN_FRACTION = 0.25
# Of a device's time and its idle time: what has less is left to the tables.
_LARGE_FRACTION = 0.05
# What of a run's settings is said, by the report's facts.
_SETTINGS = (
    "size", "attention", "optimizer", "mode", "batch", "context", "precision", "matmul", "compile", "ranks", "gpu",
)  # fmt: skip
# Phases with less of the step's kernel time have no column or table of their own.
_LONG_FRACTION = 0.005


def kernels_answer(source: str | Path) -> Answer:
    """Everything about a run's folder or a trace file.

    Args:
        source: the folder or the file.

    Raises:
        UsageError: the trace is not what it has to be.
    """
    findings = examine(source)
    timeline, run, roof = findings.trace.timeline, findings.run, roofline(findings)
    path = Line("trace", str(findings.trace.path), is_whole=True)
    headline, notes = (run_lines(findings), [path]) if run is not None else ([path], [])
    step_s = np.diff(timeline.step_ns) / 1e9
    if timeline.source != "lmbench" and len(step_s) > 1:
        slowest = f"the slowest {milliseconds(step_s.max())} ms, number {step_s.argmax() + 1} of {len(step_s)}"
        if len({*timeline.step_names}) == 1:
            slowest += f"; each ends with {timeline.step_names[0]}"
        headline.append(Line("steps", f"{milliseconds(step_s.mean())} ms each on the host, {slowest}"))
    if findings.why_no_kernels:
        operators = findings.operators.groupby("phase", sort=False)
        headline.append(Line("note", f"no kernels in this trace: {findings.why_no_kernels}"))
        headline += [_longest(str(phase), "name", rows) for phase, rows in operators]
        tables = [table("kernels/operators", rows, per=per_what(findings), phase=phase) for phase, rows in operators]
    else:
        headline += _headline(findings)
        tables = _tables(findings)
    world_size = findings.trace.events.distributed.world_size or 1
    if world_size > 1:
        notes.append(
            Line("ranks", f"one of {world_size}; give the traces of all, and lmbench tells which one they wait for")
        )
    if timeline.source != "lmbench":
        inferred = " and ".join(timeline.inferred) or "none"
        text = f"by the trace's ranges; {inferred} inferred from what autograd runs"
        notes.append(Line("phases", text if timeline.source == "foreign" else "unknown: everything is outside"))
    headline += guard_lines(findings.guards)
    figures = {
        "trace": str(findings.trace.path), "phase_source": timeline.source, "steps": len(timeline.step_ns) or None,
        "kernel_s": findings.work.total_s(), "completeness": findings.completeness,
        "devices": records(findings.clocks.devices.reset_index()), "phases": records(findings.phases.reset_index()),
        "guards": findings.guards,
    }  # fmt: skip
    return Answer(
        headline, [*tables, *roof.tables], [*notes, *roof.notes], figures=figures, data=lambda: _data(findings),
        first=(),
    )  # fmt: skip


def run_lines(findings: Findings, label: str = "run") -> list[Line]:
    """The settings of a trace's run in one line, as a report has them; nothing of a trace without one."""
    run = findings.trace.run
    return [Line(label, frame_of([run], None).in_words(0, _SETTINGS))] if run and findings.run else []


def communication_table(findings: Sequence[Findings]) -> Table:
    """Communication by phase and kind, means over ranks."""
    rows = pd.concat([one.clocks.collectives for one in findings])
    rows = rows.groupby(["phase", "collective"]).sum(min_count=1).reindex(PHASE_ORDER, level="phase") / len(findings)
    rows = rows.assign(
        hidden_s=rows.comm_s - rows.comm_exposed_s,
        algorithm_bytes_per_s=rows.message_bytes / rows.cost_s,
        bus_bytes_per_s=rows.bus_bytes / rows.cost_s,
    ).reset_index()
    total = {"phase": "all", **rows[["calls", "comm_s", "hidden_s", "comm_exposed_s", "rank_wait_s"]].sum()}
    waits, when = "waits: of exposed, until the last rank came; ", "once the last rank came"
    if len(findings) == 1:
        rows, waits, when = rows.drop(columns="rank_wait_s"), "", "waits for other ranks included"
    return table("kernels/communication", rows, [total], per=per_what(findings[0]), waits=waits, when=when)


def per_what(findings: Findings) -> str:
    """What times and numbers are sums or means of."""
    return "per step" if len(findings.trace.timeline.step_ns) else "in the whole trace"


def _headline(findings: Findings) -> list[Line]:
    """Each device's idle time, each judged phase with its advice, and what takes most."""
    lines, total, work = [], findings.clocks.total, findings.work
    for device, clock in findings.clocks.devices.iterrows():
        lines.append(Line(f"device {device}", f"{per_what(findings)} {verdict_of(clock)}: {idle_reason(clock)}"))
        if clock.comm_s:
            exposed = f"communication: {milliseconds(clock.comm_exposed_s)} ms exposed"
            beside = f"{milliseconds(clock.comm_s - clock.comm_exposed_s)} ms beside computing"
            lines.append(Line("", f"{exposed}, {beside}"))
    for where, key in (("before the trace", "before_s"), ("outside the traced steps", "outside_steps_s")):
        if uncounted_s := findings.completeness[key]:
            lines.append(Line("", f"{where}: {milliseconds(uncounted_s)} ms, not counted"))
    if total.idle_s >= _LARGE_FRACTION * total.window_s:
        lines += _wait_lines(findings)
    phases = findings.phases.dropna(subset="verdict")
    phases = phases[phases.window_s >= _LARGE_FRACTION * total.window_s]
    phases = phases[phases.window_s.rank(ascending=False) <= _NAMED]
    for phase, clock in phases.iterrows():
        is_same = clock.lag_verdict in (None, clock.verdict)
        lag = "" if is_same else f" (without the profiler {clock.lag_verdict})"
        busy = f"busy {milliseconds(clock.busy_s)} of {milliseconds(clock.window_s)} ms"
        lines.append(Line(str(phase), f"{clock.verdict}{lag}, {busy}: {clock.advice}"))
    lines.append(_longest("kinds", "kind", work.by("kind")))
    if len(precisions := work.by("precision").query("precision != ''")):
        lines.append(_longest("products", "precision", precisions))
    if work.fraction("part", UNCLASSIFIED) < _LEAST_KNOWN_FRACTION:
        lines.append(_longest("parts", "part", work.by("part")))
    if OUTSIDE in phases.index and len(findings.annotations):
        lines.append(_longest("ranges", "name", findings.annotations.nlargest(_NAMED, "own_s")))
    for place, kernel in enumerate(work.kernels()[:_LONGEST].itertuples()):
        share, name = percent(kernel.share_fraction), shortened(kernel.short_name, KERNEL_WIDTH)
        text = f"{milliseconds(kernel.kernel_s):>6} ms {share:>6}  {name}, {kernel.kind}"
        lines.append(Line("" if place else "longest", text))
    return lines


def _wait_lines(findings: Findings) -> list[Line]:
    """What held the host up while devices waited for it, and their longest pause."""
    idle_s, waits, lines = findings.clocks.total.idle_s, findings.waits, list[Line]()
    for cause, wait_s in largest_causes(waits)[:2].items():
        if wait_s >= _LARGE_FRACTION * idle_s:
            at_ms = milliseconds(waits.at_s[waits.cause == cause].iat[0])
            text = f"{milliseconds(wait_s)} of {milliseconds(idle_s)} ms in {cause_text(waits, str(cause))}"
            lines.append(Line("" if lines else "idle", f"{text}, most at {at_ms} ms"))
    pauses = findings.clocks.pauses
    if len(pauses):
        lasted_ns = pauses.end_ns - pauses.start_ns
        pause = pauses.loc[lasted_ns.idxmax()]
        # Behind the last kernel there is none; NONE reads that.
        names = [*findings.trace.kernels.name, "no kernel"]
        around = (shortened(short_name(names[place]), _PAUSE_WIDTH) for place in (pause.before, pause.after))
        text = f"{milliseconds(lasted_ns.max() / 1e9)} ms at {milliseconds(pause.start_ns / 1e9)} ms"
        lines.append(Line("pause", f"{text} between {' and '.join(around)}"))
    return lines


def _longest(label: str, key: str, rows: pd.DataFrame) -> Line:
    shares = rows[[key, "share_fraction"]][:_NAMED].itertuples(index=False)
    return Line(label, ", ".join(f"{name} {percent(share)}" for name, share in shares))


def _data(findings: Findings) -> Table:
    """Every kernel by part, or every operator, of every phase, for CSV."""
    if findings.why_no_kernels:
        return table("kernels/all_operators", findings.operators)
    return table("kernels/all_kernels", findings.work.by("phase", "name", "short_name", "kind", "part"))


def _tables(findings: Findings) -> list[Table]:
    """All tables that a trace with kernels has something for."""
    work, per, clocks = findings.work, per_what(findings), findings.clocks
    sums = work.by("phase").set_index("phase").reindex(work.phases)
    sums = sums.assign(matmul_fraction=[work.fraction("kind", MATMUL, phase) for phase in sums.index])
    rows = findings.phases
    step = {
        "phase": STEP, **sums[["kernel_s", "share_fraction", "kernel_count"]].sum(),
        "matmul_fraction": work.fraction("kind", MATMUL),
    }  # fmt: skip
    long = sums[sums.share_fraction >= _LONG_FRACTION]
    tables = [table("kernels/phases", sums.join(rows).reset_index(), [step], per=per)]
    for axis in ("kind", "part"):
        times = pd.DataFrame({f"{phase}_s": work.seconds(axis, phase) for phase in [*long.index, STEP]})
        times = times.assign(share_fraction=times.step_s / work.total_s()).rename_axis(axis)
        order = sorted(times.index, key=KINDS.index if axis == "kind" else part_order)
        tables.append(table(f"kernels/{axis}s", times.loc[order].reset_index(), per=per))
    tables += [table("kernels/kernels", work.kernels(phase), per=per, phase=phase) for phase in long.index]
    if len(findings.annotations):
        tables.append(table("kernels/annotations", findings.annotations, per=per))
    shown = (rows if clocks.total.comm_s else rows.drop(columns="comm_exposed_s")).reset_index()
    total = {**clocks.total, "phase": "all"}
    tables += [
        table("kernels/clocks", shown, [total], per=per, steps=clocks.steps, devices=len(clocks.devices)),
        table("kernels/waits", findings.waits, per=per),
    ]
    if clocks.total.comm_s:
        tables.append(communication_table([findings]))
    if attention := findings.attention:
        rows = pd.DataFrame([{"phase": phase, **asdict(times)} for phase, times in attention.items()])
        tables.append(table("kernels/attention", rows))
    return tables
