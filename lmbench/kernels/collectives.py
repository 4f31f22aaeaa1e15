"""What ranks tell each other: kind and bytes of every collective, which kernels of several ranks are one, and how much
of their time is waiting for the last rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lmbench.kernels.host import Host
from lmbench.kernels.names import NAMES, reader
from lmbench.kernels.phases import PhaseTimeline
from lmbench.records.intervals import NONE, locate

if TYPE_CHECKING:
    from lmbench.kernels.trace import Trace

#: A message from one rank to one other: which kernels of two ranks belong together no trace tells.
POINT_TO_POINT = "point-to-point"
_kind_of = reader("collectives")
_STAGE = ["group", "stage"]
_INTEGERS = (int, np.integer)


def describe(kernels: pd.DataFrame, host: Host, timeline: PhaseTimeline) -> pd.DataFrame:
    """The kernels with what they do for communication, blank or missing for those of another kind than `comm`.

    `collective` is its kind. `message_bytes` and `bus_bytes` are what algorithm and bus bandwidth are of, as nccl-tests
    define them (NVIDIA/nccl-tests:doc/PERFORMANCE.md): the larger of what a rank sends and receives, and that times
    2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter, all-gather and all-to-all between n ranks. `group` and `stage`
    say between whom and when: the collective's number, or else the step that launched it. `cost_ns` is what it takes
    once the last rank has come, the kernel's duration as far as one trace tells.
    """
    rows = {}
    for kernel in kernels[kernels.kind == "comm"].itertuples():
        around = [*host.nesting.climb(kernel.around)]
        noted = (host.events[event] for event in around if host.events.collective_name[event])
        source: Any = kernel if kernel.collective_name else next(noted, kernel)
        names = [str(source.collective_name), *(host.names[event] for event in around), kernel.name]
        kind = next(filter(None, map(_kind_of, names)), "unknown")
        size, message_bytes = source.group_size, _message_bytes(source)
        share = (size - 1) / size if isinstance(size, _INTEGERS) and size > 1 else np.nan
        bus_bytes = message_bytes * (NAMES["bus_factors"].get(kind, 0) * share or 1.0)
        (step,) = locate(timeline.step_ns[:, 0], timeline.step_ns[:, 1], np.array([kernel.launch_ns]))
        stage = timeline.step_names[step] if source.number == NONE and step != NONE else f"number {source.number}"
        group = f"{source.group_name} {source.group_ranks}"
        rows[kernel.Index] = (kind, message_bytes, bus_bytes, group, stage)
    columns = ["collective", "message_bytes", "bus_bytes", "group", "stage"]
    described = pd.DataFrame.from_dict(rows, orient="index", columns=columns).reindex(kernels.index)
    blank = {"collective": "", "group": "", "stage": ""}
    return pd.concat([kernels, described.fillna(blank)], axis=1).assign(cost_ns=kernels.duration_ns)


def match_collectives(traces: Mapping[int, Trace]) -> tuple[dict[int, Trace], pd.DataFrame]:
    """The traces of several ranks with the true `cost_ns`, and a row for each kernel that is matched: its `rank`, the
    number of its `collective` with `kind`, `phase` and `cost_ns`, its `wait_ns`, `is_last`.

    Kernels of a group are one collective by their order in the step, or by the collective's own number. Where ranks
    have others in a step, as when recording began within it, none of that step's are matched. The shortest kernel is
    the one of the rank that came last: it is the collective's cost, and what the others have more is waiting.
    """
    frames = []
    for rank, trace in traces.items():
        kernels = trace.kernels[trace.kernels.is_counted & ~trace.kernels.collective.isin(("", POINT_TO_POINT))]
        begins_ns = trace.timeline.step_ns[trace.timeline.skipped :, 0]
        is_clocked, place = kernels.launch_ns >= next(iter(begins_ns), 0), kernels.groupby(_STAGE).cumcount()
        frames.append(kernels.assign(rank=rank, place=place, kernel=kernels.index, is_clocked=is_clocked))
    every = pd.concat(frames, ignore_index=True)
    order = every.groupby([*_STAGE, "rank"]).collective.agg(" ".join).groupby(_STAGE)
    is_matched = ((order.nunique() == 1) & (order.size() > 1)).rename("is_matched")
    every = every[every.join(is_matched, on=_STAGE).is_matched.astype(bool)]
    members = every.groupby([*_STAGE, "place"], sort=False)
    every = every.assign(
        cost_ns=members.duration_ns.transform("min"), kind=every.collective, collective=members.ngroup()
    )
    every["wait_ns"] = every.duration_ns - every.cost_ns
    every["is_last"] = every.index.isin(every.groupby("collective").wait_ns.idxmin())
    known = {}
    for rank, trace in traces.items():
        cost_ns = every[every["rank"] == rank].set_index("kernel").cost_ns.combine_first(trace.kernels.cost_ns)
        known[rank] = replace(trace, kernels=trace.kernels.assign(cost_ns=cost_ns))
    return known, every.loc[every.is_clocked, ["rank", "collective", "kind", "phase", "cost_ns", "wait_ns", "is_last"]]


def _message_bytes(source: Any) -> float:
    sizes = [size for size in (source.in_elements, source.out_elements) if isinstance(size, _INTEGERS)]
    return max(sizes, default=0) * NAMES["element_bytes"].get(str(source.element_type), np.nan) or np.nan
