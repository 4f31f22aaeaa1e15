"""Two traces side by side: which kernels, kinds and parts appeared, vanished, grew and shrank, per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.kernels.answer import per_what, run_line
from lmbench.kernels.clocks import DeviceTime
from lmbench.kernels.clocks import total as total_time
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.parts import part_order
from lmbench.kernels.phases import PHASE_ORDER
from lmbench.kernels.sums import KernelRow
from lmbench.kernels.tables import MS, NUMBER, SHARE, Reading, counted, row, table_of
from lmbench.records.guard import not_passed
from lmbench.records.settings import differences
from lmbench.report.answer import BLANK, Answer, Line, Table
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import WORDS, Unit, milliseconds, percent, signed_percent, whole

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
# A share of either side that a floating-point sum can be off by: sums over different numbers of steps are.
_DUST = 1e-12

APPEARED, VANISHED, GREW, SHRANK, SAME = "new", "gone", "grew", "shrank", "same"


@dataclass(frozen=True)
class Change:
    """One kernel, kind, part or phase on both sides: kernel time and number of kernels, means per step.

    `difference_s` is B minus A, `share_fraction` that of the total difference of its table, None where the total is
    next to nothing beside what cancels out. `by_phase_s` is its difference in each phase.
    """

    name: str
    a_s: float = 0.0
    b_s: float = 0.0
    a_count: float = 0.0
    b_count: float = 0.0
    share_fraction: float | None = None
    change: str = SAME
    by_phase_s: Mapping[str, float] | None = None

    @property
    def difference_s(self) -> float:
        difference_s = self.b_s - self.a_s
        return difference_s if abs(difference_s) > _DUST * max(self.a_s, self.b_s) else 0.0


def signed_ms(seconds: float) -> str:
    """A difference in ms with its sign and as many decimals as a time of its size."""
    text = milliseconds(abs(seconds))
    if not float(text.replace(",", "")):
        return text
    return f"{'+' if seconds > 0 else '-'}{text}"


_SIGNED_MS = Unit("", 1e3, signed_ms)


class Difference:
    """B against A.

    Raises UsageError for a trace without kernels, or without a known number of steps where the other has one.
    """

    def __init__(self, a: Findings, b: Findings) -> None:
        for side in (a, b):
            if not side.has_kernels:
                reason = f"has no kernels: {side.why_no_kernels}; give traces of a GPU"
                raise UsageError(f"{str(side.trace.path)!r} {reason}")
        unknown = [side for side in (a, b) if not side.trace.timeline.has_step_count]
        if len(unknown) == 1:
            reason = "does not tell its number of steps and the other trace does; give two that do, or two that do not"
            raise UsageError(f"{str(unknown[0].trace.path)!r} {reason}")
        self.a, self.b = a, b
        by_phase = {change.name: change for change in self._changes(STEP, lambda each: {each.phase: each.kernel_s})}
        self.phases = [by_phase[phase] for phase in PHASE_ORDER if phase in by_phase]

    def total(self, phase: str = STEP) -> Change:
        """All kernels of a phase, or of the step with what is outside of any phase."""
        return next(iter(self._changes(phase, lambda each: {phase: each.kernel_s})), Change(phase))

    def axes(self, phase: str = STEP) -> dict[str, list[Change]]:
        """The kinds, parts and kernels of a phase, or of the step, the largest difference first; each list adds up to
        the total.

        `part_groups` are parts of the model that a fused kernel of either side joins, taken together: what vanished
        from `mask` and `softmax` and appeared in `mask+softmax`. They are missing where no kernel joins parts.
        """
        groups = _groups([part for each in self._rows(phase) for part in each.parts_s])

        def regrouped(each: KernelRow) -> Mapping[str, float]:
            sums: dict[str, float] = defaultdict(float)
            for part, seconds in each.parts_s.items():
                sums[groups[part]] += seconds
            return sums

        grouped = {"part_groups": self._changes(phase, regrouped)} if groups else {}
        return {
            "kinds": self._changes(phase, lambda each: {each.kind: each.kernel_s}),
            "parts": self._changes(phase, lambda each: each.parts_s),
            **grouped,
            "kernels": self._changes(phase, lambda each: {each.short_name: each.kernel_s}),
        }

    def _rows(self, phase: str, sides: Sequence[Findings] = ()) -> list[KernelRow]:
        shares = [share for side in sides or (self.a, self.b) for share in side.phases]
        return [each for share in shares if phase in (STEP, share.phase) for each in share.rows]

    def _changes(self, phase: str, times: Callable[[KernelRow], Mapping[str, float]]) -> list[Change]:
        """Every name of either side; a kernel of several names counts for each by its time."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        by_phase: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for side, findings in enumerate((self.a, self.b)):
            for each in self._rows(phase, [findings]):
                for name, seconds in times(each).items():
                    sums[name][side] += seconds
                    sums[name][2 + side] += each.instances * (seconds / each.kernel_s if each.kernel_s else 1.0)
                    by_phase[name][each.phase] += seconds if side else -seconds
        changes = [_change(name, values, by_phase[name]) for name, values in sums.items()]
        total, gross = (sum(map(function, changes)) for function in (_signed, lambda change: abs(_signed(change))))
        changes = [
            replace(
                change,
                share_fraction=_signed(change) / total if abs(total) >= _CANCELLED_FRACTION * gross > 0 else None,
                change=_word(change, gross),
            )
            for change in changes
        ]
        return sorted(changes, key=lambda each: (-abs(each.difference_s), -each.a_s - each.b_s, each.name))


def _change(name: str, sums: Sequence[float], by_phase_s: Mapping[str, float] | None = None) -> Change:
    a_s, b_s, a_count, b_count = sums
    return Change(name, a_s, b_s, a_count, b_count, by_phase_s=by_phase_s)


def _signed(change: Change) -> float:
    return change.difference_s


def _word(change: Change, gross: float) -> str:
    if not change.a_count:
        return APPEARED
    if not change.b_count:
        return VANISHED
    if abs(change.difference_s) <= max(SAME_FRACTION * max(change.a_s, change.b_s), _SMALL_FRACTION * gross):
        return SAME
    return GREW if change.difference_s > 0 else SHRANK


def _groups(parts: Sequence[str]) -> dict[str, str]:
    """For every part the parts that it is joined with, directly or by others, as one name; {} if none is."""
    if not any("+" in name for name in parts):
        return {}
    merged: list[set[str]] = []
    for group in (set(name.split("+")) for name in parts):
        merged, touching = (
            [other for other in merged if other.isdisjoint(group)],
            [other for other in merged if not other.isdisjoint(group)],
        )
        merged.append(group.union(*touching))
    of_part = {part: ", ".join(sorted(group, key=part_order)) for group in merged for part in group}
    return {name: of_part[name.partition("+")[0]] for name in parts}


def difference_answer(a: str | Path, b: str | Path, top: int = 15, phase: str | None = None) -> Answer:
    """How kernel time changed from one run or trace to another, and what changed most.

    Args:
        a: a run's folder or a trace file, before.
        b: the same, after.
        top: kernels that are shown of each table.
        phase: a phase to show alone.

    Raises:
        UsageError: a trace cannot be compared, or has no such phase.
    """
    difference = Difference(examine(a), examine(b))
    known = [STEP, *(change.name for change in difference.phases)]
    if phase not in (None, *known):
        raise UsageError(f"--phase is {phase!r}; these traces have {', '.join(known)}")
    return answer_of(difference, top, phase)


def answer_of(difference: Difference, top: int = 15, phase: str | None = None) -> Answer:
    """The answer of a comparison: tables of the whole step, or of one phase."""
    axes, total, per = difference.axes(phase or STEP), difference.total(), per_what(difference.a)
    lines = []
    for label, side in (("A", difference.a), ("B", difference.b)):
        lines.append(Line(label, str(side.trace.path), is_whole=True))
        lines += [Line("", run_line(side.run))] if side.run else []
    settings = differences(difference.a.run, difference.b.run) if difference.a.run and difference.b.run else []
    lines += [Line("differs", str(setting)) for setting in settings]
    change = f", {signed_percent(total.difference_s / total.a_s)}" if total.a_s else ""
    times = f"{milliseconds(total.a_s)} -> {milliseconds(total.b_s)} ms {per}"
    times += f" ({signed_ms(total.difference_s)} ms{change})"
    before, after = difference.a.matmul_fractions, difference.b.matmul_fractions
    matmul = [f"{percent(before[name])} -> {percent(after[name])} of {name}" for name in before if name in after]
    lines += [
        Line("kernels", f"{times}, {whole(total.a_count)} -> {whole(total.b_count)} kernels"),
        Line("matmul", ", ".join(matmul)),
    ]
    for label, axis in (("kinds", "kinds"), ("parts", "parts"), ("names", "kernels")):
        largest = [each for each in axes[axis] if each.change != SAME][:_NAMED]
        named = [f"{shortened(each.name, KERNEL_WIDTH)} {signed_ms(each.difference_s)} ms" for each in largest]
        lines.append(Line(label, ", ".join(named) or "nothing changed"))
    tables = _tables(difference, axes, top, phase)
    return Answer([*lines, BLANK, *_remarks(difference)], tables, first=())


def _remarks(difference: Difference) -> list[Line]:
    """What keeps the difference from being what people take it for, and the traces' own guards."""
    total, lines = difference.total(), list[Line]()
    changes = [each for changes in difference.axes().values() for each in changes]
    if total.difference_s and any(each.share_fraction is None for each in changes):
        lines.append(Line("note", "what grew and what shrank cancel out: shares of the difference say nothing"))
    before, after = (total_time(side.clocks.phases) for side in (difference.a, difference.b))
    wait = after.host_wait_s - before.host_wait_s
    if abs(wait) > max(0.1 * abs(total.difference_s), 0.01 * total.a_s):
        text = (
            f"kernels change by {signed_ms(total.difference_s)} ms, the device's step by "
            f"{signed_ms(after.window_s - before.window_s)} ms (under the profiler): it waits "
            f"{milliseconds(abs(wait))} ms {'longer' if wait > 0 else 'less'} for the host"
        )
        lines.append(Line("host", text))
    for label, side in (("A", difference.a), ("B", difference.b)):
        lines += [Line(guard.status.upper(), f"{label}: {guard.message}") for guard in not_passed(side.guards)]
    return lines or [Line("guards", "all of both traces fine")]


def _tables(difference: Difference, axes: Mapping[str, list[Change]], top: int, phase: str | None) -> list[Table]:
    """Phases and clocks, then the step's kinds, parts and kernels; of one phase only its own, if named."""
    total, per, tables, columns = difference.total(phase or STEP), per_what(difference.a), list[Table](), list[str]()
    caption = f"kernel time in ms {per}; share: of the difference"
    counts = f"{caption}; n: kernels {per}"
    if phase is None:
        gross = sum(abs(each.difference_s) for each in difference.phases)
        long = [each for each in difference.phases if abs(each.difference_s) > _COLUMN_FRACTION * gross]
        longest = sorted(long, key=lambda each: -abs(each.difference_s))[:_MAX_COLUMNS]
        columns = [each.name for each in difference.phases if each in longest] if len(longest) > 1 else []
        numbers: list[Reading] = [("n A", NUMBER, "shown_a_count"), ("n B", NUMBER, "shown_b_count")]
        tables = [
            table_of(
                "phases", "Kernel time by phase", counts, _rows(difference.phases, total), ("phase", WORDS, "name"),
                *_TIMES, *numbers, _WORD,
            ),
            *_clock_tables(difference),
        ]  # fmt: skip
    of_phase = f"of the {STEP}" if phase in (None, STEP) else f"of {phase}"
    by_phase: list[Reading] = [(name, _SIGNED_MS, f"{name}_s") for name in columns]
    in_each = f"; {', '.join(columns)}: B - A in each" if columns else ""
    titles = {
        "kinds": ("kind", f"By kind {of_phase}"),
        "parts": ("part", f"By part {of_phase}"),
        "part_groups": ("parts", f"By part {of_phase}, those that a fused kernel joins together"),
    }
    for axis, (heading, title) in titles.items():
        if axis in axes:
            items = _rows(axes[axis], total)
            readings: list[Reading] = [(heading, WORDS, "name"), *_TIMES, *by_phase, _WORD]
            name = "parts" if axis == "part_groups" else axis
            tables.append(table_of(name, title, f"{caption}{in_each}", items, *readings))
    shown, rest = axes["kernels"][:top], axes["kernels"][top:]
    if rest:
        sums = [sum(getattr(each, name) for each in rest) for name in ("a_s", "b_s", "a_count", "b_count")]
        merged = _change(counted(len(rest), "more kernel"), sums)
        has_shares = total.difference_s and all(each.share_fraction is not None for each in rest)
        share = merged.difference_s / total.difference_s if has_shares else None
        shown = [*shown, replace(merged, share_fraction=share)]
    a, b, *others = _TIMES
    number_a, number_b = ("n", NUMBER, "shown_a_count"), ("n", NUMBER, "shown_b_count")
    kernels: list[Reading] = [("kernel", WORDS, "name"), a, number_a, b, number_b, *others]
    return [*tables, table_of("kernels", f"By kernel {of_phase}", counts, _rows(shown, total), *kernels)]


_TIMES: tuple[Reading, ...] = (
    ("A", MS, "shown_a_s"), ("B", MS, "shown_b_s"), ("B - A", _SIGNED_MS, "difference_s"),
    ("share", SHARE, "share_fraction"),
)  # fmt: skip
_WORD: Reading = ("", WORDS, "word")


def _rows(changes: Sequence[Change], total: Change) -> list[object]:
    """Changes and their sum as rows: a side without the kernel has no figure, nor has a phase without it."""
    every = replace(total, name="all", share_fraction=1.0 if total.difference_s else None, change=SAME)
    rows: list[object] = []
    for each in (*changes, every):
        a, b = each.a_count or None, each.b_count or None
        sides = {"shown_a_count": a, "shown_b_count": b, "shown_a_s": a and each.a_s, "shown_b_s": b and each.b_s}
        by_phase = {f"{phase}_s": (each.by_phase_s or {}).get(phase) for phase in PHASE_ORDER}
        rows.append(row(each, word="" if each.change == SAME else each.change, **sides, **by_phase))
    return rows


def _clock_tables(difference: Difference) -> list[Table]:
    """The phases' device time on both sides, and B minus A of what it consists of."""
    sides = [{clock.phase: clock for clock in side.clocks.phases} for side in (difference.a, difference.b)]
    items = []
    for phase in PHASE_ORDER:
        if phase in sides[0] or phase in sides[1]:
            a, b = (side.get(phase, _NO_TIME) for side in sides)
            names = ("window_s", "busy_s", "queued_gap_s", "host_wait_s", "other_idle_s")
            changes = {name: getattr(b, name) - getattr(a, name) for name in names}
            items.append(row(None, phase=phase, a_s=a.window_s, b_s=b.window_s, **changes))
    caption = (
        f"the phase's window on the device in ms {per_what(difference.a)}, and what its difference consists of: "
        "kernels, gaps between queued ones, waiting for the host (slowed by the profiler), and other idle time"
    )
    table = table_of(
        "clocks", "Device time by phase", caption, items, ("phase", WORDS, "phase"), ("A", MS, "a_s"), ("B", MS, "b_s"),
        ("B - A", _SIGNED_MS, "window_s"), ("= kernels", _SIGNED_MS, "busy_s"), ("+ gaps", _SIGNED_MS, "queued_gap_s"),
        ("+ waits", _SIGNED_MS, "host_wait_s"), ("+ other", _SIGNED_MS, "other_idle_s"),
    )  # fmt: skip
    return [table] if items else []


_NO_TIME = DeviceTime(*[0.0] * 7)
