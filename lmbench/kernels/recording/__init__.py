"""What a recording and its reader agree on: the trace's file, and the notes beside its events."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

TRACE_FILE = "trace.json.gz"
#: The trace's key for the notes.
NOTES = "lmbench"


class GraphNotes(Struct):
    """A compiled graph: each kernel with the paths of the modules it comes from, in the order of launches.

    Library calls are named as Inductor calls them, such as `extern_kernels.mm`.
    """

    kernels: list[tuple[str, list[str]]]


class TraceNotes(Struct):
    """What lmbench notes in a trace: whole steps in it, class by module path, the compiled graphs in order."""

    schema_version: Literal[1] = 1
    steps: int | None = None
    device_type: str | None = None
    module_classes: dict[str, str] = field(default_factory=dict)
    compiled_graphs: list[GraphNotes] = field(default_factory=list)
