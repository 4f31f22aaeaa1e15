"""The traces of several ranks on one clock, with the collectives that they ran together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.trace import Trace, load_trace
from lmbench.kernels.trace_notes import TRACE_FILE
from lmbench.progress import progress
from lmbench.records.load import is_run_folder

# Kernels with the same values are collectives of one group of ranks in one step.
_STAGE = ["group", "stage"]
# Traces are of one machine's clock if this share of the collectives run on all ranks at once for a while.
_ONE_CLOCK_FRACTION = 0.95


def traces_at(sources: Iterable[str | Path]) -> list[Path]:
    """The traces at paths: those of all ranks of a run, all files of another folder, or the file itself."""
    paths = list[Path]()
    for path in map(Path, sources):
        if not os.path.isdir(path):  # noqa: PTH112 (which raises on some paths)
            paths.append(path)
        elif is_run_folder(path):
            paths += [path, *path.glob(f"rank*/{TRACE_FILE}")]
        else:
            files = [file for file in sorted(path.glob("*.json*")) if file.name.endswith((".json", ".json.gz"))]
            paths += files or [path]
    return paths


def load_traces(sources: Iterable[str | Path]) -> dict[int, Trace]:
    """The traces at paths by rank, in order: a single one as it is, those of several ranks by `match_collectives`.

    Raises:
        UsageError: a file cannot be read as a trace; or of several, two are of one rank, or the rank of one is unknown.
    """
    paths = traces_at(sources)
    if len(paths) == 1:
        trace = load_trace(paths[0])
        return {trace.rank or 0: trace}
    traces = dict[int, Trace]()
    with progress("kernels", len(paths)) as task:
        for path in paths:
            task.begin(path.name)
            trace = load_trace(path)
            if (rank := trace.rank) is None or rank in traces:
                problem = f"{str(path)!r} does not tell its rank, or has that of another trace"
                raise UsageError(
                    f"{problem}: name files rank0.json.gz, ..., or give one of them alone; "
                    "`lmbench compare --kernels A B` compares two"
                )
            traces[rank] = trace
    return match_collectives(dict(sorted(traces.items())))


def match_collectives(traces: Mapping[int, Trace]) -> dict[int, Trace]:
    """Match the kernels that several ranks ran for the same collective, so that waiting is told from communication.

    Kernels of a group of ranks match by the collective's own number, or by their order in the step. Kernels that send
    and receive match by the pair of ranks and their order. If ranks ran different collectives in a step, as when one
    recording began within it, none of this step match.

    A kernel waits until the last rank's kernel begins; the rest of its time is its cost. Ranks of one machine have one
    clock: then the kernels of a collective run at once for a while. Other clocks are shifted so that the kernels of a
    collective end together, by the median over those of each rank.

    Returns:
        The traces on one clock, with the `match` and `wait_ns` of their kernels.
    """
    first_ns = min(trace.events.origin_ns for trace in traces.values())
    frames = []
    for rank, trace in traces.items():
        kernels = trace.kernels.query("is_counted and collective != ''")
        ended_ns = kernels.end_ns + float(trace.events.origin_ns - first_ns)
        # Of a message both ranks name the same pair.
        group = [" ".join(sorted(group.replace("?", str(rank)).split())) for group in kernels.group]
        frames.append(kernels.assign(rank=rank, group=group, kernel=kernels.index, ended_ns=ended_ns))
    matches = pd.concat(frames, ignore_index=True)
    of_rank = matches.groupby([*_STAGE, "rank"])
    matches["order"] = of_rank.cumcount()
    is_alike = of_rank.collective.agg(" ".join).groupby(_STAGE).agg(lambda ranks: len(ranks) > 1 and len({*ranks}) == 1)
    matches = matches[matches.join(is_alike.rename("is_alike"), on=_STAGE).is_alike.astype(bool)]
    members = matches.groupby([*_STAGE, "order"], sort=False)
    matches = matches.assign(match=members.ngroup())
    last_ns = (matches.ended_ns - matches.duration_ns).groupby(matches.match).transform("max")
    shift_ns = pd.Series(0.0, list(traces))
    if (last_ns < members.ended_ns.transform("min")).mean() < _ONE_CLOCK_FRACTION:
        early_ns = members.ended_ns.transform("mean") - matches.ended_ns
        shift_ns = early_ns.groupby(matches["rank"]).median().reindex(list(traces), fill_value=0.0)
    began_ns = matches.ended_ns + matches["rank"].map(shift_ns) - matches.duration_ns
    last_ns = began_ns.groupby(matches.match).transform("max")
    matches["wait_ns"] = np.minimum(last_ns - began_ns, matches.duration_ns)
    aligned = {}
    for rank, trace in traces.items():
        matched = matches[matches["rank"] == rank].set_index("kernel")
        wait_ns = matched.wait_ns.reindex(trace.kernels.index, fill_value=0)
        kernels = trace.kernels.assign(match=matched.match, wait_ns=wait_ns)
        aligned[rank] = replace(
            trace, kernels=kernels, shift_ns=trace.events.origin_ns - first_ns + round(shift_ns[rank])
        )
    return aligned
