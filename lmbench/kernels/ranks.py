"""Several ranks' traces read together: what each does, which one the others wait for and why."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.answer import communication_table, kernels_answer, per_what, run_lines
from lmbench.kernels.findings import Findings, examine_trace
from lmbench.kernels.recording import TRACE_FILE
from lmbench.kernels.trace import Trace, load_trace
from lmbench.kernels.verdicts import verdict_of
from lmbench.kernels.waits import cause_text, largest_causes
from lmbench.progress import progress
from lmbench.records.load import is_run_folder
from lmbench.report.answer import Answer, Line, guard_lines
from lmbench.report.described import table
from lmbench.report.units import milliseconds, percent

_STAGE = ["group", "stage"]
# In the names of files and folders.
_RANK = re.compile(r"(?:rank|worker)[-_. ]?(\d+)", re.IGNORECASE)
# A rank that delays the others by less than this share of their time is no straggler.
_LATE_FRACTION = 0.01
# Reasons that are named, and from which share of the delay on.
_NAMED, _SAID_FRACTION = 2, 0.1


def ranks_answer(sources: Iterable[str | Path]) -> Answer:
    """What the traces of several ranks tell together; of one trace all that it tells.

    Args:
        sources: runs' folders, folders of traces, trace files.

    Raises:
        UsageError: what is given is no trace, or no single one of each rank.
    """
    paths = [*chain.from_iterable(_traces_at(Path(source)) for source in sources)]
    if len(paths) == 1:
        return kernels_answer(paths[0])
    traces: dict[int, Trace] = {}
    with progress("kernels", len(paths)) as task:
        for path in paths:
            task.begin(path.name)
            trace = load_trace(path)
            if (rank := _rank_of(trace)) is None or rank in traces:
                what = f"{str(path)!r} is not known to be of a rank of its own"
                raise UsageError(f"{what}: name files rank0.json.gz, ...; `lmbench compare --kernels A B` compares two")
            traces[rank] = trace
    known, matches = match_collectives(dict(sorted(traces.items())))
    findings = {rank: examine_trace(trace) for rank, trace in known.items()}
    if lacking := [one for one in findings.values() if one.why_no_kernels]:
        if len(lacking) < len(findings):
            path, why = lacking[0].trace.path, lacking[0].why_no_kernels
            raise UsageError(f"{str(path)!r} has no kernels: {why}; give the traces of ranks with a GPU")
        answer = kernels_answer(lacking[0].trace.path)
        text = "without kernels: gloo's collectives run on the host, and their waits are not told; the first rank:"
        return replace(answer, headline=[Line("ranks", f"{len(findings)}, {text}"), *answer.headline])
    return _answer(findings, matches)


def _answer(findings: dict[int, Findings], matches: pd.DataFrame) -> Answer:
    """What ranks do, by rank, and what their matched collectives tell."""
    first = next(iter(findings.values()))
    waits = matches.groupby("collective").wait_ns
    # The last rank itself waits for none.
    last = matches.assign(
        longest_s=waits.transform("max") / 1e9,
        mean_wait_s=waits.transform("sum") / (waits.transform("size") - 1) / 1e9,
        cost_s=matches.cost_ns / 1e9,
    )
    last = last[last.is_last].sort_values("longest_s", ascending=False)
    rows = pd.DataFrame({rank: one.clocks.total for rank, one in findings.items()}).T.rename_axis("rank")
    rows = rows.assign(
        computing_s=rows.busy_s - rows.comm_exposed_s,
        last_count=last.groupby("rank").size(),
        delay_s=last.groupby("rank").mean_wait_s.sum() / first.clocks.steps,
        verdict=rows.apply(verdict_of, axis=1),
    ).fillna({"last_count": 0, "delay_s": 0.0})
    mean, number = rows.mean(numeric_only=True), first.trace.events.distributed.world_size or len(rows)
    exposed, waiting = (float(time_s / (mean.window_s or 1.0)) for time_s in (mean.comm_exposed_s, mean.rank_wait_s))
    parts, least = "no collectives match, to tell what of it is waiting", "at least " if len(rows) < number else ""
    figures, per = {"comm_exposed_fraction": exposed}, per_what(first)
    tables = [table("kernels/ranks", rows.reset_index(), per=per)]
    lines = _straggler(findings, rows)
    if mean.comm_s:
        tables.append(communication_table([*findings.values()]))
    if len(last):
        tables.append(table("kernels/collectives", last))
        figures["rank_wait_fraction"] = waiting
        parts = f"{least}{percent(waiting)} until the last rank came, {percent(exposed - waiting)} communication"
        worst, mean_ms, longest_ms = last.iloc[0], *map(milliseconds, (last.longest_s.mean(), last.longest_s.max()))
        most = f"{longest_ms} ms ({worst.kind} of {worst.phase}, rank {worst['rank']} last)"
        lines.append(Line("skew", f"ranks come to a collective {mean_ms} ms apart on average, at most {most}"))
    for rank, one in findings.items():
        lines += guard_lines(one.guards, f"rank {rank}: ")
    headline = [
        *run_lines(first),
        Line("ranks", f"{len(rows)} of {number}, {milliseconds(mean.window_s)} ms {per} on the device"),
        Line("lost", f"{percent(exposed)} of it is exposed communication: {parts}"),
        *lines,
        Line("one rank", f"`lmbench kernels {first.trace.path}` shows its kernels", is_whole=True),
    ]
    return Answer(headline, tables, figures=figures, first=("ranks", "communication"))


def _straggler(findings: dict[int, Findings], rows: pd.DataFrame) -> list[Line]:
    """The rank that others wait longest for, and what it spends more time on than they do."""
    own_s = rows.window_s - rows.comm_exposed_s
    # Where no collectives match, by the time outside of communication.
    late_s = rows.delay_s if rows.last_count.any() else own_s - own_s.median()
    rank, delay_s = late_s.idxmax(), late_s.max()
    if delay_s < _LATE_FRACTION * rows.window_s[rank]:
        return [Line("straggler", f"none that the others wait for in {percent(_LATE_FRACTION)} of the time")]
    late = f"is {milliseconds(delay_s)} ms longer outside of communication than the median"
    if count := rows.last_count[rank]:
        many = f"{count:.0f} of {rows.last_count.sum():.0f} collectives"
        late = f"came last to {many}, and the others wait {milliseconds(delay_s)} ms for it"
    lines = [Line("straggler", f"rank {rank} {late}")]
    spent = pd.DataFrame({
        rank: {
            **one.work.seconds("kind"), **largest_causes(one.waits), "short gaps": one.clocks.total.queued_gap_s,
            "other idle time": one.clocks.total.other_idle_s,
        } for rank, one in findings.items()
    }).fillna(0.0).drop(index="comm", errors="ignore")  # fmt: skip
    more = (spent[rank] - spent.drop(columns=rank).median(axis=1)).nlargest(_NAMED)
    waits = findings[rank].waits
    for what, more_s in more[more >= _SAID_FRACTION * delay_s].items():
        where = f"waiting for {cause_text(waits, what)}" if what in set(waits.cause) else what
        lines.append(Line("cause", f"{milliseconds(more_s)} ms more than the others' median in {where}"))
    return lines


def _traces_at(path: Path) -> list[Path]:
    """The traces that a path stands for: of a run all its ranks', of another folder all that lie in it."""
    if not os.path.isdir(path):  # noqa: PTH112 (which raises on some paths)
        return [path]
    if is_run_folder(path):
        return [path, *path.glob(f"rank*/{TRACE_FILE}")]
    return [file for file in sorted(path.glob("*.json*")) if file.name.endswith((".json", ".json.gz"))] or [path]


def _rank_of(trace: Trace) -> int | None:
    """By the trace itself, its run's record, or the name of the file or its folder."""
    by_name = _RANK.search(trace.path.name) or _RANK.search(trace.path.parent.name)
    known = (trace.events.distributed.rank, trace.record.rank, by_name and int(by_name[1]))
    return next((rank for rank in known if rank is not None), None)


def match_collectives(traces: Mapping[int, Trace]) -> tuple[dict[int, Trace], pd.DataFrame]:
    """The traces of several ranks with the true `cost_ns`, and a row for each kernel that is matched: its `rank`, the
    number of its `collective` with `kind`, `phase` and `cost_ns`, its `wait_ns`, `is_last`.

    Kernels of a group are one collective by their order in the step, or by the collective's own number; those that send
    and receive by the pair of ranks and their order. Where ranks have others in a step, as when recording began within
    it, none of that step's are matched. The shortest kernel is the one of the rank that came last: it is the
    collective's cost, and what the others have more is waiting.
    """
    frames = []
    for rank, trace in traces.items():
        kernels = trace.kernels.query("is_counted and collective != ''")
        group = [
            f"{group} {sorted(message.replace('None', str(rank)) for message in messages)}"
            for group, messages in zip(kernels.group, kernels.messages, strict=True)
        ]
        begins_ns = trace.timeline.step_ns[trace.timeline.skipped :, 0]
        is_clocked, place = kernels.launch_ns >= next(iter(begins_ns), 0), kernels.groupby([group, "stage"]).cumcount()
        frames.append(kernels.assign(rank=rank, group=group, place=place, kernel=kernels.index, is_clocked=is_clocked))
    every = pd.concat(frames, ignore_index=True)
    order = every.groupby([*_STAGE, "rank"]).collective.agg(" ".join).groupby(_STAGE)
    is_matched = order.agg(lambda orders: len({*orders}) == 1 < len(orders)).rename("is_matched")
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
