"""The format that a recording and its reader share: the trace's file name, and the notes beside its events."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

TRACE_FILE = "trace.json.gz"
#: The key of the notes in the trace's JSON.
NOTES = "lmbench"


class GraphNotes(Struct):
    """A compiled graph: the name of each kernel with the paths of the modules it comes from, in the order of launches.

    Library calls have Inductor's name for them, such as `extern_kernels.mm`.
    """

    kernels: list[tuple[str, list[str]]]


class TraceNotes(Struct):
    """lmbench's notes in a trace: its number of whole steps, class names by module path, compiled graphs in order."""

    schema_version: Literal[1] = 1
    steps: int | None = None
    module_classes: dict[str, str] = field(default_factory=dict)
    compiled_graphs: list[GraphNotes] = field(default_factory=list)
