"""The traces of all ranks in one file on one clock, with a track of the critical path, for Perfetto."""

from __future__ import annotations

import gzip
from io import BytesIO
from typing import Any

import msgspec
import pandas as pd

from lmbench.files import read_file
from lmbench.kernels.events import MAX_JSON_BYTES
from lmbench.kernels.graph import Graph
from lmbench.kernels.names import short_name
from lmbench.kernels.trace import Trace

# Each rank's processes get numbers from here on, times its rank; the path's process is 0.
_RANK_PROCESSES = 1_000


def fused_trace(graph: Graph, pieces: pd.DataFrame) -> bytes:
    """A trace in Chrome's format, gzipped: the events of all ranks, and the `pieces` of the path as a process."""
    packed = BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=4, mtime=0) as file:
        file.write(b'{"traceEvents": [\n')
        file.write(b",\n".join(map(msgspec.json.encode, _path_events(pieces))))
        for rank, trace in graph.traces.items():
            for event in _events_of(trace, rank):
                file.write(b",\n" + msgspec.json.encode(event))
        file.write(b"\n]}\n")
    return packed.getvalue()


def _path_events(pieces: pd.DataFrame) -> list[Any]:
    return [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "critical path"}},
        {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": -1}},
        *({
            "ph": "X", "cat": "path", "name": row["cause"], "pid": 0, "tid": 0, "ts": row["start_ns"] / 1e3,
            "dur": row["ns"] / 1e3, "args": {
                "rank": row["rank"], "phase": row["phase"], "part": row["part"], "name": short_name(row["name"]),
            },
        } for row in pieces.sort_values("start_ns").to_dict("records")),
    ]  # fmt: skip


def _events_of(trace: Trace, rank: int) -> list[Any]:
    """All events of a rank's file, with times on the common clock, and numbers of processes and flows of its own."""
    document = msgspec.json.decode(read_file(trace.path, MAX_JSON_BYTES, True, unpacks=True))
    base_ns = int(document.get("baseTimeNanoseconds", 0))
    later_us = (trace.shift_ns - (trace.events.origin_ns - base_ns)) / 1e3
    numbers = dict[Any, int]()
    for event in document["traceEvents"]:
        event["pid"] = _RANK_PROCESSES * (rank + 1) + numbers.setdefault(event.get("pid"), len(numbers))
        if isinstance(event.get("ts"), int | float):
            event["ts"] += later_us
        if "id" in event:
            event["id"] = f"{rank}:{event['id']}"
        if event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}: {(event.get('args') or {}).get('name', '')}"}
    return list(document["traceEvents"])
