"""What a recording of the allocator's history and its reader agree on: the files, and the notes beside the snapshot.

The allocator knows addresses and stacks; what a block is for, only who made it knows. The notes say it: at a moment,
marked in the history by a range of that name, which tensors' storages were where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from lmbench.errors import UsageError
from lmbench.memory.categories import Category

SNAPSHOT_FILE = "memory_snapshot.pickle"
NOTES_FILE = "memory_notes.json"
#: An empty range at a moment, followed by the moment's index in the notes.
MOMENT = "lmbench.memory:"
#: An empty range when the gradient of a module's output is there, followed by the module's path: its backward begins.
BACKWARD = "lmbench.backward:"
#: A range in which nothing but the matrix libraries' workspaces is freed.
WORKSPACES = "lmbench.workspaces"


#: What fits into the columns of a snapshot.
_Address = Annotated[int, Meta(ge=0, le=1 << 62)]


class NotedBlock(Struct, array_like=True):
    """A tensor's storage: its address, what it is for, whose it is (a module's or a parameter's path, empty where
    nobody knows), and of one that is saved for the backward, the operator that saved it."""

    address: _Address
    category: Category
    owner: str = ""
    operator: str = ""


class NotedOutput(Struct, array_like=True):
    """What a module returned: its path, the storage's address, the tensor's shape and bytes of an element."""

    owner: str
    address: _Address
    shape: tuple[int, ...]
    element_bytes: int


class Moment(Struct):
    """What was known at a moment."""

    blocks: list[NotedBlock] = field(default_factory=list)
    outputs: list[NotedOutput] = field(default_factory=list)


class AllocatorPeaks(Struct):
    """The allocator's own figures over the recorded steps."""

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int


class MemoryNotes(Struct):
    """What lmbench notes beside a snapshot."""

    schema_version: Literal[1] = 1
    device: int = 0
    first_step: int = 0
    steps: int = 0
    max_entries: int = 0
    moments: list[Moment] = field(default_factory=list)
    peaks: AllocatorPeaks | None = None


def write_notes(notes: MemoryNotes, folder: Path) -> None:
    """Beside the snapshot. Raises OSError."""
    (folder / NOTES_FILE).write_bytes(msgspec.json.encode(notes))


def read_notes(snapshot: Path) -> MemoryNotes | None:
    """The notes beside a snapshot; None where there are none: then it is somebody else's.

    Raises:
        UsageError: they cannot be read.
    """
    path = snapshot.parent / NOTES_FILE
    if snapshot.name != SNAPSHOT_FILE or not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=MemoryNotes)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}); without it the snapshot is read as somebody else's"
        ) from None
