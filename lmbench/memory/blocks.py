"""What a byte on the device is for, in one vocabulary for predictions and recorded histories.

The allocator knows addresses and stacks; what a block is for, only who made it knows. The notes say it: at a moment,
marked in the history by a range of that name, which tensors' storages were where.

A row of a frame is a block: `size_bytes` as the allocator takes it, its `category`, held from moment `start` (BEFORE
the first) until just before moment `end`. Moments count what happened to the allocator, from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from lmbench.errors import UsageError
from lmbench.records.intervals import Integers
from lmbench.records.vocabulary import INDEX

#: parameters count buffers with them (tables, masks); inputs are the batches; activations are what the forward leaves
#: for the backward, without the logits; logits are what the loss is computed from, and what has their size: their
#: float32 copy, log-softmax and gradient; gathered are blocks of parameters that ranks share, put together; buckets are
#: what gradients are reduced in (with DDP's gradient_as_bucket_view they are the gradients); temporaries are gone when
#: the phase that made them is over; workspaces are the matrix libraries' own, kept from one call to the next.
Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "gathered",
    "buckets",
    "activations",
    "logits",
    "inputs",
    "temporaries",
    "workspaces",
    "unknown",
]

#: In the order of a table.
CATEGORIES: tuple[Category, ...] = get_args(Category)

#: What stays, then what comes and goes: the order of a picture from the bottom, and what a block is first of all, where
#: it is noted as several things (a saved tensor may be a parameter).
LASTING: tuple[Category, ...] = (
    "parameters", "optimizer_state", "gradients", "gathered", "buckets", "inputs", "workspaces", "unknown", "logits",
    "activations", "temporaries",
)  # fmt: skip

#: As a table says it.
CATEGORY_LABELS: dict[Category, str] = {name: name.replace("_", " ") for name in CATEGORIES}

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
    nobody knows), and of one that is saved for the backward, the operator that saved it. A `stream` is what one of
    several alike modules returned, whatever else it is."""

    address: _Address
    category: Category | Literal["stream"]
    owner: str = ""
    operator: str = ""


class CountedPeaks(Struct):
    """The allocator's own figures over the recorded steps."""

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int


class MemoryNotes(Struct):
    """What lmbench notes beside a snapshot; `moments` has what was known at each."""

    schema_version: Literal[2] = 2
    device: int = 0
    steps: int = 0
    max_entries: int = 0
    moments: list[list[NotedBlock]] = field(default_factory=list)
    peaks: CountedPeaks | None = None


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


def block_of(owner: str) -> str | None:
    """The path of the outermost indexed module around a module, such as `blocks.3`: None for what lies in none."""
    match = INDEX.search(owner)
    return owner[: match.end()] if match else None


#: A block's start before the first moment.
BEFORE = -1


def rounded_bytes(size_bytes: int, to_bytes: int = 512) -> int:
    """The next multiple; the allocator rounds requests up to one of 512 (kMinBlockSize)."""
    return -(-size_bytes // to_bytes) * to_bytes


def held_bytes(blocks: Any, count: int, column: str = "size_bytes") -> Integers:
    """Sum of a column over the blocks that are held at each of `count` moments."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.maximum(blocks["start"], 0), blocks[column])
    np.subtract.at(change, blocks["end"], blocks[column])
    return change[:-1].cumsum()


def held_at(blocks: Any, moment: int) -> Any:
    """The blocks that are held at a moment."""
    return blocks[(blocks["start"] <= moment) & (blocks["end"] > moment)]


def by_category(blocks: Any) -> dict[Category, int]:
    """Bytes of blocks by category, those that there are."""
    sums = blocks.groupby("category")["size_bytes"].sum()
    return {name: int(sums[name]) for name in CATEGORIES if name in sums}


def highest_moments(allocated_bytes: Any, spans: Iterable[tuple[Any, int, int]]) -> dict[Any, int]:
    """By name of spans of moments, which have their first and last, the first moment at which most is allocated."""
    moments: dict[Any, int] = {}
    for name, first, last in spans:
        moment = first + int(np.argmax(allocated_bytes[first : last + 1]))
        if allocated_bytes[moment] > allocated_bytes[moments.setdefault(name, moment)]:
            moments[name] = moment
    return moments
