"""The reasons why devices waited for the host: what the host did meanwhile, in which call and operator or range."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import pandas as pd

from lmbench.code_owners import is_users_function
from lmbench.kernels.clocks import Clocks
from lmbench.kernels.events import each, starting, take, where
from lmbench.kernels.frameworks import COMPILING, find_compiling
from lmbench.kernels.graph import SYNCHRONIZING, call_cause
from lmbench.kernels.host import ENGINE
from lmbench.kernels.names import NAMES, module_path
from lmbench.kernels.trace import Trace
from lmbench.records.intervals import NONE, Integers, covered, cut, locate, paint, union
from lmbench.report.console import shortened
from lmbench.report.units import milliseconds, percent

#: The cause of waits in which the host works towards the next launch: operators, Python between them, launch calls.
LAUNCHING = "launching"
HOST_CODE, DATA = "host code", "data"
_COMPILING, _LOADING, _SLOW, _COPYING = "compiling", "loading", "slow call", "copying"
_LAUNCH = re.compile(r"Launch\w*Kernel|KernelLaunch", re.IGNORECASE)
# Longer waits and calls have a cause of their own. From one launch to the next the host takes tens of us in eager mode,
# and up to 250 us if the profiler records stacks.
_LONG_NS = 300_000
# A text omits the share of a cause's largest part from this share on.
_NEARLY_ALL_FRACTION = 0.95
# The width of the text on where the host was.
_PLACE_WIDTH = 80
_KEYS = ["cause", "call", "under", "phase"]


def find_waits(trace: Trace, clocks: Clocks) -> pd.DataFrame:
    """The reasons why devices waited for the host, the longest first.

    A row has the `cause`, the runtime's `call` (empty outside of calls) and the host's `phase`. `under` has words for
    the operator or range around the call. `wait_s` is per step; `calls` is the number of such events in the trace.
    `at_s` is the time from the trace's first event to the start of the longest wait.

    A wait ends with a kernel. Its time goes to the innermost event on the thread that launched this kernel, or on the
    main thread while that thread did nothing. If a short wait began while the host synchronized or copied, this is its
    cause rather than the launches that followed: nothing else was queued.
    """
    pauses = clocks.pauses
    pauses = pauses[pauses.waited_ns > pauses.start_ns] if len(pauses) else pauses
    if pauses.empty:
        return pd.DataFrame(columns=[*_KEYS, "wait_s", "calls", "at_s"])
    thread = take(trace.kernels.thread, pauses.after.to_numpy(), trace.events.main_thread)
    pauses = pauses.assign(end_ns=pauses.waited_ns, thread=thread)
    waits = name_places(trace, host_pieces(trace, pauses, is_idle=True))
    sums = waits.sort_values("ns", ascending=False).groupby(_KEYS, sort=False).agg(
        wait_s=("ns", "sum"), calls=("event", "nunique"), at_s=("start_ns", "first")
    )  # fmt: skip
    sums = sums.assign(wait_s=sums.wait_s / 1e9 / clocks.steps, at_s=sums.at_s / 1e9)
    return sums.sort_values("wait_s", ascending=False, kind="stable").reset_index()


def host_pieces(trace: Trace, intervals: pd.DataFrame, is_idle: bool = False) -> pd.DataFrame:
    """What the host did in intervals of time: pieces of them, with their `cause` and `phase`.

    Args:
        trace: the trace.
        intervals: `start_ns`, `end_ns`, and the `thread` whose events go before the main thread's; those of one
            `device` do not overlap.
        is_idle: whether the device idled meanwhile: a short interval that began in a synchronize has this cause.

    Returns:
        A row for each piece, with `start_ns`, `ns`, the index of its `interval`, and the `event` that the host was in.
        Whether this is a runtime call is `is_call`; its `name`, `thread` and the `moment` in it.
    """
    main = trace.events.main_thread
    events = _events(trace)
    # An interval that is as long as a launch takes, or longer, has a cause of its own.
    pieces = pd.concat(_pieces(members, events, main) for _, members in intervals.groupby(["device", "thread"]))
    is_long = (intervals.end_ns - intervals.start_ns > _LONG_NS)[pieces.interval].to_numpy()
    event, begun_in, start_ns = pieces.event.to_numpy(), pieces.begun_in.to_numpy(), pieces.start_ns.to_numpy()
    cause, begun_cause = take(events.cause, event, LAUNCHING), take(events.cause, begun_in, LAUNCHING)
    began_blocked = is_idle & ~is_long & (cause == LAUNCHING) & np.isin(begun_cause, (SYNCHRONIZING, _COPYING))
    event, cause = np.where(began_blocked, begun_in, event), np.where(began_blocked, begun_cause, cause)
    loaders = events[starting(events.name, "enumerate(DataLoader)#")]
    loading = union(loaders.start_ns.to_numpy(), loaders.end_ns.to_numpy())
    cause[is_long & (cause == LAUNCHING)] = HOST_CODE
    cause[locate(*find_compiling(trace), start_ns) != NONE] = _COMPILING
    cause[locate(*loading, start_ns) != NONE] = DATA
    is_call = take(events.is_call, event, False) & ~np.isin(cause, (LAUNCHING, HOST_CODE, _COMPILING, DATA))
    return pieces.assign(
        cause=cause,
        event=event,
        call=np.where(is_call, take(events.name, event, ""), ""),
        thread=take(events.thread, event, main),
        moment=np.where(is_call, take(events.start_ns, event, 0), start_ns),
        phase=trace.timeline.at(start_ns),
    )


def name_places(trace: Trace, pieces: pd.DataFrame) -> pd.DataFrame:
    """Pieces of `host_pieces` with `under`: words for the operator, range or function around; empty for launches."""
    is_named = (pieces.cause != LAUNCHING).to_numpy()
    under = np.full(len(pieces), "", dtype=object)
    under[is_named] = _surroundings(
        trace, *(pieces[name].to_numpy()[is_named] for name in ("thread", "moment", "cause"))
    )
    return pieces.assign(under=under)


def largest_causes(waits: pd.DataFrame) -> pd.Series:
    """`wait_s` by cause, the largest first."""
    return waits.groupby("cause").wait_s.sum().sort_values(ascending=False)


def cause_text(waits: pd.DataFrame, cause: str) -> str:
    """Text on what held the host up for one cause: the calls, and the operator, function or range with most of this.

    Its share is told, unless it is nearly all.
    """
    under_s = waits[waits.cause == cause].groupby("under").wait_s.sum()
    largest = under_s.idxmax()
    share = under_s.max() / under_s.sum()
    share_text = f", {percent(share)} of it" if largest and share < _NEARLY_ALL_FRACTION else ""
    if function := _function_of(waits, cause):
        return f"{function}{share_text}"
    return f"{_cause_words(waits, cause)}{share_text} {shortened(largest, _PLACE_WIDTH)}".rstrip()


def remedy(waits: pd.DataFrame, cause: str, is_data: bool = False) -> str:
    """Text on how long devices waited for one cause, and what to do about it; `is_data` in a phase that gets data."""
    wait_s = waits.wait_s[waits.cause == cause].sum()
    function = _function_of(waits, cause)
    advice = "do less there, or in another process" if function else NAMES.causes[cause].remedy
    if is_data and cause in (HOST_CODE, LAUNCHING):
        advice = NAMES.causes[DATA].remedy
    return f"{milliseconds(wait_s)} ms in {function or _cause_words(waits, cause)}; {advice}"


def _function_of(waits: pd.DataFrame, cause: str) -> str:
    """The Python function with most of the time of the host's own code; empty for other causes, or if unknown."""
    under_s = waits[(waits.cause == cause) & (cause == HOST_CODE)].groupby("under").wait_s.sum()
    largest = "" if under_s.empty else under_s.idxmax().removeprefix("in ")
    return largest if is_users_function(largest) else ""


def _cause_words(waits: pd.DataFrame, cause: str) -> str:
    """The words of names.toml for a cause, with the first two calls."""
    calls = waits.call[(waits.cause == cause) & (waits.call != "")].unique()
    return NAMES.causes[cause].words.format(calls=" and ".join(calls[:2]))


def _events(trace: Trace) -> pd.DataFrame:
    """The host's operators, ranges, Python functions and calls, each with the `cause` that a wait in it has."""
    columns = ["name", "thread", "start_ns", "end_ns"]
    linked = trace.kernels[trace.kernels.launch != NONE]
    functions = trace.events.functions
    functions = functions[where(functions.name, lambda name: is_users_function(name) or COMPILING.search(name))]
    host, calls, functions = (
        pd.DataFrame.from_records(rows)[columns] for rows in (trace.events.host, trace.events.calls, functions)
    )
    # A copy that ended before its call returned made the host wait.
    is_blocking = (linked.end_ns <= linked.returned_ns) & (linked.category == "gpu_memcpy")
    is_copied = calls.start_ns.isin(linked.launch_ns[is_blocking])
    # The first launch of a kernel may load its module.
    is_first = calls.start_ns.isin(linked.drop_duplicates("name").launch_ns)
    is_long = calls.end_ns - calls.start_ns > _LONG_NS
    cause = each(calls.name, call_cause)
    is_launch = where(calls.name, _LAUNCH.search)
    tests = {_LOADING: is_long & ((cause == _LOADING) | is_launch & is_first), _COPYING: is_copied, _SLOW: is_long}
    is_named = np.isin(cause, ("allocating", SYNCHRONIZING))
    calls["cause"] = np.select([is_named, *tests.values()], [cause, *tests], LAUNCHING)
    others = pd.concat([host, functions]).assign(is_call=False, cause=LAUNCHING)
    return pd.concat([others, calls.assign(is_call=True)], ignore_index=True)


def _pieces(intervals: pd.DataFrame, events: pd.DataFrame, main: int) -> pd.DataFrame:
    """The intervals of one thread, cut where the host's innermost event changes.

    Each piece has `start_ns`, `ns`, its `interval`, and the `event` that the host was in. `begun_in` is the event in
    which the interval began. Events are indexes, NONE where there is none.
    """
    thread = intervals.thread.iat[0]
    begin, end = intervals.start_ns.to_numpy(), intervals.end_ns.to_numpy()
    within = covered(*union(begin - 1, end))
    events = events[events.thread.isin((thread, main)) & (within(events.end_ns) > within(events.start_ns))]
    # Events of the launching thread go before those of the main thread, and inner events before outer ones.
    events = events.iloc[np.lexsort((-events.end_ns, events.start_ns, events.thread == thread))]
    event_start, event_end, owner = paint(events.start_ns.to_numpy(), events.end_ns.to_numpy(), -np.arange(len(events)))
    owners = events.index.to_numpy()[owner]
    start_ns, end_ns, interval = cut(begin, end, np.append(event_start, event_end))
    columns = {
        "start_ns": start_ns,
        "ns": end_ns - start_ns,
        "event": take(owners, locate(event_start, event_end, start_ns), NONE),
        "begun_in": take(owners, locate(event_start, event_end, begin - 1), NONE)[interval],
        "interval": intervals.index[interval],
    }
    return pd.DataFrame(columns)


def _surroundings(trace: Trace, thread: Integers, moments: Integers, causes: Sequence[str]) -> list[str]:
    """Words on where the host was: `under` an operator or module, and `in` the innermost function or range of the user.

    A function alone names what the host's own code did; loading data and compiling have no other words.
    """
    host, places = trace.host, list[str]()
    main = np.full_like(thread, trace.events.main_thread)
    around = (
        host.nesting.around(thread, moments),
        host.functions.around(main, moments),
        host.users.around(main, moments),
    )
    for cause, event, function, users_range in zip(causes, *around, strict=True):
        words = []
        if event != NONE and cause not in (DATA, _COMPILING) and (cause != HOST_CODE or function == NONE):
            # Of nested ATen operators the outermost is named: the program called it.
            nested = takewhile(lambda index: host.names[index].startswith("aten::"), host.nesting.climb(event))
            name = host.names[[event, *nested][-1]]
            words.append(f"under {module_path(name) or name.removeprefix(ENGINE)}")
        if function != NONE:
            words.append(f"in {host.functions.names[function]}")
        elif users_range != NONE and cause not in (DATA, _COMPILING):
            words.append(f"in {host.users.names[users_range]}")
        places.append(" ".join(words))
    return places
