"""The results of a recorded history: the contents and place of the peak, saved tensors, and what is not known."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmbench.code_owners import Owner, recorded_folders
from lmbench.errors import UsageError
from lmbench.memory.attribution import Ranges, attribute, user_frame
from lmbench.memory.blocks import (
    BEFORE,
    CATEGORIES,
    OUTSIDE,
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
from lmbench.records.examined import MemoryHistoryRecord
from lmbench.records.guards import make_guard
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.measured import Guard, RefusedAllocation
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import PHASE, PHASES, STEP, Values, collapsed
from lmbench.report.units import gib, percent


@dataclass(frozen=True)
class Findings:
    """A device's history, replayed and attributed; the results are computed when they are asked for.

    `run` and `notes` are None for a snapshot that lmbench did not record. `blocks` and `bands` are those of
    `attribute`.
    """

    path: Path
    run: RunRecord | None
    notes: MemoryNotes | None
    played: Replay
    blocks: Any
    bands: Mapping[str, Ranges]

    @cached_property
    def peak(self) -> Values:
        """The entry after which most was allocated: its columns, its index `entry`, its `phase` and its `step`.

        The phase is `outside` if no range of a phase is around the entry.
        """
        entry = int(np.argmax(self.played.entries["allocated_bytes"]))
        time_us = self.played.clock([entry])
        phase, step = (str(self.bands[band].at(time_us)[0]) for band in (PHASE, STEP))
        columns = self.played.entries.loc[entry].to_dict()
        return {**columns, "entry": entry, "phase": phase or "outside", "step": step}

    @property
    def refused(self) -> RefusedAllocation | None:
        """The last allocation that failed, and what the device held then; None if memory did not run out."""
        entries = self.played.entries
        row = entries[entries["action"] == "oom"].tail(1)
        if row.empty:
            return None
        phase = self.bands[PHASE].at(row["time_us"].to_numpy())[0] or "outside"
        columns = ["size_bytes", "allocated_bytes", "reserved_bytes", "device_free_bytes", "stack"]
        requested, allocated, reserved, free, stack = row[columns].iloc[0].tolist()
        location = user_frame(self.played.stacks[stack], self.folders)
        return RefusedAllocation(phase, requested, allocated, reserved, free, location=location)

    @cached_property
    def folders(self) -> Mapping[str, Owner]:
        """The recording's folders by owner."""
        return recorded_folders(frame.filename for frames in self.played.stacks for frame in frames)

    @cached_property
    def held(self) -> Any:
        """The blocks that are held at the peak, each with the user's line in `user_frame`.

        `owner` has `*` for indices, so that it is a part of the model.
        """
        held, stacks = held_at(self.blocks, self.peak["entry"]), self.played.stacks
        lines = {stack: user_frame(stacks[stack], self.folders) for stack in held["stack"].unique().tolist()}
        return held.assign(owner=held["owner"].map(collapsed), user_frame=held["stack"].map(lines).astype(object))

    @cached_property
    def by_category(self) -> dict[Category, int]:
        """Bytes at the peak by category."""
        return by_category(self.held)

    @cached_property
    def parts(self) -> Any:
        """Bytes at the peak: a row for each part of the model, the largest first, and a column for each category.

        Blocks whose module is unknown have an empty part.
        """
        sizes = self.held.pivot_table("size_bytes", "owner", "category", "sum").astype("Int64")
        order = sizes.sum(axis=1).sort_values(ascending=False, kind="stable").index
        return sizes.loc[order, list(self.by_category)]

    @cached_property
    def phases(self) -> Any:
        """The peak of each phase over all recorded steps: `peak_bytes`, and a column for each category."""
        band = self.bands[PHASE]
        allocated_bytes = self.played.entries["allocated_bytes"].to_numpy()
        # Start at the entry before the phase: a phase without allocations, as of a fused optimizer, still has a peak.
        borders = np.searchsorted(self.played.entries["time_us"], [band.start, band.end]) - 1
        moments = highest_moments(allocated_bytes, zip(band.names, *borders.clip(0).tolist(), strict=True))
        moments = {phase: moments[phase] for phase in PHASES if phase in moments}
        rows = [by_category(held_at(self.blocks, moment)) for moment in moments.values()]
        sizes = pd.DataFrame(rows, pd.Index(moments, name="phase"), CATEGORIES, "Int64")
        return sizes.assign(peak_bytes=allocated_bytes[list(moments.values())])

    @cached_property
    def largest(self) -> Any:
        """The blocks that are held at the peak, grouped, with their `count` and `total_bytes`; the largest total first.

        Blocks of a group agree in size, category, part, phase, step, operator and line of the user's code.
        """
        keys = ["size_bytes", "category", "owner", "phase", "step", "operator", "user_frame"]
        rows = self.held.groupby(keys, sort=False).size().rename("count").reset_index()
        rows.insert(0, "total_bytes", rows["size_bytes"] * rows["count"])
        return rows.sort_values("total_bytes", ascending=False, kind="stable", ignore_index=True)

    @cached_property
    def saved_storages(self) -> Any:
        """The storages that the forward of one step saved for its backward, each with the model's `block` that made it.

        The step is that of the peak, or else the last one.
        """
        saved = self.blocks[(self.blocks["operator"] != "") & (self.blocks["step"] != "")]
        steps = ["", *saved["step"]]
        saved = saved[saved["step"] == (self.peak["step"] if self.peak["step"] in steps else steps[-1])]
        saved = saved[saved["category"].isin(["activations", "logits"])].sort_values("start", kind="stable")
        return saved.assign(block=saved["owner"].map(block_of))

    @property
    def saved(self) -> Any:
        """The bytes that each block of the model saves for the backward: `first`, `last`, `count` and `each_bytes` of
        equal ones in a row, with the `gradient_bytes` of the first."""
        sizes = self.saved_storages.groupby("block", sort=False)["size_bytes"].sum()
        rows = []
        for (_, size), group in groupby(sizes.index, lambda name: (collapsed(name), sizes[name])):
            names = list(group)
            rows.append((names[0], names[-1], len(names), size, size * len(names)))
        frame = pd.DataFrame(rows, columns=["first", "last", "count", "each_bytes", "total_bytes"])
        return frame.assign(gradient_bytes=frame["first"].map(self.gradient_bytes))

    @property
    def saved_operators(self) -> Any:
        """What the first of the most alike blocks saves: `block`, `operator`, `count`, `total_bytes` and their share.

        The operator with the most comes first. Empty where no block of the model saves anything.
        """
        blocks = self.saved[self.saved["first"] != OUTSIDE].sort_values("total_bytes")
        name = next(iter(blocks["first"].tail(1)), "")
        storages = self.saved_storages[self.saved_storages["block"] == name].groupby("operator")["size_bytes"]
        rows = storages.agg(count="size", total_bytes="sum").sort_values("total_bytes", ascending=False).reset_index()
        return rows.assign(block=name, share_fraction=rows["total_bytes"] / rows["total_bytes"].sum())

    @property
    def gradient_bytes(self) -> Any:
        """The bytes of gradients by block of the model, in the step of `saved_storages`."""
        gradients = self.blocks[self.blocks["category"] == "gradients"]
        gradients = gradients[gradients["step"].isin(self.saved_storages["step"])]
        return gradients["size_bytes"].groupby(gradients["owner"].map(block_of)).sum()

    @cached_property
    def cuts(self) -> list[str]:
        """The ways in which the history is not complete, each as a clause."""
        played, notes, cuts = self.played, self.notes, []
        if not played.has_history:
            cuts.append("it has no history, only what was held when it was taken")
        if notes is None:
            older = played.blocks.query(f"start == {BEFORE} and end < {len(played.entries)}")
            if len(older):
                cuts.append(
                    f"{len(older):,} blocks that were freed in it are older than its first entry: it was switched on "
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
        """Checks of whether categories are known, the history is complete, and the replay agrees with the allocator.

        The replay is compared by requested bytes: how the allocator rounds them depends on the blocks that it splits.
        """
        fraction = self.by_category.get("unknown", 0) / (self.peak["allocated_bytes"] or 1)
        remedy = "record fewer steps, or more entries (--memory.max_entries)"
        if self.notes is None:
            remedy = "call torch.cuda.memory._record_memory_history(max_entries=1_000_000) before the model is built"
        guards = [
            make_guard("memory_unknown", fraction, share=percent(fraction)),
            make_guard("memory_history", len(self.cuts), cuts="; ".join(self.cuts), remedy=remedy),
        ]
        if self.notes is not None and self.notes.peaks is not None and (peak := self.notes.peaks.requested_bytes):
            replayed = self.played.entries["requested_bytes"].max()
            difference = abs(replayed - peak) / peak
            guards.append(make_guard("memory_replay", difference, replayed=gib(replayed), counted=gib(peak)))
        return guards

    @property
    def summary(self) -> MemoryHistoryRecord:
        """The part of a run's record about its history."""
        run = self.run or RunRecord(SCHEMA_VERSION, "ok")
        shape = (run.data.batch_size, run.data.context_length, run.model.d_model)
        # Under autocast, the residual stream between blocks keeps the type of the weights.
        precision = find_precision(str(run.precision)) or PRECISIONS["32-true"]
        stream_bytes = math.prod(size or 0 for size in shape) * precision.weight_bytes
        return replace(
            run.memory_history or MemoryHistoryRecord(),
            peak_allocated_bytes=self.peak["allocated_bytes"],
            peak_phase=self.peak["phase"],
            categories={f"{name}_bytes": size for name, size in self.by_category.items()},
            residual_computed_bytes=stream_bytes or None,
        )


def examine(path: str | Path, device: int | None = None) -> Findings:
    """Read a run's folder or a snapshot, replay its history and attribute it.

    Raises:
        UsageError: the folder is no run's, there is no snapshot, it cannot be read (see `read_snapshot`), or it has
            several devices and `device` names none of them.
    """
    path, run = Path(path), None
    folder = path if os.path.isdir(path) else path.parent  # noqa: PTH112 (Path.is_dir raises on some paths)
    if path == folder or (path.name == SNAPSHOT_FILE and is_run_folder(folder)):
        run = load_run(folder, with_steps=False).record
        path = folder / SNAPSHOT_FILE
        if not path.is_file():
            raise UsageError(
                f"{folder} has no history of the allocator; record one on a GPU with `lmbench fit ... "
                f"--memory.history true`, or predict: `lmbench memory --config {folder}/config.yaml --gpu H200`"
            )
    snapshot, notes = read_snapshot(path), read_notes(path)
    played = replay(snapshot, snapshot.choose_device(notes.device if notes is not None and device is None else device))
    return Findings(path, run, notes, played, *attribute(snapshot, played, notes))


def examine_run(folder: Path) -> tuple[MemoryHistoryRecord, list[Guard]]:
    """The record and the guards of the history in a run's folder. Raises UsageError if it cannot be read."""
    findings = examine(folder)
    return findings.summary, findings.guards
