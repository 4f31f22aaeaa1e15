"""Time that defaults of PyTorch and Lightning cost: compilation, the SIGTERM check, DDP's copies of gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from lmbench.kernels.events import where
from lmbench.kernels.trace import Trace
from lmbench.records.intervals import NONE, Integers, covered, union
from lmbench.report.answer import Line
from lmbench.report.units import milliseconds

#: Dynamo and Inductor set a range around each stage of a compilation; stacks show it in traces of older versions, too.
COMPILING = re.compile(
    r"\(dynamo_timed\)$"
    r"|^torch/_dynamo/convert_frame\.py\(\d+\): _compile$|^triton/compiler/compiler\.py\(\d+\): compile$"
)
# DDP's Reducer copies gradients out of its buckets in this range (torch/csrc/distributed/c10d/reducer.cpp). It also
# copies them in, views or not, as long as `zero_grad` frees them.
_BUCKET_COPY = re.compile(r"^torch\.distributed\.ddp\.reducer::copy_bucket")
_SIGTERM = "Lightning's SIGTERM check synchronizes each batch: training_epoch_loop.py, {ms} ms"
_BUCKET_COPIES = "gradients are copied out of buckets: {ms} ms; gradient_as_bucket_view=True spares it"


def find_compiling(trace: Trace) -> tuple[Integers, Integers]:
    """Starts and ends of the times in which the host compiled, sorted and disjoint."""
    events = pd.concat([trace.events.host, trace.events.functions])
    events = events[where(events.name, COMPILING.search)]
    return union(*events[["start_ns", "end_ns"]].to_numpy().T)


def framework_lines(traces: Sequence[Trace]) -> Iterator[Line]:
    """A line on the longest compilation in the traces, and one for each cost, with its mean over the traces' ranks."""
    compiling_s, span_s = max(map(_compiling_s, traces))
    if compiling_s:
        of = f"{milliseconds(compiling_s)} of {milliseconds(span_s)} ms"
        yield Line("compiling", f"{of}: warm up before recording")
    for cost_ns, sentence in ((_sigterm_ns, _SIGTERM), (_bucket_copies_ns, _BUCKET_COPIES)):
        cost_s = sum(cost_ns(trace) / trace.timeline.steps for trace in traces) / len(traces) / 1e9
        if cost_s:
            yield Line("cost", sentence.format(ms=milliseconds(cost_s)))


def _compiling_s(trace: Trace) -> tuple[float, float]:
    """How much of the trace's steps, or of the whole trace, is compilation, and how long these are."""
    span_ns = np.array(trace.span_ns)
    (compiling_ns,) = np.diff(covered(*find_compiling(trace))(span_ns))
    return compiling_ns / 1e9, float(np.diff(span_ns)[0] / 1e9)


def _sigterm_ns(trace: Trace) -> int:
    """The host's time in Lightning's check whether a rank got SIGTERM; 0 if it is not made in every step.

    `_TrainingEpochLoop._broadcast_sigterm_tensor` (Lightning 2.6) broadcasts one integer before each batch and reads it
    at once. So an `aten::item` counts that comes right after a broadcast, outside of forward and backward.
    """
    host, names, nesting = trace.host.events, trace.host.names, trace.host.nesting
    phases = trace.timeline.at(host.start_ns.to_numpy())
    total_ns = count = 0
    for item in np.flatnonzero((host.name == "aten::item") & host.start_ns.between(*trace.span_ns, "left")).tolist():
        beside = (event for event in nesting.climb(item - 1) if nesting.parent[event] == nesting.parent[item])
        before = next(beside, item)
        is_broadcast = names[before] == "c10d::broadcast_" or host.arguments[before].collective_name == "broadcast"
        # The size is noted on the operator or inside it; gloo notes none.
        is_single = all(arguments.in_elements in (0, 1) for arguments in host.arguments[before:item])
        if is_broadcast and is_single and phases[before] not in ("forward", "backward", "optimizer"):
            total_ns += host.end_ns[item] - host.start_ns[before]
            count += 1
    return int(total_ns) if count >= trace.timeline.steps else 0


def _bucket_copies_ns(trace: Trace) -> int:
    """The time of the kernels with which DDP copies gradients out of buckets."""
    copies = trace.host.nesting.innermost(where(trace.host.names, _BUCKET_COPY.match))
    is_copy = copies[trace.kernels.around] != NONE
    return int(trace.kernels.duration_ns[trace.kernels.is_counted & is_copy].sum())
