"""Kernel time by the user's own annotations (`record_function`): the third axis beside kind and part.

A kernel belongs to the innermost annotation around its launch, on the launch's thread or else on the main one, which
waits while autograd's thread works; a kernel whose launch tells none, to the one that the profiler drew around it on
its stream (`gpu_user_annotation`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lmbench.kernels.trace.events import NONE, Flags, Integers
from lmbench.kernels.trace.kernels import Trace
from lmbench.kernels.trace.scopes import innermost, parents

# Ranges of lmbench, of Lightning, of PyTorch's profiler, optimizers, loaders and compiler, and of collectives: what
# they tell is in phases, parts and kinds already.
_NOT_THE_USERS = re.compile(
    r"^(lmbench\.|\[pl\]|ProfilerStep#|PyTorch Profiler|Optimizer\.\w+#|enumerate\(DataLoader\)#"
    r"|## Call CompiledFxGraph |(nccl|gloo|hccl|xccl|ucc|mpi|rccl):)"
)


@dataclass(frozen=True)
class AnnotationTimes:
    """One annotation's kernels over the whole trace: of all of its `calls`, in `own_s` without the annotations inside.

    An annotation within one of the same name counts once.
    """

    name: str
    calls: int
    kernel_s: float
    own_s: float
    instances: int


@dataclass(frozen=True)
class Annotated:
    """The annotations that have kernels, the longest first, and the time of kernels that are in none."""

    rows: list[AnnotationTimes]
    none_s: float


@dataclass(frozen=True)
class _Ranges:
    """The user's ranges in one kind of place (threads, streams), by place, start, the longer first."""

    names: list[str]
    place: Integers
    start_ns: Integers
    end_ns: Integers
    parent: Integers

    def around(self, place: Integers, at_ns: Integers) -> Integers:
        """The innermost range around each moment at its place, NONE if none."""
        return innermost(self.place, self.start_ns, self.end_ns, self.parent, place, at_ns)


def annotation_times(trace: Trace) -> Annotated:
    """Every kernel, copy and fill of the trace, by the annotations around it."""
    kernels, launches, events = trace.kernels, trace.events.launches, trace.events
    host = _users(events.host.names, events.host.thread, events.host.start_ns, events.host.end_ns, events.host.is_range)
    drawn = events.device_ranges
    device = _users(drawn.names, drawn.stream, drawn.start_ns, drawn.end_ns, np.ones(len(drawn.names), dtype=np.bool_))
    around = np.full(len(kernels.names), NONE, dtype=np.int64)
    launched = np.flatnonzero(kernels.launch != NONE)
    if len(launched):
        thread, at = launches.thread[kernels.launch[launched]], launches.start_ns[kernels.launch[launched]]
        own = host.around(thread, at)
        around[launched] = np.where(own != NONE, own, host.around(np.full_like(thread, events.main_thread), at))
    # Behind the host's ranges stand the device's.
    count = len(host.names)
    alone = np.flatnonzero(around == NONE)
    found = device.around(kernels.stream[alone], kernels.start_ns[alone])
    around[alone] = np.where(found != NONE, found + count, NONE)
    parent = np.concatenate((host.parent, np.where(device.parent != NONE, device.parent + count, NONE)))
    return _summed([*host.names, *device.names], parent, around, kernels.duration_ns)


def _users(names: list[str], place: Integers, start_ns: Integers, end_ns: Integers, is_range: Flags) -> _Ranges:
    kept = np.array(
        [index for index in np.flatnonzero(is_range).tolist() if not _NOT_THE_USERS.match(names[index])], dtype=np.int64
    )
    columns = (place[kept], start_ns[kept], end_ns[kept])
    return _Ranges([names[index] for index in kept], *columns, parents(*columns))


def _summed(names: list[str], parent: Integers, around: Integers, duration: Integers) -> Annotated:
    is_in = around != NONE
    own_ns = np.bincount(around[is_in], duration[is_in], len(names))
    total_ns = own_ns.copy()
    count = np.bincount(around[is_in], minlength=len(names))
    # Parents stand before their children.
    for index in reversed(np.flatnonzero(parent != NONE).tolist()):
        total_ns[parent[index]] += total_ns[index]
        count[parent[index]] += count[index]
    by_name: dict[str, list[int]] = defaultdict(list)
    for index in np.flatnonzero(count).tolist():
        by_name[names[index]].append(index)
    rows = []
    for name, members in by_name.items():
        outer = [index for index in members if not _is_within_its_like(index, names, parent)]
        rows.append(
            AnnotationTimes(
                name,
                len(outer),
                float(total_ns[outer].sum()) / 1e9,
                float(own_ns[members].sum()) / 1e9,
                int(count[outer].sum()),
            )
        )
    rows.sort(key=lambda row: (-row.kernel_s, row.name))
    return Annotated(rows, float(duration[~is_in].sum()) / 1e9)


def _is_within_its_like(index: int, names: list[str], parent: Integers) -> bool:
    name = names[index]
    while (index := int(parent[index])) != NONE:
        if names[index] == name:
            return True
    return False
