"""Two traces side by side, as people read it: on the screen and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from lmbench.kernels.shown.findings import not_passed, run_line
from lmbench.kernels.shown.screen import Line, lines_as_markdown, print_lines, print_table
from lmbench.kernels.trace.difference import SAME, Change, Difference, PhaseDifference
from lmbench.kernels.trace.phases import OUTSIDE
from lmbench.report.markdown import table_lines
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, instances, milliseconds, percent, signed_percent, whole

# Phases with less of the difference have no column of their own.
_COLUMN_FRACTION = 0.01
_MAX_COLUMNS = 2


def print_difference(found: Difference, top: int, console: Console, phase: str | None = None) -> None:
    """Print all tables, readable at 80 columns."""
    print_lines(head(found), console)
    for table in tables(found, top, phase):
        print_table(table, console)
    console.out("")
    print_lines(remarks(found), console)


def difference_markdown(found: Difference, top: int, phase: str | None = None) -> str:
    """The same as Markdown, ready to paste; ends in a line feed."""
    lines = lines_as_markdown(head(found))
    for table in tables(found, top, phase):
        lines += ["", *table_lines(table)]
    return "\n".join([*lines, "", *lines_as_markdown(remarks(found))]) + "\n"


def head(found: Difference) -> list[Line]:
    """What is compared, and how its kernel time changed."""
    lines = []
    for side, trace in (("A", found.a), ("B", found.b)):
        lines.append((side, str(trace.path)))
        if trace.run:
            lines.append(("", run_line(trace)))
    lines += [("differs", text) for text in found.settings]
    total = found.step.total
    change = f", {signed_percent(total.difference_s / total.a_s)}" if total.a_s else ""
    counts = f"{whole(total.a_count)} -> {whole(total.b_count)} kernels"
    text = (
        f"{milliseconds(total.a_s)} -> {milliseconds(total.b_s)} ms {_unit(found)}"
        f" ({signed_ms(total.difference_s)} ms{change}), {counts}"
    )
    return [*lines, ("kernels", text), ("matmul", _matmul(found))]


def _matmul(found: Difference) -> str:
    mine, theirs = found.a.matmul_fractions, found.b.matmul_fractions
    return ", ".join(f"{percent(mine.get(n))} -> {percent(theirs.get(n))} of {n}" for n in mine if n in theirs)


def _unit(found: Difference) -> str:
    return "per step" if found.a.has_step_count else "in the whole trace"


def tables(found: Difference, top: int, phase: str | None = None) -> list[Table]:
    """Phases and clocks, then the step's kinds, parts and kernels; of one phase only its own, if named."""
    if phase is not None:
        one = next(one for one in (*found.phases, found.step) if one.phase == phase)
        return _axes(one, found, top, [])
    columns = _columns(found)
    made = [_phase_table(found), *([_clock_table(found)] if found.clocks else [])]
    return [*made, *_axes(found.step, found, top, columns)]


def _columns(found: Difference) -> list[str]:
    """The phases in which most of the difference lies."""
    gross = sum(abs(one.total.difference_s) for one in found.phases)
    long = [one for one in found.phases if abs(one.total.difference_s) > _COLUMN_FRACTION * gross]
    longest = sorted(long, key=lambda one: -abs(one.total.difference_s))[:_MAX_COLUMNS]
    names = [one.phase for one in found.phases if one in longest and one.phase in found.step.total.by_phase_s]
    return names if len(names) > 1 else []


def _axes(one: PhaseDifference, found: Difference, top: int, columns: Sequence[str]) -> list[Table]:
    where = f"of the {one.phase}" if one.phase == "step" else f"of {one.phase}"
    made = [
        _table(f"By kind {where}", "kind", one.kinds, one.total, columns, found),
        _table(f"By part {where}", "part", one.parts, one.total, columns, found),
    ]
    if one.part_groups:
        title = f"By part {where}, those that a fused kernel joins together"
        made.append(_table(title, "parts", one.part_groups, one.total, columns, found))
    return [*made, _kernel_table(one, found, top, where)]


def _table(
    title: str, axis: str, changes: Sequence[Change], total: Change, columns: Sequence[str], found: Difference
) -> Table:
    rows = [_row(change, columns) for change in (*changes, _all(total))]
    headings = [*words(axis), *numbers("A", "B", "B - A", "share", *columns), *words("")]
    return Table(title, _caption(found, columns), headings, rows)


def _caption(found: Difference, columns: Sequence[str]) -> str:
    phases = f"; {', '.join(columns)}: B - A in each" if columns else ""
    return f"kernel time in ms {_unit(found)}; share: of the difference{phases}"


def _row(change: Change, columns: Sequence[str]) -> list[Entry]:
    by_phase = (change.by_phase_s.get(phase) for phase in columns)
    shown = (MISSING if value is None else signed_ms(value) for value in by_phase)
    return [fact(change.name), *_figures(change), *map(Entry, shown), _word(change)]


def _figures(change: Change) -> list[Entry]:
    a, b = (milliseconds(s) if count else MISSING for s, count in _sides(change))
    return [Entry(a), Entry(b), Entry(signed_ms(change.difference_s)), Entry(percent(change.share_fraction))]


def _sides(change: Change) -> tuple[tuple[float, float], tuple[float, float]]:
    return (change.a_s, change.a_count), (change.b_s, change.b_count)


def _all(total: Change) -> Change:
    share = 1.0 if total.difference_s else None
    fields = {**vars(total), "name": "all", "share_fraction": share}
    return Change(**fields)


def _kernel_table(one: PhaseDifference, found: Difference, top: int, where: str) -> Table:
    changes = one.kernels[:top]
    if rest := one.kernels[top:]:
        changes = [*changes, _rest(rest, one.total)]
    headings = [*words("kernel"), *numbers("A", "n", "B", "n", "B - A", "share")]
    caption = f"{_caption(found, [])}; n: kernels {_unit(found)}"
    rows = [_kernel_row(change) for change in (*changes, _all(one.total))]
    return Table(f"By kernel {where}", caption, headings, rows)


def _rest(changes: Sequence[Change], total: Change) -> Change:
    sums = {name: sum(getattr(c, name) for c in changes) for name in ("a_s", "b_s", "a_count", "b_count")}
    own = sums["b_s"] - sums["a_s"]
    shares = [change.share_fraction for change in changes]
    share = None if None in shares else own / total.difference_s
    count = f"{len(changes)} more kernel{'s' if len(changes) > 1 else ''}"
    return Change(count, **sums, difference_s=own, share_fraction=share, change="", by_phase_s={})


def _kernel_row(change: Change) -> list[Entry]:
    a, b, difference, share = _figures(change)
    counts = (_count(change.a_count), _count(change.b_count))
    return [fact(change.name), a, Entry(counts[0]), b, Entry(counts[1]), difference, share]


def _phase_table(found: Difference) -> Table:
    """Every phase that has kernels, and their sum."""
    total = found.step.total
    rows = []
    for change in (*(one.total for one in found.phases), _all(total)):
        share = change.difference_s / total.difference_s if total.difference_s else None
        counts = (_count(change.a_count), _count(change.b_count))
        a, b, difference, _ = _figures(change)
        rows.append([fact(change.name), a, b, difference, Entry(percent(share)), *map(Entry, counts), _word(change)])
    headings = [*words("phase"), *numbers("A", "B", "B - A", "share", "n A", "n B"), *words("")]
    caption = f"{_caption(found, [])}; n: kernels {_unit(found)}"
    if any(one.phase == OUTSIDE for one in found.phases):
        caption += "; all: without outside"
    return Table("Kernel time by phase", caption, headings, rows)


def _clock_table(found: Difference) -> Table:
    rows = []
    for one in found.clocks:
        changes = (one.window_s, one.busy_s, one.queued_gap_s, one.host_wait_s)
        windows = (milliseconds(one.a_window_s), milliseconds(one.b_window_s))
        rows.append([fact(one.phase), *map(Entry, windows), *(Entry(signed_ms(value)) for value in changes)])
    headings = [*words("phase"), *numbers("A", "B", "B - A", "= kernels", "+ gaps", "+ waits")]
    caption = (
        f"the phase's window on the device in ms {_unit(found)}, and what its difference consists of: kernels, gaps "
        "between queued ones, waiting for the host (slowed by the profiler)"
    )
    return Table("Device time by phase", caption, headings, rows)


def remarks(found: Difference) -> list[Line]:
    """What keeps the difference from being what people take it for, and the traces' own guards."""
    lines: list[Line] = []
    changes = (*found.step.kinds, *found.step.parts, *found.step.kernels)
    if any(change.share_fraction is None for change in changes) and found.step.total.difference_s:
        lines.append(("note", "what grew and what shrank cancel out: shares of the difference say nothing"))
    wait = sum(clock.host_wait_s for clock in found.clocks)
    window = sum(clock.window_s for clock in found.clocks)
    kernels = found.step.total.difference_s
    if found.clocks and abs(wait) > 0.1 * abs(kernels) and abs(wait) > 0.01 * found.step.total.a_s:
        word = "longer" if wait > 0 else "less"
        text = (
            f"kernels change by {signed_ms(kernels)} ms, the device's step by {signed_ms(window)} ms (under the "
            f"profiler): it waits {milliseconds(abs(wait))} ms {word} for the host"
        )
        lines.append(("host", text))
    for side, trace in (("A", found.a), ("B", found.b)):
        lines += [(guard.status.upper(), f"{side}: {guard.message}") for guard in not_passed(trace.guards)]
    return lines or [("guards", "all of both traces fine")]


def signed_ms(seconds: float) -> str:
    """A difference in ms with its sign and as many decimals as a time of its size."""
    text = milliseconds(abs(seconds))
    if not float(text.replace(",", "")):
        return text
    return f"{'+' if seconds > 0 else '-'}{text}"


def _count(value: float) -> str:
    return instances(value) if value else MISSING


def _word(change: Change) -> Entry:
    return fact("" if change.name == "all" or change.change == SAME else change.change)
