"""What `lmbench kernels` says of a trace: first the answer (was the device working, and what took the time), then
tables and what was recorded. Times and numbers are means per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from lmbench.kernels.ceiling import find_ceiling
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.kinds import KINDS
from lmbench.kernels.parts import UNCLASSIFIED, part_order
from lmbench.kernels.phases import NO_PHASE, OUTSIDE
from lmbench.kernels.roofline import roofline
from lmbench.kernels.sums import ATTENTION_PARTS, PhaseShares
from lmbench.kernels.tables import MS, NUMBER, SHARE, US, Reading, counted, row, table_of
from lmbench.records.guard import not_passed
from lmbench.records.run import RunRecord
from lmbench.report.answer import Answer, Cell, Column, Line, Table
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import COUNT, WORDS, Unit, milliseconds, percent

#: Phases that have their advice in the answer; parts, kinds and operators that are named in it.
_ADVISED, _NAMED = 3, 3
# Phases with less of the step's kernel time have no column of their own, and no more of the longest than this.
_COLUMN_FRACTION = 0.005
_MAX_COLUMNS = 3
# Parts that are known of less than this share of kernel time, communication apart, are not shown: a reader would take
# them for all there is.
_KNOWN_PARTS_FRACTION = 0.5
# Idle shares of the clock and between a device's first kernel and its last that differ by more are both said.
_SAME_IDLE_FRACTION = 0.01


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
    trace, run = findings.trace, findings.run
    path = Line("trace", str(trace.path), is_whole=True)
    headline = [Line("run", run_line(run))] if run is not None else [path]
    notes = [path] if run is not None else []
    if findings.has_kernels:
        tables = _tables(findings, top)
        headline += [*_device(findings), *_verdicts(findings), Line("kinds", _most(findings, findings.step.kinds_s))]
        if shows_parts(findings):
            headline.append(Line("parts", _most(findings, findings.step.parts_s)))
        headline += _source(findings)
        notes += _facts(findings)
        names = ((name, WORDS, name) for name in ("phase", "name", "short_name", "kind", "parts"))
        everything = [
            row(each, parts="; ".join(f"{part} {seconds:.9g}" for part, seconds in each.parts_s.items()))
            for share in findings.phases
            for each in share.rows
        ]
        data = table_of("all_kernels", "All kernels", "", everything, *names, *_TIMES)
    else:
        caption = f"time on the host without operators inside, {per_what(findings)}"
        tables = [
            table_of("operators", f"Top operators of {phase}", caption, rows[:top], *_OPERATORS)
            for phase, rows in findings.operators.items()
        ]
        shown = "operators on the host are shown, with the time of each without those inside it"
        headline += [*_source(findings), Line("note", f"no kernels in this trace: {findings.why_no_kernels}; {shown}")]
        headline += [
            Line(phase, ", ".join(f"{row.name} {percent(row.share_fraction)}" for row in rows[:_NAMED]))
            for phase, rows in findings.operators.items()
        ]
        operators = [each for rows in findings.operators.values() for each in rows]
        data = table_of("all_operators", "Operators", "", operators, ("phase", WORDS, "phase"), *_OPERATORS)
    for guard in not_passed(findings.guards):
        headline += [Line(guard.status.upper(), guard.message), Line("", guard.advice)]
    if roof is not None:
        tables, notes = [*tables, *roof.tables], [*notes, *roof.notes]
    if findings.guards:
        tally = Counter(guard.status for guard in findings.guards)
        notes.append(Line("guards", ", ".join(f"{count} {status}" for status, count in tally.items())))
    return Answer(headline, tables, notes, figures=_figures(findings, roof), data=lambda: data, first=())


def _figures(findings: Findings, roof: Answer | None) -> dict[str, Any]:
    """What stands in sentences only, for JSON."""
    clocks, timeline = findings.clocks, findings.trace.timeline
    return {
        "trace": str(findings.trace.path),
        "why_no_kernels": findings.why_no_kernels,
        "phase_source": timeline.source,
        "inferred_phases": timeline.inferred,
        "steps": timeline.steps if timeline.has_step_count else None,
        "kernel_s": findings.step.kernel_s,
        "matmul_fractions": findings.matmul_fractions if findings.has_kernels else {},
        "completeness": asdict(findings.completeness),
        "clocks": {
            "steps": clocks.steps,
            "skipped_steps": clocks.skipped,
            "is_whole_trace": clocks.is_whole_trace,
            "devices": [asdict(each) for each in clocks.devices],
            "phases": [asdict(each) for each in findings.verdicts],
        },
        "guards": findings.guards,
        **(roof.figures if roof else {}),
    }


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


def _whole_name(findings: Findings) -> str:
    """What all phases and what is outside of them are together."""
    return "step" if findings.trace.timeline.has_step_count else "all"


def shows_parts(findings: Findings) -> bool:
    """Whether the part of enough kernel time is known."""
    parts_s = findings.step.parts_s
    computing_s = findings.step.kernel_s - parts_s.get("comm", 0.0)
    return parts_s.get(UNCLASSIFIED, 0.0) <= (1 - _KNOWN_PARTS_FRACTION) * computing_s


# lines


def _device(findings: Findings) -> list[Line]:
    """How much of each device's time was idle, and for what; and its communication."""
    lines: list[Line] = []
    per = " per step" if findings.trace.timeline.has_step_count else ""
    devices = findings.clocks.devices
    for each in devices:
        waits, gaps, other = (
            percent(each.share(idle_s)) for idle_s in (each.host_wait_s, each.queued_gap_s, each.other_idle_s)
        )
        busy = f"busy {milliseconds(each.busy_s)} of {milliseconds(each.window_s)} ms{per}"
        idle = f"{waits} waiting for the host, {gaps} between queued kernels, {other} other"
        label = "device" if len(devices) == 1 else f"device {each.device}"
        lines.append(Line(label, f"{busy}, idle {percent(each.idle_fraction)}: {idle}"))
        if each.comm_s:
            hidden = f"{milliseconds(each.comm_overlapped_s)} ms beside kernels that compute"
            exposed = f"{milliseconds(each.comm_exposed_s)} ms exposed"
            lines.append(Line("", f"communication {milliseconds(each.comm_s)} ms{per}, {hidden}, {exposed}"))
    return lines


def _verdicts(findings: Findings) -> list[Line]:
    """A line with its figures for each phase that is judged, and advice for those that take longest."""
    judged = [each for each in findings.verdicts if each.verdict is not None]
    longest = sorted(judged, key=lambda each: -each.clock.window_s)[:_ADVISED]
    lines: list[Line] = []
    for each in judged:
        clock = each.clock
        lag = f" (without the profiler {each.lag_verdict})" if each.lag_verdict not in (None, each.verdict) else ""
        text = f"{each.verdict}{lag}: busy {milliseconds(clock.busy_s)} of {milliseconds(clock.window_s)} ms"
        text += f", waits for the host in {percent(each.wait_fraction)}"
        if each.verdict == "stalled":
            gaps, other = percent(clock.share(clock.queued_gap_s)), percent(clock.share(clock.other_idle_s))
            text += f", has gaps in {gaps}, idles for something else in {other}"
        lines.append(Line(each.phase, text))
        if each in longest:
            lines.append(Line("", each.advice))
    return lines


def _most(findings: Findings, sums: Mapping[str, float]) -> str:
    """Those that take most of all kernel time."""
    longest = list(sums.items())[:_NAMED]
    shares = ", ".join(f"{name} {percent(findings.step.share(seconds))}" for name, seconds in longest)
    return f"{shares} of kernel time"


def _source(findings: Findings) -> list[Line]:
    timeline = findings.trace.timeline
    if timeline.source == "none":
        return [Line("phases", "the trace shows no ranges of phases and no backward pass: everything is outside")]
    if timeline.source == "lmbench":
        return []
    text = "not recorded by lmbench: by the ranges of Lightning and PyTorch"
    if inferred := " and ".join(timeline.inferred):
        text = f"{inferred} inferred from what autograd runs, the others by the ranges of Lightning and PyTorch"
    present = {share.phase for share in findings.phases} | findings.operators.keys()
    if OUTSIDE in present and "forward" not in present:
        missing = "forward: it is outside" if "backward" in present else "forward and backward: they are outside"
        text += f"; nothing in the trace tells {missing}"
    return [Line("phases", text)]


def _facts(findings: Findings) -> list[Line]:
    """What was recorded, and what verdicts rest on."""
    timeline = findings.trace.timeline
    steps = counted(timeline.steps, "step") if timeline.has_step_count else "steps unknown"
    captured = milliseconds(findings.step.kernel_s * timeline.steps)
    lines = [
        Line("captured", f"{captured} ms in {counted(findings.completeness.kernels, 'kernel')}, {steps}"),
        _completeness(findings),
        Line("matmul", _matmul(findings)),
    ]
    if not shows_parts(findings):
        unknown = percent(findings.step.share(findings.step.parts_s[UNCLASSIFIED]))
        has_none = "the trace has no ranges of modules, and no operator"
        why = "no range of a module" if findings.has_modules else has_none
        lines.append(Line("parts", f"not shown: {why} tells what {unknown} of kernel time is for"))
    elif not findings.has_modules:
        why = "only operators tell them, and what they do not tell is unclassified"
        lines.append(Line("parts", f"the trace has no ranges of modules: {why}"))
    for device in findings.clocks.devices:
        if abs((device.idle_fraction or 0.0) - device.idle_within_fraction) > _SAME_IDLE_FRACTION:
            idle = f"idle between its first kernel and its last {percent(device.idle_within_fraction)}"
            lines.append(Line(f"device {device.device}", idle))
    for each in findings.verdicts:
        if each.verdict is not None:
            lines += [Line(each.phase, f"{each.verdict}: {each.reason}"), Line("", each.advice)]
            least = f"(smallest {milliseconds(each.min_lag_s)} ms)"
            if each.lag_verdict == each.verdict:
                lines.append(Line("", f"the lag of the unprofiled steps agrees {least}"))
            elif each.lag_verdict:
                lag = f"the lag of the unprofiled steps says {each.lag_verdict} {least}"
                lines.append(Line("", f"{lag}; {each.agreement}"))
    return lines


def _completeness(findings: Findings) -> Line:
    """Whether launches and kernels belong together, in one line."""
    count = findings.completeness
    alone, missing, early = count.kernels_without_launch, count.launches_without_kernel, count.kernels_before_launch
    parts = {
        counted(count.kernels, "kernel"): True,
        f"{alone:,} without launch" if alone else "each with its launch": True,
        f"{count.launched_before:,} of them launched before the trace began": count.launched_before,
        f"{counted(missing, 'launch', 'launches')} without kernel": missing,
        f"{counted(count.captured_launches, 'launch', 'launches')} into a graph": count.captured_launches,
        f"{counted(count.empty_fills, 'fill')} of no bytes": count.empty_fills,
        f"{early:,} up to {count.worst_early_s * 1e6:,.1f} us before it" if early else "none before it": True,
    }
    label = "incomplete" if alone or missing or early else "complete"
    return Line(label, ", ".join(text for text, is_said in parts.items() if is_said))


def _matmul(findings: Findings) -> str:
    names = {"step": _whole_name(findings)}
    shares = [f"{percent(share)} of {names.get(name, name)}" for name, share in findings.matmul_fractions.items()]
    text, other = ", ".join(shares), findings.step.top_other
    if other is not None:
        text += f"; top other kernel {shortened(other.short_name, KERNEL_WIDTH)}, {percent(other.share_fraction)}"
    return text


# tables


def _tables(findings: Findings, top: int) -> list[Table]:
    """All tables that a trace with kernels has something for."""
    tables = [_phase_table(findings), _share_table(findings, "kind", KINDS.index)]
    if shows_parts(findings):
        tables.append(_share_table(findings, "part", part_order))
    tables += _kernel_tables(findings, top)
    if findings.annotations:
        tables.append(_annotation_table(findings, top))
    tables += _clock_tables(findings)
    if findings.attention:
        caption = (
            "ms per step; matmul: the matrix products in scores and values; ratios are softmax to matmul; FLOPs per "
            "score: softmax 5 forward and 4 backward, products 4 head_dim and 8 head_dim"
        )
        items = [row(times, **times.parts_s) for times in findings.attention]
        tables.append(
            table_of(
                "attention", "Inside attention", caption, items, ("phase", WORDS, "phase"),
                *((part, MS, part) for part in ATTENTION_PARTS), ("matmul", MS, "matmul_s"),
                ("time ratio", Unit("", 1.0, "{:.2f}".format), "time_ratio"),
                ("FLOP ratio", Unit("", 1.0, "{:.4f}".format), "flop_ratio"),
            )
        )  # fmt: skip
    return tables


def _phase_table(findings: Findings) -> Table:
    """One row a phase, and their sum: it is the captured time."""
    timeline, of_all = findings.trace.timeline, findings.step.share
    items = [
        row(
            share,
            phase=f"{share.phase} (inferred)" if share.phase in timeline.inferred else share.phase,
            share_fraction=of_all(share.kernel_s),
        )
        for share in findings.phases
    ]
    if len(items) > 1:
        items.append(row(findings.step, phase="all", share_fraction=1.0, top_other=None))
    unknown = "" if timeline.has_step_count else " (its number of steps is unknown)"
    return table_of(
        "phases", "Kernel time by phase", f"sum of kernels, ms and number {per_what(findings)}{unknown}", items,
        ("phase", WORDS, "phase"), ("ms", MS, "kernel_s"), ("share", SHARE, "share_fraction"),
        ("kernels", COUNT, "instances"), ("matmul", SHARE, "matmul_fraction"),
        ("top kernel but matmul", WORDS, "top_other.short_name"), ("", SHARE, "top_other.share_fraction"),
    )  # fmt: skip


def _share_table(findings: Findings, axis: str, order: Callable[[str], Any]) -> Table:
    """A row for each kind or part; for each long phase its ms and share; last the whole step."""
    sums = attrgetter(f"{axis}s_s")
    long = [share for share in findings.phases if _is_long(findings, share)]
    longest = sorted(long, key=lambda share: (share.phase not in NO_PHASE, -share.kernel_s))[:_MAX_COLUMNS]
    shares = [share for share in long if share in longest]
    if len(shares) != 1:
        shares.append(findings.step)

    def cell(name: str, share: PhaseShares) -> Cell | None:
        seconds = sums(share).get(name)
        if seconds is None or not share.kernel_s:
            return None
        return Cell(seconds, text=f"{milliseconds(seconds)} {percent(share.share(seconds)):>7}")

    whole = _whole_name(findings)
    caption = "ms per step and share of the phase" if whole == "step" else "ms and share of the phase"
    if shorter := [share.phase for share in long if share not in longest]:
        caption += f"; {' and '.join(shorter)} within {whole} only"
    titles = [whole if share is findings.step else share.phase for share in shares]
    columns = [Column(axis, narrowing="shorten"), *(Column(title, MS, f"{title}_s") for title in titles)]
    names = sorted({name for share in shares for name in sums(share)}, key=order)
    rows = [(name, *(cell(name, share) for share in shares)) for name in names]
    return Table(f"{axis}s", f"Kernel time by {axis}", columns, rows, caption)


def _is_long(findings: Findings, share: PhaseShares) -> bool:
    return share.phase in NO_PHASE or share.kernel_s >= _COLUMN_FRACTION * findings.step.kernel_s


_TIMES = (("ms", MS, "kernel_s"), ("share", SHARE, "share_fraction"), ("n", NUMBER, "instances"), ("us", US, "mean_s"))


def _kernel_tables(findings: Findings, top: int) -> list[Table]:
    """The longest kernels of every phase that takes some time, and what is outside; the rest of each in one row."""
    has_parts = shows_parts(findings)
    part = [("part", WORDS, "part_label")] if has_parts else []
    caption = f"ms and number n {per_what(findings)}, us each"
    caption += "; the part with most of its time (+ number of other parts)" if has_parts else ""
    tables = []
    for share in filter(lambda share: _is_long(findings, share), findings.phases):
        items = [
            row(each, part_label=each.part if len(each.parts_s) == 1 else f"{each.part} +{len(each.parts_s) - 1}")
            for each in share.rows[:top]
        ]
        if rest := share.rows[top:]:
            rest_s, count = sum(each.kernel_s for each in rest), sum(each.instances for each in rest)
            label = counted(len(rest), "more kernel")
            items.append(
                row(
                    None, short_name=label, kernel_s=rest_s, share_fraction=share.share(rest_s), instances=count,
                    mean_s=rest_s / count,
                )
            )  # fmt: skip
        columns = (("kernel", WORDS, "short_name"), ("kind", WORDS, "kind"), *part, *_TIMES)
        tables.append(table_of("kernels", f"Top kernels of {share.phase}", caption, items, *columns))
    return tables


def _annotation_table(findings: Findings, top: int) -> Table:
    """The longest of the user's own ranges, and what is in none; the column `own` adds up to the captured time."""
    share, rest, none_s = findings.step.share, findings.annotations[top:], findings.no_annotation_s
    items = [row(each, share_fraction=share(each.own_s)) for each in findings.annotations[:top]]
    blank = {"kernel_s": None, "instances": None}
    if rest:
        own_s, calls = sum(each.own_s for each in rest), sum(each.calls for each in rest)
        label = counted(len(rest), "more annotation")
        items.append(row(None, name=label, calls=calls, own_s=own_s, share_fraction=share(own_s), **blank))
    if none_s:
        items.append(
            row(None, name="in no annotation", calls=None, own_s=none_s, share_fraction=share(none_s), **blank)
        )
    caption = (
        f"ranges of the program itself (record_function); ms and numbers {per_what(findings)}; ms: kernels launched "
        "within, own: without annotations inside, share: own of all kernels"
    )
    return table_of(
        "annotations", "Kernel time by annotation", caption, items, ("annotation", WORDS, "name"),
        ("calls", NUMBER, "calls"), ("ms", MS, "kernel_s"), ("own", MS, "own_s"), ("share", SHARE, "share_fraction"),
        ("kernels", NUMBER, "instances"),
    )  # fmt: skip


def _clock_tables(findings: Findings) -> list[Table]:
    """The device's time by phase, by events and by the trace; what the host started, with both verdicts; and
    communication, with how much of it is hidden behind kernels that compute."""
    clocks, whole = findings.clocks, findings.clocks.whole
    if not clocks.phases:
        return []
    phase: Reading = ("phase", WORDS, "phase")
    items = [
        row(
            each,
            host_s=each.clock.host_s if each.host_span_s is None else each.host_span_s,
            gap_s=each.clock.queued_gap_s / each.clock.queued_gaps if each.clock.queued_gaps else None,
        )
        for each in findings.verdicts
    ]
    total = [row(None, phase="all", clock=whole)]
    over = "ms per step" if findings.trace.timeline.has_step_count else "ms"
    over += " over the whole trace" if clocks.is_whole_trace else ""
    over += ", without the first step, which begins on an idle device" if clocks.skipped else ""
    over += f", summed over {len(clocks.devices)} devices" if len(clocks.devices) > 1 else ""
    caption = (
        f"{over}. events: device span by events; window: the device's time with the phase, = busy (kernels) + gaps "
        "(between queued kernels) + waits (for the host) + other (idle); host: host span; lag: least of unprofiled "
        "steps"
    )
    tables = [
        table_of(
            "clocks", "Clocks", caption, items + total[: len(items) - 1], phase, ("events", MS, "device_span_s"),
            ("window", MS, "clock.window_s"), ("busy", MS, "clock.busy_s"), ("gaps", MS, "clock.queued_gap_s"),
            ("waits", MS, "clock.host_wait_s"), ("other", MS, "clock.other_idle_s"), ("host", MS, "host_s"),
            ("lag", MS, "min_lag_s"),
        )
    ]  # fmt: skip
    caption = (
        f"{per_what(findings)}; calls: launches by the host; in us: median: of kernels' durations, gap: mean between "
        "queued kernels, host: host time per launch, with waiting for a full queue and without waiting until the "
        "device is done; waits: share of the window in which the device waits for the host; trace, lag: verdicts of "
        "the trace and of the unprofiled steps' lag"
    )
    launching = [item for item in items if item.clock.kernels]
    tables.append(
        table_of(
            "launches", "Launches", caption, launching, phase, ("calls", NUMBER, "clock.launches"),
            ("kernels", NUMBER, "clock.kernels"), ("median", US, "clock.median_kernel_s"), ("gap", US, "gap_s"),
            ("host", US, "clock.host_s_per_launch"), ("waits", SHARE, "wait_fraction"), ("trace", WORDS, "verdict"),
            ("lag", WORDS, "lag_verdict"),
        )
    )  # fmt: skip
    communicating = [item for item in items if item.clock.comm_s]
    if communicating:
        caption = (
            f"ms {per_what(findings)} in which collectives run, waiting for other ranks included, of the phase that "
            "launched them; beside compute: beside kernels that are no communication and no copies; exposed: the "
            "rest; overlap: share beside compute; of all: exposed share of the device's time"
        )
        rows = [
            row(
                item,
                overlap_fraction=item.clock.comm_overlapped_s / item.clock.comm_s,
                exposed_fraction=whole.share(item.clock.comm_exposed_s),
            )
            for item in communicating + total[: len(communicating) - 1]
        ]
        tables.append(
            table_of(
                "communication", "Communication", caption, rows, phase, ("ms", MS, "clock.comm_s"),
                ("beside compute", MS, "clock.comm_overlapped_s"), ("exposed", MS, "clock.comm_exposed_s"),
                ("overlap", SHARE, "overlap_fraction"), ("of all", SHARE, "exposed_fraction"),
            )
        )  # fmt: skip
    return tables


_OPERATORS: tuple[Reading, ...] = (
    ("operator", WORDS, "name"), ("ms", MS, "self_s"), ("share", SHARE, "share_fraction"), ("calls", NUMBER, "calls"),
    ("mean us", US, "mean_s"),
)  # fmt: skip
