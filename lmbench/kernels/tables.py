"""A trace's findings as people read them: tables; kernels as CSV.

Times are means per step in ms, shares are of the phase's kernel time.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

from lmbench.kernels.roofline import Roofline, roofline_table
from lmbench.kernels.trace.clocks import DeviceTime
from lmbench.kernels.trace.findings import Findings, kernel_record
from lmbench.kernels.trace.kinds import KINDS, UNCLASSIFIED
from lmbench.kernels.trace.parts import part_order
from lmbench.kernels.trace.phases import NO_PHASE
from lmbench.kernels.trace.shares import ATTENTION_PARTS, KernelRow, PhaseShares
from lmbench.records.run import RunRecord
from lmbench.report.delimited import csv_field
from lmbench.report.table import Entry, Table, fact, generated, numbers
from lmbench.report.units import MISSING, instances, microseconds, milliseconds, percent, whole

# Phases with less of the step's kernel time have no column of their own, and no more of the longest than this.
_COLUMN_FRACTION = 0.005
_MAX_COLUMNS = 3
# Parts that are known of less than this share of kernel time, communication apart, are not shown: a reader would take
# them for all there is.
_KNOWN_PARTS_FRACTION = 0.5


def to_csv(found: Findings) -> str:
    """Every kernel of every phase, a row each, in SI units; of a trace without kernels its operators."""
    stream = io.StringIO()
    if found.has_kernels:
        names = ["phase", "name", "short_name", "kind", "parts_s", "total_s", "share_fraction", "instances", "mean_s"]
        rows = [kernel_record(row) for phase in found.phases for row in phase.rows]
    else:
        names = ["phase", "name", "self_s", "share_fraction", "calls", "mean_s"]
        rows = [dict(vars(row)) for of_phase in found.operators.values() for row in of_phase]
    writer = csv.DictWriter(stream, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if found.has_kernels:
            row["parts_s"] = "; ".join(f"{part} {seconds:.9g}" for part, seconds in row["parts_s"].items())
        writer.writerow({name: csv_field(value) for name, value in row.items()})
    return stream.getvalue()


def tables(found: Findings, top: int, roof: Roofline | None) -> list[Table]:
    """All tables that this trace, and what its kernels attain, have something for."""
    if not found.has_kernels:
        return operator_tables(found, top)
    made = [phase_table(found), share_table(found, "kind", lambda share: share.kinds_s, KINDS.index)]
    if shows_parts(found):
        made.append(share_table(found, "part", lambda share: share.parts_s, part_order))
    made += kernel_tables(found, top)
    if found.annotations.rows:
        made.append(annotation_table(found, top))
    if found.clocks.phases:
        made += [clock_table(found), launch_table(found)]
    if any(one.comm_s for one in found.clocks.devices):
        made.append(communication_table(found))
    if found.attention:
        made.append(attention_table(found))
    if roof is not None:
        made.append(roofline_table(roof))
    return made


def counted(number: int, word: str, several: str | None = None) -> str:
    return f"{number:,} {word if number == 1 else several or f'{word}s'}"


def run_line(run: RunRecord) -> str:
    """The run's settings in one line."""
    attention = f"attention {run.model.attention}" if run.model.attention else None
    shape = f"batch {run.data.batch_size} x context {run.data.context_length}"
    precision = f"{run.precision}, float32 matmul {run.matmul_precision}"
    compiled = "compiled" if run.compile.is_enabled else "eager"
    device = run.environment.gpu.name if run.environment else None
    named = (run.model.size or run.model.name, attention, run.model.optimizer, run.mode)
    return ", ".join(one for one in (*named, shape, precision, compiled, device or "CPU") if one)


def whole_name(found: Findings) -> str:
    """What all phases and what is outside of them are together."""
    return "step" if found.has_step_count else "all"


def per_what(found: Findings) -> str:
    """What times and numbers are sums or means of."""
    return "per step" if found.has_step_count else "in the whole trace"


def shows_parts(found: Findings) -> bool:
    """Whether the part of enough kernel time is known."""
    computing_s = found.step.kernel_s - found.step.parts_s.get("comm", 0.0)
    return found.step.parts_s.get(UNCLASSIFIED, 0.0) <= (1 - _KNOWN_PARTS_FRACTION) * computing_s


def phase_table(found: Findings) -> Table:
    """One row a phase, and their sum: it is the captured time."""
    rows = [_phase_row(found, share) for share in found.phases]
    if len(found.phases) > 1:
        count = sum(share.instances for share in found.phases)
        total = [milliseconds(found.captured_s / found.steps), percent(1.0), whole(count / found.steps)]
        matmul = percent(found.step.matmul_fraction)
        rows.append([fact("all"), *map(Entry, (*total, matmul)), fact(""), Entry("")])
    headings = [*generated("phase"), *numbers("ms", "share", "kernels", "matmul")]
    headings += [*generated("top kernel but matmul"), *numbers("")]
    unit = "per step" if found.has_step_count else "in the whole trace (its number of steps is unknown)"
    return Table("Kernel time by phase", f"sum of kernels, ms and number {unit}", headings, rows, name="phases")


def _phase_row(found: Findings, share: PhaseShares) -> list[Entry]:
    other = share.top_other
    of_all = share.kernel_s / found.captured_s if found.captured_s else 0.0
    figures = (
        milliseconds(share.kernel_s / found.steps),
        percent(of_all),
        whole(share.instances / found.steps),
        percent(share.matmul_fraction),
    )
    top = (fact(other.short_name), Entry(percent(other.share_fraction))) if other else (fact(""), Entry(""))
    phase = f"{share.phase} (inferred)" if share.phase in found.inferred_phases else share.phase
    return [fact(phase), *map(Entry, figures), *top]


def share_table(
    found: Findings, axis: str, sums: Callable[[PhaseShares], dict[str, float]], order: Callable[[str], Any]
) -> Table:
    """A row for each kind or part; for each long phase its ms and share; last the whole step."""
    enough = _COLUMN_FRACTION * found.captured_s
    long = [share for share in found.phases if share.kernel_s >= enough or share.phase in NO_PHASE]
    longest = sorted(long, key=lambda share: (share.phase not in NO_PHASE, -share.kernel_s))[:_MAX_COLUMNS]
    columns = [share for share in long if share in longest]
    if len(columns) != 1:
        columns.append(found.step)
    names = sorted({name for share in columns for name in sums(share)}, key=order)
    rows = [
        [fact(name), *(_time_and_share(sums(share).get(name), share, found) for share in columns)] for name in names
    ]
    headings = [*generated(axis), *numbers(*(whole_name(found) if one is found.step else one.phase for one in columns))]
    caption = "ms per step and share of the phase" if found.has_step_count else "ms and share of the phase"
    if shorter := [share.phase for share in long if share not in longest]:
        caption += f"; {' and '.join(shorter)} within {whole_name(found)} only"
    return Table(f"Kernel time by {axis}", caption, headings, rows, name=f"{axis}s")


def _time_and_share(seconds: float | None, share: PhaseShares, found: Findings) -> Entry:
    if seconds is None or not share.kernel_s:
        return Entry(MISSING)
    return Entry(f"{milliseconds(seconds / found.steps)} {percent(seconds / share.kernel_s):>7}")


def kernel_tables(found: Findings, top: int) -> list[Table]:
    """The longest kernels of every phase that takes some time, and what is outside; the rest of each in one row."""
    has_parts = shows_parts(found)
    headings = [*generated("kernel", "kind", *(["part"] if has_parts else [])), *numbers("ms", "share", "n", "us")]
    made = []
    for share in found.phases:
        if share.kernel_s < _COLUMN_FRACTION * found.captured_s and share.phase not in NO_PHASE:
            continue
        rows = [_kernel_row(row, found.steps, has_parts) for row in share.rows[:top]]
        if rest := share.rows[top:]:
            total = sum(row.total_s for row in rest)
            count = sum(row.instances for row in rest)
            fraction = total / share.kernel_s if share.kernel_s else 0.0
            figures = (milliseconds(total / found.steps), percent(fraction), instances(count / found.steps))
            mean = microseconds(total / count)
            label = f"{len(rest)} more kernel{'s' if len(rest) > 1 else ''}"
            blank = [fact("")] * (2 if has_parts else 1)
            rows.append([fact(label), *blank, *map(Entry, (*figures, mean))])
        caption = f"ms and number n {per_what(found)}, us each"
        caption += "; the part with most of its time (+ number of other parts)" if has_parts else ""
        made.append(Table(f"Top kernels of {share.phase}", caption, headings, rows, name="kernels"))
    return made


def _kernel_row(row: KernelRow, steps: int, has_parts: bool) -> list[Entry]:
    part = f"{row.part} +{len(row.parts_s) - 1}" if len(row.parts_s) > 1 else row.part
    figures = (
        milliseconds(row.total_s / steps),
        percent(row.share_fraction),
        instances(row.instances / steps),
        microseconds(row.mean_s),
    )
    return [fact(row.short_name), fact(row.kind), *([fact(part)] if has_parts else []), *map(Entry, figures)]


def annotation_table(found: Findings, top: int) -> Table:
    """The longest of the user's own ranges, and what is in none; the column `own` adds up to the captured time."""
    rows = found.annotations.rows
    shown_rows = [
        [fact(row.name), *map(Entry, _annotation(found, row.calls, row.kernel_s, row.own_s, row.instances))]
        for row in rows[:top]
    ]
    if rest := rows[top:]:
        label = counted(len(rest), "more annotation")
        own_s, calls = sum(row.own_s for row in rest), sum(row.calls for row in rest)
        shown_rows.append([fact(label), *map(Entry, _annotation(found, calls, None, own_s, None))])
    if found.annotations.none_s:
        shown_rows.append(
            [fact("in no annotation"), *map(Entry, _annotation(found, None, None, found.annotations.none_s, None))]
        )
    headings = [*generated("annotation"), *numbers("calls", "ms", "own", "share", "kernels")]
    caption = (
        f"ranges of the program itself (record_function); ms and numbers {per_what(found)}; ms: kernels launched "
        "within, own: without annotations inside, share: own of all kernels"
    )
    return Table("Kernel time by annotation", caption, headings, shown_rows, name="annotations")


def _annotation(
    found: Findings, calls: int | None, total_s: float | None, own_s: float, count: int | None
) -> tuple[str, ...]:
    return (
        MISSING if calls is None else instances(calls / found.steps),
        MISSING if total_s is None else milliseconds(total_s / found.steps),
        milliseconds(own_s / found.steps),
        percent(own_s / found.captured_s if found.captured_s else None),
        MISSING if count is None else instances(count / found.steps),
    )


def clock_table(found: Findings) -> Table:
    """The device's time by phase: by events, by the trace, and what the trace's consists of; and the host's."""
    rows = []
    for one in found.verdicts:
        clock = one.clock
        times = (
            one.device_span_s, *_parts_of(clock),
            one.host_span_s if one.host_span_s is not None else clock.host_s, one.min_lag_s,
        )  # fmt: skip
        rows.append([fact(one.phase), *(Entry(milliseconds(value)) for value in times)])
    if len(rows) > 1:
        parts = [Entry(milliseconds(value)) for value in _parts_of(found.clocks.whole)]
        rows.append([fact("all"), Entry(""), *parts, Entry(""), Entry("")])
    headings = [*generated("phase"), *numbers("events", "window", "busy", "gaps", "waits", "other", "host", "lag")]
    return Table("Clocks", _clock_caption(found), headings, rows, name="clocks")


def _parts_of(time: DeviceTime) -> tuple[float, ...]:
    return time.window_s, time.busy_s, time.queued_gap_s, time.host_wait_s, time.other_idle_s


def _clock_caption(found: Findings) -> str:
    over = "ms per step" if found.has_step_count else "ms"
    if found.clocks.is_whole_trace:
        over += " over the whole trace"
    if found.clocks.skipped:
        over += ", without the first step, which begins on an idle device"
    if len(found.clocks.devices) > 1:
        over += f", summed over {len(found.clocks.devices)} devices"
    return (
        f"{over}. events: device span by events; window: the device's time with the phase, = busy (kernels) + gaps "
        "(between queued kernels) + waits (for the host) + other (idle); host: host span; lag: least of unprofiled "
        "steps"
    )


def communication_table(found: Findings) -> Table:
    """Communication by phase: its time, and how much of it is hidden behind kernels that compute."""
    clocks: list[tuple[str, DeviceTime]] = [(one.phase, one) for one in found.clocks.phases if one.comm_s]
    if len(clocks) > 1:
        clocks.append(("all", found.clocks.whole))
    rows = []
    for name, one in clocks:
        share = one.comm_exposed_s / found.clocks.whole.window_s
        times = (one.comm_s, one.comm_overlapped_s, one.comm_exposed_s)
        overlap = percent(one.comm_overlapped_s / one.comm_s)
        rows.append([fact(name), *(Entry(milliseconds(time)) for time in times), Entry(overlap), Entry(percent(share))])
    headings = [*generated("phase"), *numbers("ms", "beside compute", "exposed", "overlap", "of all")]
    caption = (
        f"ms {per_what(found)} in which collectives run, waiting for other ranks included, of the phase that "
        "launched them; beside compute: beside kernels that are no communication and no copies; exposed: the rest; "
        "overlap: share beside compute; of all: exposed share of the device's time"
    )
    return Table("Communication", caption, headings, rows, name="communication")


def launch_table(found: Findings) -> Table:
    """What the host started, and both verdicts."""
    rows = []
    for one in found.verdicts:
        clock = one.clock
        if not clock.kernels:
            continue
        times = (
            clock.median_kernel_s,
            clock.queued_gap_s / clock.queued_gaps if clock.queued_gaps else None,
            clock.host_s_per_launch,
        )
        figures = (instances(clock.launches), instances(clock.kernels), *map(microseconds, times))
        verdicts = (one.verdict or MISSING, one.lag_verdict or MISSING)
        rows.append([fact(one.phase), *map(Entry, (*figures, percent(clock.wait_fraction))), *map(fact, verdicts)])
    headings = [
        *generated("phase"),
        *numbers("calls", "kernels", "median", "gap", "host", "waits"),
        *generated("trace", "lag"),
    ]
    caption = (
        f"{per_what(found)}; calls: launches by the host; in us: median: of kernels' durations, gap: mean between "
        "queued kernels, host: host time per launch, with waiting for a full queue and without waiting until the "
        "device is done; waits: share of the window in which the device waits for the host; trace, lag: verdicts of "
        "the trace and of the unprofiled steps' lag"
    )
    return Table("Launches", caption, headings, rows, name="launches")


def attention_table(found: Findings) -> Table:
    """Scores, mask, softmax and values of attention written out, with softmax against the matrix products."""
    rows = []
    for times in found.attention:
        figures = [milliseconds(times.parts_s[part]) for part in ATTENTION_PARTS]
        ratio = MISSING if times.flop_ratio is None else f"{times.flop_ratio:.4f}"
        ratios = (f"{times.time_ratio:.2f}", ratio)
        rows.append([fact(times.phase), *map(Entry, (*figures, milliseconds(times.matmul_s), *ratios))])
    headings = [*generated("phase"), *numbers(*ATTENTION_PARTS, "matmul", "time ratio", "FLOP ratio")]
    caption = (
        "ms per step; matmul: the matrix products in scores and values; ratios are softmax to matmul; FLOPs per score: "
        "softmax 5 forward and 4 backward, products 4 head_dim and 8 head_dim"
    )
    return Table("Inside attention", caption, headings, rows, name="attention")


def operator_tables(found: Findings, top: int) -> list[Table]:
    """The longest operators of every phase."""
    headings = [*generated("operator"), *numbers("ms", "share", "calls", "mean us")]
    made = []
    for phase, of_phase in found.operators.items():
        rows = [
            [
                fact(row.name),
                Entry(milliseconds(row.self_s / found.steps)),
                Entry(percent(row.share_fraction)),
                Entry(instances(row.calls / found.steps)),
                Entry(microseconds(row.mean_s)),
            ]
            for row in of_phase[:top]
        ]
        caption = f"time on the host without operators inside, {per_what(found)}"
        made.append(Table(f"Top operators of {phase}", caption, headings, rows, name="operators"))
    return made
