"""What a history says: what the peak is made of, where it was, what is saved for the backward, what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.memory.attribution import Ranges, attribute
from lmbench.memory.recorded import (
    CATEGORIES,
    CATEGORY_LABELS,
    SNAPSHOT_FILE,
    Category,
    MemoryNotes,
    block_of,
    collapsed,
    read_notes,
)
from lmbench.memory.replay import BEFORE, Replay, replay
from lmbench.memory.snapshot import NO_STACK, Stack, read_snapshot
from lmbench.memory.stacks import user_frame
from lmbench.records.guard import Guard, at_most
from lmbench.records.instruments import MemoryHistoryRecord, SavedPerBlock, TopAllocation
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import PHASE, PHASES, STEP
from lmbench.report.units import gib, percent

#: Of the peak: more than this without a category is a warning.
MAX_UNKNOWN_FRACTION = 0.05
#: Of the peak: the replay and the allocator's counter are of the same bytes.
MAX_REPLAY_FRACTION = 0.001
#: What a block of the model is called that is none.
OUTSIDE = "outside of blocks"
#: Precisions whose stream between the blocks has 2 bytes an element; autocast and fp32 leave it in float32.
_TRUE_HALF = ("bf16-true", "16-true", "transformer-engine")


@dataclass(frozen=True)
class Findings:
    """A device's history, replayed and attributed; what it says is worked out when it is asked for.

    `run` and `notes` are None of a snapshot that lmbench did not record. `blocks`, `bands` and `unmatched` are as
    `attribute` has them. `peak` is the entry right after which most was allocated.
    """

    path: Path
    run: RunRecord | None
    notes: MemoryNotes | None
    played: Replay
    blocks: Any
    bands: Mapping[str, Ranges]
    unmatched: int

    @cached_property
    def peak(self) -> int:
        return int(np.argmax(self.played.allocated_bytes))

    @property
    def peak_bytes(self) -> int:
        return int(self.played.allocated_bytes[self.peak])

    @property
    def peak_requested_bytes(self) -> int:
        return int(self.held["requested_bytes"].sum())

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self.played.reserved_bytes[self.peak])

    @property
    def peak_phase(self) -> str:
        """The phase of the peak; `outside` where no range of lmbench's is around it."""
        return self._band_at_peak(PHASE) or "outside"

    @property
    def peak_step(self) -> str:
        return self._band_at_peak(STEP)

    def _band_at_peak(self, band: str) -> str:
        return str(self.bands[band].at(self.played.time_us[[self.peak]])[0])

    @cached_property
    def held(self) -> Any:
        """The blocks that are held at the peak, with the `part` of the model: the owner with `*` for its indices."""
        held = self.blocks[self.played.held_at(self.peak)]
        return held.assign(part=held["owner"].map(collapsed))

    def categories_at(self, entry: int) -> dict[Category, int]:
        """Bytes that are held right after an entry, by category: those that there are."""
        sums = self.blocks[self.played.held_at(entry)].groupby("category")["size_bytes"].sum()
        return {name: int(sums[name]) for name in CATEGORIES if name in sums}

    @cached_property
    def by_category(self) -> dict[Category, int]:
        """Bytes at the peak by category."""
        return self.categories_at(self.peak)

    @property
    def unknown_fraction(self) -> float:
        return self.by_category.get("unknown", 0) / self.peak_bytes if self.peak_bytes else 0.0

    @cached_property
    def parts(self) -> Any:
        """Bytes at the peak: a row for each part of the model, the largest first, and a column for each category. The
        part of blocks whose module nobody knows is empty."""
        sizes = self.held.pivot_table("size_bytes", "part", "category", "sum").astype("Int64")
        order = sizes.sum(axis=1).sort_values(ascending=False, kind="stable").index
        return sizes.loc[order, list(self.by_category)]

    @property
    def shared_path(self) -> str:
        """What the path of every part begins with, such as `network.`, and tells nothing."""
        first = {part.partition(".")[0] for part in self.parts.index if part}
        shared = f"{first.pop()}." if len(first) == 1 else ""
        return "" if any(part.startswith(f"{shared}*") for part in self.parts.index) else shared

    @cached_property
    def phases(self) -> Any:
        """The most that was allocated in each phase, over all recorded steps: `peak_bytes`, `reserved_bytes` at
        that moment, and a column for each category."""
        played, bands = self.played, self.bands[PHASE]
        peaks: dict[str, list[int]] = {name: [] for name in PHASES}
        borders = np.searchsorted(played.time_us, [bands.start, bands.end]).tolist()
        for name, first, end in zip(bands.names, *borders, strict=True):
            # A phase may allocate nothing, as a fused optimizer does: it has what was there when it began.
            begin = max(first - 1, 0)
            entry = begin + int(np.argmax(played.allocated_bytes[begin : max(end, begin + 1)]))
            peaks.setdefault(name, []).append(entry)
        entries = {name: max(of_phase, key=played.allocated_bytes.item) for name, of_phase in peaks.items() if of_phase}
        moments = list(entries.values())
        sizes = pd.DataFrame(map(self.categories_at, moments), pd.Index(entries, name="phase"), CATEGORIES, "Int64")
        return sizes.assign(peak_bytes=played.allocated_bytes[moments], reserved_bytes=played.reserved_bytes[moments])

    @cached_property
    def largest(self) -> Any:
        """What is held at the peak: a row for blocks of one size, category, part, phase, step, operator and line of the
        user's code, with their `count` and `total_bytes`, the largest total first."""
        lines = {stack: user_frame(self.frames_of(stack)) for stack in self.held["stack"].unique().tolist()}
        held = self.held.assign(owner=self.held["part"], user_frame=self.held["stack"].map(lines))
        keys = ["size_bytes", "category", "owner", "phase", "step", "operator", "user_frame"]
        rows = held.groupby(keys, sort=False).size().rename("count").reset_index()
        rows.insert(0, "total_bytes", rows["size_bytes"] * rows["count"])
        return rows.sort_values("total_bytes", ascending=False, kind="stable", ignore_index=True)

    def frames_of(self, stack: int) -> Stack:
        """A stack's frames from the innermost; none where nobody looked."""
        return () if stack == NO_STACK else self.played.stacks[stack]

    @cached_property
    def saved_storages(self) -> Any:
        """The storages that the forward of the peak's step (or of the last one) saved for its backward, each with the
        `block` of the model that made it."""
        blocks = self.blocks
        saved = blocks[(blocks["operator"] != "") & (blocks["step"] != "")]
        steps = ["", *saved["step"]]
        saved = saved[saved["step"] == (self.peak_step if self.peak_step in steps else steps[-1])]
        saved = saved[saved["category"].isin(["activations", "logits"])].sort_values("start", kind="stable")
        return saved.assign(block=[block_of(owner) or OUTSIDE for owner in saved["owner"]])

    @cached_property
    def saved(self) -> list[SavedPerBlock]:
        """What is saved for the backward; blocks of the model that follow each other are together where they save as
        much, by operator too."""
        sizes = {
            block: (collapsed(block), storages.groupby("operator")["size_bytes"].sum().to_dict())
            for block, storages in self.saved_storages.groupby("block", sort=False)
        }
        rows = []
        for (_, by_operator), same in groupby(sizes, key=sizes.__getitem__):
            names = list(same)
            rows.append(SavedPerBlock(names[0], names[-1], len(names), int(sum(by_operator.values()))))
        return rows

    @property
    def stream_bytes(self) -> int | None:
        """The size of a block's output by the shape in the record; None where that is not known."""
        if self.run is None:
            return None
        sizes = (self.run.data.batch_size, self.run.data.context_length, self.run.model.d_model)
        element_bytes = 2 if str(self.run.precision).startswith(_TRUE_HALF) else 4
        return math.prod(size or 0 for size in sizes) * element_bytes or None

    @property
    def streams(self) -> dict[int, int]:
        """The sizes of the blocks' outputs in the history, with how many there are of each, most first."""
        sizes = self.blocks.query("is_stream")["size_bytes"].value_counts()
        return {int(size): int(number) for size, number in sizes.items()}

    @cached_property
    def cuts(self) -> list[str]:
        """The ways in which the history is not complete, each in a clause."""
        played, notes, cuts = self.played, self.notes, []
        if not played.has_history:
            cuts.append("it has no history, only what was held when it was taken")
        if notes is not None and 0 < notes.max_entries <= played.entry_count:
            allowed = "all that `--memory.max_entries` allows: older ones are lost"
            cuts.append(f"it holds {played.entry_count:,} entries, {allowed}")
        steps = len(self.bands[STEP])
        if notes is not None and 0 < steps < notes.steps:
            cuts.append(f"of {notes.steps} recorded steps it has {steps}")
        if notes is None:
            old = played.blocks[(played.blocks["start"] == BEFORE) & (played.blocks["end"] < played.entry_count)]
            if len(old):
                cuts.append(
                    f"{gib(int(old['size_bytes'].sum()))} that were freed in it are older than its first entry: it was "
                    "switched on late, or cut off by its max_entries"
                )
        if played.holes:
            cuts.append(f"{played.holes:,} allocations or frees are missing in it")
        return cuts

    @property
    def is_complete(self) -> bool:
        return not self.cuts

    @property
    def remedy_of_cuts(self) -> str:
        remedy = "record fewer steps, or more entries (--memory.max_entries)"
        if self.notes is None:
            remedy = "call torch.cuda.memory._record_memory_history(max_entries=1_000_000) before the model is built"
        return f"An earlier peak may have been higher: {remedy}."

    @property
    def guards(self) -> list[Guard]:
        """Whether the categories are known, the history is complete, and the replay agrees with the allocator's own
        counter of what was asked for: how it rounds depends on what it splits."""
        fraction, cuts = self.unknown_fraction, "; ".join(self.cuts)
        advice = "Switch the history on before the model is built; what no stack tells stays unknown."
        message = f"{percent(fraction)} of the peak has no category"
        older = self.held[(self.held["category"] == "unknown") & (self.held["start"] == BEFORE)]
        if len(older) and self.played.has_history:
            message += f": {gib(int(older['size_bytes'].sum()))} are older than the history"
        guards = [at_most("memory_unknown", fraction, MAX_UNKNOWN_FRACTION, "fraction", message, advice=advice)]
        complete = Guard("memory_history", "pass", message="the history is complete")
        message = f"the history is not complete: {cuts}"
        cut = Guard("memory_history", "warn", message=message, advice=self.remedy_of_cuts)
        guards.append(cut if cuts else complete)
        if self.notes is not None and self.notes.peaks is not None and self.notes.peaks.requested_bytes:
            replayed, counted = int(self.played.requested_bytes.max()), self.notes.peaks.requested_bytes
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
        record.parts = {part or "none": int(size) for part, size in self.parts.sum(axis=1)[:40].items()}
        record.saved, record.saved_bytes = self.saved, int(self.saved_storages["size_bytes"].sum())
        record.residual_computed_bytes, record.residual_seen_bytes = self.stream_bytes, next(iter(self.streams), None)
        columns = ["size_bytes", "count", "category", "owner", "phase", "user_frame"]
        top = self.largest[:10].replace({"category": CATEGORY_LABELS})[columns]
        record.top = [TopAllocation(*row) for row in top.itertuples(index=False)]


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
    return Findings(path, run, notes, played, *attribute(snapshot, played, notes))
