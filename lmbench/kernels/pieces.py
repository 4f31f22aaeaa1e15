"""What the links of the graph stand for: what the host did in them, by the events of the trace, or which kernel ran.

Every reading of the graph uses these pieces: the critical path, the idle time of devices, and what-ifs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile

import numpy as np
import pandas as pd

from lmbench.code_owners import is_users_function
from lmbench.kernels.events import starting, where
from lmbench.kernels.frameworks import COMPILING, find_compiling
from lmbench.kernels.host import ENGINE
from lmbench.kernels.links import SYNCHRONIZING, call_cause, moment_times
from lmbench.kernels.names import NAMES, kind_of, module_path
from lmbench.kernels.trace import Trace
from lmbench.records.intervals import NONE, covered, cut, locate, paint, take, union

# Links in which the host does something. Those of one kind and thread do not overlap.
_HOST = ("program", "call", "return", "queue")
#: The cause of time in which the host works towards the next launch: operators, Python between them, launch calls.
LAUNCHING = "launching"
#: Other code of the host; the DataLoader.
HOST_CODE, DATA = "host code", "data"
_COMPILING, _LOADING, _SLOW, _COPYING = "compiling", "loading", "slow call", "copying"
#: Causes of time on the device beside kinds of kernels and collectives.
GAPS, UNEXPLAINED = "short gaps", "unexplained"
_LAUNCH = re.compile(r"Launch\w*Kernel|KernelLaunch", re.IGNORECASE)
#: Longer waits and calls have a cause of their own. From one launch to the next the host takes tens of us in eager
#: mode, and up to 250 us if the profiler records stacks.
LONG_NS = 300_000
_KERNEL = ["name", "kind", "part", "phase", "collective", "bus_bytes", "around"]


def link_pieces(traces: Mapping[int, Trace], activities: pd.DataFrame, links: pd.DataFrame) -> pd.DataFrame:
    """What all links stand for: a row for each piece of one cause.

    Columns are the `link`, its `link_kind` and `rank`, `start_ns` on the clock of all ranks, `ns`, `cause`, `phase`,
    `kind`, `part`, `name` (of a kernel, call or operator), the `launch` that the link's target is or comes from, and
    whether the target `is_inside` the clocked steps. A kernel has `bus_bytes`. The cause of a kernel is its kind, that
    of a collective `exposed` and its name. `around` is the event of the host around the piece, or around the kernel's
    launch. The host's pieces have the `event` that the host was in, its `thread`, and a `moment` in it on the trace's
    own clock.
    """
    rows = links.rename(columns={"kind": "link_kind"}).assign(
        link=links.index, owner=links.target // 2, start_ns=moment_times(activities)[links.target] - links.ns
    ).join(activities[["rank", "thread", "launch", "kernel", "is_inside"]], on="owner")  # fmt: skip
    groups = rows[~rows.link_kind.isin(("join", "end"))].groupby([rows["rank"], rows.link_kind.isin(_HOST)])
    pieces = pd.concat([
        (_host_pieces if is_host else _device_pieces)(traces[rank], rows) for (rank, is_host), rows in groups
    ], ignore_index=True)  # fmt: skip
    # Comparisons of categories take a tenth of the time of those of words.
    words = dict.fromkeys(("link_kind", "cause", "phase", "kind", "part"), "category")
    return pieces[pieces.ns > 0].reset_index(drop=True).fillna({"around": NONE, "event": NONE}).astype(words)


def _device_pieces(trace: Trace, links: pd.DataFrame) -> pd.DataFrame:
    """Links of kernels, and the time in which nothing explains why they waited as pieces of their own."""
    pieces = links.drop(columns="thread").join(trace.kernels[_KERNEL], on="kernel")
    of_kernel = pieces.kind.where(pieces.kind != "comm", "exposed " + pieces.collective)
    kind, explained_ns = pieces.link_kind, pieces.ns - pieces.unexplained_ns
    cause = np.select([kind == "kernel", kind == "launch"], [of_kernel, LAUNCHING], GAPS)
    hidden = pieces.assign(start_ns=pieces.start_ns + explained_ns, ns=pieces.unexplained_ns, cause=UNEXPLAINED)
    return pd.concat([pieces.assign(ns=explained_ns, cause=cause), hidden])


def _host_pieces(trace: Trace, links: pd.DataFrame) -> pd.DataFrame:
    """Links of the host, cut where its innermost event changes or a phase begins.

    Events of the thread that launches go before the main thread's.
    """
    events, timeline = _events(trace), trace.timeline
    links = links.assign(start_ns=links.start_ns - trace.shift_ns)
    groups = links.groupby(["link_kind", "thread"])
    pieces = pd.concat([_cut(rows, events, trace) for _, rows in groups], ignore_index=True)
    pieces = pieces.join(events[["name", "thread", "is_call", "cause"]], on="event")
    moment = pieces.start_ns.to_numpy()
    loaders = events[starting(events.name, "enumerate(DataLoader)#")]
    loading = union(loaders.start_ns.to_numpy(), loaders.end_ns.to_numpy())
    causes = {
        SYNCHRONIZING: pieces.link_kind == "queue",
        DATA: locate(*loading, moment) != NONE,
        _COMPILING: locate(*find_compiling(trace), moment) != NONE,
        # A link that is as long as a launch takes, or longer, has a cause of its own.
        HOST_CODE: (pieces.link_ns > LONG_NS) & (pieces.cause == LAUNCHING),
    }
    pieces["cause"] = np.select([*causes.values()], [*causes], pieces.cause)
    pieces["phase"] = locate(timeline.start_ns, timeline.end_ns, moment)
    # On the way to one launch, launching in one phase is one piece: it begins in its first event, and its last is told.
    is_launching = (pieces.cause == LAUNCHING) & (len(trace.kernels) > 0)
    is_same = is_launching & is_launching.shift(fill_value=False) & (pieces[["link", "phase"]].diff() == 0).all(axis=1)
    groups = pieces.assign(moment=moment).groupby((~is_same).cumsum())
    first = groups[["start_ns", "event"]].first()
    pieces = groups.last().assign(ns=groups.ns.sum(), start_ns=first.start_ns + trace.shift_ns, event=first.event)
    is_call = pieces.is_call & ~pieces.cause.isin((LAUNCHING, HOST_CODE, _COMPILING, DATA))
    pieces = pieces.assign(
        phase=timeline.phases[pieces.phase], kind="", part="", bus_bytes=np.nan,
        name=pieces.name.where(is_call, ""), around=trace.host.nesting.around(pieces.thread, pieces.moment),
    )  # fmt: skip
    return pieces if len(trace.kernels) else _computing(trace, pieces)


def _computing(trace: Trace, pieces: pd.DataFrame) -> pd.DataFrame:
    """Pieces of a trace of a CPU, on which operators compute: with `kind` and `part`, and the kind as `cause`."""
    around = pieces.around.to_numpy()
    is_operator = ~take(trace.host.is_module, around, True) & (pieces.cause != DATA).to_numpy()
    names = take(trace.host.names, around, "")
    kinds = np.where(is_operator, [kind_of("", operator=name) for name in names], "")
    parts = [
        NAMES.phase_parts.get(phase) or trace.host.part(event) or ""
        for event, phase in zip(around.tolist(), pieces.phase, strict=True)
    ]
    cause = np.where(is_operator, kinds, np.where(pieces.cause == LAUNCHING, HOST_CODE, pieces.cause))
    return pieces.assign(kind=kinds, part=parts, name=names, cause=cause)


def _events(trace: Trace) -> pd.DataFrame:
    """The host's operators, ranges, Python functions and calls, each with the `cause` that time in it has."""
    columns = ["name", "thread", "start_ns", "end_ns"]
    functions = trace.events.functions
    functions = functions[where(functions.name, lambda name: is_users_function(name) or COMPILING.search(name))]
    # The time in no event is that of an event without a name, whose index is NONE.
    nothing = pd.DataFrame({"name": "", "thread": trace.events.main_thread, "start_ns": 0, "end_ns": 0}, [0])
    others = pd.concat([nothing, trace.events.host[columns], functions[columns]]).assign(is_call=False, cause=LAUNCHING)
    calls = trace.events.calls[columns].assign(is_call=True)
    is_copied = calls.index.isin(trace.kernels.launch[trace.kernels.is_awaited])
    # The first launch of a kernel may load its module.
    is_first = calls.index.isin(trace.kernels.drop_duplicates("name").launch)
    is_long = calls.end_ns - calls.start_ns > LONG_NS
    cause = calls.name.map(call_cause)
    is_launch = where(calls.name, _LAUNCH.search)
    tests = {_LOADING: is_long & ((cause == _LOADING) | is_launch & is_first), _COPYING: is_copied, _SLOW: is_long}
    is_named = np.isin(cause, ("allocating", SYNCHRONIZING))
    calls["cause"] = np.select([is_named, *tests.values()], [cause, *tests], LAUNCHING)
    events = pd.concat([others, calls], ignore_index=True)
    return events.set_axis(events.index + NONE)


def _cut(links: pd.DataFrame, events: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    """The links of one kind and thread, in pieces with `start_ns`, `ns`, the `event` that the host was in, or NONE."""
    thread = links.thread.iat[0]
    links = links[links.ns > 0].assign(link_ns=lambda rows: rows.ns).sort_values("start_ns")
    begin = links.start_ns.to_numpy()
    end = begin + links.ns.to_numpy()
    within = covered(*union(begin, end))
    events = events[
        events.thread.isin((thread, trace.events.main_thread)) & (within(events.end_ns) > within(events.start_ns))
    ]
    # Events of the launching thread go before those of the main thread, and inner events before outer ones.
    events = events.iloc[np.lexsort((-events.end_ns, events.start_ns, events.thread == thread))]
    event_start, event_end, owner = paint(events.start_ns.to_numpy(), events.end_ns.to_numpy(), -np.arange(len(events)))
    borders = np.concatenate((event_start, event_end, trace.timeline.start_ns, trace.timeline.end_ns))
    start_ns, end_ns, row = cut(begin, end, borders)
    event = np.append(events.index[owner], NONE)[locate(event_start, event_end, start_ns)]
    columns = ["link", "link_kind", "rank", "launch", "is_inside", "link_ns"]
    return links[columns].iloc[row].assign(start_ns=start_ns, ns=end_ns - start_ns, event=event)


def places(traces: Mapping[int, Trace], pieces: pd.DataFrame) -> pd.Series:
    """Words on where the host was in its pieces: `under` an operator or module, `in` a function or range of the user.

    They are the innermost ones. A function alone names what the host's own code did; loading data and compiling have no
    other words. Launching has none.
    """
    words = pd.Series("", pieces.index, dtype=object)
    for rank, rows in pieces[(pieces.event != NONE) & (pieces.cause != LAUNCHING)].groupby("rank"):
        words[rows.index] = _places(traces[rank], rows)
    return words


def _places(trace: Trace, pieces: pd.DataFrame) -> list[str]:
    """The words of `places` for pieces of one rank."""
    host, main, moments = trace.host, trace.events.main_thread, pieces.moment.astype(int)
    functions, users = (nesting.around(main, moments) for nesting in (host.functions, host.users))
    around, words = pieces.around.astype(int), list[str]()
    for cause, event, function, users_range in zip(pieces.cause, around, functions, users, strict=True):
        place = list[str]()
        if event != NONE and cause not in (DATA, _COMPILING) and (cause != HOST_CODE or function == NONE):
            # Of nested ATen operators the outermost is named: the program called it.
            nested = takewhile(lambda index: host.names[index].startswith("aten::"), host.nesting.climb(event))
            name = host.names[[event, *nested][-1]]
            place.append(f"under {module_path(name) or name.removeprefix(ENGINE)}")
        if function != NONE:
            place.append(f"in {host.functions.names[function]}")
        elif users_range != NONE and cause not in (DATA, _COMPILING):
            place.append(f"in {host.users.names[users_range]}")
        words.append(" ".join(place))
    return words
