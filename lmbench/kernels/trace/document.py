"""A trace's file, read piece by piece: its events, decoded as far as they are needed, and the notes beside them.

A trace is a file that somebody else may have made, and it is large: no more than a piece of it is in memory at a time,
and every size has a limit. Whatever is no trace, or a damaged one, is one line to the user.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from lmbench.errors import UsageError
from lmbench.files import Bounded, Unreadable, open_unpacked
from lmbench.kernels.recorded import NOTES, TRACE_FILE, TraceNotes
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.store import RUN_FILE

#: The most that a trace may hold, unpacked.
MAX_JSON_BYTES = 2 << 30
#: The most that one event may hold, and all that stands before or behind the events.
MAX_PIECE_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_RECORD_ONE = "record one with `lmbench fit ... --trainer.profiler kernels`"
_GIVE_ONE = "give one that torch.profiler wrote"

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{")
# Where one event ends and the next begins is looked for in so much of the text before a place.
_LOOK_BACK_BYTES = 256 << 10
# Of what looks like a border or a key and stands within a name or a list, so many are tried.
_TRIES, _KEY_TRIES = 2, 8
# What profilers write that is no JSON: figures that are not finite, control characters and half characters in names.
_NOT_FINITE = re.compile(rb":\s*[-+]?(?:nan|inf(?:inity)?)\s*(?=[,}\]])", re.IGNORECASE)
_SURROGATES = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F]..")
_NO_CONTROLS = bytes(byte if byte >= 0x20 else 0x20 for byte in range(256))
T = TypeVar("T")
_ARCHIVES = (
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (0, b"\xfd7zXZ", "compressed by xz"),
    (0, b"BZh", "compressed by bzip2"),
    (257, b"ustar", "a tar archive"),
)


class Arguments(Struct, frozen=True, gc=False):
    """What is used of an event's `args`, as it stands in the file; older profilers write `external id`."""

    correlation: Any = None
    external_id: Any = field(default=None, name="External id")
    old_external_id: Any = field(default=None, name="external id")
    device: Any = None
    stream: Any = None
    sequence: Any = field(default=None, name="Sequence number")
    forward_thread: Any = field(default=None, name="Fwd thread id")
    task_type: Any = field(default=None, name="Task Type")


NO_ARGUMENTS = Arguments()


class Event(Struct, gc=False):
    """What is used of an event, as it stands in the file: times in us."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Arguments = NO_ARGUMENTS


class _Head(Struct):
    """What stands before the events, which are left out."""

    traceEvents: list[Raw]
    notes: Raw | UnsetType = field(default=UNSET, name=NOTES)


class _Rest(Struct):
    """The last of the events, and what stands behind them."""

    traceEvents: list[Event]
    notes: Raw | UnsetType = field(default=UNSET, name=NOTES)


class _Named(Struct):
    """Any object, to see whether it has events."""

    traceEvents: Raw | UnsetType = UNSET


_head = msgspec.json.Decoder(_Head)
_events = msgspec.json.Decoder(list[Event])
_rest = msgspec.json.Decoder(_Rest)
_named = msgspec.json.Decoder(_Named | list[Raw])


class TraceDocument:
    """A trace file that was found, and the run whose folder it lies in (None for a bare trace file).

    `notes` are what stood beside the events, once these are read.
    """

    def __init__(self, path: Path, run: Run | None) -> None:
        self.path = path
        self.run = run
        self.notes = TraceNotes()
        self._is_in_result = path.name == TRACE_FILE and is_run_folder(path.parent)
        self._event_count = 0

    def events(self) -> Iterator[list[Event]]:
        """All events, in the file's order.

        Raises UsageError, in one line, for a file that is missing, no regular one, too large, truncated, or no trace.
        """
        try:
            # A link that the user names may lead anywhere, one in a result not.
            with open_unpacked(self.path, MAX_JSON_BYTES, follows_links=not self._is_in_result) as stream:
                for piece in self._pieces(stream):
                    self._event_count += len(piece)
                    yield piece
        except Unreadable as error:
            advice = "record fewer steps" if "more than" in str(error) else _RECORD_ONE
            self.refuse(f"cannot be read: {error}; {advice}")
        if not self._event_count:
            self.refuse(f"is an empty trace: it has no events; {_RECORD_ONE}")

    def refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"{str(self.path)[:200]!r} {reason}")

    def _pieces(self, stream: Bounded) -> Iterator[list[Event]]:
        text, is_list = self._begin(stream)
        wanted_bytes = _PIECE_BYTES
        while True:
            chunk = _read(stream, max(wanted_bytes - len(text), 1))
            text += chunk
            if len(text) < wanted_bytes:
                yield self._last(text, is_list)
                return
            # What has faults is mended at the first borders only, as that takes long.
            tries = (
                (border, is_mended)
                for place, border in enumerate(_borders(text))
                for is_mended in ((False, True) if place < _TRIES else (False,))
            )
            for (end, following), is_mended in tries:
                if (piece := self._whole_events(_repaired(text[:end]) if is_mended else text[:end])) is not None:
                    yield piece
                    text, wanted_bytes = text[following:], _PIECE_BYTES
                    break
            else:
                # One event is larger than the piece, or the rest has none.
                if wanted_bytes >= MAX_PIECE_BYTES:
                    self._last(text, is_list)
                    self.refuse(f"is no trace: one of its events is too large; {_GIVE_ONE}")
                wanted_bytes *= 2

    def _begin(self, stream: Bounded) -> tuple[bytes, bool]:
        """What was read behind the bracket before the first event, and whether the events stand alone (Chrome's other
        form)."""
        text = b""
        wanted_bytes = _PIECE_BYTES
        while True:
            text += _read(stream, wanted_bytes - len(text))
            is_whole = len(text) < wanted_bytes
            if (begin := len(text) - len(text.lstrip())) < len(text) and text[begin : begin + 1] == b"[":
                return text[begin + 1 :], True
            for found in islice(_EVENTS_KEY.finditer(text), _KEY_TRIES):
                # Only there is what stands before a whole object but for its end: the key is not within another.
                try:
                    head = _head.decode(_repaired(text[: found.end()]) + b"]}")
                except (msgspec.DecodeError, RecursionError):
                    continue
                self._note(head.notes)
                return text[found.end() :], False
            if is_whole or wanted_bytes >= MAX_PIECE_BYTES:
                self._refuse_without_events(text, is_whole)
            wanted_bytes *= 2

    def _whole_events(self, text: bytes) -> list[Event] | None:
        """The events of a text of whole ones, None for another: only one without an open bracket can be decoded."""
        try:
            return _events.decode(b"[" + text + b"]")
        except msgspec.ValidationError as error:
            self._refuse_event(error)
        except RecursionError:
            self.refuse(f"is no trace: nested too deeply; {_GIVE_ONE}")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _last(self, text: bytes, is_list: bool) -> list[Event]:
        """The events in the rest of the file; notes what stands behind them."""
        try:
            if is_list:
                return _decoded(_events, b"[" + text)
            rest = _decoded(_rest, b'{"traceEvents":[' + text)
        except msgspec.ValidationError as error:
            self._refuse_event(error)
        except RecursionError:
            self.refuse(f"is no trace: nested too deeply; {_GIVE_ONE}")
        except msgspec.DecodeError as error:
            self._refuse_json(error, text)
        self._note(rest.notes)
        return rest.traceEvents

    def _note(self, notes: Raw | UnsetType) -> None:
        if notes is UNSET:
            return
        try:
            self.notes = msgspec.json.decode(notes, type=TraceNotes)
        except msgspec.ValidationError as error:
            self.refuse(f"is damaged: its notes of lmbench: {str(error).replace('`', '')}; {_RECORD_ONE}")

    def _refuse_event(self, error: msgspec.ValidationError) -> NoReturn:
        told = str(error).replace("`", "")
        where = re.search(r" - at \$(?:\.traceEvents)?\[(\d+)\](?:\.(\w+))?", told)
        number = self._event_count + int(where[1]) if where else self._event_count
        what = f"{where[2]} of event {number}" if where and where[2] else f"event {number}"
        self.refuse(
            f"is damaged: {what}: {told.partition(' - at ')[0].lower()}; give a trace as torch.profiler wrote it"
        )

    def _refuse_json(self, error: msgspec.DecodeError, text: bytes) -> NoReturn:
        if "truncated" in str(error) and len(text) >= MAX_PIECE_BYTES:
            limit = f"{MAX_PIECE_BYTES >> 20} MiB"
            self.refuse(f"is no trace: it has more than {limit} in one event or behind its events; {_GIVE_ONE}")
        if "truncated" in str(error):
            self.refuse(f"is truncated: its JSON ends early; {_RECORD_ONE}")
        self.refuse(f"is no trace: not JSON ({_fault(error)}, behind {self._event_count} events); {_GIVE_ONE}")

    def _refuse_without_events(self, text: bytes, is_whole: bool) -> NoReturn:
        """Say what a file is that has no list of events."""
        if not text or text.isspace():
            self.refuse(f"is empty; {_RECORD_ONE}" if is_whole else f"is no trace: it begins with blanks; {_GIVE_ONE}")
        if packed := next((what for at, magic, what in _ARCHIVES if text[at : at + len(magic)] == magic), None):
            self.refuse(f"is {packed}, which is not read; unpack it, and give the trace (.json or .json.gz) in it")
        if not is_whole:
            limit = f"{MAX_PIECE_BYTES >> 20} MiB"
            self.refuse(f"is no trace: it has no list traceEvents in its first {limit}; {_GIVE_ONE}")
        try:
            _named.decode(_repaired(text))
        except msgspec.ValidationError:
            pass
        except RecursionError:
            self.refuse(f"is no trace: nested too deeply; {_GIVE_ONE}")
        except msgspec.DecodeError as error:
            if "truncated" in str(error):
                self.refuse(f"is truncated: its JSON ends early; {_RECORD_ONE}")
            self.refuse(f"is no trace: not JSON ({_fault(error)}); {_GIVE_ONE}")
        self.refuse(f"is no trace: it has no list `traceEvents`; {_GIVE_ONE}")


def find_trace(path: str | Path) -> TraceDocument:
    """A trace file (`.json` or `.json.gz`) or the one in a run's folder, with its run.

    Raises UsageError, in one line, for what is no such path.
    """
    try:
        file = _find(Path(path), str(path))
        is_in_result = file.name == TRACE_FILE and is_run_folder(file.parent)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no path"
        raise UsageError(f"{str(path)[:200]!r} cannot be read: {why}; give a run's folder or a trace") from error
    return TraceDocument(file, load_run(file.parent) if is_in_result else None)


def _find(given: Path, path: str) -> Path:
    """The trace's file. Raises UsageError, and OSError for a place that may not be looked into."""
    if given.name == RUN_FILE and given.is_file():
        given = given.parent
    if given.is_dir():
        if not is_run_folder(given):
            raise UsageError(f"{path!r} is no lmbench result; give a run's folder or a trace file")
        file = given / TRACE_FILE
        if not file.is_file():
            raise UsageError(f"{path!r} has no {TRACE_FILE}; {_RECORD_ONE}")
        return file
    if given.is_file():
        return given
    if given.exists():
        raise UsageError(f"{path!r} is a pipe or a device; write the trace to a file and give that")
    raise UsageError(f"{path!r} does not exist; give a run's folder or a trace file")


def _read(stream: Bounded, size: int) -> bytes:
    """So many bytes, fewer only at the end."""
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _borders(text: bytes) -> Iterator[tuple[int, int]]:
    """Where an event may end and the next begin, a few to try: at the text's end, then at seven places before it."""
    for eighths in range(8, 0, -1):
        end = len(text) * eighths // 8
        found = deque(_BETWEEN_EVENTS.finditer(text, max(end - _LOOK_BACK_BYTES, 0), end), maxlen=_TRIES)
        yield from ((one.start() + 1, one.end() - 1) for one in reversed(found))


def _decoded(decoder: msgspec.json.Decoder[T], text: bytes) -> T:
    """What a decoder gives for a text, or for what it was meant to be."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        if (repaired := _repaired(text)) == text:
            raise
        return decoder.decode(repaired)


def _repaired(text: bytes) -> bytes:
    """A text whose only faults are those that profilers make, as JSON."""
    text = text.translate(_NO_CONTROLS).decode("utf-8", "replace").encode()
    text = _SURROGATES.sub(lambda found: found[1] or rb"\ufffd", text)
    return _NOT_FINITE.sub(b":null", text)


def _fault(error: msgspec.DecodeError) -> str:
    """`invalid character` of msgspec's `JSON is malformed: invalid character (byte 3)`, whose place is a piece's."""
    return str(error).rpartition(": ")[2].partition(" (byte")[0]
