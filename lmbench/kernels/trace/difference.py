"""Two traces side by side: which kernels, kinds and parts appeared, vanished, grew and shrank, per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from lmbench.errors import UsageError
from lmbench.kernels.trace.clocks import PhaseClock
from lmbench.kernels.trace.findings import Findings
from lmbench.kernels.trace.parts import part_order
from lmbench.kernels.trace.phases import OUTSIDE, PHASE_ORDER
from lmbench.kernels.trace.shares import KernelRow, PhaseShares
from lmbench.records.run import RunRecord
from lmbench.records.settings import differences

STEP = "step"
#: Two recordings of the same work agree to this share of a kernel's time.
SAME_FRACTION = 0.02
# Of all that grew and shrank: below it nothing is called either.
_SMALL_FRACTION = 0.001
# If what grew and what shrank cancel out to less than this share of both, shares of the rest say nothing.
_CANCELLED_FRACTION = 0.05

# A share of either side that a floating-point sum can be off by.
_DUST = 1e-12

APPEARED, VANISHED, GREW, SHRANK, SAME = "new", "gone", "grew", "shrank", "same"


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


@dataclass(frozen=True)
class Difference:
    """B against A. `phases` add up to `step`; what is outside of any phase is no part of it, but among `phases`."""

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
    per_phase = {phase: (mine.get(phase), theirs.get(phase)) for phase in present}
    steps = (a.steps, b.steps)
    phases = [_of_phase(phase, {phase: pair}, steps) for phase, pair in per_phase.items()]
    of_step = {phase: pair for phase, pair in per_phase.items() if phase != OUTSIDE} or per_phase
    return Difference(
        a,
        b,
        [str(one) for one in differences(_typed(a.run), _typed(b.run))] if a.run and b.run else [],
        _judged(phases),
        _of_phase(STEP, of_step, steps),
        _clocks(a, b),
    )


def _typed(run: Any) -> RunRecord:
    return run if isinstance(run, RunRecord) else msgspec.convert(run, RunRecord)


def _judged(phases: Sequence[PhaseDifference]) -> list[PhaseDifference]:
    """The phases with the words that their totals deserve beside each other's."""
    gross = sum(abs(one.total.difference_s) for one in phases)
    words = [_word(t.a_s, t.b_s, t.a_count, t.b_count, gross) for t in (one.total for one in phases)]
    return [replace(one, total=replace(one.total, change=word)) for one, word in zip(phases, words, strict=True)]


Pair = tuple[PhaseShares | None, PhaseShares | None]
Times = Mapping[str, tuple[float, float]]


def _of_phase(name: str, pairs: Mapping[str, Pair], steps: tuple[int, int]) -> PhaseDifference:
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


def _counted(rows: Iterable[KernelRow], times: Callable[[KernelRow], Mapping[str, float]]) -> Times:
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


def _changes(pairs: Mapping[str, Pair], steps: tuple[int, int], times: Callable[[PhaseShares], Times]) -> list[Change]:
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


def _times(clock: PhaseClock | None) -> tuple[float, float, float, float]:
    if clock is None:
        return 0.0, 0.0, 0.0, 0.0
    return clock.window_s, clock.busy_s, clock.queued_gap_s, clock.host_wait_s


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
