"""What a history says: what the peak is made of, where it was, what is saved for the backward, what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmbench.errors import UsageError
from lmbench.memory.attribution import Attribution, attribute, block_of, collapsed, user_frame
from lmbench.memory.categories import CATEGORIES, CATEGORY_LABELS, Category
from lmbench.memory.recorded import SNAPSHOT_FILE, MemoryNotes, read_notes
from lmbench.memory.replay import BEFORE, Replay, replay
from lmbench.memory.snapshot import NO_STACK, Frame, read_snapshot
from lmbench.records.guard import Guard, at_most
from lmbench.records.instruments import MemoryHistoryRecord, SavedPerBlock, TopAllocation
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import PHASES
from lmbench.report.units import gib, percent

#: Of the peak: more than this without a category is a warning.
MAX_UNKNOWN_FRACTION = 0.05
#: Of the peak: the replay and the allocator's counter are of the same bytes.
MAX_REPLAY_FRACTION = 0.001
#: What a block of the model is called that is none.
OUTSIDE = "outside of blocks"
#: Precisions whose stream between the blocks has 2 bytes an element; autocast and fp32 leave it in float32.
_TRUE_HALF = ("bf16-true", "16-true", "transformer-engine")


class PhasePeak(NamedTuple):
    """The most that was allocated in a phase, over all recorded steps, and what it was made of."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    by_category: Mapping[Category, int]


@dataclass(frozen=True)
class Allocation:
    """Blocks of one size, category, owner and origin that are held at the peak; `frames`, from the innermost, are the
    first one's."""

    total_bytes: int
    size_bytes: int
    count: int
    category: Category
    owner: str
    phase: str
    step: str
    operator: str
    user_frame: str
    frames: tuple[str, ...]


@dataclass(frozen=True)
class SavedBlocks:
    """Blocks of the model that save as much for the backward as each other: bytes of one, by operator too."""

    first: str
    last: str
    count: int
    each_bytes: int
    by_operator: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return self.each_bytes * self.count


class Residual(NamedTuple):
    """The stream between the model's blocks: its size by the shape in the record (None where that is not known), the
    sizes of the blocks' outputs in the history with how many there are of each, and how many are held at the peak."""

    computed_bytes: int | None
    seen_bytes: Mapping[int, int]
    at_peak: int


@dataclass(frozen=True)
class Findings:
    """A device's history, replayed and attributed; what it says is worked out when it is asked for.

    `run` and `notes` are None of a snapshot that lmbench did not record. `peak` is the entry right after which most was
    allocated.
    """

    path: Path
    run: RunRecord | None
    notes: MemoryNotes | None
    played: Replay
    attribution: Attribution

    @property
    def title(self) -> str:
        return self.run.run_id if self.run is not None and self.run.run_id else self.path.name

    @cached_property
    def peak(self) -> int:
        return int(np.argmax(self.played.allocated_bytes))

    @property
    def peak_bytes(self) -> int:
        return int(self.played.allocated_bytes[self.peak])

    @property
    def peak_requested_bytes(self) -> int:
        return int(self._held["requested_bytes"].sum())

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self.played.reserved_bytes[self.peak])

    @property
    def peak_phase(self) -> str:
        """The phase of the peak; `outside` where no range of lmbench's is around it."""
        return str(self.attribution.bands.phases.at(self._peak_us)[0]) or "outside"

    @property
    def peak_step(self) -> str:
        return str(self.attribution.bands.steps.at(self._peak_us)[0])

    @property
    def _peak_us(self) -> Any:
        return self.played.time_us[[self.peak]]

    @cached_property
    def _held(self) -> Any:
        """The blocks that are held at the peak."""
        held = self.attribution.blocks[self.played.held_at(self.peak)]
        return held.assign(part=held["owner"].map(collapsed))

    def categories_at(self, entry: int) -> dict[Category, int]:
        """Bytes that are held right after an entry, by category: those that there are."""
        blocks = self.attribution.blocks[self.played.held_at(entry)]
        sums = blocks.groupby("category")["size_bytes"].sum()
        return {name: int(sums[name]) for name in CATEGORIES if name in sums}

    @cached_property
    def by_category(self) -> dict[Category, int]:
        """Bytes at the peak by category."""
        return self.categories_at(self.peak)

    @property
    def unknown_fraction(self) -> float:
        return self.by_category.get("unknown", 0) / self.peak_bytes if self.peak_bytes else 0.0

    @cached_property
    def by_part(self) -> dict[str, dict[Category, int]]:
        """Bytes at the peak by part of the model and category, the largest part first; the part of blocks whose module
        nobody knows is empty."""
        parts: dict[str, dict[Category, int]] = {}
        for (part, category), size in self._held.groupby(["part", "category"])["size_bytes"].sum().items():
            parts.setdefault(part, {})[category] = int(size)
        return dict(sorted(parts.items(), key=lambda item: -sum(item[1].values())))

    @cached_property
    def phases(self) -> list[PhasePeak]:
        played, bands = self.played, self.attribution.bands.phases
        peaks: dict[str, int] = {}
        for name, *times in zip(bands.names, bands.start, bands.end, strict=True):
            first, end = np.searchsorted(played.time_us, times)
            # A phase may allocate nothing, as a fused optimizer does: it has what was there when it began.
            first = max(int(first) - 1, 0)
            peak = first + int(np.argmax(played.allocated_bytes[first : max(int(end), first + 1)]))
            peaks[name] = max(peaks.get(name, peak), peak, key=lambda entry: int(played.allocated_bytes[entry]))
        order = [name for name in PHASES if name in peaks] + [name for name in peaks if name not in PHASES]
        return [
            PhasePeak(name, int(played.allocated_bytes[peaks[name]]), int(played.reserved_bytes[peaks[name]]),
                      self.categories_at(peaks[name]))
            for name in order
        ]  # fmt: skip

    @cached_property
    def largest(self) -> list[Allocation]:
        """What is held at the peak, alike blocks together, the largest sum first.

        The same line of the user's code under other callers is the same origin: the first one's frames stand for all.
        """
        frames = {stack: self.frames_of(stack) for stack in self._held["stack"].unique()}
        origins = {stack: user_frame(found) for stack, found in frames.items()}
        keys = ["size_bytes", "category", "part", "phase", "step", "operator", "origin"]
        held = self._held.assign(origin=self._held["stack"].map(origins))
        rows = []
        for (size, *words), stacks in held.groupby(keys, sort=False)["stack"]:
            texts = tuple(map(str, frames[stacks.iloc[0]]))
            rows.append(Allocation(int(size) * len(stacks), int(size), len(stacks), *words, texts))  # type: ignore[call-arg]
        return sorted(rows, key=lambda row: -row.total_bytes)

    def frames_of(self, stack: int, limit: int = 30) -> list[Frame]:
        """A stack's frames from the innermost; none where nobody looked."""
        return [] if stack == NO_STACK else self.played.stacks.frames[stack][:limit]

    @cached_property
    def saved(self) -> list[SavedBlocks]:
        """What the forward of the peak's step (or of the last one) saved for its backward, by block of the model."""
        blocks = self.attribution.blocks
        saved = blocks[(blocks["operator"] != "") & (blocks["step"] != "")]
        if not (saved["step"] == self.peak_step).any():
            saved = saved[saved["step"] == (saved["step"].iloc[-1] if len(saved) else "")]
        else:
            saved = saved[saved["step"] == self.peak_step]
        saved = saved[saved["category"].isin(["activations", "logits"])].sort_values("start", kind="stable")
        sums: dict[str, dict[str, int]] = {}
        for owner, operator, size in zip(saved["owner"], saved["operator"], saved["size_bytes"], strict=True):
            of_block = sums.setdefault(block_of(owner) or OUTSIDE, {})
            of_block[operator] = of_block.get(operator, 0) + int(size)
        rows: list[SavedBlocks] = []
        for name, by_operator in sums.items():
            if rows and rows[-1].by_operator == by_operator and collapsed(rows[-1].first) == collapsed(name):
                rows[-1] = replace(rows[-1], last=name, count=rows[-1].count + 1)
            else:
                rows.append(SavedBlocks(name, name, 1, sum(by_operator.values()), by_operator))
        return rows

    @cached_property
    def residual(self) -> Residual | None:
        computed = None
        if self.notes is not None and self.run is not None:
            sizes = (self.run.data.batch_size, self.run.data.context_length, self.run.model.d_model)
            element_bytes = 2 if str(self.run.precision).startswith(_TRUE_HALF) else 4
            computed = math.prod(size or 0 for size in sizes) * element_bytes or None
        rows = self.attribution.blocks.iloc[sorted(set(self.attribution.streams))]
        seen = {int(size): int(count) for size, count in rows["size_bytes"].value_counts().items()}
        if not seen and computed is None:
            return None
        return Residual(computed, seen, int(rows.index.isin(self._held.index).sum()))

    @cached_property
    def cuts(self) -> list[str]:
        """The ways in which the history is not complete, each in a clause."""
        played, notes, cuts = self.played, self.notes, []
        if notes is not None and 0 < notes.max_entries <= played.entry_count:
            allowed = "all that `--memory.max_entries` allows: older ones are lost"
            cuts.append(f"it holds {played.entry_count:,} entries, {allowed}")
        steps = len(self.attribution.bands.steps)
        if notes is not None and 0 < steps < notes.steps:
            cuts.append(f"of {notes.steps} recorded steps it has {steps}")
        if notes is None:
            old = played.blocks[(played.blocks["start"] == BEFORE) & (played.blocks["end"] < played.entry_count)]
            if len(old):
                cuts.append(
                    f"{len(old):,} blocks ({gib(int(old['size_bytes'].sum()))}) that were freed in it are older than "
                    "its first entry: it was switched on late, or cut off by its max_entries"
                )
        if played.holes:
            cuts.append(f"{played.holes:,} allocations or frees are missing in it")
        return cuts

    @property
    def is_complete(self) -> bool:
        return not self.cuts

    @property
    def guards(self) -> list[Guard]:
        """Whether the categories are known, the history is complete, and the replay agrees with the allocator's own
        counter of what was asked for: how it rounds depends on what it splits."""
        advice = "They were made outside of the recorded steps, by code that the recording does not know."
        if self.notes is None:
            advice = (
                "Without lmbench's notes only stacks tell: switch the history on before the model is built, with "
                "Python stacks."
            )
        fraction = self.unknown_fraction
        message = f"{percent(fraction)} of the peak has no category"
        guards = [at_most("memory_unknown", fraction, MAX_UNKNOWN_FRACTION, "fraction", message, advice=advice)]
        if self.is_complete:
            guards.append(Guard("memory_history", "pass", message="the history is complete"))
        else:
            message = f"the history is not complete: {'; '.join(self.cuts)}"
            advice = "An earlier peak may have been higher: record fewer steps, or more entries (--memory.max_entries)."
            guards.append(Guard("memory_history", "warn", message=message, advice=advice))
        peaks = None if self.notes is None else self.notes.peaks
        if peaks is not None and peaks.requested_bytes:
            replayed, counted = int(self.played.requested_bytes.max()), peaks.requested_bytes
            message = f"the replayed peak of what was asked for is {gib(replayed)}, the allocator's own {gib(counted)}"
            advice = "The history misses something; do not trust what it says of the peak."
            fraction = abs(replayed - counted) / counted
            guards.append(at_most("memory_replay", fraction, MAX_REPLAY_FRACTION, "fraction", message, advice=advice))
        return guards

    def summarize(self, record: MemoryHistoryRecord) -> None:
        """Fill in what a run's record keeps of its history."""
        record.entry_count, record.is_complete = self.played.entry_count, self.is_complete
        record.peak_allocated_bytes, record.peak_requested_bytes = self.peak_bytes, self.peak_requested_bytes
        record.peak_reserved_bytes, record.peak_phase = self.peak_reserved_bytes, self.peak_phase
        record.unknown_fraction = self.unknown_fraction
        record.categories = {f"{name}_bytes": size for name, size in self.by_category.items()}
        record.parts = {part or "none": sum(sizes.values()) for part, sizes in list(self.by_part.items())[:40]}
        record.saved_bytes = sum(row.total_bytes for row in self.saved)
        record.saved = [SavedPerBlock(row.first, row.last, row.count, row.each_bytes) for row in self.saved]
        if self.residual is not None:
            seen = self.residual.seen_bytes
            record.residual_computed_bytes = self.residual.computed_bytes
            record.residual_seen_bytes = max(seen, key=seen.__getitem__) if seen else None
        record.top = [
            TopAllocation(
                row.size_bytes, row.count, CATEGORY_LABELS[row.category], row.owner, row.phase, row.user_frame
            )
            for row in self.largest[:10]
        ]


def examine(path: str | Path, device: int | None = None) -> Findings:
    """Read a run's folder or a snapshot, and work it out.

    Raises:
        UsageError: there is none, it cannot be read (see read_snapshot), or several devices and none was named.
    """
    path, run = Path(path), None
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not is_run_folder(folder):
        raise UsageError(f"{folder} is no run's folder; name one, or a snapshot that PyTorch pickled")
    if is_run_folder(folder) and (path.is_dir() or path.name == SNAPSHOT_FILE):
        run, path = load_run(folder, with_steps=False).record, folder / SNAPSHOT_FILE
        if not path.is_file():
            where = "on a GPU " if run.device_type == "cpu" else ""
            raise UsageError(
                f"{folder} has no history of the allocator; record one {where}with `lmbench fit ... --memory.history "
                "true`"
            )
    snapshot, notes = read_snapshot(path), read_notes(path)
    played = replay(snapshot, snapshot.choose_device(notes.device if notes is not None and device is None else device))
    return Findings(path, run, notes, played, attribute(snapshot, played, notes))
