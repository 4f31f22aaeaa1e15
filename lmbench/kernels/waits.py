"""The reasons why devices waited for the host, in words: what the host did meanwhile, and what to do about it."""

from __future__ import annotations

import pandas as pd

from lmbench.code_owners import is_users_function
from lmbench.kernels.clocks import Clocks
from lmbench.kernels.graph import Graph
from lmbench.kernels.names import NAMES
from lmbench.kernels.pieces import DATA, HOST_CODE, LAUNCHING, LONG_NS, places
from lmbench.records.intervals import NONE
from lmbench.report.console import shortened
from lmbench.report.units import milliseconds, percent

# A text omits the share of a cause's largest part from this share on.
_NEARLY_ALL_FRACTION = 0.95
# The width of the text on where the host was.
_PLACE_WIDTH = 80
_KEYS = ["cause", "call", "under", "phase"]


def find_waits(graph: Graph, clocks: Clocks) -> pd.DataFrame:
    """The reasons why devices waited for the host, the longest first, from the graph of one rank.

    A row has the `cause`, the runtime's `call` (empty outside of calls) and the host's `phase`. `under` has words for
    the operator or range around the call. `wait_s` is per step; `calls` is the number of such events in the trace.
    `at_s` is the time from the trace's first event to the start of the longest wait.

    If a short pause began while the host synchronized or copied, this is its cause rather than the launches that
    followed: nothing else was queued.
    """
    if clocks.wait_pieces.empty:
        return pd.DataFrame(columns=[*_KEYS, "wait_s", "calls", "at_s"])
    waits = clocks.wait_pieces.rename(columns={"name": "call"})
    # The call that the host waited in as the pause began.
    columns = ["cause", "call", "event", "around", "moment"]
    calls = waits[waits.link == waits.after].drop_duplicates("chain").set_index("chain")[columns]
    is_blocked = (waits.cause == LAUNCHING) & (waits.pause_ns <= LONG_NS) & (waits.after != NONE)
    waits.loc[is_blocked, columns] = calls.loc[waits.chain[is_blocked]].to_numpy()
    # A kernel's launch has the kernel's name.
    waits["call"] = waits.call.where(waits.event != NONE, "")
    waits["under"] = places(graph.traces, waits)
    sums = waits.sort_values("ns", ascending=False, kind="stable").groupby(_KEYS, sort=False).agg(
        wait_s=("ns", "sum"), calls=("event", "nunique"), at_s=("start_ns", "first")
    )  # fmt: skip
    sums = sums.assign(wait_s=sums.wait_s / 1e9 / graph.steps, at_s=sums.at_s / 1e9)
    return sums.sort_values("wait_s", ascending=False, kind="stable").reset_index()


def largest_causes(waits: pd.DataFrame) -> pd.Series:
    """`wait_s` by cause, the largest first."""
    return waits.groupby("cause").wait_s.sum().sort_values(ascending=False)


def cause_text(waits: pd.DataFrame, cause: str) -> str:
    """Text on what held the host up for one cause: the calls, and the operator, function or range with most of this.

    Its share is told, unless it is nearly all.
    """
    place, share = _largest_place(waits, cause)
    share_text = f", {percent(share)} of it" if place and share < _NEARLY_ALL_FRACTION else ""
    if function := _users_function(place, cause):
        return f"{function}{share_text}"
    return f"{_cause_words(waits, cause)}{share_text} {shortened(place, _PLACE_WIDTH)}".rstrip()


def remedy(waits: pd.DataFrame, cause: str, is_data: bool) -> str:
    """Text on how long devices waited for one cause, and what to do about it; `is_data` in a phase that gets data."""
    wait_s = waits.wait_s[waits.cause == cause].sum()
    function = _users_function(_largest_place(waits, cause)[0], cause)
    advice = "do less there, or in another process" if function else NAMES.causes[cause].remedy
    if is_data and cause in (HOST_CODE, LAUNCHING):
        advice = NAMES.causes[DATA].remedy
    return f"{milliseconds(wait_s)} ms in {function or _cause_words(waits, cause)}; {advice}"


def _largest_place(waits: pd.DataFrame, cause: str) -> tuple[str, float]:
    """The words `under` with the most of a cause's time, and their share of it."""
    under_s = waits[waits.cause == cause].groupby("under").wait_s.sum()
    return str(under_s.idxmax()), under_s.max() / under_s.sum()


def _users_function(place: str, cause: str) -> str:
    """The Python function that the words on a place of the host's own code name; empty for other causes and words."""
    function = place.removeprefix("in ")
    return function if cause == HOST_CODE and is_users_function(function) else ""


def _cause_words(waits: pd.DataFrame, cause: str) -> str:
    """The words of names.toml for a cause, with the first two calls."""
    calls = waits.call[(waits.cause == cause) & (waits.call != "")].unique()
    return NAMES.causes[cause].words.format(calls=" and ".join(calls[:2]))
