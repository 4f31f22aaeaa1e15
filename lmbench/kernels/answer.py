"""What `lmbench kernels` says of a trace: first the answer (was the device working, and what took the time), then
tables and what was recorded. Times and numbers are means per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmbench.kernels.ceiling import find_ceiling, roofline
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.kinds import KINDS, MATMUL, short_name
from lmbench.kernels.parts import UNCLASSIFIED, part_order
from lmbench.kernels.sums import STEP, Work
from lmbench.kernels.tables import MS, Row, reading, records, row, table_of, with_rest
from lmbench.kernels.verdicts import idle_reason, verdict_of
from lmbench.kernels.waits import cause_text, largest_causes
from lmbench.records.guard import not_passed
from lmbench.records.run import RunRecord
from lmbench.report.answer import Answer, Cell, Column, Line, Table
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import Unit, milliseconds, percent

# Parts, kinds and operators that are named in the answer.
_NAMED = 3
# Kernels that are named there.
_LONGEST = 5
# Of the names of kernels around a pause, on one line of a narrow screen.
_PAUSE_WIDTH = 16
# Parts of a foreign model that are not known for more than this are left to the tables.
_LEAST_KNOWN_FRACTION = 0.25
# Of a device's time and its idle time: what has less is left to the tables.
_LARGE_FRACTION = 0.05
# Phases with less of the step's kernel time have no column or table of their own, and no more of the longest a column.
_LONG_FRACTION = 0.005
_MAX_COLUMNS = 3

_TIMES = reading(ms="kernel_s", share="share_fraction", n="kernel_count", us="mean_s")
_OPERATORS = reading(operator="name", ms="self_s", share="share_fraction", calls="call_count", mean_us="mean_s")


def kernels_answer(source: str | Path, top: int = 10, ceiling: Path | None = None) -> Answer:
    """Everything about a run's folder or a trace file.

    Args:
        source: the folder or the file.
        top: kernels, operators and annotations that are shown of each phase.
        ceiling: a record of `lmbench ceiling`; by default the newest of the same GPU beside the results.

    Raises:
        UsageError: the trace or the ceiling is not what it has to be.
    """
    findings = examine(source)
    record = find_ceiling(findings.trace.path.parent, findings.run, ceiling)
    return answer_of(findings, top, roofline(findings, record))


def answer_of(findings: Findings, top: int = 10, roof: Answer | None = None) -> Answer:
    """The answer of a trace; `roof` is what its kernels attain."""
    roof = roof or Answer()
    timeline, clocks, run = findings.trace.timeline, findings.clocks, findings.run
    path = Line("trace", str(findings.trace.path), is_whole=True)
    headline, notes = ([Line("run", run_line(run))], [path]) if run is not None else ([path], [])
    headline += _headline(findings)
    count, steps = findings.completeness, timeline.steps if timeline.has_step_count else None
    captured = f"{count['captured_kernel_count']:,} kernels, {count['captured_launch_count']:,} launches"
    notes.append(Line("captured", f"{captured}, steps: {steps or 'unknown'}"))
    if timeline.source != "lmbench":
        inferred = " and ".join(timeline.inferred) or "none"
        text = f"by the trace's ranges; {inferred} inferred from what autograd runs"
        notes.append(Line("phases", text if timeline.source == "foreign" else "unknown: everything is outside"))
    for guard in not_passed(findings.guards):
        headline += [Line(guard.status.upper(), guard.message), Line("", guard.advice)]
    tables, data = (_operator_tables if findings.why_no_kernels else _tables)(findings, top)
    figures = {
        "trace": str(findings.trace.path),
        "why_no_kernels": findings.why_no_kernels,
        "phase_source": timeline.source,
        "inferred_phases": timeline.inferred,
        "steps": steps,
        "kernel_s": findings.work.total()["kernel_s"],
        "matmul_fractions": findings.matmul_fractions,
        "completeness": count,
        "clocks": {
            "steps": clocks.steps,
            "skipped_steps": clocks.skipped,
            "is_whole_trace": clocks.is_whole_trace,
            "devices": records(clocks.devices.reset_index()),
            "phases": records(findings.phases.reset_index()),
        },
        "guards": findings.guards,
    }
    return Answer(
        headline, [*tables, *roof.tables], [*notes, *roof.notes], figures={**figures, **roof.figures}, data=data,
        first=(),
    )  # fmt: skip


def run_line(run: RunRecord) -> str:
    """The run's settings in one line."""
    named = (
        run.model.size or run.model.name,
        f"attention {run.model.attention}" if run.model.attention else None,
        run.model.optimizer,
        run.mode,
        f"batch {run.data.batch_size} x context {run.data.context_length}",
        f"{run.precision}, float32 matmul {run.matmul_precision}",
        "compiled" if run.compile.is_enabled else "eager",
        (run.environment.gpu.name if run.environment else None) or "CPU",
    )
    return ", ".join(filter(None, named))


def per_what(findings: Findings) -> str:
    """What times and numbers are sums or means of."""
    return "per step" if findings.trace.timeline.has_step_count else "in the whole trace"


def _headline(findings: Findings) -> list[Line]:
    """Each device's idle time, each judged phase with its advice, and what takes most; or the longest operators."""
    if findings.why_no_kernels:
        return [
            Line("note", f"no kernels in this trace: {findings.why_no_kernels}"),
            *(_longest(phase, "name", rows) for phase, rows in findings.operators.items()),
        ]
    lines, total = [], findings.clocks.total
    for device, clock in findings.clocks.devices.iterrows():
        lines.append(Line(f"device {device}", f"{per_what(findings)} {verdict_of(clock)}: {idle_reason(clock)}"))
        if clock.comm_s:
            hidden, exposed = milliseconds(clock.comm_s - clock.comm_exposed_s), milliseconds(clock.comm_exposed_s)
            lines.append(Line("", f"communication: {exposed} ms exposed, {hidden} ms beside computing"))
    for place, key in (("before the trace", "before_s"), ("outside the traced steps", "outside_steps_s")):
        if uncounted_s := findings.completeness[key]:
            lines.append(Line("", f"{place}: {milliseconds(uncounted_s)} ms, not counted"))
    lines += _wait_lines(findings)
    phases = findings.phases[findings.phases.verdict.notna()]
    for phase, clock in phases.nlargest(_NAMED, "window_s").sort_index(key=phases.index.get_indexer).iterrows():
        if clock.window_s >= _LARGE_FRACTION * total.window_s:
            is_other = clock.lag_verdict not in (None, clock.verdict)
            lag = f" (without the profiler {clock.lag_verdict})" if is_other else ""
            busy = f"busy {milliseconds(clock.busy_s)} of {milliseconds(clock.window_s)} ms"
            lines.append(Line(str(phase), f"{clock.verdict}{lag}, {busy}: {clock.advice}"))
    lines.append(_longest("kinds", "kind", findings.work.by("kind")))
    if precisions := [row for row in findings.work.by("precision") if row["precision"]]:
        lines.append(_longest("products", "precision", precisions))
    if findings.work.fraction("part", UNCLASSIFIED) < _LEAST_KNOWN_FRACTION:
        lines.append(_longest("parts", "part", findings.work.by("part")))
    for kernel in findings.work.kernels()[:_LONGEST]:
        share, name = percent(kernel["share_fraction"]), shortened(kernel["short_name"], KERNEL_WIDTH)
        text = f"{milliseconds(kernel['kernel_s']):>6} ms {share:>6}  {name}, {kernel['kind']}"
        lines.append(Line("" if lines[-1].label in ("", "longest") else "longest", text))
    return lines


def _wait_lines(findings: Findings) -> list[Line]:
    """What held the host up while devices waited for it, and their longest pause."""
    clocks, waits = findings.clocks, findings.waits
    idle_s = clocks.total.idle_s
    if idle_s < _LARGE_FRACTION * clocks.total.window_s:
        return []
    lines = list[Line]()
    for cause, wait_s in largest_causes(waits)[:2].items():
        if wait_s >= _LARGE_FRACTION * idle_s:
            at_ms = milliseconds(waits.at_s[waits.cause == cause].iat[0])
            text = f"{milliseconds(wait_s)} of {milliseconds(idle_s)} ms in {cause_text(waits, str(cause))}"
            lines.append(Line("" if lines else "idle", f"{text}, most at {at_ms} ms"))
    for pause in _pauses(findings)[:1]:
        between = " and ".join(shortened(pause[side], _PAUSE_WIDTH) for side in ("before", "after"))
        at_ms = milliseconds(pause["at_s"])
        lines.append(Line("pause", f"{milliseconds(pause['pause_s'])} ms at {at_ms} ms between {between}"))
    return lines


def _pauses(findings: Findings) -> list[Row]:
    """Idle times of devices in the trace, the longest first, with the kernels around them."""
    pauses = findings.clocks.pauses
    names = [*map(short_name, findings.trace.kernels.name), "no kernel"]
    rows = pauses.assign(
        at_s=pauses.start_ns / 1e9,
        pause_s=(pauses.end_ns - pauses.start_ns) / 1e9,
        before=[names[index] for index in pauses.before],
        after=[names[index] for index in pauses.after],
        phase=findings.trace.timeline.at(pauses.start_ns.to_numpy()),
    )
    return records(rows.sort_values("pause_s", ascending=False, kind="stable"))


def _longest(label: str, key: str, rows: Sequence[Row]) -> Line:
    return Line(label, ", ".join(f"{row[key]} {percent(row['share_fraction'])}" for row in rows[:_NAMED]))


def _operator_tables(findings: Findings, top: int) -> tuple[list[Table], Callable[[], Table]]:
    """The longest operators of each phase, of a trace without kernels; and all of them, for CSV."""
    operators = [operator for rows in findings.operators.values() for operator in rows]
    caption = f"time on the host without operators inside, {per_what(findings)}"
    tables = [
        table_of("operators", f"Top operators of {phase}", caption, rows[:top], *_OPERATORS)
        for phase, rows in findings.operators.items()
    ]
    return tables, partial(table_of, "all_operators", "Operators", "", operators, *reading(phase="phase"), *_OPERATORS)


def _all_kernels(work: Work) -> Table:
    """Every kernel of every phase, for CSV."""
    rows = [{**each, "phase": phase} for phase in work.phases for each in work.kernels(phase)]
    for each in rows:
        each["parts"] = "; ".join(f"{part} {seconds:.9g}" for part, seconds in each["parts"].items())
    names = reading(phase="phase", name="name", short_name="short_name", kind="kind", parts="parts")
    return table_of("all_kernels", "All kernels", "", rows, *names, *_TIMES)


def _tables(findings: Findings, top: int) -> tuple[list[Table], Callable[[], Table]]:
    """All tables that a trace with kernels has something for; and all kernels, for CSV."""
    work, per = findings.work, per_what(findings)
    rows = sorted(work.by("phase"), key=lambda total: work.phases.index(total["phase"]))
    rows += [{**work.total(), "phase": STEP}] if len(rows) > 1 else []
    for total in rows:
        total["matmul_fraction"] = work.fraction("kind", MATMUL, phase=total["phase"])
        other = next((kernel for kernel in work.kernels(total["phase"]) if kernel["kind"] != MATMUL), {})
        total |= {"other": other.get("short_name"), "other_fraction": other.get("share_fraction")}
    columns = [*reading(kernel="short_name", kind="kind", part="part", others="more"), *_TIMES]
    caption = f"ms and number n {per}, us each; the part with most of its time, and the number of its other parts"
    tables = [
        table_of(
            "phases", "Kernel time by phase", f"sum of kernels, ms and number {per}", rows,
            *reading(phase="phase", ms="kernel_s", share="share_fraction", kernels="kernel_count",
                     matmul="matmul_fraction", top_kernel_but_matmul="other", _="other_fraction"),
        ),
        _share_table(findings, "kind", KINDS.index),
        _share_table(findings, "part", part_order),
    ]  # fmt: skip
    for phase in sorted(_long_phases(work), key=work.phases.index):
        kernels = [{**each, "more": len(each["parts"]) - 1} for each in work.kernels(phase)]
        rows = with_rest(kernels, top, ["kernel_s", "kernel_count", "share_fraction"], "short_name", "kernels")
        tables.append(table_of("kernels", f"Top kernels of {phase}", caption, rows, *columns))
    if findings.annotations:
        tables.append(_annotation_table(findings, top))
    tables += [*_clock_tables(findings), *_wait_tables(findings, top)]
    if findings.attention:
        caption = (
            "ms per step; matmul: the matrix products in scores and values; ratios are softmax to matmul; FLOPs per "
            "score: softmax 5 forward and 4 backward, products 4 head_dim and 8 head_dim"
        )
        tables.append(
            table_of(
                "attention", "Inside attention", caption,
                [row(times, phase=phase) for phase, times in findings.attention.items()],
                *reading(phase="phase", scores="scores_s", mask="mask_s", softmax="softmax_s", values="values_s",
                         matmul="matmul_s"),
                ("time ratio", Unit("", 1.0, "{:.2f}".format), "softmax_matmul_time_ratio"),
                ("FLOP ratio", Unit("", 1.0, "{:.4f}".format), "softmax_matmul_flop_ratio"),
            )
        )  # fmt: skip
    return tables, partial(_all_kernels, work)


def _long_phases(work: Work) -> list[str]:
    """Phases that take some of the step's kernel time, the longest first."""
    return [each["phase"] for each in work.by("phase") if each["share_fraction"] >= _LONG_FRACTION]


def _share_table(findings: Findings, axis: str, order: Callable[[str], Any]) -> Table:
    """A row for each kind or part; for each of the longest phases its ms and share; last the whole step."""
    work, longest = findings.work, _long_phases(findings.work)[:_MAX_COLUMNS]
    phases = [*(phase for phase in work.phases if phase in longest), STEP]
    sums = {phase: {each[axis]: each for each in work.by(axis, phase=phase)} for phase in phases}

    def cell(name: str, phase: str) -> Cell | None:
        if name not in sums[phase]:
            return None
        seconds, share = sums[phase][name]["kernel_s"], sums[phase][name]["share_fraction"]
        return Cell(seconds, text=f"{milliseconds(seconds)} {percent(share):>7}")

    columns = [Column(axis, narrowing="shorten"), *(Column(phase, MS, f"{phase}_s") for phase in phases)]
    rows = [(name, *(cell(name, phase) for phase in phases)) for name in sorted(sums[STEP], key=order)]
    caption = f"ms {per_what(findings)} and share of the phase, for the longest phases"
    return Table(f"{axis}s", f"Kernel time by {axis}", columns, rows, caption)


def _annotation_table(findings: Findings, top: int) -> Table:
    """The longest of the user's own ranges, and what is in none; the column `own` adds up to the captured time."""
    annotations, total_s = findings.annotations, findings.work.total()["kernel_s"] or 1.0
    rows = with_rest(annotations, top, ["calls", "own_s"], "name", "annotations")
    rows.append({"name": "in no annotation", "own_s": findings.no_annotation_s})
    caption = (
        f"ranges of the program itself (record_function); ms and numbers {per_what(findings)}; ms: kernels launched "
        "within, own: without annotations inside, share: own of all kernels"
    )
    return table_of(
        "annotations", "Kernel time by annotation", caption,
        [{**each, "share_fraction": each["own_s"] / total_s} for each in rows],
        *reading(annotation="name", calls="calls", ms="kernel_s", own="own_s", share="share_fraction",
                 kernels="kernel_count"),
    )  # fmt: skip


def _wait_tables(findings: Findings, top: int) -> list[Table]:
    """What held the host up, and the longest pauses."""
    waits = with_rest(records(findings.waits), top, ["wait_s", "calls"], "cause", "causes")
    caption = (
        f"ms {per_what(findings)} in which a device waited for the host, by what the host did; calls: in the trace; "
        "at: when the longest began, in ms of the trace"
    )
    return [
        table_of(
            "waits", "Waits for the host", caption, waits,
            *reading(cause="cause", ms="wait_s", calls="calls", at="at_s", phase="phase", call="call", where="under"),
        ),
        table_of(
            "pauses", "Longest pauses", "ms in which a device was idle, and the kernels before and after",
            _pauses(findings)[:top],
            *reading(at="at_s", ms="pause_s", device="device", phase="phase", before="before", after="after"),
        ),
    ]  # fmt: skip


def _clock_tables(findings: Findings) -> list[Table]:
    """The device's time by phase, by events and by the trace; and what the host started, with both verdicts."""
    clocks, phases, per = findings.clocks, findings.phases, per_what(findings)
    phases = phases.assign(
        host_s=phases.host_span_s.fillna(phases.host_s),
        gap_s=phases.queued_gap_s / phases.queued_gaps,
        wait_fraction=phases.host_wait_s / phases.window_s,
    ).reset_index()
    over = "over the whole trace" if clocks.is_whole_trace else f"over {clocks.steps} steps"
    clock_caption = (
        f"ms {per}, {over}, of {len(clocks.devices)} devices; events: device span by events; window: the device's time "
        "with the phase, = busy (kernels) + gaps (between queued kernels) + waits (for the host) + other (idle); "
        "exposed: communication beside which nothing computes; host: host span; lag: least of unprofiled steps"
    )
    launch_caption = (
        f"{per}; calls: launches by the host; in us: median: of kernels' durations, gap: mean between queued kernels, "
        "host: median from one launch to the next; waits: share of the window in which the "
        "device waits for the host; trace, lag: verdicts of the trace and of the unprofiled steps' lag"
    )
    exposed = reading(exposed="comm_exposed_s") if clocks.total.comm_s else []
    return [
        table_of(
            "clocks", "Clocks", clock_caption, [*records(phases), {**clocks.total, "phase": "all"}],
            *reading(phase="phase", events="device_span_s", window="window_s", busy="busy_s", gaps="queued_gap_s",
                     waits="host_wait_s", other="other_idle_s"),
            *exposed, *reading(host="host_s", lag="min_lag_s"),
        ),
        table_of(
            "launches", "Launches", launch_caption, records(phases[phases.kernels > 0]),
            *reading(phase="phase", calls="launches", kernels="kernels", median="median_kernel_s", gap="gap_s",
                     host="launch_interval_s", waits="wait_fraction", trace="verdict", lag="lag_verdict"),
        ),
    ]  # fmt: skip
