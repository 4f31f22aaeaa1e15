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
from lmbench.kernels.events import is_range, starting, where
from lmbench.kernels.frameworks import COMPILING, find_compiling
from lmbench.kernels.host import ENGINE
from lmbench.kernels.links import SYNCHRONIZING, call_cause, moment_times
from lmbench.kernels.names import NAMES, kind_of, module_path
from lmbench.kernels.trace import OUTSIDE, Trace
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
    `kind`, `part`, `name` (of a kernel, call or operator), and the `launch` that the link's target is or comes from. A
    kernel has `bus_bytes`. The cause of a kernel is its kind, that of a collective `exposed` and its name. `around` is
    the event of the host around the piece, or around the kernel's launch. The host's pieces have the `event` that the
    host was in, its `thread`, and the `moment` in it on the trace's own clock.
    """
    owners = activities[["rank", "thread", "launch", "kernel"]].iloc[links.target // 2].set_axis(links.index)
    rows = pd.concat([links.rename(columns={"kind": "link_kind"}), owners], axis=1).assign(
        link=links.index, start_ns=moment_times(activities)[links.target] - links.ns
    )
    groups = rows[~rows.link_kind.isin(("join", "end"))].groupby([rows["rank"], rows.link_kind.isin(_HOST)])
    pieces = pd.concat([
        (_host_pieces if is_host else _device_pieces)(traces[rank], rows) for (rank, is_host), rows in groups
    ], ignore_index=True)  # fmt: skip
    # Comparisons of categories take a tenth of the time of those of words.
    words = dict.fromkeys(("link_kind", "cause", "phase", "kind", "part"), "category")
    return pieces[pieces.ns > 0].reset_index(drop=True).fillna({"around": NONE, "event": NONE}).astype(words)


def _device_pieces(trace: Trace, links: pd.DataFrame) -> pd.DataFrame:
    """Links of kernels, and the time in which nothing explains why they waited as pieces of their own."""
    columns = ["link", "link_kind", "rank", "launch", "start_ns", "ns"]
    kernels = trace.kernels.loc[links.kernel, _KERNEL].set_axis(links.index)
    of_kernel = kernels.kind.where(kernels.kind != "comm", "exposed " + kernels.collective)
    cause = np.select([links.link_kind == "kernel", links.link_kind == "launch"], [of_kernel, LAUNCHING], GAPS)
    explained_ns = links.ns - links.unexplained_ns
    pieces = pd.concat([links[columns], kernels], axis=1).assign(ns=explained_ns, cause=cause)
    hidden = pieces.assign(
        start_ns=pieces.start_ns + explained_ns, ns=links.unexplained_ns, cause=UNEXPLAINED
    )  # fmt: skip
    return pd.concat([pieces, hidden])


def _host_pieces(trace: Trace, links: pd.DataFrame) -> pd.DataFrame:
    """Links of the host, cut where its innermost event changes or a phase begins.

    Events of the thread that launches go before the main thread's.
    """
    main, events = trace.events.main_thread, _events(trace)
    links = links.assign(start_ns=links.start_ns - trace.shift_ns)
    groups = links.groupby(["link_kind", "thread"])
    pieces = pd.concat([_cut(rows, events, trace) for _, rows in groups], ignore_index=True)
    event, start_ns, timeline = pieces.event.to_numpy(), pieces.start_ns.to_numpy(), trace.timeline
    cause, phase = take(events.cause, event, LAUNCHING), locate(timeline.start_ns, timeline.end_ns, start_ns)
    loaders = events[starting(events.name, "enumerate(DataLoader)#")]
    loading = union(loaders.start_ns.to_numpy(), loaders.end_ns.to_numpy())
    # A link that is as long as a launch takes, or longer, has a cause of its own.
    cause[(pieces.link_ns > LONG_NS) & (cause == LAUNCHING)] = HOST_CODE
    cause[locate(*find_compiling(trace), start_ns) != NONE] = _COMPILING
    cause[locate(*loading, start_ns) != NONE] = DATA
    cause[pieces.link_kind == "queue"] = SYNCHRONIZING
    # On the way to one launch, launching in one phase is one piece, that of its last event.
    is_launching = (cause == LAUNCHING) & (len(trace.kernels) > 0)
    is_same = is_launching[1:] & is_launching[:-1] & (np.diff(pieces.link) == 0) & (np.diff(phase) == 0)
    is_first, is_last = (np.append(*flags)[: len(pieces)] for flags in ((True, ~is_same), (~is_same, True)))
    ns = pieces.ns.groupby(np.cumsum(is_first)).sum().to_numpy()
    event, inside_ns, start_ns, cause = event[is_last], start_ns[is_last], start_ns[is_first], cause[is_first]
    is_call = take(events.is_call, event, False) & ~np.isin(cause, (LAUNCHING, HOST_CODE, _COMPILING, DATA))
    thread = take(events.thread, event, main)
    pieces = pieces[is_first].assign(
        ns=ns, cause=cause, phase=take(timeline.phases, phase[is_first], OUTSIDE), kind="", part="", thread=thread,
        name=np.where(is_call, take(events.name, event, ""), ""),
        moment=np.where(is_call, take(events.start_ns, event, 0), start_ns),
        around=trace.host.nesting.around(thread, inside_ns), start_ns=start_ns + trace.shift_ns,
    )  # fmt: skip
    return pieces if len(trace.kernels) else _computing(trace, pieces)


def _computing(trace: Trace, pieces: pd.DataFrame) -> pd.DataFrame:
    """Pieces of a trace of a CPU, on which operators compute: with `kind` and `part`, and the kind as `cause`."""
    around = pieces.around.to_numpy()
    is_operator = ~take(is_range(trace.host.events), around, True) & (pieces.cause != DATA).to_numpy()
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
    others = pd.concat([trace.events.host[columns], functions[columns]]).assign(is_call=False, cause=LAUNCHING)
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
    return pd.concat([others, calls], ignore_index=True)


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
    event = take(events.index.to_numpy()[owner], locate(event_start, event_end, start_ns), NONE)
    columns = ["link", "link_kind", "rank", "launch", "link_ns"]
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
    host, words = trace.host, list[str]()
    thread, moments = (pieces[name].to_numpy(np.int64) for name in ("thread", "moment"))
    main = np.full_like(thread, trace.events.main_thread)
    around = (
        host.nesting.around(thread, moments), host.functions.around(main, moments), host.users.around(main, moments)
    )  # fmt: skip
    for cause, event, function, users_range in zip(pieces.cause.tolist(), *around, strict=True):
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
