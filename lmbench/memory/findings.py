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
from msgspec.structs import replace

from lmbench.errors import UsageError
from lmbench.memory.attribution import Ranges, attribute, user_frame
from lmbench.memory.blocks import (
    BEFORE,
    CATEGORIES,
    CATEGORY_LABELS,
    SNAPSHOT_FILE,
    Category,
    MemoryNotes,
    block_of,
    by_category,
    held_at,
    highest_moments,
    read_notes,
)
from lmbench.memory.snapshot import Replay, read_snapshot, replay
from lmbench.precision import PRECISIONS, find_precision
from lmbench.records.guards import judge
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.measured import Guard, MemoryHistoryRecord, SavedPerBlock, TopAllocation
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import PHASE, PHASES, STEP, collapsed
from lmbench.report.units import gib, percent

#: What a block of the model is called that is none.
OUTSIDE = "outside of blocks"


@dataclass(frozen=True)
class Findings:
    """A device's history, replayed and attributed; what it says is worked out when it is asked for.

    `run` and `notes` are None of a snapshot that lmbench did not record. `blocks` and `bands` are as `attribute` has
    them.
    """

    path: Path
    run: RunRecord | None
    notes: MemoryNotes | None
    played: Replay
    blocks: Any
    bands: Mapping[str, Ranges]

    @cached_property
    def peak(self) -> dict[str, Any]:
        """The entry right after which most was allocated: its columns, its place `entry`, `phase` (`outside` where no
        range of lmbench's is around it) and `step`."""
        entry = int(np.argmax(self.played.entries["allocated_bytes"]))
        time_us = self.played.clock([entry])
        phase, step = (str(self.bands[band].at(time_us)[0]) for band in (PHASE, STEP))
        known = self.played.entries.loc[entry].to_dict()
        return {**known, "entry": entry, "phase": phase or "outside", "step": step}

    @cached_property
    def held(self) -> Any:
        """The blocks that are held at the peak; `owner` is the part of the model, with `*` for indices."""
        held = held_at(self.blocks, self.peak["entry"])
        return held.assign(owner=held["owner"].map(collapsed))

    @cached_property
    def by_category(self) -> dict[Category, int]:
        """Bytes at the peak by category."""
        return by_category(self.held)

    @cached_property
    def parts(self) -> Any:
        """Bytes at the peak: a row for each part of the model, the largest first, and a column for each category. The
        part of blocks whose module nobody knows is empty."""
        sizes = self.held.pivot_table("size_bytes", "owner", "category", "sum").astype("Int64")
        order = sizes.sum(axis=1).sort_values(ascending=False, kind="stable").index
        return sizes.loc[order, list(self.by_category)]

    @cached_property
    def phases(self) -> Any:
        """The most that was allocated in each phase, over all recorded steps: `peak_bytes`, and a column for each
        category."""
        band, allocated_bytes = self.bands[PHASE], self.played.entries["allocated_bytes"].to_numpy()
        # A phase may allocate nothing, as a fused optimizer does: it has what was there when it began.
        borders = np.searchsorted(self.played.entries["time_us"], [band.start, band.end]) - 1
        moments = highest_moments(allocated_bytes, zip(band.names, *borders.clip(0).tolist(), strict=True))
        moments = {phase: moments[phase] for phase in PHASES if phase in moments}
        rows = [by_category(held_at(self.blocks, moment)) for moment in moments.values()]
        sizes = pd.DataFrame(rows, pd.Index(moments, name="phase"), CATEGORIES, "Int64")
        return sizes.assign(peak_bytes=allocated_bytes[list(moments.values())])

    @cached_property
    def largest(self) -> Any:
        """What is held at the peak: a row for blocks of one size, category, part, phase, step, operator and line of the
        user's code, with their `count` and `total_bytes`, the largest total first."""
        lines = {stack: user_frame(self.played.stacks[stack]) for stack in self.held["stack"].unique().tolist()}
        held = self.held.assign(user_frame=self.held["stack"].map(lines))
        keys = ["size_bytes", "category", "owner", "phase", "step", "operator", "user_frame"]
        rows = held.groupby(keys, sort=False).size().rename("count").reset_index()
        rows.insert(0, "total_bytes", rows["size_bytes"] * rows["count"])
        return rows.sort_values("total_bytes", ascending=False, kind="stable", ignore_index=True)

    @cached_property
    def saved_storages(self) -> Any:
        """The storages that the forward of the peak's step (or of the last one) saved for its backward, each with the
        `block` of the model that made it."""
        saved = self.blocks[(self.blocks["operator"] != "") & (self.blocks["step"] != "")]
        steps = ["", *saved["step"]]
        saved = saved[saved["step"] == (self.peak["step"] if self.peak["step"] in steps else steps[-1])]
        saved = saved[saved["category"].isin(["activations", "logits"])].sort_values("start", kind="stable")
        return saved.assign(block=[block_of(owner) or OUTSIDE for owner in saved["owner"]])

    @property
    def saved(self) -> list[SavedPerBlock]:
        """What is saved for the backward; alike blocks of the model that follow each other and save as much are
        together."""
        sizes = self.saved_storages.groupby("block", sort=False)["size_bytes"].sum()
        alike = [
            (list(names), key[1]) for key, names in groupby(sizes.index, lambda name: (collapsed(name), sizes[name]))
        ]
        return [SavedPerBlock(names[0], names[-1], len(names), int(size)) for names, size in alike]

    @cached_property
    def cuts(self) -> list[str]:
        """The ways in which the history is not complete, each in a clause."""
        played, notes, cuts = self.played, self.notes, []
        if not played.has_history:
            cuts.append("it has no history, only what was held when it was taken")
        if notes is None:
            old = played.blocks.query(f"start == {BEFORE} and end < {len(played.entries)}")
            if len(old):
                cuts.append(
                    f"{len(old):,} blocks that were freed in it are older than its first entry: it was switched on "
                    "late, or cut off by its max_entries"
                )
        elif 0 < notes.max_entries <= len(played.entries):
            allowed = "all that `--memory.max_entries` allows: older ones are lost"
            cuts.append(f"it holds {len(played.entries):,} entries, {allowed}")
        if played.holes:
            cuts.append(f"{played.holes:,} allocations or frees are missing in it")
        return cuts

    @property
    def guards(self) -> list[Guard]:
        """Whether the categories are known, the history is complete, and the replay agrees with the allocator's own
        counter of what was asked for: how it rounds depends on what it splits."""
        fraction = self.by_category.get("unknown", 0) / (self.peak["allocated_bytes"] or 1)
        remedy = "record fewer steps, or more entries (--memory.max_entries)"
        if self.notes is None:
            remedy = "call torch.cuda.memory._record_memory_history(max_entries=1_000_000) before the model is built"
        guards = [
            judge("memory_unknown", fraction, share=percent(fraction)),
            judge("memory_history", len(self.cuts), cuts="; ".join(self.cuts), remedy=remedy),
        ]
        if self.notes is not None and self.notes.peaks is not None and (peak := self.notes.peaks.requested_bytes):
            replayed = self.played.entries["requested_bytes"].max()
            difference = abs(replayed - peak) / peak
            guards.append(judge("memory_replay", difference, replayed=gib(replayed), counted=gib(peak)))
        return guards

    @property
    def summary(self) -> MemoryHistoryRecord:
        """What a run's record keeps of its history."""
        columns = ["size_bytes", "count", "category", "owner", "phase", "user_frame"]
        top = self.largest[:10].replace({"category": CATEGORY_LABELS})[columns]
        run = self.run or RunRecord(SCHEMA_VERSION, "ok")
        shape = (run.data.batch_size, run.data.context_length, run.model.d_model)
        # Autocast leaves the stream between the blocks as the weights are.
        precision = find_precision(str(run.precision)) or PRECISIONS["32-true"]
        stream_bytes = math.prod(size or 0 for size in shape) * precision.weight_bytes
        return replace(
            run.memory_history or MemoryHistoryRecord(),
            entry_count=len(self.played.entries),
            is_complete=not self.cuts,
            peak_allocated_bytes=self.peak["allocated_bytes"],
            peak_requested_bytes=self.peak["requested_bytes"],
            peak_reserved_bytes=self.peak["reserved_bytes"],
            peak_phase=self.peak["phase"],
            unknown_fraction=self.guards[0].value,
            categories={f"{name}_bytes": size for name, size in self.by_category.items()},
            parts={part or "none": int(size) for part, size in self.parts.sum(axis=1)[:40].items()},
            saved=self.saved,
            saved_bytes=int(self.saved_storages["size_bytes"].sum()),
            residual_computed_bytes=stream_bytes or None,
            residual_seen_bytes=next(iter(self.blocks.query("is_stream")["size_bytes"].mode().tolist()), None),
            top=[TopAllocation(*row) for row in top.to_numpy().tolist()],
        )


def examine(path: str | Path, device: int | None = None) -> Findings:
    """Read a run's folder or a snapshot, and work it out.

    Raises:
        UsageError: there is none, it cannot be read (see read_snapshot), or several devices and none was named.
    """
    path, run = Path(path), None
    folder = path if path.is_dir() else path.parent
    if is_run_folder(folder) and (path.is_dir() or path.name == SNAPSHOT_FILE):
        run, path = load_run(folder, with_steps=False).record, folder / SNAPSHOT_FILE
        if not path.is_file():
            where = "on a GPU " if run.device_type == "cpu" else ""
            raise UsageError(
                f"{folder} has no history of the allocator; record one {where}with `lmbench fit ... --memory.history "
                "true`"
            )
    elif path.is_dir():
        raise UsageError(f"{folder} is no run's folder; name one, or a snapshot that PyTorch pickled")
    snapshot, notes = read_snapshot(path), read_notes(path)
    played = replay(snapshot, snapshot.choose_device(notes.device if notes is not None and device is None else device))
    return Findings(path, run, notes, played, *attribute(snapshot, played, notes))


def examine_run(folder: Path) -> tuple[MemoryHistoryRecord, list[Guard]]:
    """The figures of the history in a run's folder and its guards. Raises like `examine`."""
    findings = examine(folder)
    return findings.summary, findings.guards
