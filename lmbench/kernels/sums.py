"""Where the time goes, as means per step: on the device by phase, kernel, kind and part, inside attention and by the
user's own annotations; on the host, of a trace without kernels, by operator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmbench.kernels.events import is_range, users_ranges
from lmbench.kernels.host import Nesting
from lmbench.kernels.kinds import MATMUL, precision_of, short_name
from lmbench.kernels.phases import PHASE_ORDER
from lmbench.kernels.tables import Row, records
from lmbench.kernels.trace import Trace
from lmbench.records.instruments import AttentionTimes
from lmbench.records.intervals import NONE
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


@dataclass(frozen=True)
class Work:
    """The kernels of a trace of `steps` steps, summed up: a row for each `phase`, `name`, `kind` and `part`, with its
    `short_name`, its `precision` if it is a product, and of all steps `total_ns` and the kernels' number, `launched`.

    Rows are mappings, since a frame takes 4 ms to sum up a few hundred of them, and this 0.2 ms.
    """

    rows: list[Row]
    steps: int

    @classmethod
    def of(cls, kernels: pd.DataFrame, steps: int) -> Work:
        grouped = kernels.groupby(["phase", "name", "kind", "part"], sort=False).duration_ns
        rows = grouped.agg(total_ns="sum", launched="size").reset_index().to_dict("records")
        for row in rows:
            row["short_name"], row["precision"] = short_name(row["name"]), precision_of(row["name"], row["kind"])
        return cls(rows, steps)

    @property
    def phases(self) -> list[str]:
        """Each phase that has kernels, `outside` and `unlinked` among them, in the order of a step."""
        return [phase for phase in PHASE_ORDER if any(phase == row["phase"] for row in self.rows)]

    def by(self, *keys: str, phase: str = STEP) -> list[Row]:
        """Means per step of a phase's kernels, or of all, by these columns, the largest first: `kernel_s`,
        `kernel_count`, and `share_fraction` of the phase's kernel time."""
        sums = defaultdict[tuple[str, ...], list[int]](lambda: [0, 0])
        for row in self.rows:
            if phase in (STEP, row["phase"]):
                members = sums[tuple(row[key] for key in keys)]
                members[0] += row["total_ns"]
                members[1] += row["launched"]
        total_ns = sum(ns for ns, _ in sums.values()) or 1
        rows: list[Row] = [
            {
                **dict(zip(keys, values, strict=True)),
                "kernel_s": ns / 1e9 / self.steps,
                "kernel_count": launched / self.steps,
                "share_fraction": ns / total_ns,
            }
            for values, (ns, launched) in sums.items()
        ]
        return sorted(rows, key=lambda row: -row["kernel_s"])

    def seconds(self, key: str, phase: str = STEP) -> dict[str, float]:
        """Kernel time per step by one of the columns, the largest first."""
        return {row[key]: row["kernel_s"] for row in self.by(key, phase=phase)}

    def total(self, phase: str = STEP) -> Row:
        """`kernel_s` and `kernel_count` per step of all kernels of a phase."""
        return next(iter(self.by(phase=phase)), {"kernel_s": 0.0, "kernel_count": 0.0, "share_fraction": 0.0})

    def fraction(self, key: str, *values: str, phase: str = STEP) -> float:
        """Share of the kernel time of a phase that has one of these values in a column."""
        return float(sum(row["share_fraction"] for row in self.by(key, phase=phase) if row[key] in values))

    def kernels(self, phase: str = STEP) -> list[Row]:
        """Each kernel of a phase, the longest first: the columns of `by`, `name`, `kind`, `short_name`, `mean_s`, its
        `parts`, in s each, and the one with the most of its time, `part`."""
        parts = defaultdict[tuple[str, str], dict[str, float]](dict)
        for row in self.by("name", "kind", "part", phase=phase):
            parts[row["name"], row["kind"]][row["part"]] = row["kernel_s"]
        rows = self.by("name", "short_name", "kind", phase=phase)
        for row in rows:
            row["parts"], row["mean_s"] = parts[row["name"], row["kind"]], row["kernel_s"] / row["kernel_count"]
            row["part"] = next(iter(row["parts"]))
        return sorted(rows, key=lambda row: (-row["kernel_s"], row["name"]))


def attention_times(work: Work, model: Model) -> dict[Phase, AttentionTimes]:
    """Forward and backward, where both the products and softmax have kernels of their own; else nothing. Ratios are of
    softmax to matrix products.

    A kernel that does one of these parts together with anything else leaves the phase out: its time cannot be divided.
    """
    times: dict[Phase, AttentionTimes] = {}
    for phase in _FLOPS:
        parts = work.seconds("part", phase)
        is_divided = all(part in ATTENTION_PARTS or {*ATTENTION_PARTS}.isdisjoint(part.split("+")) for part in parts)
        products = (row for row in work.by("kind", "part", phase=phase) if row["kind"] == MATMUL)
        matmul_s = sum(row["kernel_s"] for row in products if row["part"] in ("scores", "values"))
        if is_divided and matmul_s and parts.get("softmax"):
            inside = {f"{part}_s": parts.get(part, 0.0) for part in ATTENTION_PARTS}
            ratio = parts["softmax"] / matmul_s
            times[phase] = AttentionTimes(**inside, matmul_s=matmul_s, softmax_matmul_time_ratio=ratio)
            times[phase].softmax_matmul_flop_ratio = flop_ratio(phase, model)
    return times


def flop_ratio(phase: Phase, model: Model) -> float | None:
    """FLOPs of softmax to those of the two products, from the model's head_dim; the scores' size cancels out."""
    if not model.d_model or not model.num_heads:
        return None
    softmax, products = _FLOPS[phase]
    return softmax / (products * model.d_model / model.num_heads)


def annotation_times(trace: Trace) -> tuple[list[Row], float]:
    """Kernel time by the user's own annotations (`record_function`), the longest first, and that in none, per step.

    The columns are `name`, `calls`, `kernel_s` and `kernel_count` of its kernels, and `own_s` of those in no annotation
    inside; an annotation within one of the same name counts once. A kernel belongs to the innermost annotation around
    its launch, on the launch's thread or else on the main one, which waits while autograd's thread works.
    """
    launches, steps = trace.events.launches, trace.timeline.steps
    nesting = Nesting(users_ranges(trace.events.host))
    main = np.full_like(launches.thread, trace.events.main_thread)
    by_thread, by_main = (nesting.around(thread, launches.start_ns) for thread in (launches.thread, main))
    innermost = np.append(np.where(by_thread != NONE, by_thread, by_main), NONE)[trace.kernels.launch]
    durations = trace.kernels.duration_ns
    innermost, durations = innermost[trace.kernels.is_counted], durations[trace.kernels.is_counted]
    rows = []
    for index, duration in zip(innermost.tolist(), durations.tolist(), strict=True):
        # The outermost of each name.
        for name, event in {nesting.names[event]: event for event in nesting.climb(index)}.items():
            rows.append((name, event, duration, duration if name == nesting.names[index] else 0))
    frame = pd.DataFrame(rows, columns=["name", "event", "ns", "own_ns"])
    sums = frame.groupby("name").agg(
        calls=("event", "nunique"), kernel_s=("ns", "sum"), own_s=("own_ns", "sum"), kernel_count=("ns", "size")
    )
    means = (sums / steps).assign(kernel_s=sums.kernel_s / 1e9 / steps, own_s=sums.own_s / 1e9 / steps)
    longest = means.sort_values("kernel_s", ascending=False, kind="stable")
    return records(longest.reset_index()), float(durations[innermost == NONE].sum()) / 1e9 / steps


def operator_times(trace: Trace) -> dict[str, list[Row]]:
    """By phase, in the order of a step, its operators on the host, the longest first, per step: `phase`, `name`,
    `self_s` without operators inside, its `share_fraction` of the phase's, `call_count` and `mean_s`."""
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
        "self_ns": np.maximum(self_ns, 0),
    }
    sums = pd.DataFrame(columns).groupby(["phase", "name"]).self_ns.agg(ns="sum", calls="size", mean_s="mean")
    rows = sums.assign(
        self_s=sums.ns / 1e9 / steps,
        share_fraction=sums.ns / sums.groupby("phase").ns.transform("sum").clip(lower=1),
        call_count=sums.calls / steps,
        mean_s=sums.mean_s / 1e9,
    ).sort_values("self_s", ascending=False, kind="stable")
    longest = records(rows.reset_index().drop(columns=["ns", "calls"]))
    by_phase = {phase: [row for row in longest if row["phase"] == phase] for phase in PHASE_ORDER}
    return {phase: rows for phase, rows in by_phase.items() if rows}
