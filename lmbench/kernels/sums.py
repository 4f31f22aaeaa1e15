"""Where the time of a step goes, as means per step.

Kernel time is summed by phase, kernel, kind and part, inside attention, and by the user's own annotations. Of a trace
without kernels, host time is summed by operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmbench.kernels.graph import Graph
from lmbench.kernels.names import MATMUL, precision_of, short_name
from lmbench.kernels.trace import PHASE_ORDER, Trace
from lmbench.records.examined import AttentionTimes
from lmbench.records.intervals import NONE, take
from lmbench.records.run import Model
from lmbench.records.vocabulary import Phase

#: All phases together, with the time outside of them.
STEP = "step"
#: The parts of naive attention.
ATTENTION_PARTS = ("scores", "mask", "softmax", "values")
# FLOPs per element of the scores: those of softmax, and those of the products divided by head_dim. Forward, softmax
# finds the maximum, subtracts it, exponentiates, sums and divides; the products of q and k and of weights and v cost
# 2 * head_dim each. Backward, softmax multiplies, sums, subtracts and multiplies; each forward product has two of its
# size, one for each gradient.
_FLOPS: dict[Phase, tuple[int, int]] = {"forward": (5, 4), "backward": (4, 8)}


@dataclass(frozen=True, eq=False)
class Work:
    """The kernels of a trace, summed over its `steps` steps.

    `rows` has a row for each `phase`, `name`, `kind` and `part`: the `short_name`, the `precision` of products, the
    summed time `ns` and the `number` of kernels.
    """

    rows: pd.DataFrame
    steps: int

    @classmethod
    def of(cls, kernels: pd.DataFrame, steps: int, float32_matmul: str | None = None) -> Work:
        grouped = kernels.groupby(["phase", "name", "kind", "part"], sort=False).duration_ns
        rows = grouped.agg(ns="sum", number="size").reset_index()
        precisions = [precision_of(*product, float32_matmul) for product in zip(rows.name, rows.kind, strict=True)]
        return cls(rows.assign(short_name=[*map(short_name, rows.name)], precision=precisions), steps)

    @property
    def phases(self) -> list[str]:
        """The phases that have kernels, in the order of a step; `outside` and `unlinked` come last."""
        present = set(self.rows.phase)
        return [phase for phase in PHASE_ORDER if phase in present]

    def by(self, *keys: str, phase: str = STEP) -> pd.DataFrame:
        """Means per step over the kernels of a phase, or of the step, grouped by columns; the largest time first.

        The means are `kernel_s`, the `share_fraction` of the phase's kernel time, `kernel_count`, and `mean_s` of one
        kernel.
        """
        rows = self.rows if phase == STEP else self.rows[self.rows.phase == phase]
        sums = rows.groupby([*keys], sort=False)[["ns", "number"]].sum().reset_index()
        means = sums.assign(
            kernel_s=sums.ns / 1e9 / self.steps,
            share_fraction=sums.ns / max(sums.ns.sum(), 1),
            kernel_count=sums.number / self.steps,
            mean_s=sums.ns / 1e9 / sums.number,
        )
        return means.drop(columns=["ns", "number"]).sort_values("kernel_s", ascending=False, kind="stable")

    def seconds(self, key: str, phase: str = STEP) -> dict[str, float]:
        """Kernel time per step for each value of a column, the largest first."""
        times: dict[str, float] = self.by(key, phase=phase).set_index(key).kernel_s.to_dict()
        return times

    def total_s(self, phase: str = STEP) -> float:
        """Kernel time per step of a phase, or of the whole step."""
        return sum(self.seconds("phase", phase).values())

    def fraction(self, key: str, value: str, phase: str = STEP) -> float:
        """The share of a phase's kernel time that has this value in a column."""
        rows = self.by(key, phase=phase)
        return float(rows.share_fraction[rows[key] == value].sum())

    def kernels(self, phase: str = STEP) -> pd.DataFrame:
        """The kernels of a phase, the longest first: `name`, `short_name`, `kind`, and the means of `by`.

        `part` is the part that has most of the kernel's time.
        """
        keys = ["name", "short_name", "kind"]
        parts = self.by(*keys, "part", phase=phase).drop_duplicates(keys)[[*keys, "part"]]
        rows = self.by(*keys, phase=phase).merge(parts, on=keys)
        return rows.sort_values(["kernel_s", "name"], ascending=[False, True])


def attention_times(work: Work, model: Model) -> dict[Phase, AttentionTimes]:
    """The times inside naive attention in forward and backward, with the ratios of softmax to matrix products.

    A phase is left out if its products or its softmax have no kernels of their own. It is also left out if a kernel
    does one of the parts together with another: its time cannot be divided.
    """
    times = {}
    for phase, (softmax, products) in _FLOPS.items():
        parts = work.seconds("part", phase)
        pieces = work.by("kind", "part", phase=phase)
        is_divided = all(part in ATTENTION_PARTS or {*ATTENTION_PARTS}.isdisjoint(part.split("+")) for part in parts)
        is_product = (pieces.kind == MATMUL) & pieces.part.isin(("scores", "values"))
        matmul_s = float(pieces.kernel_s[is_product].sum())
        if is_divided and matmul_s and parts.get("softmax"):
            part_times = {f"{part}_s": parts.get(part, 0.0) for part in ATTENTION_PARTS}
            ratio = parts["softmax"] / matmul_s
            times[phase] = AttentionTimes(**part_times, matmul_s=matmul_s, softmax_matmul_time_ratio=ratio)
            if model.d_model and model.num_heads:
                # Both FLOP counts are per element of the scores, whose number cancels out.
                times[phase].softmax_matmul_flop_ratio = softmax / (products * model.d_model / model.num_heads)
    return times


def annotation_times(trace: Trace) -> pd.DataFrame:
    """Kernel time per step by the user's own annotations (`record_function`), the longest first.

    The columns are `name`, `calls`, `kernel_s` and `kernel_count`. `own_s` is the time of the kernels outside of inner
    annotations, and `share_fraction` is its share of all kernel time. An annotation inside one of the same name counts
    once. A kernel belongs to the innermost annotation around its launch: on the launch's thread, or else on the main
    thread, which waits while autograd's thread works.
    """
    steps = trace.timeline.steps
    kernels = trace.kernels[trace.kernels.is_counted]
    nesting, threads = trace.host.users, (kernels.thread, trace.events.main_thread)
    by_thread, by_main = (nesting.around(thread, kernels.launch_ns) for thread in threads)
    innermost = np.where(by_thread != NONE, by_thread, by_main)
    duration_s = kernels.duration_ns / 1e9
    sums = duration_s.groupby(np.where(kernels.launch != NONE, innermost, NONE)).agg(["sum", "size"])
    # A kernel counts for each name around its launch; `calls` counts the outermost annotation of the name.
    rows = [
        (name, event, time_s, count, time_s if name == nesting.names[index] else 0.0)
        for index, time_s, count in sums.itertuples()
        for name, event in {nesting.names[around]: around for around in nesting.climb(index)}.items()
    ]
    frame = pd.DataFrame(rows, columns=["name", "calls", "kernel_s", "kernel_count", "own_s"])
    means = frame.groupby("name").agg({"calls": "nunique", "kernel_s": "sum", "own_s": "sum", "kernel_count": "sum"})
    means = (means / steps).assign(share_fraction=means.own_s / duration_s.sum())
    return means.sort_values("kernel_s", ascending=False, kind="stable").reset_index()


def host_times(graph: Graph) -> pd.DataFrame:
    """The host's time in the clocked steps of a trace without kernels, summed by `phase`, `name` and `function`.

    `name` is that of the innermost operator, and `function` the user's Python function around time outside of
    operators; both are empty where there is none. A row has the summed time `ns`, and the `number` of operators.
    """
    trace = graph.first
    pieces = graph.path
    around, functions = pieces.around.to_numpy(np.int64), trace.host.functions
    is_operator = ~take(trace.host.is_module, around, True)
    # The engine's event has only its own work around a node: the node's function has an event of its own.
    names = np.where(trace.host.is_engine, "autograd engine", trace.host.names)
    function = take(functions.names, functions.around(trace.events.main_thread, pieces.start_ns), "")
    pieces = pieces.assign(
        name=np.where(is_operator, take(names, around, ""), ""), function=np.where(is_operator, "", function)
    )
    groups = pieces.groupby(["phase", "name", "function"], sort=False)
    return groups.agg(ns=("ns", "sum"), number=("around", "nunique")).reset_index()


def operator_times(graph: Graph) -> pd.DataFrame:
    """Host time per clocked step by phase, in the order of a step, and operator, the longest first.

    The columns are `phase`, `name`, `self_s` without operators inside, the `share_fraction` of the phase's self time,
    `call_count` and `mean_s`.
    """
    work = Work(host_times(graph).query("name != ''"), graph.steps)
    rows = pd.concat([work.by("phase", "name", phase=phase) for phase in work.phases or [STEP]])
    return rows.rename(columns={"kernel_s": "self_s", "kernel_count": "call_count"})
