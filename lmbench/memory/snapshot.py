"""A snapshot of PyTorch's CUDA allocator, read as plain typed values, and the replay of its history.

The layout is that of `torch.cuda.memory._snapshot()` (torch/csrc/cuda/memory_snapshot.cpp, torch/csrc/cuda/Module.cpp).
No code of the pickle runs, and no file above a size limit is read. A history of a million entries (60 MB) takes 0.5 GB
and a few seconds.

Blocks from before the history began are known from later entries: they were freed, or are still held, and never
allocated. So sums are exact from the first entry on, even where older entries are lost.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pandas as pd
from msgspec import Meta, Struct
from msgspec.structs import astuple

from lmbench.errors import UsageError, error_line
from lmbench.files import Unreadable, plain_unpickled, read_file
from lmbench.memory.blocks import BEFORE, held_bytes, rounded_bytes
from lmbench.records.intervals import Integers

#: The largest snapshot that is read, which has room for some 30 million entries.
MAX_FILE_BYTES = 2 << 30
#: More frames of a stack are not read: real stacks are shorter, those of a damaged file may not be.
MAX_FRAMES = 400
#: The actions by which segments grow and shrink, with the sign of their bytes.
GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
#: The index of the empty stack, which is the last one.
NO_STACK = -1
#: File names of C and C++ frames: no name, or a source, a header or a library.
_NOT_PYTHON = re.compile(r"^\W*$|\.([cCS]|cc|cpp|cxx|cu|cuh|h|hpp|inl|o|pyx|pxd|dll|exe|so[.\d]*)$|/include/")

_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
#: At most a PiB: sums of larger sizes would overflow.
_Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]


class StackFrame(Struct, frozen=True):
    """A frame of a stack."""

    name: str = ""
    filename: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} {self.name}"

    @property
    def path(self) -> str:
        """The file name, with / between folders even if it is one of Windows."""
        return self.filename.replace("\\", "/")

    @property
    def is_python(self) -> bool:
        """Whether it is a frame of Python, and not of C or C++."""
        return "::" not in self.name and not _NOT_PYTHON.search(self.filename)


Stack = tuple[StackFrame, ...]


_ENTRY_KEYS = {"address": "addr", "requested_bytes": "size", "stack": "frames", "device_free_bytes": "device_free"}


class Entry(Struct, rename=_ENTRY_KEYS):
    """An action of the allocator.

    `action` is alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom
    (which has no address, and the bytes that the device had free) or snapshot. `stack` has frames from the innermost
    on; None if no stack was recorded. PyTorch 2.0 noted no times.
    """

    action: str
    address: _Int64 = 0
    requested_bytes: _Bytes = 0
    time_us: _Int64 = 0
    stack: Any = None
    device_free_bytes: _Bytes = 0


class PastBlock(Struct, rename={"requested_bytes": "real_size", "stack": "frames"}):
    """An allocation in a block, as PyTorch 2.0 noted it."""

    requested_bytes: _Bytes = 0
    stack: Any = None


class SegmentBlock(Struct, rename={"size_bytes": "size", "requested_bytes": "requested_size", "stack": "frames"}):
    """A piece of a segment.

    Its state is active_allocated, inactive, or active_pending_free: given back while another stream still uses it. The
    docstring of torch.cuda.memory calls the last active_awaiting_free. In PyTorch 2.0's form a block has no address,
    and its latest allocation is the first of its `history`; `read_snapshot` fills in address, size and stack.
    """

    size_bytes: _Bytes
    state: str
    address: _Int64 | None = None
    requested_bytes: _Bytes = 0
    stack: Any = None
    history: list[PastBlock] = []


class Segment(Struct):
    """Memory that the allocator held when the snapshot was taken."""

    device: int
    address: _Int64
    total_size: _Bytes
    blocks: list[SegmentBlock] = []
    is_expandable: bool = False


class Annotation(Struct):
    """The beginning or end of a range (`record_function`) that was open while the history was recorded."""

    name: str
    stage: Literal["START", "END"]
    time_us: _Int64
    device: int = 0


class Snapshot(Struct):
    """A whole snapshot; `device_traces` has the history of each device, oldest entry first."""

    segments: list[Segment]
    device_traces: Annotated[list[list[Entry]], Meta(max_length=64)]
    external_annotations: list[Annotation] = []

    def choose_device(self, device: int | None) -> int:
        """The device to look at: `device`, or else the one that ran out of memory, or the only one with a history, or
        without histories with memory.

        Raises:
            UsageError: the snapshot has nothing of `device`, or has several devices and `device` is None.
        """
        actions = [{entry.action for entry in trace} for trace in self.device_traces]
        with_history = [index for index, names in enumerate(actions) if names - {"snapshot"}]
        present = with_history or sorted({segment.device for segment in self.segments})
        if device in present:
            return device
        full = [index for index, names in enumerate(actions) if "oom" in names]
        if device is None and len(full or present) == 1:
            return (full or present)[0]
        if not present:
            raise UsageError("this snapshot is empty: it has neither a history nor memory that was held")
        raise UsageError(f"name a device of the snapshot: --device {', '.join(map(str, present))}")


def different_stacks(lists: Sequence[Any]) -> tuple[list[Stack], list[int]]:
    """The different stacks among lists of frames, and for each list the index of its stack.

    The empty stack is the last one; None and empty lists have its index NO_STACK. In a snapshot many lists are equal or
    the same object: a step of 15,000 entries has some 200 stacks.
    """
    stacks = dict[Stack, int]()
    index = {}
    try:
        for identity, frames in {id(frames): frames for frames in lists if frames}.items():
            index[identity] = stacks.setdefault(msgspec.convert(frames[:MAX_FRAMES], Stack), len(stacks))
    except (TypeError, msgspec.ValidationError) as error:
        raise UsageError(f"no snapshot of PyTorch's: a stack is no list of frames ({error})") from None
    return [*stacks, ()], [index.get(id(frames), NO_STACK) for frames in lists]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file; no code of the file runs.

    Raises:
        UsageError: there is no such file, it is too large, truncated, no snapshot, or names a class or function.
    """
    # Garbage collection would walk over millions of live containers and take more than half of the time.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        content = read_file(path, MAX_FILE_BYTES, follows_links=True)
        snapshot = msgspec.convert(plain_unpickled(content), Snapshot)
    except Unreadable as error:
        advice = "; give a run's folder, a snapshot or a configuration" if error.is_missing else ""
        raise UsageError(f"{path}: {error}{advice}") from None
    except Exception as error:
        # A damaged pickle can raise any error: UnpicklingError, KeyError, TypeError, MemoryError, ...
        raise UsageError(f"{path}: no snapshot of PyTorch's: {error_line(error)[:300]}") from None
    finally:
        if is_collecting:
            gc.enable()
    for segment in snapshot.segments:
        end = segment.address
        for block in segment.blocks:
            if block.address is None:
                block.address = end
            if block.history:
                latest = block.history[0]
                block.requested_bytes, block.stack = latest.requested_bytes, latest.stack
            end = block.address + block.size_bytes
    return snapshot


@dataclass(frozen=True)
class Replay:
    """One device's history, as frames.

    - `entries`: `action`, `address`, `stack` (an index into `stacks`), `time_us`, `size_bytes` and `device_free_bytes`
      of each entry; and the memory after it, `allocated_bytes` with the allocator's rounding, `requested_bytes` without
      it, and `reserved_bytes`.
    - `blocks`: as in `lmbench.memory.blocks`, with `address`, `requested_bytes` and `stack`. Their moments are indexes
      of entries.
    - `holes`: the number of allocations and frees that must have happened, and are missing in the history.
    - `segments`: those reserved at the end, with `address`, `total_bytes` and `is_expandable`.
    """

    device: int
    has_history: bool
    entries: Any
    blocks: Any
    stacks: list[Stack]
    holes: int
    segments: Any

    def clock(self, entries: Any) -> Integers:
        """The times of entries in us; for an entry outside of the history, that of its first or last entry."""
        times: Integers = self.entries["time_us"].to_numpy()[np.clip(entries, 0, len(self.entries) - 1)]
        return times


def replay(snapshot: Snapshot, device: int) -> Replay:
    """Replay the history of a device."""
    entries = snapshot.device_traces[device : device + 1]
    has_history = any(entry.action != "snapshot" for trace in entries for entry in trace)
    # Without a history there is one moment, that of the snapshot, with the blocks held then.
    rows = map(astuple, entries[0] if has_history else [Entry("snapshot")])
    log = pd.DataFrame(rows, columns=Entry.__struct_fields__)
    segments = [segment for segment in snapshot.segments if segment.device == device]
    pieces = pd.DataFrame(
        [astuple(block) for segment in segments for block in segment.blocks], columns=SegmentBlock.__struct_fields__
    )
    stacks, index = different_stacks([*log["stack"], *pieces["stack"]])
    log = log.assign(stack=index[: len(log)], start=log.index, size_bytes=log["requested_bytes"])
    if not log["time_us"].any():
        log["time_us"] = log.index
    # Clocks of a damaged snapshot may go back.
    log["time_us"] = log["time_us"].cummax()
    held = pieces.assign(stack=index[len(log) :])[pieces["state"] == "active_allocated"]
    blocks, holes = _blocks(log, held.drop(columns=["state", "history"]).astype(np.int64))
    reserved = pd.DataFrame(
        [(segment.address, segment.total_size, segment.is_expandable) for segment in segments],
        columns=["address", "total_bytes", "is_expandable"],
    )
    # Segments are known at the end: reserved bytes at other entries follow from how they grew and shrank.
    grown = (log["requested_bytes"] * log["action"].map(GROWTH).fillna(0).astype(np.int64)).cumsum()
    log = log[["action", "address", "stack", "time_us", "size_bytes", "device_free_bytes"]].assign(
        allocated_bytes=held_bytes(blocks, len(log)),
        requested_bytes=held_bytes(blocks, len(log), "requested_bytes"),
        reserved_bytes=reserved["total_bytes"].sum() + grown - grown.iloc[-1],
    )
    return Replay(device, has_history, log, blocks, stacks, holes, reserved)


def _blocks(log: Any, held: Any) -> tuple[Any, int]:
    """All blocks, and the number of missing events; `held` are the blocks that are held at the end."""
    # A block is allocated until it is given back; in a history that does not record that, until it is free.
    free_action = "free_requested" if "free_requested" in set(log["action"]) else "free_completed"
    events = log[log["action"].isin(["alloc", free_action])].sort_values(["address", "start"])
    # An address is allocated and freed in turn.
    by_address = events.groupby("address")
    is_alloc = events["action"] == "alloc"
    before = by_address["action"].shift()
    events["end"] = by_address["start"].shift(-1).fillna(len(log))
    # The allocator tells the true size of blocks that are still held; sizes of others are rounded requests.
    held_size = events["address"].map(held.drop_duplicates("address").set_index("address")["size_bytes"])
    held_size = held_size.where(events["end"] == len(log))
    events["size_bytes"] = held_size.fillna(rounded_bytes(events["requested_bytes"]))
    older = events[~is_alloc & before.isna()]
    older = older.assign(start=BEFORE, end=older["start"], stack=NO_STACK)
    last = events.drop_duplicates("address", keep="last")
    is_held = last["address"].isin(held["address"])
    ends_held = last["action"] == "alloc"
    # An event is missing between two frees or two allocations in a row, and where the last event and the end disagree.
    holes = int((events["action"] == before).sum() + (is_held != ends_held).sum())
    untouched = held[~held["address"].isin(last.loc[ends_held, "address"])].assign(start=BEFORE, end=len(log))
    parts = [part[list(untouched)] for part in (events[is_alloc], older, untouched)]
    return pd.concat(parts, ignore_index=True).astype(np.int64), holes
