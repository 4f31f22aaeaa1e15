"""Where the time goes, as means per step: on the device by phase, kernel, kind and part, inside attention and by the
user's own annotations; on the host, of a trace without kernels, by operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmbench.kernels.events import is_range
from lmbench.kernels.host import Nesting
from lmbench.kernels.names import MATMUL, precision_of, short_name
from lmbench.kernels.trace import PHASE_ORDER, Trace
from lmbench.records.intervals import NONE
from lmbench.records.measured import AttentionTimes
from lmbench.records.run import Model
from lmbench.records.vocabulary import Phase

#: All phases, and what lies outside of them.
STEP = "step"
#: Parts of attention where it is written out.
ATTENTION_PARTS = ("scores", "mask", "softmax", "values")
# FLOPs per element of the scores, of softmax and of products per head_dim. Forward: softmax finds the maximum,
# subtracts it, exponentiates, sums and divides; the products of q and k and of weights and v cost 2 * head_dim each.
# Backward: softmax multiplies, sums, subtracts and multiplies; each product has two of its size, for both gradients.
_FLOPS: dict[Phase, tuple[int, int]] = {"forward": (5, 4), "backward": (4, 8)}


@dataclass(frozen=True, eq=False)
class Work:
    """The kernels of a trace of `steps` steps, summed up: a row for each `phase`, `name`, `kind` and `part`, with its
    `short_name`, its `precision` if it is a product, and of all steps `ns` and the kernels' `number`."""

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
        """Each phase that has kernels, `outside` and `unlinked` among them, in the order of a step."""
        present = set(self.rows.phase)
        return [phase for phase in PHASE_ORDER if phase in present]

    def by(self, *keys: str, phase: str = STEP) -> pd.DataFrame:
        """Means per step of a phase's kernels, or of all, by these columns, the largest first: `kernel_s`,
        `kernel_count`, `mean_s` of one, and `share_fraction` of the phase's kernel time."""
        rows = self.rows if phase == STEP else self.rows[self.rows.phase == phase]
        sums = rows.groupby([*keys], sort=False)[["ns", "number"]].sum().reset_index()
        means = sums.assign(
            kernel_s=sums.ns / 1e9 / self.steps,
            kernel_count=sums.number / self.steps,
            mean_s=sums.ns / 1e9 / sums.number,
            share_fraction=sums.ns / max(sums.ns.sum(), 1),
        )
        return means.drop(columns=["ns", "number"]).sort_values("kernel_s", ascending=False, kind="stable")

    def seconds(self, key: str, phase: str = STEP) -> dict[str, float]:
        """Kernel time per step by one of the columns, the largest first."""
        return dict(self.by(key, phase=phase)[[key, "kernel_s"]].itertuples(index=False, name=None))

    def total_s(self, phase: str = STEP) -> float:
        """Kernel time per step of a phase, or of all."""
        return sum(self.seconds("phase", phase).values())

    def fraction(self, key: str, value: str, phase: str = STEP) -> float:
        """Share of the kernel time of a phase that has this value in a column."""
        rows = self.by(key, phase=phase)
        return float(rows.share_fraction[rows[key] == value].sum())

    def kernels(self, phase: str = STEP) -> pd.DataFrame:
        """Each kernel of a phase, the longest first: `name`, `short_name`, `kind`, the columns of `by`, and the `part`
        with most of its time."""
        keys = ["name", "short_name", "kind"]
        parts = self.by(*keys, "part", phase=phase).drop_duplicates(keys)[[*keys, "part"]]
        rows = self.by(*keys, phase=phase).merge(parts, on=keys)
        return rows.sort_values(["kernel_s", "name"], ascending=[False, True])


def attention_times(work: Work, model: Model) -> dict[Phase, AttentionTimes]:
    """Forward and backward, where both the products and softmax have kernels of their own; else nothing. Ratios are of
    softmax to matrix products.

    A kernel that does one of these parts together with anything else leaves the phase out: its time cannot be divided.
    """
    times: dict[Phase, AttentionTimes] = {}
    for phase, (softmax, products) in _FLOPS.items():
        parts, pieces = work.seconds("part", phase), work.by("kind", "part", phase=phase)
        is_divided = all(part in ATTENTION_PARTS or {*ATTENTION_PARTS}.isdisjoint(part.split("+")) for part in parts)
        is_product = (pieces.kind == MATMUL) & pieces.part.isin(("scores", "values"))
        matmul_s = float(pieces.kernel_s[is_product].sum())
        if is_divided and matmul_s and parts.get("softmax"):
            inside = {f"{part}_s": parts.get(part, 0.0) for part in ATTENTION_PARTS}
            times[phase] = AttentionTimes(**inside, matmul_s=matmul_s)
            times[phase].softmax_matmul_time_ratio = parts["softmax"] / matmul_s
            if model.d_model and model.num_heads:
                # The scores' size cancels out.
                times[phase].softmax_matmul_flop_ratio = softmax / (products * model.d_model / model.num_heads)
    return times


def annotation_times(trace: Trace) -> pd.DataFrame:
    """Kernel time by the user's own annotations (`record_function`), the longest first, per step.

    The columns are `name`, `calls`, `kernel_s` and `kernel_count` of its kernels, and of those in no annotation inside
    `own_s` and the `share_fraction` of all kernels; an annotation within one of the same name counts once. A kernel
    belongs to the innermost annotation around its launch, on the launch's thread or else on the main one, which waits
    while autograd's thread works.
    """
    steps, kernels = trace.timeline.steps, trace.kernels[trace.kernels.is_counted]
    nesting = trace.host.users
    main = np.full(len(kernels), trace.events.main_thread)
    by_thread, by_main = (
        nesting.around(thread, kernels.launch_ns.to_numpy()) for thread in (kernels.thread.to_numpy(), main)
    )
    innermost = np.where(by_thread != NONE, by_thread, by_main)
    duration_s = kernels.duration_ns / 1e9
    sums = duration_s.groupby(np.where(kernels.launch != NONE, innermost, NONE)).agg(["sum", "size"])
    # The outermost of each name.
    rows = [
        (name, event, time_s, count, time_s if name == nesting.names[index] else 0.0)
        for index, time_s, count in sums.itertuples()
        for name, event in {nesting.names[around]: around for around in nesting.climb(index)}.items()
    ]
    frame = pd.DataFrame(rows, columns=["name", "calls", "kernel_s", "kernel_count", "own_s"])
    means = frame.groupby("name").agg({"calls": "nunique", "kernel_s": "sum", "own_s": "sum", "kernel_count": "sum"})
    means = (means / steps).assign(share_fraction=means.own_s / duration_s.sum())
    return means.sort_values("kernel_s", ascending=False, kind="stable").reset_index()


def operator_times(trace: Trace) -> pd.DataFrame:
    """Operators on the host by phase, in the order of a step, the longest first, per step: `phase`, `name`, `self_s`
    without operators inside, its `share_fraction` of the phase's, `call_count` and `mean_s`."""
    steps, is_operator = trace.timeline.steps, ~is_range(trace.host.events)
    operators, is_engine = trace.host.events[is_operator], trace.host.is_engine[is_operator]
    self_ns, parent = operators.end_ns - operators.start_ns, Nesting(operators).parent
    inside = np.flatnonzero(parent != NONE)
    taken = np.minimum(self_ns[inside], operators.end_ns[parent[inside]] - operators.start_ns[inside])
    np.subtract.at(self_ns, parent[inside], taken)
    columns = {
        "phase": trace.timeline.at(operators.start_ns),
        # The engine's own work around each node; the node's function is an event of its own.
        "name": np.where(is_engine, "autograd engine", operators.name),
        "ns": np.maximum(self_ns, 0),
    }
    sums = pd.DataFrame(columns).groupby(["phase", "name"], sort=False).ns.agg(ns="sum", number="size")
    work = Work(sums.reset_index(), steps)
    rows = pd.concat([work.by("phase", "name", phase=phase) for phase in work.phases or [STEP]])
    return rows.rename(columns={"kernel_s": "self_s", "kernel_count": "call_count"})
