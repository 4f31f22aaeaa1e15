"""Blocks of device memory and their categories: one vocabulary for predictions and recorded histories.

The allocator's history has addresses and stacks, but does not tell what a block is for. lmbench's notes add that: they
list tensors' storages with their addresses at certain moments, which ranges mark in the history.

A frame of blocks has a row for each block: `size_bytes` as the allocator takes it, its `category`, and the moments
`start` (or BEFORE, ahead of the first) and `end`; the block is freed at `end`. Moments number the allocator's events
from 0.
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

#: - parameters: with buffers, such as tables and masks.
#: - gathered: whole blocks of parameters that ranks share, put together on this rank.
#: - buckets: tensors in which gradients are reduced; with DDP's gradient_as_bucket_view they are the gradients.
#: - activations: tensors that the forward leaves for the backward, without the logits.
#: - logits: the input of the loss, and tensors of its size: float32 copy, log-softmax and gradient.
#: - inputs: the batches.
#: - temporaries: gone when the phase that made them is over.
#: - workspaces: the matrix libraries' own, kept from one call to the next.
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

#: The categories in the order of tables.
CATEGORIES: tuple[Category, ...] = get_args(Category)

#: The categories from lasting ones to short-lived ones: the order of a picture from the bottom. A block that is noted
#: under several has the first of them: a saved tensor may be a parameter.
LASTING: tuple[Category, ...] = (
    "parameters", "optimizer_state", "gradients", "gathered", "buckets", "inputs", "workspaces", "unknown", "logits",
    "activations", "temporaries",
)  # fmt: skip

#: The words for each category in a table.
CATEGORY_LABELS: dict[Category, str] = {name: name.replace("_", " ") for name in CATEGORIES}

SNAPSHOT_FILE = "memory_snapshot.pickle"
NOTES_FILE = "memory_notes.json"
#: The name of an empty range that marks a moment, followed by the moment's index in the notes.
MOMENT = "lmbench.memory:"
#: The name of an empty range that marks the start of a module's backward, followed by the module's path.
BACKWARD = "lmbench.backward:"
#: The name of a range in which only the matrix libraries' workspaces are freed.
WORKSPACES = "lmbench.workspaces"

#: Addresses fit into the int64 columns of a snapshot.
_Address = Annotated[int, Meta(ge=0, le=1 << 62)]


class NotedBlock(Struct, array_like=True):
    """A tensor's storage: its address, its category, the path of its module, and the operator that saved it.

    `owner` is empty if the module is unknown, `operator` if the storage was not saved for the backward.
    """

    address: _Address
    category: Category
    owner: str = ""
    operator: str = ""


class CountedPeaks(Struct):
    """The peaks of the allocator's own counters over the recorded steps."""

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int


class MemoryNotes(Struct):
    """lmbench's notes beside a snapshot; `moments` has the storages that were noted at each moment."""

    schema_version: Literal[2] = 2
    device: int = 0
    steps: int = 0
    max_entries: int = 0
    moments: list[list[NotedBlock]] = field(default_factory=list)
    peaks: CountedPeaks | None = None


def read_notes(snapshot: Path) -> MemoryNotes | None:
    """The notes beside a snapshot; None if there are none, as for a snapshot that lmbench did not record.

    Raises:
        UsageError: the notes cannot be read.
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


#: The name, in place of a block of the model, for modules outside of all blocks.
OUTSIDE = "outside of blocks"


def block_of(owner: str) -> str:
    """The path of the outermost indexed module around a module, such as `blocks.3`; OUTSIDE without such a module."""
    match = INDEX.search(owner)
    return owner[: match.end()] if match else OUTSIDE


#: The start of a block that was allocated before the first moment.
BEFORE = -1


def rounded_bytes(size_bytes: int, to_bytes: int = 512) -> int:
    """The size rounded up to a multiple of `to_bytes`; the allocator rounds requests to 512 (kMinBlockSize)."""
    return -(-size_bytes // to_bytes) * to_bytes


def held_bytes(blocks: Any, count: int, column: str = "size_bytes") -> Integers:
    """The sum of a column over the blocks that are held, for each of `count` moments."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.maximum(blocks["start"], 0), blocks[column])
    np.subtract.at(change, blocks["end"], blocks[column])
    return change[:-1].cumsum()


def held_at(blocks: Any, moment: int) -> Any:
    """The blocks that are held at a moment."""
    return blocks[(blocks["start"] <= moment) & (blocks["end"] > moment)]


def by_category(blocks: Any) -> dict[Category, int]:
    """The blocks' bytes by category, without categories that they do not have."""
    sums = blocks.groupby("category")["size_bytes"].sum()
    return {name: int(sums[name]) for name in CATEGORIES if name in sums}


def highest_moments(allocated_bytes: Any, spans: Iterable[tuple[Any, int, int]]) -> dict[Any, int]:
    """The moment of the highest allocation for each name of spans, given as name, first moment and last moment.

    Several spans may have one name. Of equally high moments it is the first.
    """
    moments = dict[Any, int]()
    for name, first, last in spans:
        moment = first + int(np.argmax(allocated_bytes[first : last + 1]))
        if allocated_bytes[moment] > allocated_bytes[moments.setdefault(name, moment)]:
            moments[name] = moment
    return moments
