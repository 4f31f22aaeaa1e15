"""A snapshot of PyTorch's CUDA allocator, as plain typed columns: what every reader of a history works on.

The layout is that of `torch.cuda.memory._snapshot()` (torch/csrc/cuda/memory_snapshot.cpp, torch/csrc/cuda/Module.cpp).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

#: What an entry of a history did, by its code in `Trace.action`. An unknown one has the last code.
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
    "snapshot", "other",
)  # fmt: skip
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_OTHER = _CODES["other"]
#: A block that somebody holds, and one that was given back while another stream still uses it. The docstring of
#: torch.cuda.memory calls the latter otherwise than the binary does.
HELD, PENDING = "active_allocated", ("active_pending_free", "active_awaiting_free")
#: No Python stack is deeper; what a hostile file lists beyond is not read.
MAX_FRAMES = 400
#: Machines have fewer devices; the list of a hostile file may name one device a million times.
MAX_DEVICES = 64
#: Entries, blocks and frames together: one list in a file can stand at a million places.
MAX_ITEMS = 100_000_000
#: Of a block or segment: a PiB, beyond which sums would be nonsense.
MAX_BYTES = 1 << 50
NO_STACK = -1


class Malformed(Exception):
    """The file is a pickle of plain values, but no snapshot: says where it is not."""


class Frame(Struct, frozen=True):
    """A frame of a stack."""

    name: str
    filename: str
    line: int


class Trace(Struct):
    """The history of one device: columns of the entries, oldest first, each the bytes of an array.

    `action` is uint8, all others int64: `address`, `size_bytes` (asked for), `time_us` (Unix time), `stack` (an index
    into the snapshot's stacks, NO_STACK where nobody looked).
    """

    count: int
    action: bytes
    address: bytes
    size_bytes: bytes
    time_us: bytes
    stack: bytes


class Segments(Struct):
    """Memory that the allocator held at the end, and the blocks in it: columns as in a Trace.

    `segment` of a block is its segment's place; `state` is 0 of a free block, 1 of a held one, 2 of one that waits for
    another stream.
    """

    device: list[int]
    address: list[int]
    total_bytes: list[int]
    allocated_bytes: list[int]
    block_segment: bytes
    block_address: bytes
    block_bytes: bytes
    block_requested_bytes: bytes
    block_state: bytes
    block_stack: bytes


class Annotation(Struct, array_like=True):
    """The beginning or end of a range that was open while the history was recorded."""

    name: str
    is_start: bool
    device: int
    time_us: int


class Snapshot(Struct):
    """A whole snapshot. `stacks` are indices into `frames`, the innermost first."""

    traces: list[Trace]
    segments: Segments
    annotations: list[Annotation]
    frames: list[Frame]
    stacks: list[list[int]]
    settings: dict[str, str | int | float | bool] = field(default_factory=dict)


def snapshot_of(plain: Any) -> Snapshot:
    """The snapshot in an unpickled value, every level's types checked.

    Raises:
        Malformed: it is none.
    """
    top = _mapping(plain, "the file")
    if "device_traces" not in top or "segments" not in top:
        raise Malformed("the file has no `segments` and `device_traces`")
    traces = _sequence(top["device_traces"], "device_traces")
    segments = _sequence(top["segments"], "segments")
    if len(traces) > MAX_DEVICES:
        raise Malformed(f"device_traces lists {len(traces)} devices; {MAX_DEVICES} at most")
    entries = [_sequence(trace, f"device_traces[{place}]") for place, trace in enumerate(traces)]
    blocks = [_sequence(_mapping(each, "a segment").get("blocks", []), "a segment's blocks") for each in segments]
    if sum(map(len, entries)) + sum(map(len, blocks)) > MAX_ITEMS:
        raise Malformed(f"it lists more than {MAX_ITEMS:,} entries and blocks")
    stacks = _Stacks()
    made = [_trace(trace, place, stacks) for place, trace in enumerate(entries)]
    return Snapshot(
        made,
        _segments(segments, blocks, stacks),
        _annotations(top.get("external_annotations", [])),
        stacks.frames,
        stacks.stacks,
        _settings(top.get("allocator_settings")),
    )


class _Stacks:
    """Lists of frames, each once: in the file many entries share one list, and many lists a frame."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.stacks: list[list[int]] = []
        self._of_list: dict[int, int] = {id(None): NO_STACK}
        self._of_frame: dict[int, int] = {}
        self._of_value: dict[Frame, int] = {}
        self._count = 0

    def indices(self, lists: Iterable[Any]) -> Iterator[int]:
        """The stack of each; None stands for none."""
        known = self._of_list
        for frames in lists:
            own = id(frames)
            if own not in known:
                known[own] = self._add(frames)
            yield known[own]

    def _add(self, frames: Any) -> int:
        given = _sequence(frames, "frames")[:MAX_FRAMES]
        self._count += len(given)
        if self._count > MAX_ITEMS:
            raise Malformed(f"its stacks have more than {MAX_ITEMS:,} frames")
        if not given:
            return NO_STACK
        self.stacks.append([self._frame(frame) for frame in given])
        return len(self.stacks) - 1

    def _frame(self, given: Any) -> int:
        index = self._of_frame.get(id(given))
        if index is None:
            plain = _mapping(given, "a frame")
            name, filename, line = plain.get("name", ""), plain.get("filename", ""), plain.get("line", 0)
            if type(name) is not str or type(filename) is not str or type(line) is not int:
                raise Malformed("a frame is not a name, a filename and a line")
            frame = Frame(name, filename, line)
            index = self._of_value.setdefault(frame, len(self.frames))
            if index == len(self.frames):
                self.frames.append(frame)
            self._of_frame[id(given)] = index
        return index


def _trace(entries: Sequence[Any], device: int, stacks: _Stacks) -> Trace:
    where = f"device_traces[{device}]"
    if not set(map(type, entries)) <= {dict}:
        raise Malformed(f"an entry of {where} is no mapping")
    try:
        # One column after the other, and no lists between: there may be millions of entries.
        return Trace(
            len(entries),
            bytes(_CODES.get(entry["action"], _OTHER) for entry in entries),
            # An entry about a lack of memory has `device_free` in the place of an address.
            _column(entry.get("addr", 0) for entry in entries),
            _sizes(entry.get("size", 0) for entry in entries),
            # PyTorch 2.0 noted no times.
            _column(entry.get("time_us", 0) for entry in entries),
            _column(stacks.indices(entry.get("frames") for entry in entries)),
        )
    except KeyError as error:
        raise Malformed(f"an entry of {where} has no {error}") from None
    except (TypeError, OverflowError):
        raise Malformed(f"an entry of {where} has a value of a wrong type, or out of range") from None


def _segments(segments: Sequence[Any], blocks: Sequence[Sequence[Any]], stacks: _Stacks) -> Segments:
    try:
        device, address, total, allocated = (
            [_whole(segment[key]) for segment in segments]
            for key in ("device", "address", "total_size", "allocated_size")
        )
        of_segment: list[int] = []
        rows: list[dict[str, Any]] = []
        for place, own in enumerate(blocks):
            at = _whole(segments[place]["address"])
            for block in own:
                plain = dict(_mapping(block, "a block"))
                # Older versions leave the address to be summed up.
                plain.setdefault("address", at)
                at = _whole(plain["address"]) + _whole(plain["size"])
                rows.append(plain)
                of_segment.append(place)
        state = [_state(row["state"]) for row in rows]
        return Segments(
            device,
            address,
            total,
            allocated,
            _column(of_segment),
            _column([row["address"] for row in rows]),
            _sizes(row["size"] for row in rows),
            _sizes(row.get("requested_size", row["size"]) for row in rows),
            _column(state),
            _column(stacks.indices(_block_frames(row) for row in rows)),
        )
    except KeyError as error:
        raise Malformed(f"a segment or block has no {error}") from None
    except (TypeError, OverflowError):
        raise Malformed("a segment or block has a value of a wrong type, or out of range") from None


def _block_frames(block: dict[str, Any]) -> Any:
    """The stack of a block; PyTorch 2.0 kept it in a list of what the block had been."""
    if "frames" in block or "history" not in block:
        return block.get("frames")
    past = _sequence(block["history"], "a block's history")
    return _mapping(past[0], "a block's history").get("frames") if past else None


def _state(name: Any) -> int:
    return 1 if name == HELD else 2 if name in PENDING else 0


def _annotations(given: Any) -> list[Annotation]:
    found = []
    for each in _sequence(given, "external_annotations"):
        plain = _mapping(each, "an annotation")
        name, stage = plain.get("name"), plain.get("stage")
        if type(name) is not str or stage not in ("START", "END"):
            raise Malformed("an annotation is not a name and a stage")
        found.append(Annotation(name, stage == "START", _whole(plain.get("device", 0)), _whole(plain.get("time_us"))))
    return found


def _settings(given: Any) -> dict[str, str | int | float | bool]:
    if type(given) is not dict:
        return {}
    return {key: value for key, value in given.items() if type(key) is str and type(value) in (str, int, float, bool)}


def _column(values: Iterable[Any]) -> bytes:
    """Raises TypeError for what is no whole number, OverflowError for one that takes more than 64 bits."""
    return array("q", values).tobytes()


def _sizes(values: Iterable[Any]) -> bytes:
    """The same, of bytes of memory. Raises OverflowError for what no device has."""
    column = array("q", values)
    if column and not 0 <= min(column) <= max(column) <= MAX_BYTES:
        raise OverflowError
    return column.tobytes()


def _whole(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise Malformed(f"{type(value).__name__!s} where a whole number of 64 bits is expected")
    return value


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise Malformed(f"{what} is no mapping")
    return value


def _sequence(value: Any, what: str) -> Sequence[Any]:
    if type(value) not in (list, tuple):
        raise Malformed(f"{what} is no list")
    return value  # type: ignore[no-any-return]


def encode(snapshot: Snapshot) -> bytes:
    """As bytes, for another process."""
    return msgspec.msgpack.encode(snapshot)


def decode(content: bytes) -> Snapshot:
    """From bytes. Raises msgspec.MsgspecError for what is none."""
    return msgspec.msgpack.decode(content, type=Snapshot)
