"""A trace of torch.profiler, read into columns: what ran on the device, what launched it, what the host did.

The reader takes recordings of torch 2.x on CUDA and ROCm. Anybody may have made the file: its size is limited, and
other files are refused with a message of one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import pandas as pd
from msgspec import Meta, Struct, field

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file
from lmbench.kernels.trace_notes import NOTES, TraceNotes
from lmbench.records.intervals import NONE, Flags

#: A frame of events, numbered from 0. The columns are `name`, `category`, `thread`, `device`, all `arguments`, and
#: `start_ns` and `end_ns` since the first event. The numbers `correlation`, `sequence` and `forward_thread` are NONE
#: where an event has none.
Events: TypeAlias = pd.DataFrame

#: The largest trace that is read, in bytes unpacked: its events take about twice as much memory.
MAX_JSON_BYTES = 1 << 30
#: The advice on how to record a trace, for error messages.
RECORD = "record one with `lmbench fit ... --trainer.profiler kernels`"

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_OPERATOR = "cpu_op"
_HOST = (_OPERATOR, "user_annotation")
# With stacks, the profiler records calls of Python functions. Calls of modules are read, and other functions from this
# time on: shorter ones explain no pause, and a trace may hold millions of them.
_FUNCTION, MODULE_CALL = "python_function", "nn.Module: "
_MIN_FUNCTION_US = 100.0
# Categories of other devices, and of profilers before torch 2.0: a trace with such events is refused.
_UNREAD = re.compile(r"xpu_|privateuse1_|mtia_|hpu_|async_npu$|Kernel$|Runtime$|Operator$")

_LAUNCHING = re.compile(r"Launch\w*Kernel|KernelLaunch|GraphLaunch|Memcpy|Memset", re.IGNORECASE)
# The largest time in us that still fits into 64 bits as ns; microseconds since 1970 are about 2e15.
_MAX_US = 9e15

# Ranges of lmbench, of Lightning, of PyTorch's profiler, modules, optimizers, loaders and compiler, and of collectives.
_TOOL_RANGE = re.compile(
    r"^(lmbench\.|\[pl\]|ProfilerStep#|PyTorch Profiler|nn\.Module: |Optimizer\.\w+#|enumerate\(DataLoader\)#"
    r"|## Call CompiledFxGraph |.*(\bcompile_id=|\(dynamo_timed\)$)|(nccl|gloo|hccl|xccl|ucc|mpi|rccl):)"
)

_Number = Annotated[int, Meta(ge=-(2**62), le=2**62)]


# The names in the file of fields of an event's `args`; those of a collective are in torch/csrc/profiler/util.h.
_NAMES_IN_FILE = {
    "sequence": "Sequence number",
    "forward_thread": "Fwd thread id",
    "collective_name": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "element_type": "dtype",
    "group_name": "Process Group Name",
    "group_ranks": "Process Group Ranks",
    "group_size": "Group size",
    "number": "Seq",
    "source": "Src Rank",
    "target": "Dst Rank",
}


class Arguments(Struct, frozen=True, gc=False, rename=_NAMES_IN_FILE):
    """The fields of an event's `args` that lmbench uses.

    Those of a collective may hold anything in other events. `source` or `target` is the other rank of a point-to-point
    message.
    """

    correlation: _Number = NONE
    device: _Number = 0
    sequence: _Number = NONE
    forward_thread: _Number = NONE
    collective_name: Any = ""
    in_elements: Any = 0
    out_elements: Any = 0
    element_type: Any = ""
    group_name: Any = ""
    group_ranks: Any = ""
    group_size: Any = 0
    number: Any = NONE
    source: Any = None
    target: Any = None


class _Event(Struct, gc=False):
    """The fields of an event that lmbench uses, as in the file; times are in us."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = float("nan")
    dur: float | None = None
    args: Arguments = Arguments()


class Distributed(Struct):
    """The rank that recorded a trace and the number of ranks; None where the trace does not say."""

    rank: int | None = None
    world_size: int | None = None


class _Document(Struct):
    traceEvents: list[_Event]
    distributedInfo: Distributed | None = None
    # Times of events count from here.
    baseTimeNanoseconds: _Number = 0
    notes: TraceNotes = field(name=NOTES, default_factory=TraceNotes)


# Some tools write numbers as text: `strict=False` reads them.
_decoder = msgspec.json.Decoder(_Document, strict=False)


def where(words: Sequence[str], test: Callable[[str], object]) -> Flags:
    """A flag for each word: whether it passes the test, which is made once for each different word."""
    codes, distinct = pd.factorize(np.asarray(words, dtype=object))
    flags: Flags = np.array([bool(test(word)) for word in distinct], dtype=np.bool_)[codes]
    return flags


def starting(words: Sequence[str], beginning: str | tuple[str, ...]) -> Flags:
    """A flag for each word: whether it starts with this, or with one of these."""
    return where(words, lambda word: word.startswith(beginning))


def is_range(events: Events) -> Flags:
    """A flag for each event of the host: whether it is a range rather than an operator."""
    return np.asarray(events.category != _OPERATOR)


def users_ranges(events: Events) -> Events:
    """The user's own ranges among events of the host, without those of lmbench, Lightning and PyTorch."""
    return events[is_range(events) & where(events.name, lambda name: not _TOOL_RANGE.match(name))]


@dataclass(frozen=True)
class TraceEvents:
    """A whole trace of one process.

    `host` has operators and ranges, ordered by thread, then start, then the longer first: parents before children. The
    others are ordered by start: `calls` of the runtime and driver, and `kernels`, copies and fills. A call with
    `is_launch` can start work on the device; one with `is_captured` starts nothing, since its stream was being captured
    into a graph. `functions` are calls of Python functions of 0.1 ms and more, if the profiler recorded stacks.
    `main_thread` is the thread with the most ranges. `origin_ns` is the first event's time on the clock of the machine.
    """

    distributed: Distributed
    host: Events
    calls: Events
    kernels: Events
    functions: Events
    main_thread: int
    origin_ns: int


def read_trace(path: Path, follows_links: bool = True) -> tuple[TraceEvents, TraceNotes]:
    """A trace's events, and the notes that lmbench left beside them.

    Args:
        path: the trace, plain or gzipped.
        follows_links: whether the file may be a symbolic link: yes for a path that the user names, no in a result.

    Raises:
        UsageError: in one line, for a file that is missing, irregular, too large, truncated or no trace; for events of
            wrong types or of unsupported devices; and for a trace of several processes.
    """

    def refuse(reason: str) -> NoReturn:
        raise UsageError(f"{str(path)[:200]!r} {reason}")

    try:
        document = _decoder.decode(read_file(path, MAX_JSON_BYTES, follows_links, unpacks=True))
    except Unreadable as error:
        refuse(f"cannot be read: {error}; {RECORD}, of fewer steps if it is too large")
    except (RecursionError, msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).replace("`", "")
        refuse(
            f"is no trace, or a damaged one: {reason}; give one as torch.profiler wrote it, or a run's folder; "
            "`lmbench list SWEEP` shows those of a sweep"
        )
    if unread := sorted(filter(_UNREAD.match, {event.cat for event in document.traceEvents})):
        refuse(f"has events of {', '.join(unread)}, which are not read; give one of torch 2 on CUDA or ROCm")
    # Events that never ended have no duration. The trace's guards report a launch or kernel that is lost this way.
    finished = [
        event
        for event in document.traceEvents
        if event.ph == "X"
        and event.dur is not None
        and event.dur >= (_MIN_FUNCTION_US if event.cat == _FUNCTION and not event.name.startswith(MODULE_CALL) else 0)
        and event.cat in (*_DEVICE, *_CALLS, *_HOST, _FUNCTION)
    ]
    if all(event.cat in (*_CALLS, _FUNCTION) for event in finished):
        refuse(f"has no operators and no kernels among its {len(document.traceEvents)} events; {RECORD}")
    if len(processes := {event.pid for event in finished if event.cat not in _DEVICE}) > 1:
        refuse(f"holds {len(processes)} processes; give that of one rank")
    start_us, duration_us = np.array([[event.ts for event in finished], [event.dur for event in finished]])
    if not (np.maximum(np.abs(start_us), duration_us) <= _MAX_US).all():
        refuse("is damaged: an event's ts or dur is no time in us; give one as torch.profiler wrote it")
    # Times count from the first event: a 64-bit float cannot hold nanoseconds since 1970.
    start_ns = np.rint((start_us - start_us.min()) * 1e3).astype(np.int64)
    numbers = ("correlation", "device", "sequence", "forward_thread")
    events = pd.DataFrame({
        "name": [event.name for event in finished],
        "category": [event.cat for event in finished],
        "thread": pd.factorize(np.array([str(event.tid) for event in finished], dtype=object))[0],
        "start_ns": start_ns,
        "end_ns": start_ns + np.rint(duration_us * 1e3).astype(np.int64),
        **{name: [getattr(event.args, name) for event in finished] for name in numbers},
        "arguments": [event.args for event in finished],
    })  # fmt: skip
    origin_ns = document.baseTimeNanoseconds + round(start_us.min() * 1e3)
    return _divide(events, document.distributedInfo or Distributed(), origin_ns), document.notes


def _divide(events: pd.DataFrame, distributed: Distributed, origin_ns: int) -> TraceEvents:
    """Events divided into those of the host, calls, kernels and Python functions."""
    on_host = events[events.category.isin((*_HOST, _FUNCTION))]
    on_host = on_host.sort_values(["thread", "start_ns", "end_ns"], ascending=[True, True, False])
    is_function = (on_host.category == _FUNCTION) & ~on_host.name.str.startswith(MODULE_CALL)
    host, functions = (on_host[rows].reset_index(drop=True) for rows in (~is_function, is_function))
    by_start = events.sort_values("start_ns", kind="stable")
    kernels, calls = (by_start[by_start.category.isin(kind)].reset_index(drop=True) for kind in (_DEVICE, _CALLS))
    # A capture lasts until the next call that ends one, or to the end of the trace. All threads launch into it.
    is_begin, is_end = (calls.name.str.contains(f"Stream{word}Capture") for word in ("Begin", "End"))
    is_captured = pd.Series(np.select([is_begin, is_end], [1.0, 0.0], np.nan), calls.index).ffill() == 1.0
    ranges = host.thread[is_range(host)]
    return TraceEvents(
        distributed,
        host,
        calls.assign(is_captured=is_captured, is_launch=where(calls.name, _LAUNCHING.search)),
        kernels.assign(duration_ns=kernels.end_ns - kernels.start_ns),
        functions,
        int(next(iter([*ranges.mode(), *host.thread[:1]]), 0)),
        origin_ns,
    )
