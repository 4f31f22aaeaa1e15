"""The traces of several ranks read together: what each rank does, which rank the others wait for, and why."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.answer import communication_table, kernels_answer, run_lines
from lmbench.kernels.findings import KernelFindings, examine_trace
from lmbench.kernels.frameworks import framework_lines
from lmbench.kernels.matching import load_traces
from lmbench.kernels.verdicts import verdict_of
from lmbench.kernels.waits import cause_text, largest_causes
from lmbench.report.answer import Answer, Line, guard_lines
from lmbench.report.described import table
from lmbench.report.units import milliseconds, percent

# A straggler delays the others by at least this share of their time.
_LATE_FRACTION = 0.01
# The headline names at most this many causes of a delay, each at least this share of it.
_TOP_CAUSES, _MIN_CAUSE_FRACTION = 2, 0.1


def ranks_answer(sources: Iterable[str | Path]) -> Answer:
    """The joint answer for the traces of several ranks; for a single trace the full answer about it.

    Args:
        sources: folders of runs, folders of traces, or trace files.

    Raises:
        UsageError: a file cannot be read as a trace, two traces are of one rank, or the rank of a trace is unknown.
    """
    findings = {rank: examine_trace(trace) for rank, trace in load_traces(sources).items()}
    if len(findings) == 1:
        return kernels_answer(*findings.values())
    if without_kernels := [rank for rank in findings.values() if rank.why_no_kernels]:
        path, why = without_kernels[0].trace.path, without_kernels[0].why_no_kernels
        if len(without_kernels) < len(findings):
            raise UsageError(f"{str(path)!r} has no kernels: {why}; give the traces of ranks with a GPU")
        answer = kernels_answer(without_kernels[0])
        text = "without kernels: gloo's collectives run on the host, and their waits are not told; the first rank:"
        return replace(answer, headline=[Line("ranks", f"{len(findings)}, {text}"), *answer.headline])
    return _answer(findings)


def _answer(findings: dict[int, KernelFindings]) -> Answer:
    """The answer for ranks with kernels."""
    first = next(iter(findings.values()))
    kernels = [result.trace.kernels.assign(rank=rank) for rank, result in findings.items()]
    collectives = pd.concat(kernels, ignore_index=True).query("collective != ''")
    matches = collectives.dropna(subset="match")
    # A row for each collective, of the rank that came last; it does not wait, so the mean is over the others.
    last = matches.loc[matches.groupby("match").wait_ns.idxmin()].query("is_clocked").set_index("match")
    matches = matches[matches.is_clocked]
    waits = matches.groupby("match").wait_ns
    last = last.assign(
        longest_s=waits.max() / 1e9,
        mean_wait_s=waits.sum() / (waits.size() - 1) / 1e9,
        cost_s=(last.duration_ns - last.wait_ns) / 1e9,
        kind=last.collective,
    ).sort_values("longest_s", ascending=False)
    rows = pd.DataFrame({rank: result.clocks.total for rank, result in findings.items()}).T.rename_axis("rank")
    rows = rows.assign(
        computing_s=rows.busy_s - rows.comm_exposed_s,
        last_count=last.groupby("rank").size(),
        delay_s=last.groupby("rank").mean_wait_s.sum() / first.graph.steps,
        verdict=rows.apply(verdict_of, axis=1),
    ).fillna({"last_count": 0, "delay_s": 0.0})
    mean = rows.mean(numeric_only=True)
    world_size = first.trace.events.distributed.world_size or len(rows)
    exposed, waiting = (float(time_s / (mean.window_s or 1.0)) for time_s in (mean.comm_exposed_s, mean.rank_wait_s))
    figures, per = {"comm_exposed_fraction": exposed}, first.per
    division = "no collectives match, so that waiting is not told apart"
    tables = [table("kernels/ranks", rows.reset_index(), per=per)]
    if mean.comm_s:
        tables.append(communication_table([*findings.values()]))
    if len(last):
        tables.append(table("kernels/collectives", last))
        figures["rank_wait_fraction"] = waiting
        unmatched = collectives.is_clocked.sum() - len(matches)
        least = "at least " if unmatched or len(rows) < world_size else ""
        division = f"{least}{percent(waiting)} until the last rank came, {percent(exposed - waiting)} communication"
        if unmatched:
            division += f"; {unmatched} of its kernels match none of another rank"
    headline = [
        *run_lines(first),
        Line("ranks", f"{len(rows)} of {world_size}, {milliseconds(mean.window_s)} ms {per} on the device"),
        Line("lost", f"{percent(exposed)} of it is exposed communication: {division}"),
        *framework_lines([result.trace for result in findings.values()]),
        *_straggler_lines(findings, rows),
        *chain.from_iterable(guard_lines(result.guards, f"rank {rank}: ") for rank, result in findings.items()),
        Line("one rank", f"`lmbench kernels {shlex.quote(str(first.trace.path))}` shows its kernels", is_whole=True),
    ]
    return Answer(headline, tables, figures=figures, first=("ranks", "communication"))


def _straggler_lines(findings: dict[int, KernelFindings], rows: pd.DataFrame) -> Iterator[Line]:
    """Lines for the rank that the others wait longest for, and for what it spends more time on than they do.

    Where no collectives match, it is the rank with the most time outside of communication.
    """
    not_comm_s = rows.window_s - rows.comm_exposed_s
    late_s = rows.delay_s if rows.last_count.any() else not_comm_s - not_comm_s.median()
    rank, delay_s = late_s.idxmax(), late_s.max()
    if delay_s < _LATE_FRACTION * rows.window_s[rank]:
        yield Line("straggler", f"none that the others wait for in {percent(_LATE_FRACTION)} of the time")
        return
    late = f"is {milliseconds(delay_s)} ms longer outside of communication than the median"
    if count := rows.last_count[rank]:
        collectives = f"{count:.0f} of {rows.last_count.sum():.0f} collectives"
        late = f"came last to {collectives}, and the others wait {milliseconds(delay_s)} ms for it"
    yield Line("straggler", f"rank {rank} {late}")
    spent_s = pd.DataFrame({
        rank: {
            **result.work.seconds("kind"), **largest_causes(result.waits),
            "short gaps": result.clocks.total.queued_gap_s, "other idle time": result.clocks.total.other_idle_s,
        } for rank, result in findings.items()
    }).fillna(0.0).drop(index="comm", errors="ignore")  # fmt: skip
    more = (spent_s[rank] - spent_s.drop(columns=rank).median(axis=1)).nlargest(_TOP_CAUSES)
    waits = findings[rank].waits
    for cause, more_s in more[more >= _MIN_CAUSE_FRACTION * delay_s].items():
        activity = f"waiting for {cause_text(waits, cause)}" if cause in set(waits.cause) else cause
        yield Line("cause", f"{milliseconds(more_s)} ms more than the others' median in {activity}")
