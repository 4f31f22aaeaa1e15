"""What-ifs: the graph of the traced steps simulated again with other times, as a user asks for by words.

Several changes at once are simulated together, since what one saves another may not save again.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from lmbench.errors import UsageError, unknown
from lmbench.kernels.graph import START_LINKS, Graph, Solution
from lmbench.kernels.names import KINDS, PARTS
from lmbench.kernels.path import device_time, host_time, path_pieces
from lmbench.kernels.trace import PHASE_ORDER
from lmbench.kernels.verdicts import FUSED_OPTIMIZER
from lmbench.kernels.waits import DATA, LAUNCHING
from lmbench.records.run import Model

#: The changes that are tried where none is named, where the trace has what they change.
USUAL: Final = ("collectives=0", "rank=median", "launches=0", "data=0", "optimizer=fused", "attention=fused", "device=2x", "host=2x")
# Parts that are outside of the blocks, which `layers` does not change.
_OUTSIDE_BLOCKS = ("embedding", "head", "loss", "data", "comm", "optimizer", "unclassified")
# AdamW in a loop or by foreach reads and writes 20 numbers for each weight (lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
# addcdiv 4, decay 2); fused, it reads weight, gradient and both moments, and writes all but the gradient.
_FUSED_FRACTION = 7 / 20
_FORMS = (
    "collectives=F or =N GB/s, launches=0, data=0, rank=median, optimizer=fused, attention=fused, layers=F, host=F, "
    "device=F, kind:K=F, part:P=F, phase:P=F; F: a factor on the time, such as 0.5, or a speed, such as 2x"
)


class Change(NamedTuple):
    """A change of the graph: what is changed, which one of several, and the factor on its time.

    `gb_per_s` is the bus bandwidth of collectives instead of a factor.
    """

    words: str
    axis: str
    name: str = ""
    factor: float = 0.0
    gb_per_s: float | None = None


def read_changes(text: str) -> list[Change]:
    """The changes in a list with commas, such as `collectives=0,kind:elementwise=0.5`. Raises UsageError for others."""
    return [_read_change(words.strip()) for words in text.split(",")]


def _read_change(words: str) -> Change:
    target, _, value = words.partition("=")
    axis, _, name = target.partition(":")
    if named := {"kind": KINDS, "part": PARTS, "phase": PHASE_ORDER}.get(axis):
        if name not in named:
            raise unknown(f"--what_if {axis}", name, named)
    fixed = {"launches": "0", "data": "0", "rank": "median", "optimizer": "fused", "attention": "fused"}
    is_known = named or (not name and axis in (*fixed, "collectives", "layers", "host", "device"))
    try:
        if not is_known or value != fixed.get(axis, value):
            raise ValueError
        if axis in fixed:
            return Change(words, axis)
        if axis == "collectives" and value.endswith("GB/s"):
            return Change(words, axis, gb_per_s=_positive(value.removesuffix("GB/s")))
        if value.endswith("x"):
            return Change(words, axis, name, 1 / _positive(value.removesuffix("x")))
        return Change(words, axis, name, float(value) and _positive(value))
    except ValueError:
        raise UsageError(f"--what_if {words[:60]!r} is no change; give {_FORMS}") from None


def _positive(value: str) -> float:
    number = float(value)
    if not 0 < number < np.inf:
        raise ValueError
    return number


class WhatIf:
    """The graph with what its links stand for, simulated with changes; lengths are those of a step, in s.

    `host` and `device` have the pieces and kernels of the links; `base` is the simulation without a change.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.host, self.device = host_time(graph), device_time(graph)
        self.base = graph.simulate()
        self.measured_s = graph.measured.length_ns / 1e9 / graph.steps
        #: How much longer the simulation without a change is than the recording, as a share of it.
        self.residual_fraction = self.base.length_ns / graph.measured.length_ns - 1

    def ask(self, changes: Sequence[Change]) -> tuple[float, pd.DataFrame]:
        """The step with all of these changes, and its critical path as `path_pieces` returns it.

        Raises:
            UsageError: the trace does not have what a change needs.
        """
        factors = np.ones(len(self.device)), np.ones(len(self.device)), np.ones(len(self.host))
        for change in changes:
            for total, factor in zip(factors, self._factors(change), strict=True):
                total *= factor
        kernel, launch, host = factors
        links, ns = self.graph.links, self.graph.links.ns.to_numpy(np.float64).copy()
        kind = links.kind[self.device.index].to_numpy()
        # A link into a kernel's start shrinks as its launches do; what is unexplained stays.
        unexplained_ns = links.unexplained_ns[self.device.index].to_numpy()
        scaled_ns = (ns[self.device.index] - unexplained_ns) * launch + unexplained_ns
        ns[self.device.index] = np.where(kind == "kernel", ns[self.device.index] * kernel, scaled_ns)
        if any(change.axis == "launches" for change in changes):
            ns[links.kind == "launch"] = links.unexplained_ns[links.kind == "launch"]
        host = self.host.assign(ns=self.host.ns * host * self._of_calls(launch))
        sums = host.groupby("interval").ns.sum()
        ns[sums.index] = sums
        solution = self.graph.simulate(ns, any(change.axis == "rank" for change in changes))
        step_s = self.measured_s + (solution.length_ns - self.base.length_ns) / 1e9 / self.graph.steps
        return step_s, path_pieces(self.graph, solution, host, self.device)

    def _of_calls(self, launch: Any) -> Any:
        """The factor on each piece of launching: the mean of those of the kernels that its call launches."""
        owners = self.graph.links.owner[self.host.interval].to_numpy()
        is_kernel = (self.graph.links.kind[self.device.index] == "kernel").to_numpy()
        by_launch = pd.Series(launch[is_kernel]).groupby([
            self.device["rank"].to_numpy()[is_kernel], self.device.launch.to_numpy()[is_kernel]
        ]).mean()  # fmt: skip
        factor = np.ones(len(self.host))
        for rank, calls in self.graph.calls.items():
            is_rank = (self.host["rank"] == rank).to_numpy() & (self.host.cause == LAUNCHING).to_numpy()
            launches = calls.launch.to_numpy()[owners[is_rank]]
            factor[is_rank] = by_launch.get(rank, pd.Series(dtype=float)).reindex(launches).fillna(1.0)
        return factor

    def _factors(self, change: Change) -> tuple[Any, Any, Any]:
        """The factors that a change has on the time of each kernel, of its launch, and of each piece of the host's."""
        device, host, factor = self.device, self.host, change.factor
        is_comm = (device.kind == "comm").to_numpy()
        kernel, launch, on_host = np.ones(len(device)), np.ones(len(device)), np.ones(len(host))
        is_changed = np.zeros(len(device), dtype=bool)
        if change.axis in ("kind", "part", "phase"):
            is_changed = (device[change.axis] == change.name).to_numpy()
        elif change.axis == "collectives":
            is_changed = is_comm
        elif change.axis == "device":
            is_changed = ~is_comm
        elif change.axis == "attention":
            is_changed = device.part.isin(("mask", "softmax")).to_numpy()
        elif change.axis == "layers":
            is_changed = ~device.part.isin(_OUTSIDE_BLOCKS).to_numpy()
        elif change.axis == "optimizer":
            is_changed = ((device.phase == "optimizer") & ~device.name.str.contains(FUSED_OPTIMIZER)).to_numpy() & ~is_comm
            factor = _FUSED_FRACTION
        elif change.axis == "data":
            is_changed = device.phase.isin(("data", "transfer")).to_numpy()
        elif change.axis == "rank" and len(self.graph.traces) == 1:
            raise UsageError(f"--what_if {change.words} needs the traces of several ranks; give a folder with all of them")
        is_data = ((host.cause == DATA) | host.phase.isin(("data", "transfer"))).to_numpy()
        if not is_changed.any() and change.axis not in ("host", "launches", "rank") and not (change.axis == "data" and is_data.any()):
            raise UsageError(f"--what_if {change.words} changes nothing: the trace has no such kernels")
        kernel[is_changed] = factor
        if change.gb_per_s is not None:
            rate_ns = device.bus_bytes / change.gb_per_s / self.graph.links.ns[device.index]
            kernel[is_changed] = rate_ns[is_changed].fillna(1.0)
        elif not factor or change.axis in ("layers", "optimizer"):
            # Kernels that are gone need no launches, and half as many layers half as many.
            launch[is_changed] = 0.0 if change.axis == "optimizer" else factor
        if change.axis == "data":
            on_host[is_data] = 0.0
        elif change.axis in ("host", "launches"):
            on_host[(change.axis == "host") | (host.cause == LAUNCHING)] = factor
        return kernel, launch, on_host


@cache
def _checked() -> dict[str, float]:
    """The largest error of each axis in runs that made a what-if true, as a share of their step."""
    errors = dict[str, float]()
    for row in csv.DictReader((files("lmbench.reference") / "what_if.csv").read_text(encoding="utf-8").splitlines()):
        axis = row["what_if"].partition("=")[0].partition(":")[0]
        errors[axis] = max(errors.get(axis, 0.0), abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1))
    return errors


def checked_fraction(changes: Sequence[Change]) -> float | None:
    """The largest error of these changes where they were made true, as a share of the step; None if one never was."""
    errors = [_checked().get(change.axis) for change in changes]
    return None if None in errors else max(filter(None, errors), default=0.0)
