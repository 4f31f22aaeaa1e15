"""The reasons why devices waited for the host: what the host did meanwhile, in which call and operator or range."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from lmbench.kernels.clocks import Clocks
from lmbench.kernels.events import each, where
from lmbench.kernels.host import ENGINE, settled
from lmbench.kernels.names import NAMES, module_path, reader
from lmbench.kernels.trace import Trace
from lmbench.records.intervals import NONE, covered, cut, locate, paint, union
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import milliseconds, percent

#: The cause of waits in which the host works towards the next launch: operators, Python between them, launch calls.
LAUNCHING = "launching"
_HOST_CODE, _DATA, _LOADING, _SLOW, _COPYING = "host code", "data", "loading", "slow call", "copying"
_call_cause = reader("calls")
_LAUNCH = re.compile(r"Launch\w*Kernel|KernelLaunch", re.IGNORECASE)
# Longer waits and calls have a cause of their own. From one launch to the next the host takes tens of us in eager mode,
# and up to 250 us if the profiler records stacks.
_LONG_NS = 300_000
# A text omits the share of a cause's largest part from this share on.
_NEARLY_ALL_FRACTION = 0.95
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
    main = trace.events.main_thread
    # A pause behind the last kernel has `after` NONE (-1), which reads the appended main thread.
    pauses = pauses.assign(thread=np.append(trace.kernels.thread, main)[pauses.after])
    events = _events(trace)
    waits = pd.concat(_pieces(members, events, main) for _, members in pauses.groupby(["device", "thread"]))
    is_long = (pauses.waited_ns - pauses.start_ns > _LONG_NS)[waits.pause].to_numpy()
    causes = events.cause.to_numpy()
    began_blocked = (causes[waits.event] == LAUNCHING) & np.isin(causes[waits.begun_in], ("synchronizing", _COPYING))
    index = np.where(began_blocked & ~is_long, waits.begun_in, waits.event)
    event = events.iloc[index].reset_index(drop=True)
    start_ns = waits.start_ns.to_numpy()
    loaders = events[where(events.name, lambda name: name.startswith("enumerate(DataLoader)#"))]
    loading = union(loaders.start_ns.to_numpy(), loaders.end_ns.to_numpy())
    is_host_code = is_long & (event.cause == LAUNCHING)
    cause = np.select([locate(*loading, start_ns) != NONE, is_host_code], [_DATA, _HOST_CODE], event.cause)
    is_call = event.is_call & ~np.isin(cause, (LAUNCHING, _HOST_CODE, _DATA))
    under = _surroundings(trace, event.thread.to_numpy(), np.where(is_call, event.start_ns, start_ns))
    waits = waits.assign(
        cause=cause,
        call=np.where(is_call, event.name, ""),
        event=index,
        under=np.where(np.isin(cause, (LAUNCHING, _DATA)), "", under),
        phase=trace.timeline.at(start_ns),
    ).sort_values("wait_ns", ascending=False)
    sums = waits.groupby(_KEYS, sort=False).agg(
        wait_s=("wait_ns", "sum"), calls=("event", "nunique"), at_s=("start_ns", "first")
    )
    sums = sums.assign(wait_s=sums.wait_s / 1e9 / clocks.steps, at_s=sums.at_s / 1e9)
    return sums.sort_values("wait_s", ascending=False, kind="stable").reset_index()


def largest_causes(waits: pd.DataFrame) -> pd.Series:
    """`wait_s` by cause, the largest first."""
    return waits.groupby("cause").wait_s.sum().sort_values(ascending=False)


def cause_text(waits: pd.DataFrame, cause: str) -> str:
    """Text on what held the host up for one cause: the calls, and the operator or range with the most of this time.

    Its share is told, unless it is nearly all.
    """
    under_s = waits[waits.cause == cause].groupby("under").wait_s.sum()
    largest = shortened(under_s.idxmax(), KERNEL_WIDTH)
    share = under_s.max() / under_s.sum()
    share_text = f", {percent(share)} of it" if largest and share < _NEARLY_ALL_FRACTION else ""
    return f"{_cause_words(waits, cause)}{share_text} {largest}".rstrip()


def remedy(waits: pd.DataFrame, cause: str) -> str:
    """Text on how long devices waited for one cause, and what to do about it."""
    wait_s = waits.wait_s[waits.cause == cause].sum()
    return f"{milliseconds(wait_s)} ms in {_cause_words(waits, cause)}; {NAMES['causes'][cause][1]}"


def _cause_words(waits: pd.DataFrame, cause: str) -> str:
    """The words of names.toml for a cause, with the first two calls."""
    calls = waits.call[(waits.cause == cause) & (waits.call != "")].unique()
    words: str = NAMES["causes"][cause][0]
    return words.format(calls=" and ".join(calls[:2]))


def _events(trace: Trace) -> pd.DataFrame:
    """The host's operators, ranges and calls, each with the `cause` that a wait in it has.

    The last row is an event without a name, which the index NONE (-1) reads.
    """
    columns = ["name", "thread", "start_ns", "end_ns"]
    linked = trace.kernels[trace.kernels.launch != NONE]
    host, calls = (pd.DataFrame.from_records(rows)[columns] for rows in (trace.events.host, trace.events.calls))
    # A copy that ended before its call returned made the host wait.
    is_blocking = (linked.end_ns <= linked.returned_ns) & (linked.kind == "memcpy")
    is_copied = calls.start_ns.isin(linked.launch_ns[is_blocking])
    # The first launch of a kernel may load its module.
    is_first = calls.start_ns.isin(linked.drop_duplicates("name").launch_ns)
    is_long = calls.end_ns - calls.start_ns > _LONG_NS
    cause = each(calls.name, _call_cause)
    is_launch = where(calls.name, _LAUNCH.search)
    tests = {_LOADING: is_long & ((cause == _LOADING) | is_launch & is_first), _COPYING: is_copied, _SLOW: is_long}
    is_named = np.isin(cause, ("allocating", "synchronizing"))
    calls["cause"] = np.select([is_named, *tests.values()], [cause, *tests], LAUNCHING)
    nothing = pd.DataFrame({"name": "", "thread": trace.events.main_thread, "start_ns": 0, "end_ns": 0}, index=[0])
    events = [host.assign(is_call=False), calls.assign(is_call=True), nothing.assign(is_call=False)]
    return pd.concat(events, ignore_index=True).fillna({"cause": LAUNCHING})


def _pieces(pauses: pd.DataFrame, events: pd.DataFrame, main: int) -> pd.DataFrame:
    """The waits of one device for one thread, cut where the host's innermost event changes.

    Each piece has `start_ns`, `wait_ns`, its `pause`, and the `event` that the host was in. `begun_in` is the event in
    which the pause began. Events are indexes, NONE where there is none.
    """
    thread = pauses.thread.iat[0]
    begin = pauses.start_ns.to_numpy()
    end = pauses.waited_ns.to_numpy()
    waited = covered(begin - 1, end)
    events = events[events.thread.isin((thread, main)) & (waited(events.end_ns) > waited(events.start_ns))]
    # Events of the launching thread go before those of the main thread, and inner events before outer ones.
    events = events.iloc[np.lexsort((-events.end_ns, events.start_ns, events.thread == thread))]
    event_start, event_end, owner = paint(events.start_ns.to_numpy(), events.end_ns.to_numpy(), -np.arange(len(events)))
    owners = np.append(events.index[owner], NONE)
    start_ns, end_ns, pause = cut(begin, end, np.append(event_start, event_end))
    columns = {
        "start_ns": start_ns,
        "wait_ns": end_ns - start_ns,
        "event": owners[locate(event_start, event_end, start_ns)],
        "begun_in": owners[locate(event_start, event_end, begin - 1)][pause],
        "pause": pauses.index[pause],
    }
    return pd.DataFrame(columns)


def _surroundings(trace: Trace, thread: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Words on where the host was: `under` an operator or module, and `in` the innermost of the user's ranges."""
    host, users = trace.host, trace.host.users
    is_operator = where(host.names, lambda name: name.startswith("aten::"))
    parent = host.nesting.parent
    # Of nested ATen operators the outermost is named: the program called it.
    outer = settled(np.where(is_operator & (parent != NONE) & is_operator[parent], parent, np.arange(len(parent))))
    # The index NONE (-1) reads the last entry, here and in the texts below.
    events = np.append(outer, NONE)[host.nesting.around(thread, moments)]
    ranges = users.around(np.full_like(thread, trace.events.main_thread), moments)
    under = each([*host.names, ""], lambda name: name and f"under {module_path(name) or name.removeprefix(ENGINE)}")
    inside = each([*users.names, ""], lambda name: name and f"in {name}")
    return np.array([*map(str.strip, under[events] + " " + inside[ranges])], dtype=object)
