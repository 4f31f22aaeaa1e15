"""The traces of several ranks read together: what each rank does, which rank the others wait for, and why."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.answer import communication_table, kernels_answer, per_what, run_lines
from lmbench.kernels.findings import KernelFindings, examine_trace
from lmbench.kernels.frameworks import framework_lines
from lmbench.kernels.graph import Graph, build_graph
from lmbench.kernels.trace import Trace, load_trace
from lmbench.kernels.trace_notes import TRACE_FILE
from lmbench.kernels.verdicts import verdict_of
from lmbench.kernels.waits import cause_text, largest_causes
from lmbench.progress import progress
from lmbench.records.load import is_run_folder
from lmbench.report.answer import Answer, Line, guard_lines
from lmbench.report.described import table
from lmbench.report.units import milliseconds, percent

# Kernels with the same values are collectives of one group of ranks in one step.
_STAGE = ["group", "stage"]
# The rank in the name of a file or folder.
_RANK = re.compile(r"(?:rank|worker)[-_. ]?(\d+)", re.IGNORECASE)
# A straggler delays the others by at least this share of their time.
_LATE_FRACTION = 0.01
# Traces are of one machine's clock if this share of the collectives run on all ranks at once for a while.
_ONE_CLOCK_FRACTION = 0.95
# The headline names at most this many causes of a delay, each at least this share of it.
_TOP_CAUSES, _MIN_CAUSE_FRACTION = 2, 0.1


def ranks_answer(sources: Iterable[str | Path]) -> Answer:
    """The joint answer for the traces of several ranks; for a single trace the full answer about it.

    Args:
        sources: folders of runs, folders of traces, or trace files.

    Raises:
        UsageError: a file cannot be read as a trace, two traces are of one rank, or the rank of a trace is unknown.
    """
    paths = [*chain.from_iterable(_traces_at(Path(source)) for source in sources)]
    if len(paths) == 1:
        return kernels_answer(paths[0])
    traces, matches = match_collectives(_load(paths))
    findings = {rank: examine_trace(trace) for rank, trace in traces.items()}
    if without_kernels := [rank for rank in findings.values() if rank.why_no_kernels]:
        path, why = without_kernels[0].trace.path, without_kernels[0].why_no_kernels
        if len(without_kernels) < len(findings):
            raise UsageError(f"{str(path)!r} has no kernels: {why}; give the traces of ranks with a GPU")
        answer = kernels_answer(path)
        text = "without kernels: gloo's collectives run on the host, and their waits are not told; the first rank:"
        return replace(answer, headline=[Line("ranks", f"{len(findings)}, {text}"), *answer.headline])
    return _answer(findings, matches)


def graph_of(sources: Iterable[str | Path]) -> Graph:
    """The graph of one trace, or of those of several ranks. Raises UsageError as `ranks_answer` does."""
    paths = [*chain.from_iterable(_traces_at(Path(source)) for source in sources)]
    if len(paths) == 1:
        trace = load_trace(paths[0])
        return build_graph({_rank_of(trace) or 0: trace})
    return build_graph(*match_collectives(_load(paths)))


def _load(paths: Sequence[Path]) -> dict[int, Trace]:
    """The traces by rank, in order. Raises UsageError where the rank of one is unknown or that of another."""
    traces = {}
    with progress("kernels", len(paths)) as task:
        for path in paths:
            task.begin(path.name)
            trace = load_trace(path)
            if (rank := _rank_of(trace)) is None or rank in traces:
                problem = f"{str(path)!r} does not tell its rank, or has that of another trace"
                raise UsageError(
                    f"{problem}: name files rank0.json.gz, ...; `lmbench compare --kernels A B` compares two"
                )
            traces[rank] = trace
    return dict(sorted(traces.items()))


def _answer(findings: dict[int, KernelFindings], matches: pd.DataFrame) -> Answer:
    """The answer for ranks with kernels, from each rank's results and from their matched collectives."""
    first = next(iter(findings.values()))
    matches = matches[matches.is_clocked.astype(bool)]
    waits = matches.groupby("collective").wait_ns
    # A row for each collective, of the rank that came last; it does not wait, so the mean is over the others.
    last = matches.assign(
        longest_s=waits.transform("max") / 1e9,
        mean_wait_s=waits.transform("sum") / (waits.transform("size") - 1) / 1e9,
        cost_s=matches.cost_ns / 1e9,
    )
    last = last[last.is_last].sort_values("longest_s", ascending=False)
    rows = pd.DataFrame({rank: result.clocks.total for rank, result in findings.items()}).T.rename_axis("rank")
    rows = rows.assign(
        computing_s=rows.busy_s - rows.comm_exposed_s,
        last_count=last.groupby("rank").size(),
        delay_s=last.groupby("rank").mean_wait_s.sum() / first.clocks.steps,
        verdict=rows.apply(verdict_of, axis=1),
    ).fillna({"last_count": 0, "delay_s": 0.0})
    mean = rows.mean(numeric_only=True)
    world_size = first.trace.events.distributed.world_size or len(rows)
    exposed, waiting = (float(time_s / (mean.window_s or 1.0)) for time_s in (mean.comm_exposed_s, mean.rank_wait_s))
    figures, per = {"comm_exposed_fraction": exposed}, per_what(first)
    division = "no collectives match, so that waiting is not told apart"
    tables = [table("kernels/ranks", rows.reset_index(), per=per)]
    lines = _straggler_lines(findings, rows)
    if mean.comm_s:
        tables.append(communication_table([*findings.values()]))
    if len(last):
        tables.append(table("kernels/collectives", last))
        figures["rank_wait_fraction"] = waiting
        least = "at least " if len(rows) < world_size else ""
        division = f"{least}{percent(waiting)} until the last rank came, {percent(exposed - waiting)} communication"
        worst, mean_ms = last.iloc[0], milliseconds(last.longest_s.mean())
        largest = f"{milliseconds(worst.longest_s)} ms ({worst.kind} of {worst.phase}, rank {worst['rank']} last)"
        lines.append(Line("skew", f"ranks come to a collective {mean_ms} ms apart on average, at most {largest}"))
    for rank, result in findings.items():
        lines += guard_lines(result.guards, f"rank {rank}: ")
    headline = [
        *run_lines(first),
        Line("ranks", f"{len(rows)} of {world_size}, {milliseconds(mean.window_s)} ms {per} on the device"),
        Line("lost", f"{percent(exposed)} of it is exposed communication: {division}"),
        *framework_lines([result.trace for result in findings.values()]),
        *lines,
        Line("one rank", f"`lmbench kernels {first.trace.path}` shows its kernels", is_whole=True),
    ]
    return Answer(headline, tables, figures=figures, first=("ranks", "communication"))


def _straggler_lines(findings: dict[int, KernelFindings], rows: pd.DataFrame) -> list[Line]:
    """Lines for the rank that the others wait longest for, and for what it spends more time on than they do.

    Where no collectives match, it is the rank with the most time outside of communication.
    """
    not_comm_s = rows.window_s - rows.comm_exposed_s
    late_s = rows.delay_s if rows.last_count.any() else not_comm_s - not_comm_s.median()
    rank, delay_s = late_s.idxmax(), late_s.max()
    if delay_s < _LATE_FRACTION * rows.window_s[rank]:
        return [Line("straggler", f"none that the others wait for in {percent(_LATE_FRACTION)} of the time")]
    late = f"is {milliseconds(delay_s)} ms longer outside of communication than the median"
    if count := rows.last_count[rank]:
        collectives = f"{count:.0f} of {rows.last_count.sum():.0f} collectives"
        late = f"came last to {collectives}, and the others wait {milliseconds(delay_s)} ms for it"
    lines = [Line("straggler", f"rank {rank} {late}")]
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
        lines.append(Line("cause", f"{milliseconds(more_s)} ms more than the others' median in {activity}"))
    return lines


def _traces_at(path: Path) -> list[Path]:
    """The traces at a path: those of all ranks of a run, all files of another folder, or the file itself."""
    if not os.path.isdir(path):  # noqa: PTH112 (which raises on some paths)
        return [path]
    if is_run_folder(path):
        return [path, *path.glob(f"rank*/{TRACE_FILE}")]
    return [file for file in sorted(path.glob("*.json*")) if file.name.endswith((".json", ".json.gz"))] or [path]


def _rank_of(trace: Trace) -> int | None:
    """The rank of a trace, by the trace itself, else by its run's record, else by the name of its file or folder."""
    by_name = _RANK.search(trace.path.name) or _RANK.search(trace.path.parent.name)
    ranks = (trace.events.distributed.rank, trace.record.rank, by_name and int(by_name[1]))
    return next((rank for rank in ranks if rank is not None), None)


def match_collectives(traces: Mapping[int, Trace]) -> tuple[dict[int, Trace], pd.DataFrame]:
    """Match the kernels that several ranks ran for the same collective, so that waiting is told from communication.

    Kernels of a group of ranks match by the collective's own number, or by their order in the step. Kernels that send
    and receive match by the pair of ranks and their order. If ranks ran different collectives in a step, as when one
    recording began within it, none of this step match.

    A kernel waits until the last rank's kernel begins; the rest of its time is its cost. Ranks of one machine have one
    clock: then the kernels of a collective run at once for a while. Other clocks are shifted so that the kernels of a
    collective end together, by the median over those of each rank.

    Returns:
        The traces on one clock, with the true `cost_ns` of matched kernels; and a row for each matched kernel: its
        `rank`, its index `kernel`, the number of its `collective`, the collective's `kind`, `phase`, its `cost_ns` and
        `wait_ns`, whether it `is_last`, and whether a clocked step launched it.
    """
    first_ns = min(trace.events.origin_ns for trace in traces.values())
    frames = []
    for rank, trace in traces.items():
        kernels = trace.kernels.assign(is_clocked=trace.is_clocked).query("is_counted and collective != ''")
        group = [
            f"{group} {sorted(message.replace('None', str(rank)) for message in messages)}"
            for group, messages in zip(kernels.group, kernels.messages, strict=True)
        ]
        kernels = kernels.assign(
            rank=rank, group=group, kernel=kernels.index,
            ended_ns=kernels.end_ns + float(trace.events.origin_ns - first_ns),
        )  # fmt: skip
        frames.append(kernels.assign(order=kernels.groupby(_STAGE).cumcount()))
    matches = pd.concat(frames, ignore_index=True)
    sequences = matches.groupby([*_STAGE, "rank"]).collective.agg(" ".join).groupby(_STAGE)
    is_matched = sequences.agg(lambda ranks: len({*ranks}) == 1 < len(ranks)).rename("is_matched")
    matches = matches[matches.join(is_matched, on=_STAGE).is_matched.astype(bool)]
    members = matches.groupby([*_STAGE, "order"], sort=False)
    matches = matches.assign(kind=matches.collective, collective=members.ngroup())
    last_ns = (matches.ended_ns - matches.duration_ns).groupby(matches.collective).transform("max")
    shift_ns = pd.Series(0.0, list(traces))
    if (last_ns < members.ended_ns.transform("min")).mean() < _ONE_CLOCK_FRACTION:
        early_ns = members.ended_ns.transform("mean") - matches.ended_ns
        shift_ns = early_ns.groupby(matches["rank"]).median().reindex(list(traces), fill_value=0.0)
    began_ns = matches.ended_ns + matches["rank"].map(shift_ns) - matches.duration_ns
    last_ns = began_ns.groupby(matches.collective).transform("max")
    wait_ns = np.minimum(last_ns - began_ns, matches.duration_ns)
    matches = matches.assign(wait_ns=wait_ns, cost_ns=matches.duration_ns - wait_ns)
    matches["is_last"] = matches.index.isin(matches.groupby("collective").wait_ns.idxmin())
    aligned = {}
    for rank, trace in traces.items():
        cost_ns = matches[matches["rank"] == rank].set_index("kernel").cost_ns.combine_first(trace.kernels.cost_ns)
        kernels = trace.kernels.assign(cost_ns=cost_ns)
        aligned[rank] = replace(
            trace, kernels=kernels, shift_ns=trace.events.origin_ns - first_ns + round(shift_ns[rank])
        )
    columns = ["rank", "kernel", "collective", "kind", "phase", "cost_ns", "wait_ns", "is_last", "is_clocked"]
    return aligned, matches[columns]
