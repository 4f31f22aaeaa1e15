"""What a recording of dtypes leaves beside run.json, and its reader agrees on: every module, call and operator."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

from lmbench.errors import UsageError
from lmbench.records.codec import indented_json

DTYPES_FILE = "dtypes.json"

#: What autocast does to an operator: runs it in its lower precision, in float32, in the widest dtype of its inputs, or
#: refuses it. `none` is an operator in no list; `off` one that ran without autocast; `unknown` one whose list could
#: not be asked for.
Rule = Literal["lower", "float32", "widest", "refused", "none", "off", "unknown"]


class NotedOperator(Struct):
    """Calls of an operator that are alike: dtypes of the tensors it was given, of what it was run on, and of what it
    gives (null where that could not be asked); `within` is the operator that it is a part of.

    `cast` says that the code asked for another dtype, and `gives` which.
    """

    name: str
    count: int
    inputs: list[str]
    ran_on: list[str]
    gives: str | None
    rule: Rule
    reason: str
    within: str | None = None
    is_cast: bool = False


class NotedCall(Struct):
    """Calls of a module that are alike: dtypes of the tensors it got, returned, and whose gradients came back."""

    count: int
    inputs: list[str]
    outputs: list[str]
    gradients: list[str] = field(default_factory=list)


class NotedModule(Struct):
    """A module by its path: its own parameters and buffers, how it was called, and the operators it called itself.

    The path of what runs in no module is empty: the code of the step.
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

    schema_version: Literal[1] = 1
    torch: str = ""
    device_type: str = ""
    modules: list[NotedModule] = field(default_factory=list)


def write_notes(notes: DtypeNotes, folder: Path) -> None:
    """Into the result folder. Raises OSError."""
    (folder / DTYPES_FILE).write_bytes(indented_json(notes).encode())


def read_notes(folder: Path) -> DtypeNotes:
    """Of a result folder.

    Raises:
        UsageError: they are not there, or cannot be read.
    """
    path = folder / DTYPES_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=DtypeNotes)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; record it again with --dtypes.record true"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}); record it again with --dtypes.record true") from None
