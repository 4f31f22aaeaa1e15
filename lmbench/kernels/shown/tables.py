"""The tables of a trace. Times are means per step in ms, shares are of the phase's kernel time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmbench.kernels.trace.attention import ATTENTION_PARTS
from lmbench.kernels.trace.findings import Findings
from lmbench.kernels.trace.phases import OUTSIDE
from lmbench.kernels.trace.shares import KernelRow, PhaseShares
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, instances, microseconds, milliseconds, percent, whole

# Phases with less of the step's kernel time have no column of their own, and no more of the longest than this.
_COLUMN_FRACTION = 0.005
_MAX_COLUMNS = 3


def phase_table(found: Findings) -> Table:
    """One row a phase, and their sum: it is the captured time."""
    rows = [_phase_row(found, share) for share in found.phases]
    if len(found.phases) > 1:
        count = sum(share.instances for share in found.phases)
        total = [milliseconds(found.captured_s / found.steps), percent(1.0), whole(count / found.steps)]
        rows.append([fact("all"), *map(Entry, total), Entry(_matmul_of_all(found)), fact(""), Entry("")])
    headings = [*words("phase"), *numbers("ms", "share", "kernels", "matmul")]
    headings += [*words("top kernel but matmul"), *numbers("")]
    unit = "per step" if found.has_step_count else "in the whole trace (its number of steps is unknown)"
    return Table("Kernel time by phase", f"sum of kernels, ms and number {unit}", headings, rows)


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
    return [fact(share.phase), *map(Entry, figures), *top]


def _matmul_of_all(found: Findings) -> str:
    if not found.captured_s:
        return MISSING
    return percent(sum(share.kernel_s * share.matmul_fraction for share in found.phases) / found.captured_s)


def share_table(
    found: Findings, axis: str, sums: Callable[[PhaseShares], dict[str, float]], order: Callable[[str], Any]
) -> Table:
    """A row for each kind or part; for each long phase its ms and share; last the whole step."""
    enough = _COLUMN_FRACTION * found.captured_s
    long = [share for share in found.phases if share.kernel_s >= enough or share.phase == OUTSIDE]
    # What is outside is in no other column.
    longest = sorted(long, key=lambda share: (share.phase != OUTSIDE, -share.kernel_s))[:_MAX_COLUMNS]
    columns = [share for share in long if share in longest]
    if len(columns) != 1:
        columns.append(found.step)
    names = sorted({name for share in columns for name in sums(share)}, key=order)
    rows = [
        [fact(name), *(_time_and_share(sums(share).get(name), share, found) for share in columns)] for name in names
    ]
    headings = [*words(axis), *numbers(*(share.phase for share in columns))]
    caption = "ms per step and share of the phase" if found.has_step_count else "ms and share of the phase"
    if shorter := [share.phase for share in long if share not in longest]:
        caption += f"; {' and '.join(shorter)} within step only"
    return Table(f"Kernel time by {axis}", caption, headings, rows)


def _time_and_share(seconds: float | None, share: PhaseShares, found: Findings) -> Entry:
    if seconds is None or not share.kernel_s:
        return Entry(MISSING)
    return Entry(f"{milliseconds(seconds / found.steps)} {percent(seconds / share.kernel_s):>7}")


def kernel_tables(found: Findings, top: int) -> list[Table]:
    """The longest kernels of every phase that takes some time, and what is outside; the rest of each in one row."""
    headings = [*words("kernel", "kind", "part"), *numbers("ms", "share", "n", "us")]
    made = []
    for share in found.phases:
        if share.kernel_s < _COLUMN_FRACTION * found.captured_s and share.phase != OUTSIDE:
            continue
        rows = [_kernel_row(row, found.steps) for row in share.rows[:top]]
        if rest := share.rows[top:]:
            total = sum(row.total_s for row in rest)
            count = sum(row.instances for row in rest)
            fraction = total / share.kernel_s if share.kernel_s else 0.0
            figures = (milliseconds(total / found.steps), percent(fraction), instances(count / found.steps))
            mean = microseconds(total / count)
            label = f"{len(rest)} more kernel{'s' if len(rest) > 1 else ''}"
            rows.append([fact(label), fact(""), fact(""), *map(Entry, (*figures, mean))])
        caption = "ms and number n per step" if found.has_step_count else "ms and number n in the whole trace"
        caption += ", us each; the part with most of its time (+ number of other parts)"
        made.append(Table(f"Top kernels of {share.phase}", caption, headings, rows))
    return made


def _kernel_row(row: KernelRow, steps: int) -> list[Entry]:
    part = f"{row.part} +{len(row.parts_s) - 1}" if len(row.parts_s) > 1 else row.part
    figures = (
        milliseconds(row.total_s / steps),
        percent(row.share_fraction),
        instances(row.instances / steps),
        microseconds(row.mean_s),
    )
    return [fact(row.short_name), fact(row.kind), fact(part), *map(Entry, figures)]


def clock_table(found: Findings) -> Table:
    """The device's time by phase: by events, by the trace, and what the trace's consists of; and the host's."""
    rows = []
    for one in found.verdicts:
        clock = one.clock
        times = (
            one.device_span_s, clock.window_s, clock.busy_s, clock.queued_gap_s, clock.host_wait_s,
            one.host_span_s if one.host_span_s is not None else clock.host_s, one.min_lag_s,
        )  # fmt: skip
        rows.append([fact(one.phase), *(Entry(milliseconds(value)) for value in times)])
    headings = [*words("phase"), *numbers("events", "window", "busy", "gaps", "waits", "host", "lag")]
    return Table("Clocks", _clock_caption(found), headings, rows)


def _clock_caption(found: Findings) -> str:
    first = ", without the first step, which begins on an idle device" if found.clocks.skipped else ""
    over = f"ms per step{first}" if found.has_step_count else "ms in the whole trace"
    return (
        f"{over}. events: device span by events; window: first kernel to the next phase's first, = busy (kernels) "
        "+ gaps (between queued kernels) + waits (for the host); host: host span; lag: least of unprofiled steps"
    )


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
    headings = [*words("phase"), *numbers("calls", "kernels", "median", "gap", "host", "waits"), *words("trace", "lag")]
    caption = (
        "per step; calls: launches by the host; in us: median: of kernels' durations, gap: mean between queued "
        "kernels, host: host time per launch, waiting for a full queue included; waits: share of the window in which "
        "the device waits for the host; trace, lag: verdicts of the trace and of the unprofiled steps' lag"
    )
    return Table("Launches", caption, headings, rows)


def attention_table(found: Findings) -> Table:
    """Scores, mask, softmax and values of attention written out, with softmax against the matrix products."""
    rows = []
    for times in found.attention:
        figures = [milliseconds(times.parts_s[part]) for part in ATTENTION_PARTS]
        ratio = MISSING if times.flop_ratio is None else f"{times.flop_ratio:.4f}"
        ratios = (f"{times.time_ratio:.2f}", ratio)
        rows.append([fact(times.phase), *map(Entry, (*figures, milliseconds(times.matmul_s), *ratios))])
    headings = [*words("phase"), *numbers(*ATTENTION_PARTS, "matmul", "time ratio", "FLOP ratio")]
    caption = (
        "ms per step; matmul: the matrix products in scores and values; ratios are softmax to matmul; FLOPs per score: "
        "softmax 5 forward and 4 backward, products 4 head_dim and 8 head_dim"
    )
    return Table("Inside attention", caption, headings, rows)


def operator_tables(found: Findings, top: int) -> list[Table]:
    """The longest operators of every phase."""
    headings = [*words("operator"), *numbers("ms", "share", "calls", "mean us")]
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
        unit = "per step" if found.has_step_count else "in the whole trace"
        made.append(
            Table(f"Top operators of {phase}", f"time on the host without operators inside, {unit}", headings, rows)
        )
    return made
