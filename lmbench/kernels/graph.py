"""One graph of the traced steps on all ranks: what every moment of host and device waits for, measured and simulated.

A moment comes when its last link allows it: this link is its binding one. The chain of binding links, walked back from
the end, is the critical path. Walked back from a kernel, it tells why the device idled before. The same graph with
other times on its links is simulated for what-ifs (Zhu et al., Daydream, USENIX ATC 2020; Hu et al., dPRO, MLSys 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from lmbench.kernels.links import find_links, moment_times
from lmbench.kernels.pieces import link_pieces
from lmbench.kernels.trace import Trace
from lmbench.records.intervals import NONE, Integers, take

# The simulation repeats the steps until two repetitions differ by at most this share, and no more often than this.
_STEADY_FRACTION, _MAX_LAPS = 1e-3, 8


@dataclass(frozen=True)
class Solution:
    """The time of each moment in ns, its binding link, and the moment before this link, for repetitions in turn.

    Links are NONE where a moment waited for nothing. The last repetition ends with the moment `end` and is `length_ns`
    long.
    """

    time_ns: list[float]
    binding: list[int]
    source: list[int]
    end: int
    length_ns: float

    def chain(self, moment: int, begin_ns: float) -> list[tuple[int, float, float]]:
        """The chain of binding links from `begin_ns` to a moment: each link with its start and end."""
        rows = []
        while self.time_ns[moment] > begin_ns and (link := self.binding[moment]) != NONE:
            end_ns, moment = self.time_ns[moment], self.source[moment]
            rows.append((link, max(self.time_ns[moment], begin_ns), end_ns))
        return rows[::-1]

    @property
    def path(self) -> list[tuple[int, float, float]]:
        """The critical path: the chain of the last repetition."""
        return self.chain(self.end, self.time_ns[self.end] - self.length_ns)


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph of the traced steps of one or several ranks, on one clock.

    `activities` has a row for each of its `kind`: a `call` of the host that launches kernels or waits for them, with
    the index of its `launch`; a `kernel`, with its index in the rank's trace and that of its launch; the `join` of the
    ranks that come to a collective; and the `steps` of a rank. Columns are the `rank`, `thread`, `start_ns`, `end_ns`,
    whether it `is_inside` the clocked steps, and the `match` of a kernel. Activity number n has the moments 2 n and
    2 n + 1. `next` is the moment that replaces the end of a kernel from before the steps when they repeat.

    `links` has a row for each link, in an order in which all links to its source come before: the moments `source` and
    `target`, the least time `ns` between them, and the `kind`: the host between two calls (`program`) and in one
    (`call`); from a `launch` to its kernel; from a kernel to the next of its stream (`order`) or of another one
    (`wait`); a `kernel` or collective itself; from a kernel to the call that waits for it (`return`) or for room in the
    launch queue (`queue`); from a rank's arrival at a collective (`join`); and to the `end` of the steps. `is_binding`
    flags those that their targets waited for, and `unexplained_ns` is the part of their time that nothing in the trace
    accounts for. The simulation goes from `from_moment`, of the repetition before if `is_lapped`; it is NONE where a
    moment of the next repetition is not known.

    `steps` is the number of clocked steps.
    """

    traces: Mapping[int, Trace]
    activities: pd.DataFrame
    links: pd.DataFrame
    steps: int

    @property
    def first(self) -> Trace:
        """The trace of the first rank."""
        return next(iter(self.traces.values()))

    @cached_property
    def time_ns(self) -> Integers:
        """The recorded time of each moment."""
        return moment_times(self.activities)

    @cached_property
    def measured(self) -> Solution:
        """The steps as they were recorded, once."""
        binding, source = np.full((2, len(self.time_ns)), NONE)
        links = self.links[self.links.is_binding]
        binding[links.target], source[links.target] = links.index, links.source
        steps = self.activities[self.activities.kind == "steps"]
        last = int(steps.end_ns.idxmax())
        length_ns = float(steps.end_ns[last] - steps.start_ns[last])
        times: list[float] = self.time_ns.astype(float).tolist()
        return Solution(times, binding.tolist(), source.tolist(), 2 * last + 1, length_ns)

    @cached_property
    def pieces(self) -> pd.DataFrame:
        """What each link stands for, as `link_pieces` returns it."""
        return link_pieces(self.traces, self.activities, self.links)

    def chain_pieces(self, chains: Sequence[Sequence[tuple[int, float, float]]]) -> pd.DataFrame:
        """The pieces of chains of links, as `Solution.chain` returns them of the recorded steps, in order of time.

        Each has the number of its `chain`, and `after`: the link of the call that had waited for the device before the
        piece, if nothing was launched since; else NONE.
        """
        rows = [(number, *link) for number, chain in enumerate(chains) for link in chain]
        types = {"chain": np.int64, "link": np.int64, "begin_ns": np.float64, "past_ns": np.float64}
        frame = pd.DataFrame(rows, columns=[*types]).astype(types)
        kind = self.links.kind.reindex(frame.link).to_numpy()
        is_launched = (np.append("", kind)[:-1] == "launch") & (kind != "return")
        after = frame.link.where(kind == "return").mask(is_launched, NONE)
        frame["after"] = after.groupby(frame.chain).ffill().fillna(NONE)
        pieces = frame.merge(self.pieces, on="link")
        # Words, since groups of categories have members that are not there (pandas 2).
        pieces = pieces.astype(dict.fromkeys(pieces.select_dtypes("category"), object))
        start_ns = np.maximum(pieces.start_ns, pieces.begin_ns)
        pieces["ns"] = np.minimum(pieces.start_ns + pieces.ns, pieces.past_ns) - start_ns
        return pieces.assign(start_ns=start_ns)[pieces.ns > 0].drop(columns=["begin_ns", "past_ns"])

    @cached_property
    def path(self) -> pd.DataFrame:
        """The critical path of the recording, as `chain_pieces` returns it."""
        return self.chain_pieces([self.measured.path])

    @cached_property
    def _repeated(self) -> tuple[Integers, Integers, list[tuple[int, int, int]]]:
        """The links that repeat, by target; their sources, of which those of the repetition before come first; and
        each target with the first of its links and the one past the last."""
        is_inside = self.activities.is_inside.to_numpy()[self.links.target // 2]
        rows = np.flatnonzero((self.links.from_moment != NONE) & is_inside)
        links = self.links.iloc[rows]
        sources = links.from_moment.to_numpy() + np.where(links.is_lapped, 0, len(self.time_ns))
        target = links.target.to_numpy()
        firsts = np.flatnonzero(np.diff(target, prepend=NONE))
        spans = zip(target[firsts].tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(links)], strict=True)
        return rows, sources, [*spans]

    def simulate(self, ns: Any, without_stragglers: bool = False) -> Solution:
        """The steps with these times on the links, repeated until their length is steady.

        With `without_stragglers` a collective begins when half of the ranks have come, rather than all of them.
        """
        number, (rows, from_moments, spans) = len(self.time_ns), self._repeated
        weights, sources = ns[rows].tolist(), from_moments.tolist()
        kind = self.activities.kind
        joins = {2 * join + 1 for join in np.flatnonzero(kind == "join")} if without_stragglers else set[int]()
        ends = [2 * steps + 1 for steps in np.flatnonzero(kind == "steps").tolist()]
        times, bindings, ends_ns = [[0.0] * number], [], [0.0]
        while len(times) <= _MAX_LAPS:
            time, binding = times[-1] + [ends_ns[-1]] * number, [NONE] * number
            for target, first, past in spans:
                reach = [time[sources[link]] + weights[link] for link in range(first, past)]
                moment = sorted(reach)[(len(reach) - 1) // 2] if target in joins else max(reach)
                time[number + target], binding[target] = moment, first + reach.index(moment)
            times.append(time[number:])
            bindings.append(np.array(binding))
            ends.sort(key=times[-1].__getitem__)
            end = ends[(len(ends) - 1) // 2 if without_stragglers else -1]
            ends_ns.append(times[-1][end])
            lengths = np.diff(ends_ns)
            if len(lengths) > 1 and abs(lengths[-1] - lengths[-2]) <= _STEADY_FRACTION * lengths[-1]:
                break
        before = [take(from_moments, binding, NONE) + (lap - 1) * number for lap, binding in enumerate(bindings)]
        return Solution(
            np.concatenate(times[1:]).tolist(),
            take(rows, np.concatenate(bindings), NONE).tolist(),
            np.concatenate(before).tolist(),
            (len(bindings) - 1) * number + end,
            ends_ns[-1] - ends_ns[-2],
        )


def build_graph(traces: Mapping[int, Trace]) -> Graph:
    """The graph of the traces of one or several ranks, as for `find_links`."""
    timeline = next(iter(traces.values())).timeline
    return Graph(traces, *find_links(traces), timeline.steps - timeline.skipped)
