"""What a history says: what the peak is made of, where it was, what is saved for the backward, and what is not
known."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmbench.errors import UsageError
from lmbench.memory.categories import CATEGORIES, Category
from lmbench.memory.history.attribution import (
    Attribution,
    attribute,
    block_of,
    collapsed,
    user_frame,
)
from lmbench.memory.history.bands import NONE
from lmbench.memory.history.pickled import read_snapshot
from lmbench.memory.history.replay import BEFORE, Flags, Free, Replay, choose_device, free_at_end, replay
from lmbench.memory.history.snapshot import Snapshot
from lmbench.memory.recorded import SNAPSHOT_FILE, MemoryNotes, read_notes
from lmbench.records.guard import Guard, at_most
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import PHASES
from lmbench.report.units import gib, percent
from lmbench.text import shown

#: Of the peak: more than this without a category is a warning.
MAX_UNKNOWN_FRACTION = 0.05
#: Of the peak: the replay and the allocator's counter are of the same bytes.
MAX_REPLAY_FRACTION = 0.001
#: A step's phase that no range of lmbench's is around.
OUTSIDE = "outside"


@dataclass(frozen=True)
class PhasePeak:
    """Most that was allocated in a phase, over all recorded steps, and what it was made of."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    by_category: Mapping[Category, int]


@dataclass(frozen=True)
class Allocation:
    """Blocks of one size, category, owner and origin that are held at the peak; `frames`, from the innermost, are the
    first one's."""

    size_bytes: int
    count: int
    category: Category
    owner: str
    phase: str
    step: str
    operator: str
    user_frame: str
    frames: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * self.count


@dataclass(frozen=True)
class SavedBlocks:
    """Blocks of the model that save as much for the backward as each other: bytes of one, by operator too."""

    first: str
    last: str
    count: int
    each_bytes: int
    by_operator: Mapping[str, int]


@dataclass(frozen=True)
class Residual:
    """The stream between the model's blocks: its size by the shape in the record (None where that is not known), the
    sizes of the blocks' outputs in the history with how many there are of each, and how many are held at the peak."""

    computed_bytes: int | None
    seen_bytes: Mapping[int, int]
    at_peak: int


@dataclass(frozen=True)
class Findings:
    """All of it. `cuts` are the ways in which the history is not complete, each in a clause."""

    path: Path
    run: RunRecord | None
    notes: MemoryNotes | None
    snapshot: Snapshot
    played: Replay
    attribution: Attribution
    devices: int
    peak: int
    by_category: Mapping[Category, int]
    by_part: Mapping[str, Mapping[Category, int]]
    phases: list[PhasePeak]
    largest: list[Allocation]
    saved: list[SavedBlocks]
    residual: Residual | None
    free: Free
    cuts: list[str]
    guards: list[Guard]

    @property
    def title(self) -> str:
        """What it is of, for a heading."""
        return self.run.run_id if self.run is not None and self.run.run_id else self.path.name

    @property
    def peak_bytes(self) -> int:
        return int(self.played.allocated_bytes[self.peak])

    @property
    def peak_requested_bytes(self) -> int:
        blocks = self.played.blocks
        return int(blocks.requested_bytes[blocks.held_at(self.peak)].sum())

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self.played.reserved_bytes[self.peak])

    @property
    def peak_phase(self) -> str:
        return phase_of(self.attribution, int(self.played.time_us[self.peak]))

    @property
    def peak_step(self) -> str:
        step = self.attribution.bands.step_at
        index = int(step.at(np.array([self.played.time_us[self.peak]]))[0])
        return step.names[index] if index != NONE else ""

    @property
    def unknown_fraction(self) -> float:
        return self.by_category.get("unknown", 0) / self.peak_bytes if self.peak_bytes else 0.0

    @property
    def is_older_lost(self) -> bool:
        """Whether all that is missing is what was before the first entry."""
        return bool(self.cuts) and not self.played.holes

    @property
    def is_complete(self) -> bool:
        return not self.cuts


def examine(path: str | Path, device: int | None = None) -> Findings:
    """Read a run's folder or a snapshot, and work it out.

    Raises:
        UsageError: there is none, it cannot be read (see read_snapshot), or several devices and none was named.
    """
    path = Path(path)
    run = None
    if path.is_dir():
        run, path = _of_run(path)
    elif is_run_folder(path.parent) and path.name == SNAPSHOT_FILE:
        run = load_run(path.parent, with_steps=False).record
    snapshot = read_snapshot(path)
    notes = read_notes(path)
    return findings_of(snapshot, notes, run, path, device)


def _of_run(folder: Path) -> tuple[RunRecord, Path]:
    if not is_run_folder(folder):
        raise UsageError(f"{folder} is no run's folder; name one, or a snapshot that PyTorch pickled")
    run = load_run(folder, with_steps=False).record
    path = folder / SNAPSHOT_FILE
    if not path.is_file():
        where = "on a GPU " if run.device_type == "cpu" else ""
        raise UsageError(
            f"{folder} has no history of the allocator; record one {where}with `lmbench fit ... --memory.history true`"
        )
    return run, path


def findings_of(
    snapshot: Snapshot, notes: MemoryNotes | None, run: RunRecord | None, path: Path, device: int | None = None
) -> Findings:
    """What a snapshot says, with its notes where it is lmbench's own. Raises UsageError, see examine."""
    chosen = choose_device(snapshot, notes.device if notes is not None and device is None else device)
    played = replay(snapshot, chosen)
    told = attribute(snapshot, played, notes)
    peak = played.peak
    held = played.blocks.held_at(peak)
    by_category = _categories(played, told, held)
    cuts = _cuts(played, notes, told)
    total = int(played.allocated_bytes[peak])
    return Findings(
        path=path, run=run, notes=notes, snapshot=snapshot, played=played, attribution=told,
        devices=sum(trace.count > 0 for trace in snapshot.traces), peak=peak, by_category=by_category,
        by_part=_parts(played, told, held), phases=_phases(played, told),
        largest=_largest(snapshot, played, told, held),
        saved=_saved(played, told, peak), residual=_residual(played, told, notes, run, held),
        free=free_at_end(snapshot, chosen), cuts=cuts,
        guards=[
            _unknown_guard(by_category, total, notes is not None), _complete_guard(cuts), *_replay_guard(played, notes),
        ],
    )  # fmt: skip


def _categories(played: Replay, told: Attribution, chosen: Flags) -> dict[Category, int]:
    """Bytes of the chosen blocks by category, those that there are."""
    sums = np.bincount(
        told.category[chosen], weights=played.blocks.size_bytes[chosen], minlength=len(CATEGORIES)
    ).astype(np.int64)
    return {name: int(size) for name, size in zip(CATEGORIES, sums, strict=True) if size}


def _parts(played: Replay, told: Attribution, held: Flags) -> dict[str, dict[Category, int]]:
    """Bytes at the peak by part of the model and category, the largest part first."""
    found: dict[str, dict[Category, int]] = defaultdict(lambda: defaultdict(int))
    parts = [collapsed(owner) for owner in told.owners]
    sums: dict[tuple[int, int], int] = defaultdict(int)
    for owner, category, size in zip(
        told.owner[held].tolist(), told.category[held].tolist(), played.blocks.size_bytes[held].tolist(), strict=True
    ):
        sums[owner, category] += size
    for (owner, category), size in sums.items():
        found[parts[owner] if owner != NONE else ""][CATEGORIES[category]] += size
    return {part: dict(found[part]) for part in sorted(found, key=lambda part: -sum(found[part].values()))}


def phase_of(told: Attribution, time_us: int) -> str:
    """The phase at a moment."""
    index = int(told.bands.phase_at.at(np.array([time_us]))[0])
    return told.bands.phase_at.names[index] if index != NONE else OUTSIDE


def _phases(played: Replay, told: Attribution) -> list[PhasePeak]:
    entries: dict[str, list[int]] = {}
    for band in told.bands.phases:
        first, end = np.searchsorted(played.time_us, [band.start_us, band.end_us])
        # A phase may allocate nothing, as a fused optimizer does: it has what was there when it began.
        first = max(int(first) - 1, 0)
        peak = first + int(np.argmax(played.allocated_bytes[first : max(int(end), first + 1)]))
        entries.setdefault(band.name, []).append(peak)
    order: dict[str, int] = {phase: place for place, phase in enumerate(PHASES)}
    found = []
    for phase in sorted(entries, key=lambda phase: order.get(phase, len(order))):
        peak = max(entries[phase], key=lambda entry: int(played.allocated_bytes[entry]))
        by_category = _categories(played, told, played.blocks.held_at(peak))
        allocated, reserved = int(played.allocated_bytes[peak]), int(played.reserved_bytes[peak])
        found.append(PhasePeak(phase, allocated, reserved, by_category))
    return found


def _largest(snapshot: Snapshot, played: Replay, told: Attribution, held: Flags) -> list[Allocation]:
    """What is held at the peak, alike blocks together, the largest sum first."""
    blocks = played.blocks
    groups: dict[tuple[int, ...], int] = defaultdict(int)
    parts: dict[str, int] = {}
    of_owner = [parts.setdefault(collapsed(owner), len(parts)) for owner in told.owners]
    rows = np.flatnonzero(held)
    # The same line of the user's code under other callers is the same origin: the first one's frames stand for all.
    first: dict[str, int] = {}
    alike = {stack: first.setdefault(_origin(snapshot, stack), stack) for stack in set(blocks.stack[rows].tolist())}
    for size, category, owner, phase, step, operator, stack in zip(
        *(column[rows].tolist() for column in (
            blocks.size_bytes, told.category, told.owner, told.phase, told.step, told.operator, blocks.stack
        )), strict=True
    ):  # fmt: skip
        groups[size, category, of_owner[owner] if owner != NONE else NONE, phase, step, operator, alike[stack]] += 1
    names = list(parts)
    found = []
    for (size, category, part, phase, step, operator, stack), count in groups.items():
        found.append((size * count, Allocation(
            size, count, CATEGORIES[category], names[part] if part != NONE else "",
            told.bands.phase_at.names[phase] if phase != NONE else "",
            told.bands.step_at.names[step] if step != NONE else "",
            told.operators[operator] if operator != NONE else "",
            _origin(snapshot, stack),
            tuple(frames_of(snapshot, stack)),
        )))  # fmt: skip
    found.sort(key=lambda pair: -pair[0])
    return [allocation for _, allocation in found]


def _origin(snapshot: Snapshot, stack: int) -> str:
    """The first frame of the user's code, as text; empty where there is none."""
    frame = user_frame(snapshot, stack)
    return f"{frame.filename}:{frame.line} {frame.name}" if frame else ""


def frames_of(snapshot: Snapshot, stack: int, limit: int = 30) -> Iterable[str]:
    """A stack's frames as text, from the innermost; none where nobody looked."""
    indices = snapshot.stacks[stack][:limit] if stack != NONE else []
    return [f"{frame.filename}:{frame.line} {frame.name}" for frame in (snapshot.frames[i] for i in indices)]


_SAVED: tuple[Category, ...] = ("activations", "logits")


def _saved(played: Replay, told: Attribution, peak: int) -> list[SavedBlocks]:
    """What the forward of the peak's step saved for its backward, by block of the model."""
    names = told.bands.step_at.names
    at_peak = int(told.bands.step_at.at(np.array([played.time_us[peak]]))[0])
    steps = told.step[told.operator != NONE]
    step = at_peak if at_peak in steps else int(steps.max(initial=NONE))
    if step == NONE or not names:
        return []
    is_saved = np.isin(told.category, [CATEGORIES.index(name) for name in _SAVED]) & (told.operator != NONE)
    chosen = np.flatnonzero((told.step == step) & is_saved)
    sums: dict[str, dict[str, int]] = {}
    for block in chosen[np.argsort(played.blocks.start[chosen])].tolist():
        owner = told.owners[told.owner[block]] if told.owner[block] != NONE else ""
        of_block = sums.setdefault(block_of(owner) or "outside of blocks", {})
        operator = told.operators[told.operator[block]]
        of_block[operator] = of_block.get(operator, 0) + int(played.blocks.size_bytes[block])
    found: list[SavedBlocks] = []
    for name, by_operator in sums.items():
        last = found[-1] if found else None
        if last is not None and last.by_operator == by_operator and collapsed(last.first) == collapsed(name):
            found[-1] = SavedBlocks(last.first, name, last.count + 1, last.each_bytes, by_operator)
        else:
            found.append(SavedBlocks(name, name, 1, sum(by_operator.values()), by_operator))
    return found


#: Bytes of an element of the stream where the precision is a true one; autocast and fp32 leave it in float32.
_TRUE_HALF = ("bf16-true", "16-true", "transformer-engine")


def _residual(
    played: Replay, told: Attribution, notes: MemoryNotes | None, run: RunRecord | None, held: Flags
) -> Residual | None:
    if notes is None:
        return None
    computed = None
    if run is not None:
        sizes = (run.data.batch_size, run.data.context_length, run.model.d_model)
        if all(sizes):
            element = 2 if str(run.precision).startswith(_TRUE_HALF) else 4
            computed = math.prod(size for size in sizes if size) * element
    seen: dict[int, int] = defaultdict(int)
    at_peak = 0
    counted: set[int] = set()
    for block in told.streams.tolist():
        if block not in counted:
            counted.add(block)
            seen[int(played.blocks.size_bytes[block])] += 1
            at_peak += bool(held[block])
    return Residual(computed, dict(seen), at_peak) if seen or computed else None


def _cuts(played: Replay, notes: MemoryNotes | None, told: Attribution) -> list[str]:
    cuts = []
    if notes is not None and notes.max_entries and played.entry_count >= notes.max_entries:
        cuts.append(
            f"it holds {played.entry_count:,} entries, all that `--memory.max_entries` allows: older ones are lost"
        )
    if notes is not None and told.bands.steps and len(told.bands.steps) < notes.steps:
        cuts.append(f"of {notes.steps} recorded steps it has {len(told.bands.steps)}")
    if notes is None:
        blocks = played.blocks
        old = (blocks.start == BEFORE) & (blocks.end < played.entry_count)
        if old.any():
            cuts.append(
                f"{int(old.sum()):,} blocks ({gib(int(blocks.size_bytes[old].sum()))}) that were freed in it are older "
                "than its first entry: it was switched on late, or cut off by its max_entries"
            )
    if played.holes:
        cuts.append(f"{played.holes:,} allocations or frees are missing in it")
    return cuts


def _unknown_guard(by_category: Mapping[Category, int], total: int, is_own: bool) -> Guard:
    fraction = by_category.get("unknown", 0) / total if total else 0.0
    advice = (
        "They were made outside of the recorded steps, by code that the recording does not know."
        if is_own
        else "Without lmbench's notes only stacks tell: switch the history on before the model is built, with "
        "Python stacks."
    )
    message = f"{percent(fraction)} of the peak has no category"
    return at_most("memory_unknown", fraction, MAX_UNKNOWN_FRACTION, "fraction", message, advice=advice)


def _replay_guard(played: Replay, notes: MemoryNotes | None) -> list[Guard]:
    """The replay against the allocator's own counter, of what was asked for: rounding is the allocator's secret."""
    if notes is None or notes.peaks is None or not notes.peaks.requested_bytes:
        return []
    own, theirs = int(played.requested_bytes.max()), notes.peaks.requested_bytes
    message = f"the replayed peak of what was asked for is {gib(own)}, the allocator's own {gib(theirs)}"
    advice = "The history misses something; do not trust what it says of the peak."
    return [
        at_most("memory_replay", abs(own - theirs) / theirs, MAX_REPLAY_FRACTION, "fraction", message, advice=advice)
    ]


def _complete_guard(cuts: list[str]) -> Guard:
    if not cuts:
        return Guard("memory_history", "pass", message="the history is complete")
    return Guard(
        "memory_history", "warn", message=f"the history is not complete: {'; '.join(cuts)}",
        advice="An earlier peak may have been higher: record fewer steps, or more entries (--memory.max_entries).",
    )  # fmt: skip


def as_record(found: Findings, top: int = 200) -> dict[str, Any]:
    """Everything as plain values, for JSON."""
    return {
        "path": str(found.path),
        "device": found.played.device,
        "entries": found.played.entry_count,
        "is_complete": found.is_complete,
        "cuts": found.cuts,
        "peak": {
            "allocated_bytes": found.peak_bytes, "requested_bytes": found.peak_requested_bytes,
            "reserved_bytes": found.peak_reserved_bytes,
            "pending_bytes": int(found.played.pending_bytes[found.peak]),
            "phase": found.peak_phase, "step": found.peak_step, "by_category": dict(found.by_category),
            "by_part": {shown(part): dict(sizes) for part, sizes in found.by_part.items()},
        },
        "phases": [vars(phase) for phase in found.phases],
        "largest": [{**vars(each), "total_bytes": each.total_bytes} for each in found.largest[:top]],
        "saved": [vars(each) for each in found.saved],
        "residual": None if found.residual is None else vars(found.residual),
        "free_at_end": vars(found.free),
        "guards": [{name: getattr(guard, name) for name in guard.__struct_fields__} for guard in found.guards],
    }  # fmt: skip
