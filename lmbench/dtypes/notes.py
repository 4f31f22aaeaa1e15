"""What a recording of dtypes leaves beside run.json as dtypes.json: every module, its calls and its operators."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

from lmbench.errors import UsageError
from lmbench.records.codec import indented_json

DTYPES_FILE = "dtypes.json"


class NotedOperator(Struct):
    """Calls of an operator that are alike: dtypes of the tensors that the code gave it, of its result, and why."""

    name: str
    count: int
    inputs: list[str]
    output: str
    reason: str


class NotedCall(Struct):
    """Calls of a module that are alike: dtypes of the tensors it got, returned, and whose gradients came back."""

    count: int
    inputs: list[str]
    outputs: list[str]
    gradients: list[str] = field(default_factory=list)


class NotedModule(Struct):
    """A module by its path: its parameters and buffers, how it was called, and the operators that its own code called.

    The path of the step's own code, which runs in no module, is empty.
    """

    path: str
    class_name: str
    reason: str
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    calls: list[NotedCall] = field(default_factory=list)
    operators: list[NotedOperator] = field(default_factory=list)


class DtypeNotes(Struct):
    """The content of dtypes.json."""

    schema_version: Literal[2] = 2
    torch: str = ""
    device_type: str = ""
    modules: list[NotedModule] = field(default_factory=list)


def write_notes(notes: DtypeNotes, folder: Path) -> None:
    """Write the notes into a result folder. Raises OSError."""
    (folder / DTYPES_FILE).write_bytes(indented_json(notes).encode())


def read_notes(folder: Path) -> DtypeNotes:
    """Read the notes of a result folder.

    Raises:
        UsageError: there are none, or they cannot be read.
    """
    path = folder / DTYPES_FILE
    again = "record it again with --dtypes.record true"
    try:
        return msgspec.json.decode(path.read_bytes(), type=DtypeNotes)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; {again}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is damaged: {error}; {again}") from None


def in_words(dtypes: Iterable[str]) -> str:
    """Dtypes in their order, neighbours that are alike together: `float32 x 3, int64`."""
    runs = [(dtype, len(list(same))) for dtype, same in groupby(dtypes)]
    return ", ".join(dtype if count == 1 else f"{dtype} x {count}" for dtype, count in runs)


def tally(dtypes: dict[str, int]) -> str:
    """Dtypes with how many tensors have each; one dtype alone needs no number."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{dtype} ({count})" for dtype, count in dtypes.items()) or "none"
