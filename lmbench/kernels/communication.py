"""The collectives and messages that communication kernels run: kind, size, group of ranks and number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lmbench.kernels.host import HostEvents
from lmbench.kernels.names import NAMES, reader
from lmbench.records.intervals import NONE

#: The kind of communication in which one rank sends a message to one other.
POINT_TO_POINT = "point-to-point"
_kind_of = reader("collectives")


class CommunicationKernel(NamedTuple):
    """The collective, or the point-to-point messages, of one kernel.

    - `collective`: its kind.
    - `message_bytes`: the larger of what a rank sends and receives; algorithm bandwidth refers to it. NaN if unknown.
    - `bus_bytes`: `message_bytes` times 2(n-1)/n for all-reduce and times (n-1)/n for reduce-scatter, all-gather and
      all-to-all between n ranks; bus bandwidth refers to it. Both are as nccl-tests define them
      (NVIDIA/nccl-tests:doc/PERFORMANCE.md).
    - `group`: the ranks that take part. Of a point-to-point kernel it has the messages, such as `0>?` from rank 0 to
      the trace's own: one kernel sends all messages that its thread noted since the communication before.
    - `stage`: the collective's number, or else the step that launched it.
    """

    collective: str
    message_bytes: float
    bus_bytes: float
    group: str
    stage: str


def describe_communication(kernels: pd.DataFrame, host: HostEvents) -> pd.DataFrame:
    """The columns of `CommunicationKernel` for all kernels, blank or missing for those of other kinds than `comm`."""
    comm = kernels[kernels.kind == "comm"]
    notes = host.events[host.events.name == "record_param_comms"].sort_values("start_ns")
    launches = comm.reset_index()[["index", "thread", "launch_ns"]].sort_values("launch_ns")
    notes = pd.merge_asof(
        notes, launches, left_on="start_ns", right_on="launch_ns", by="thread", direction="forward"
    ).groupby("index").arguments.agg(list)  # fmt: skip
    rows = [communication_of(kernel, notes.get(kernel.Index, []), host) for kernel in comm.itertuples()]
    frame = pd.DataFrame(rows, comm.index, CommunicationKernel._fields).reindex(kernels.index)
    return frame.fillna({"collective": "", "group": "", "stage": ""})


def communication_of(kernel: Any, notes: Sequence[Any], host: HostEvents) -> CommunicationKernel:
    """The collective of a communication kernel; `notes` are those of its thread since the communication before."""
    around = [*host.nesting.climb(kernel.around)]
    # Some profilers note the message on the operator alone.
    candidates = [kernel.arguments, *host.events.arguments[around]]
    note = next((arguments for arguments in candidates if arguments.collective_name), kernel.arguments)
    names = [str(note.collective_name), *host.events.name[around], kernel.name]
    kind = next(filter(None, map(_kind_of, names)), "unknown")
    if kind == POINT_TO_POINT:
        sent = [message for message in notes if message.source != message.target] or [note]
        out = sum(_elements(message) for message in sent if message.target is not None)
        into = sum(_elements(message) for message in sent if message.target is None)
        message_bytes = max(out, into) * _element_bytes(sent[0])
        # Each rank numbers these messages by itself, so their numbers do not match.
        messages = {f"{message.source}>{message.target}".replace("None", "?") for message in sent}
        stage = kernel.step or f"number {NONE}"
        return CommunicationKernel(kind, message_bytes, message_bytes, " ".join(messages), stage)
    message_bytes = _elements(note) * _element_bytes(note) or np.nan
    size = note.group_size
    bus_factor = bus_factor_of(kind, size if isinstance(size, int) else 0)
    stage = kernel.step if note.number == NONE and kernel.step else f"number {note.number}"
    group = f"{note.group_name} {note.group_ranks}"
    return CommunicationKernel(kind, message_bytes, message_bytes * bus_factor, group, stage)


def bus_factor_of(kind: str, size: int) -> float:
    """The ratio of bus bytes to message bytes for a collective between `size` ranks; NaN between fewer than two."""
    if kind not in NAMES.bus_factors:
        return 1.0
    return NAMES.bus_factors[kind] * (size - 1) / size if size > 1 else np.nan


def _elements(note: Any) -> int:
    return max((number for number in (note.in_elements, note.out_elements) if isinstance(number, int)), default=0)


def _element_bytes(note: Any) -> float:
    return NAMES.element_bytes.get(str(note.element_type), np.nan)
