"""Why a device waited for the host: what the host did meanwhile, in which call, under which operator or range."""

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

#: What the host does for one kernel after the other: operators, Python between them, launches.
LAUNCHING = "launching"
_HOST_CODE, _DATA, _LOADING, _SLOW, _COPYING = "host code", "data", "loading", "slow call", "copying"
_call_cause = reader("calls")
_LAUNCH = re.compile(r"Launch\w*Kernel|KernelLaunch", re.IGNORECASE)
# Host time from one launch to the next is tens of us in eager mode, and up to 250 where the profiler notes stacks.
_LONG_NS = 300_000
_NEARLY_ALL_FRACTION = 0.95
_KEYS = ["cause", "call", "under", "phase"]


def find_waits(trace: Trace, clocks: Clocks) -> pd.DataFrame:
    """Why devices waited for the host, the longest first: a row for each `cause`, `call` of the runtime ("" outside of
    calls), operator or range around it (`under`) and `phase` of the host, with `wait_s` per step, the number of `calls`
    in the trace, and when the longest wait began, `at_s` from the trace's first event on.

    The innermost event has the time, of the thread that launched the kernel that ended the wait, or where it did
    nothing, of the main thread. A short wait for launches that began while the host synchronized or copied is due to
    that, since nothing else was queued.
    """
    pauses = clocks.pauses
    pauses = pauses[pauses.waited_ns > pauses.start_ns] if len(pauses) else pauses
    if pauses.empty:
        return pd.DataFrame(columns=[*_KEYS, "wait_s", "calls", "at_s"])
    main = trace.events.main_thread
    # Behind the kernels stands what comes after the last.
    pauses = pauses.assign(thread=np.append(trace.kernels.thread, main)[pauses.after])
    events = _events(trace)
    waits = pd.concat(_pieces(members, events, main) for _, members in pauses.groupby(["device", "thread"]))
    is_long = (pauses.waited_ns - pauses.start_ns > _LONG_NS)[waits.pause].to_numpy()
    causes = events.cause.to_numpy()
    is_stopped = (causes[waits.event] == LAUNCHING) & np.isin(causes[waits.stop], ("synchronizing", _COPYING))
    index = np.where(is_stopped & ~is_long, waits.stop, waits.event)
    event, start_ns = events.iloc[index].reset_index(drop=True), waits.start_ns.to_numpy()
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
    """What held the host up, for one cause of waits: calls, and where most of it was, with its share if that is not
    nearly all."""
    under_s = waits[waits.cause == cause].groupby("under").wait_s.sum()
    place, share = shortened(under_s.idxmax(), KERNEL_WIDTH), under_s.max() / under_s.sum()
    most = f", {percent(share)} of it" if place and share < _NEARLY_ALL_FRACTION else ""
    return f"{_words(waits, cause)}{most} {place}".rstrip()


def remedy(waits: pd.DataFrame, cause: str) -> str:
    """How much of the waits has a cause, and what to do about it."""
    wait_s = waits.wait_s[waits.cause == cause].sum()
    return f"{milliseconds(wait_s)} ms in {_words(waits, cause)}; {NAMES['causes'][cause][1]}"


def _words(waits: pd.DataFrame, cause: str) -> str:
    calls = waits.call[(waits.cause == cause) & (waits.call != "")].unique()
    words: str = NAMES["causes"][cause][0]
    return words.format(calls=" and ".join(calls[:2]))


def _events(trace: Trace) -> pd.DataFrame:
    """Everything that the host did: operators, ranges and calls, with the `cause` that they are of a wait; and last,
    where NONE reads it, nothing."""
    columns, linked = ["name", "thread", "start_ns", "end_ns"], trace.kernels[trace.kernels.launch != NONE]
    host, calls = (pd.DataFrame.from_records(rows)[columns] for rows in (trace.events.host, trace.events.calls))
    is_waited = (linked.end_ns <= linked.returned_ns) & (linked.kind == "memcpy")
    is_copied = calls.start_ns.isin(linked.launch_ns[is_waited])
    is_first = calls.start_ns.isin(linked.drop_duplicates("name").launch_ns)
    is_long = calls.end_ns - calls.start_ns > _LONG_NS
    cause, is_launch = each(calls.name, _call_cause), where(calls.name, _LAUNCH.search)
    tests = {_LOADING: is_long & ((cause == _LOADING) | is_launch & is_first), _COPYING: is_copied, _SLOW: is_long}
    calls["cause"] = np.where(
        np.isin(cause, ("allocating", "synchronizing")), cause, np.select([*tests.values()], [*tests], LAUNCHING)
    )
    nothing = pd.DataFrame({"name": "", "thread": trace.events.main_thread, "start_ns": 0, "end_ns": 0}, index=[0])
    events = [host.assign(is_call=False), calls.assign(is_call=True), nothing.assign(is_call=False)]
    return pd.concat(events, ignore_index=True).fillna({"cause": LAUNCHING})


def _pieces(pauses: pd.DataFrame, events: pd.DataFrame, main: int) -> pd.DataFrame:
    """Waits of one device for one thread, cut up by the `event` that the host was in: `start_ns`, `wait_ns`, the
    `pause`, and the event in which that began, `stop`; NONE where there is no event."""
    thread, begin, until = pauses.thread.iat[0], pauses.start_ns.to_numpy(), pauses.waited_ns.to_numpy()
    beside = covered(begin - 1, until)
    events = events[events.thread.isin((thread, main)) & (beside(events.end_ns) > beside(events.start_ns))]
    # What the main thread does lies below what the launching one does, and outer events below inner ones.
    events = events.iloc[np.lexsort((-events.end_ns, events.start_ns, events.thread == thread))]
    start, end, owner = paint(events.start_ns.to_numpy(), events.end_ns.to_numpy(), -np.arange(len(events)))
    owners = np.append(events.index[owner], NONE)
    start_ns, end_ns, pause = cut(begin, until, np.append(start, end))
    columns = {
        "start_ns": start_ns,
        "wait_ns": end_ns - start_ns,
        "event": owners[locate(start, end, start_ns)],
        "stop": owners[locate(start, end, begin - 1)][pause],
        "pause": pauses.index[pause],
    }
    return pd.DataFrame(columns)


def _surroundings(trace: Trace, thread: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Where the host was: `under` an operator or module, and `in` the innermost of the user's ranges."""
    host, users = trace.host, trace.host.users
    is_operator, parent = where(host.names, lambda name: name.startswith("aten::")), host.nesting.parent
    # Of ATen's operators within each other the outermost, which the program called.
    outer = settled(np.where(is_operator & (parent != NONE) & is_operator[parent], parent, np.arange(len(parent))))
    # Behind the last stands what NONE reads.
    events = np.append(outer, NONE)[host.nesting.around(thread, moments)]
    ranges = users.around(np.full_like(thread, trace.events.main_thread), moments)
    under = each([*host.names, ""], lambda name: name and f"under {module_path(name) or name.removeprefix(ENGINE)}")
    inside = each([*users.names, ""], lambda name: name and f"in {name}")
    return np.array([*map(str.strip, under[events] + " " + inside[ranges])], dtype=object)
