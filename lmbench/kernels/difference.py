"""Two traces side by side: which kernels, kinds and parts appeared, vanished, grew and shrank, per step; as tables on
the screen and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from lmbench.errors import UsageError
from lmbench.kernels.tables import per_what, run_line
from lmbench.kernels.trace.clocks import PhaseClock
from lmbench.kernels.trace.findings import Findings
from lmbench.kernels.trace.parts import part_order
from lmbench.kernels.trace.phases import PHASE_ORDER
from lmbench.kernels.trace.shares import KernelRow, PhaseShares
from lmbench.records.guard import not_passed
from lmbench.records.settings import differences
from lmbench.report.chosen import Chosen, more, print_chosen
from lmbench.report.markdown import parts_to_markdown
from lmbench.report.table import BLANK, Entry, Line, Part, Table, fact, generated, numbers
from lmbench.report.text import KERNEL_WIDTH, shortened
from lmbench.report.units import MISSING, instances, milliseconds, percent, signed_percent, whole

STEP = "step"
#: Two recordings of the same work agree to this share of a kernel's time.
SAME_FRACTION = 0.02
# Of all that grew and shrank: below it nothing is called either.
_SMALL_FRACTION = 0.001
# If what grew and what shrank cancel out to less than this share of both, shares of the rest say nothing.
_CANCELLED_FRACTION = 0.05
# Phases with less of the difference have no column of their own.
_COLUMN_FRACTION = 0.01
_MAX_COLUMNS = 2
# Kinds, parts and kernels that are named first.
_NAMED = 3
# A share of either side that a floating-point sum can be off by.
_DUST = 1e-12

APPEARED, VANISHED, GREW, SHRANK, SAME = "new", "gone", "grew", "shrank", "same"

_Pair = tuple[PhaseShares | None, PhaseShares | None]
_Times = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Change:
    """One kernel, kind, part or phase on both sides: kernel time and number of kernels, means per step.

    `difference_s` is B minus A, `share_fraction` that of the total difference of its table, None where the total is
    next to nothing beside what cancels out. `by_phase_s` is its difference in each phase (of a whole step).
    """

    name: str
    a_s: float
    b_s: float
    a_count: float
    b_count: float
    difference_s: float
    share_fraction: float | None
    change: str
    by_phase_s: dict[str, float]


@dataclass(frozen=True)
class PhaseDifference:
    """A phase, or the whole step, on both sides; each of the lists adds up to `total`.

    `part_groups` are parts of the model that a fused kernel of either side joins, taken together: what vanished from
    `mask` and `softmax` and appeared in `mask+softmax`. It is empty where no kernel joins parts.
    """

    phase: str
    total: Change
    kinds: list[Change]
    parts: list[Change]
    part_groups: list[Change]
    kernels: list[Change]


@dataclass(frozen=True)
class ClockDifference:
    """A phase's device time on both sides, and B minus A of what it consists of."""

    phase: str
    a_window_s: float
    b_window_s: float
    window_s: float
    busy_s: float
    queued_gap_s: float
    host_wait_s: float
    other_idle_s: float


@dataclass(frozen=True)
class Difference:
    """B against A. `phases`, with what is outside of any phase, add up to `step`."""

    a: Findings
    b: Findings
    settings: list[str]
    phases: list[PhaseDifference]
    step: PhaseDifference
    clocks: list[ClockDifference]


def difference(a: Findings, b: Findings) -> Difference:
    """Compare two traces.

    Raises UsageError for a trace without kernels, or without a known number of steps where the other has one.
    """
    for found in (a, b):
        if not found.has_kernels:
            raise UsageError(f"{str(found.path)!r} has no kernels: {found.why_no_kernels}; give traces of a GPU")
    if a.has_step_count != b.has_step_count:
        unknown = a if b.has_step_count else b
        raise UsageError(
            f"{str(unknown.path)!r} does not tell its number of steps and the other trace does; give two that do, or "
            "two that do not"
        )
    mine, theirs = ({share.phase: share for share in found.phases} for found in (a, b))
    present = [phase for phase in PHASE_ORDER if phase in mine or phase in theirs]
    per_phase: dict[str, _Pair] = {phase: (mine.get(phase), theirs.get(phase)) for phase in present}
    steps = (a.steps, b.steps)
    phases = [_of_phase(phase, {phase: pair}, steps) for phase, pair in per_phase.items()]
    return Difference(
        a,
        b,
        [str(one) for one in differences(a.run, b.run)] if a.run and b.run else [],
        _judged(phases),
        _of_phase(STEP, per_phase, steps),
        _clocks(a, b),
    )


def _judged(phases: Sequence[PhaseDifference]) -> list[PhaseDifference]:
    """The phases with the words that their totals deserve beside each other's."""
    gross = sum(abs(one.total.difference_s) for one in phases)
    words = [_word(t.a_s, t.b_s, t.a_count, t.b_count, gross) for t in (one.total for one in phases)]
    return [replace(one, total=replace(one.total, change=word)) for one, word in zip(phases, words, strict=True)]


def _of_phase(name: str, pairs: Mapping[str, _Pair], steps: tuple[int, int]) -> PhaseDifference:
    """All axes of a phase, or of several as a step."""
    total = _changes(pairs, steps, lambda share: {name: (share.kernel_s, share.instances)})
    group = _groups(part for pair in pairs.values() for share in pair if share for part in share.parts_s)
    return PhaseDifference(
        name,
        total[0] if total else Change(name, 0.0, 0.0, 0.0, 0.0, 0.0, None, SAME, {}),
        _changes(pairs, steps, lambda share: _counted(share.rows, lambda row: {row.kind: row.total_s})),
        _changes(pairs, steps, lambda share: _counted(share.rows, lambda row: row.parts_s)),
        _changes(pairs, steps, lambda share: _counted(share.rows, lambda row: _regrouped(row.parts_s, group)))
        if group
        else [],
        _changes(pairs, steps, lambda share: _counted(share.rows, lambda row: {row.short_name: row.total_s})),
    )


def _counted(rows: Iterable[KernelRow], times: Callable[[KernelRow], Mapping[str, float]]) -> _Times:
    """Seconds and number of kernels by name; a kernel that works for several parts counts for each by its time."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, seconds in times(row).items():
            before = found.get(name, (0.0, 0.0))
            count = row.instances * (seconds / row.total_s if row.total_s else 1.0)
            found[name] = (before[0] + seconds, before[1] + count)
    return found


def _groups(parts: Iterable[str]) -> dict[str, str]:
    """For every part the parts that it is joined with, directly or by others, as one name; {} if none is."""
    names = list(dict.fromkeys(parts))
    groups = [set(name.split("+")) for name in names]
    if all(len(group) == 1 for group in groups):
        return {}
    merged: list[set[str]] = []
    for group in groups:
        touching = [other for other in merged if not other.isdisjoint(group)]
        merged = [other for other in merged if other.isdisjoint(group)]
        merged.append(group.union(*touching))
    of_part = {part: ", ".join(sorted(group, key=part_order)) for group in merged for part in group}
    return {name: of_part[name.partition("+")[0]] for name in names}


def _regrouped(parts_s: Mapping[str, float], group: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for part, seconds in parts_s.items():
        found[group[part]] += seconds
    return found


def _changes(
    pairs: Mapping[str, _Pair], steps: tuple[int, int], times: Callable[[PhaseShares], _Times]
) -> list[Change]:
    """Every name of either side, the largest difference first; together they are the difference of all."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_phase: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for phase, pair in pairs.items():
        for side, share in enumerate(pair):
            for name, (total_s, count) in times(share).items() if share else ():
                seconds[name][side] += total_s / steps[side]
                counts[name][side] += count / steps[side]
                by_phase[name][phase] += total_s / steps[side] * (1 if side else -1)
    # Sums over different numbers of steps differ in their last digits only.
    change = {name: b - a if abs(b - a) > _DUST * max(a, b) else 0.0 for name, (a, b) in seconds.items()}
    total = sum(change.values())
    gross = sum(map(abs, change.values()))
    found = []
    for name, (a, b) in seconds.items():
        a_count, b_count = counts[name]
        own = change[name]
        portion, word = _share(own, total, gross), _word(a, b, a_count, b_count, gross)
        found.append(Change(name, a, b, a_count, b_count, own, portion, word, dict(by_phase[name])))
    return sorted(found, key=lambda change: (-abs(change.difference_s), -change.a_s - change.b_s, change.name))


def _share(own: float, total: float, gross: float) -> float | None:
    return own / total if total and abs(total) >= _CANCELLED_FRACTION * gross else None


def _word(a: float, b: float, a_count: float, b_count: float, gross: float) -> str:
    if not a_count:
        return APPEARED
    if not b_count:
        return VANISHED
    if abs(b - a) <= max(SAME_FRACTION * max(a, b), _SMALL_FRACTION * gross):
        return SAME
    return GREW if b > a else SHRANK


def _clocks(a: Findings, b: Findings) -> list[ClockDifference]:
    mine, theirs = ({clock.phase: clock for clock in found.clocks.phases} for found in (a, b))
    found = []
    for phase in PHASE_ORDER:
        if phase not in mine and phase not in theirs:
            continue
        before, after = _times(mine.get(phase)), _times(theirs.get(phase))
        changes = (later - earlier for earlier, later in zip(before, after, strict=True))
        found.append(ClockDifference(phase, before[0], after[0], *changes))
    return found


def _times(clock: PhaseClock | None) -> tuple[float, float, float, float, float]:
    if clock is None:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    return clock.window_s, clock.busy_s, clock.queued_gap_s, clock.host_wait_s, clock.other_idle_s


def difference_record(found: Difference) -> dict[str, Any]:
    """Everything as plain JSON values, in SI units; times and numbers of kernels are means per step."""
    return {
        "schema_version": 1,
        "a": {"trace": str(found.a.path), "steps": found.a.steps},
        "b": {"trace": str(found.b.path), "steps": found.b.steps},
        "settings": found.settings,
        "step": asdict(found.step),
        "phases": [asdict(phase) for phase in found.phases],
        "clocks": [asdict(clock) for clock in found.clocks],
    }


def print_difference(found: Difference, top: int, phase: str | None, chosen: Chosen, console: Console) -> None:
    """Print how kernel time changed and what changed most, or the tables that were chosen instead, or everything.

    Raises:
        UsageError: a table was chosen that there is none of.
    """
    made = tables(found, top, phase)
    one = next(one for one in (*found.phases, found.step) if one.phase == (phase or "step"))
    answer = [*head(found), *_most(one), BLANK, *remarks(found), more(made)]
    print_chosen(chosen, made, _everything(found, made), answer, console, whole=("A", "B"))


def _most(one: PhaseDifference) -> list[Line]:
    """The kinds, parts and kernels that changed most."""
    lines = []
    for label, changes in (("kinds", one.kinds), ("parts", one.parts), ("names", one.kernels)):
        largest = [change for change in changes if change.change != SAME][:_NAMED]
        told = ", ".join(f"{shortened(each.name, KERNEL_WIDTH)} {signed_ms(each.difference_s)} ms" for each in largest)
        lines.append((label, told or "nothing changed"))
    return lines


def difference_markdown(found: Difference, top: int, phase: str | None) -> str:
    """The same as Markdown."""
    return parts_to_markdown(_everything(found, tables(found, top, phase)))


def _everything(found: Difference, made: Sequence[Table]) -> list[Part]:
    return [*head(found), *made, BLANK, *remarks(found)]


def head(found: Difference) -> list[Line]:
    """What is compared, and how its kernel time changed."""
    lines = []
    for side, trace in (("A", found.a), ("B", found.b)):
        lines.append((side, str(trace.path)))
        if trace.run:
            lines.append(("", run_line(trace.run)))
    lines += [("differs", text) for text in found.settings]
    total = found.step.total
    change = f", {signed_percent(total.difference_s / total.a_s)}" if total.a_s else ""
    counts = f"{whole(total.a_count)} -> {whole(total.b_count)} kernels"
    text = (
        f"{milliseconds(total.a_s)} -> {milliseconds(total.b_s)} ms {per_what(found.a)}"
        f" ({signed_ms(total.difference_s)} ms{change}), {counts}"
    )
    return [*lines, ("kernels", text), ("matmul", _matmul(found))]


def _matmul(found: Difference) -> str:
    mine, theirs = found.a.matmul_fractions, found.b.matmul_fractions
    return ", ".join(f"{percent(mine.get(n))} -> {percent(theirs.get(n))} of {n}" for n in mine if n in theirs)


def tables(found: Difference, top: int, phase: str | None) -> list[Table]:
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
    names = [one.phase for one in found.phases if one in longest]
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
    headings = [*generated(axis), *numbers("A", "B", "B - A", "share", *columns), *generated("")]
    return Table(title, _caption(found, columns), headings, rows, name="kinds" if axis == "kind" else "parts")


def _caption(found: Difference, columns: Sequence[str]) -> str:
    phases = f"; {', '.join(columns)}: B - A in each" if columns else ""
    return f"kernel time in ms {per_what(found.a)}; share: of the difference{phases}"


def _row(change: Change, columns: Sequence[str]) -> list[Entry]:
    by_phase = (change.by_phase_s.get(phase) for phase in columns)
    shown = (MISSING if value is None else signed_ms(value) for value in by_phase)
    return [fact(change.name), *_figures(change), *map(Entry, shown), _changed(change)]


def _figures(change: Change) -> list[Entry]:
    sides = ((change.a_s, change.a_count), (change.b_s, change.b_count))
    a, b = (milliseconds(seconds) if count else MISSING for seconds, count in sides)
    return [Entry(a), Entry(b), Entry(signed_ms(change.difference_s)), Entry(percent(change.share_fraction))]


def _all(total: Change) -> Change:
    share = 1.0 if total.difference_s else None
    return replace(total, name="all", share_fraction=share)


def _kernel_table(one: PhaseDifference, found: Difference, top: int, where: str) -> Table:
    changes = one.kernels[:top]
    if rest := one.kernels[top:]:
        changes = [*changes, _rest(rest, one.total)]
    headings = [*generated("kernel"), *numbers("A", "n", "B", "n", "B - A", "share")]
    caption = f"{_caption(found, [])}; n: kernels {per_what(found.a)}"
    rows = [_kernel_row(change) for change in (*changes, _all(one.total))]
    return Table(f"By kernel {where}", caption, headings, rows, name="kernels")


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
        rows.append([fact(change.name), a, b, difference, Entry(percent(share)), *map(Entry, counts), _changed(change)])
    headings = [*generated("phase"), *numbers("A", "B", "B - A", "share", "n A", "n B"), *generated("")]
    caption = f"{_caption(found, [])}; n: kernels {per_what(found.a)}"
    return Table("Kernel time by phase", caption, headings, rows, name="phases")


def _clock_table(found: Difference) -> Table:
    rows = []
    for one in found.clocks:
        changes = (one.window_s, one.busy_s, one.queued_gap_s, one.host_wait_s, one.other_idle_s)
        windows = (milliseconds(one.a_window_s), milliseconds(one.b_window_s))
        rows.append([fact(one.phase), *map(Entry, windows), *(Entry(signed_ms(value)) for value in changes)])
    headings = [*generated("phase"), *numbers("A", "B", "B - A", "= kernels", "+ gaps", "+ waits", "+ other")]
    caption = (
        f"the phase's window on the device in ms {per_what(found.a)}, and what its difference consists of: kernels, "
        "gaps between queued ones, waiting for the host (slowed by the profiler), and other idle time"
    )
    return Table("Device time by phase", caption, headings, rows, name="clocks")


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


def _changed(change: Change) -> Entry:
    return fact("" if change.name == "all" or change.change == SAME else change.change)
