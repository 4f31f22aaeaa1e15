"""What-ifs: the graph of the traced steps simulated again with other times, as a user asks for by words.

Several changes at once are simulated together, since what one saves another may not save again.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from lmbench.errors import UsageError, unknown
from lmbench.kernels.graph import Graph
from lmbench.kernels.names import KINDS, PARTS
from lmbench.kernels.path import device_time, host_time, link_causes, path_pieces
from lmbench.kernels.trace import PHASE_ORDER
from lmbench.kernels.verdicts import FUSED_OPTIMIZER
from lmbench.kernels.waits import DATA, LAUNCHING

#: The changes that are tried where none is named, where the trace has what they change.
USUAL: Final = (
    "collectives=0", "rank=median", "launches=0", "data=0", "optimizer=fused", "attention=fused", "device=2x",
    "host=2x",
)  # fmt: skip
#: The changes whose effect is kept in run.json, for reports and for the tuner.
RECORDED: Final = (*USUAL, "layers=0.5", "attention=0", "part:loss=0", "phase:optimizer=0")
# Parts that are outside of the blocks, which `layers` does not change.
_OUTSIDE_BLOCKS = ("", "embedding", "head", "loss", "data", "comm", "optimizer", "unclassified")
# AdamW in a loop or by foreach reads and writes 20 numbers for each weight (lerp 3, mul 2, addcmul 3, sqrt 2, div 2,
# add 2, addcdiv 4, decay 2); fused, it reads weight, gradient and both moments, and writes all but the gradient.
_FUSED_FRACTION = 7 / 20
# Parts of attention; a fused one has no kernels for two of those that are written out.
_ATTENTION_PARTS, _FUSED_AWAY = ("attention", "scores", "mask", "softmax", "values"), ("mask", "softmax")
# Phases that get a batch to the device.
_LOADING_PHASES = ("data", "transfer")
# Phases whose work goes with the number of parameters.
_UPDATE_PHASES = ("clip", "optimizer", "zero_grad")
_FORMS = (
    "collectives=F or =NGB/s, launches=0, data=0, rank=median, optimizer=fused, attention=fused or =F, layers=F, "
    "host=F, device=F, kind:K=F, part:P=F, phase:P=F; F: a factor on the time, such as 0.5, or a speed, such as 2x"
)


class GraphChange(NamedTuple):
    """A change of the graph: what is changed, which one of several, and the factor on its time.

    `gb_per_s` is the bus bandwidth of collectives instead of a factor.
    """

    words: str
    axis: str
    name: str = ""
    factor: float = 0.0
    gb_per_s: float | None = None


def read_changes(text: str) -> list[GraphChange]:
    """The changes in a list with commas, such as `collectives=0,kind:elementwise=0.5`. Raises UsageError for others."""
    return [_read_change(words.strip()) for words in text.split(",")]


def _read_change(words: str) -> GraphChange:
    target, _, value = words.partition("=")
    axis, _, name = target.partition(":")
    named = {"kind": KINDS, "part": PARTS, "phase": PHASE_ORDER}.get(axis)
    if named and name not in named:
        raise unknown(f"--what_if {axis}", name, named)
    fixed = {"launches": "0", "data": "0", "rank": "median", "optimizer": "fused"}
    is_known = named or (not name and axis in (*fixed, "attention", "collectives", "layers", "host", "device"))
    try:
        if not is_known or value != fixed.get(axis, value):
            raise ValueError
        if axis in fixed or words == "attention=fused":
            return GraphChange(words, axis, "" if axis in fixed else "fused")
        if axis == "collectives" and value.endswith("GB/s"):
            return GraphChange(words, axis, gb_per_s=_positive(value.removesuffix("GB/s")))
        if value.endswith("x"):
            return GraphChange(words, axis, name, 1 / _positive(value.removesuffix("x")))
        return GraphChange(words, axis, name, float(value) and _positive(value))
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

    Raises:
        UsageError: the steps take no time, as in a damaged trace.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        if not graph.measured.length_ns > 0:
            path = next(iter(graph.traces.values())).path
            raise UsageError(f"the steps of {str(path)!r} take no time; give a trace as torch.profiler wrote it")
        self.host, self.device = host_time(graph), device_time(graph)
        self.base = graph.simulate()
        self.measured_s = float(graph.measured.length_ns / 1e9 / graph.steps)
        #: How much longer the simulation without a change is than the recording, as a share of it.
        self.residual_fraction = self.base.length_ns / graph.measured.length_ns - 1

    @cached_property
    def pieces(self) -> pd.DataFrame:
        """The critical path of the recording, as `path_pieces` returns it."""
        return path_pieces(self.graph, self.graph.measured, self.host, self.device)

    def recorded(self) -> dict[str, float]:
        """How much longer the step is, in s, with each change of `RECORDED`; 0 if the traces have nothing to change.

        One trace knows nothing of a straggler.
        """
        changes_s = dict.fromkeys(RECORDED, 0.0)
        if len(self.graph.traces) == 1:
            del changes_s["rank=median"]
        for words in changes_s:
            with suppress(UsageError):
                changes_s[words] = self.ask(read_changes(words))[0] - self.measured_s
        return changes_s

    def ask(self, changes: Sequence[GraphChange]) -> tuple[float, pd.Series]:
        """The step with all of these changes, and the shares of causes in its critical path, the largest first.

        Raises:
            UsageError: the trace does not have what a change needs.
        """
        kernel, launch, host = (np.prod(factors, axis=0) for factors in zip(*map(self._factors, changes), strict=True))
        links, ns = self.graph.links, self.graph.links.ns.to_numpy(np.float64).copy()
        kind = links.kind[self.device.index].to_numpy()
        # A link into a kernel's start shrinks as its launches do; what is unexplained stays.
        unexplained_ns = links.unexplained_ns[self.device.index].to_numpy()
        scaled_ns = (ns[self.device.index] - unexplained_ns) * launch + unexplained_ns
        ns[self.device.index] = np.where(kind == "kernel", ns[self.device.index] * kernel, scaled_ns)
        if any(change.axis == "launches" for change in changes):
            ns[links.kind == "launch"] = links.unexplained_ns[links.kind == "launch"]
        pieces_ns = self.host.ns * host * self._of_calls(launch)
        sums = pieces_ns.groupby(self.host.interval).sum()
        ns[sums.index] = sums
        solution = self.graph.simulate(ns, any(change.axis == "rank" for change in changes))
        step_s = self.measured_s + (solution.length_ns - self.base.length_ns) / 1e9 / self.graph.steps
        path = self.graph.path(solution)
        spans = ((path.end_ns - path.start_ns) / solution.length_ns).groupby(path.link).sum()
        # A link of the host counts for the causes of its pieces.
        weights = pieces_ns / sums[self.host.interval].to_numpy()
        of_pieces = spans.reindex(self.host.interval, fill_value=0.0).to_numpy() * weights
        of_links = spans.drop(self.host.interval, errors="ignore")
        shares = (
            of_pieces.groupby(self.host.cause)
            .sum()
            .add(of_links.groupby(link_causes(self.graph.links, self.device)).sum(), fill_value=0.0)
        )
        return float(step_s), shares[shares > 0].sort_values(ascending=False)

    def _block_fraction(self) -> float:
        """The share of the blocks in the parameters; 0 if the trace has no run of lmbench's model."""
        model = next(iter(self.graph.traces.values())).record.model
        if not (model.parameter_count and model.vocab_size and model.d_model):
            return 0.0
        return 1 - 2 * model.vocab_size * model.d_model / model.parameter_count

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

    def _factors(self, change: GraphChange) -> tuple[Any, Any, Any]:
        """The factors that a change has on the time of each kernel, of its launch, and of each piece of the host's."""
        axis, factor = change.axis, _FUSED_FRACTION if change.axis == "optimizer" else change.factor
        if axis == "rank" and len(self.graph.traces) == 1:
            raise UsageError(
                f"--what_if {change.words} needs the traces of several ranks; give a folder with all of them"
            )
        is_changed, is_computed = _selected(self.device, change), _selected(self.host, change)
        kernel, launch = np.where(is_changed, factor, 1.0), np.ones(len(self.device))
        # On a CPU operators compute; the host's other time in a block goes with the block alone.
        host = np.where(is_computed & ((self.host.kind != "") | (axis == "layers")), factor, 1.0)
        if change.gb_per_s is not None:
            kernel = np.where(
                is_changed, self.device.bus_bytes / change.gb_per_s / self.graph.links.ns[self.device.index], 1.0
            )
            kernel = np.nan_to_num(kernel, nan=1.0)
        elif (not factor and axis != "device") or axis in ("layers", "optimizer"):
            # Kernels that are gone need no launches, and half as many layers half as many.
            launch[is_changed] = 0.0 if axis == "optimizer" else factor
        if axis == "layers":
            # Updates and gradients go with the parameters, of which embedding and head keep theirs.
            kept = self.device.phase.isin(_UPDATE_PHASES) | (self.device.kind == "comm")
            kernel[kept] = launch[kept] = 1 - self._block_fraction() * (1 - factor)
        is_host = np.zeros(len(host), dtype=bool)
        if axis == "data":
            is_host = ((self.host.cause == DATA) | self.host.phase.isin(_LOADING_PHASES)).to_numpy()
        elif axis in ("host", "launches"):
            is_host = ((axis == "host") & (self.host.kind == "") | (self.host.cause == LAUNCHING)).to_numpy()
        host[is_host] = factor
        if axis != "rank" and not is_host.any() and (host == 1.0).all() and not is_changed.any():
            raise UsageError(f"--what_if {change.words} changes nothing: the trace has no such kernels")
        return kernel, launch, host


def _selected(rows: pd.DataFrame, change: GraphChange) -> Any:
    """A flag for each kernel, or operator on a CPU: whether a change acts on it."""
    axis, is_comm = change.axis, rows.kind == "comm"
    if axis in ("kind", "part", "phase"):
        is_selected = rows[axis] == change.name
    elif axis in ("collectives", "device"):
        is_selected = is_comm == (axis == "collectives")
    elif axis == "attention":
        is_selected = rows.part.isin(_FUSED_AWAY if change.name else _ATTENTION_PARTS)
    elif axis == "layers":
        is_selected = ~rows.part.isin(_OUTSIDE_BLOCKS)
    elif axis == "optimizer":
        is_selected = (rows.phase == "optimizer") & ~is_comm & ~rows.name.astype(str).str.contains(FUSED_OPTIMIZER)
    else:
        is_selected = rows.phase.isin(_LOADING_PHASES) & (axis == "data")
    return is_selected.to_numpy(dtype=bool)


@cache
def _checked() -> dict[str, float]:
    """The largest error of each axis in runs that made a what-if true, as a share of their step."""
    errors = dict[str, float]()
    for row in csv.DictReader((files("lmbench.reference") / "what_if.csv").read_text(encoding="utf-8").splitlines()):
        axis = row["what_if"].partition("=")[0].partition(":")[0]
        errors[axis] = max(errors.get(axis, 0.0), abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1))
    return errors


def checked_fraction(changes: Sequence[GraphChange]) -> float | None:
    """The largest error of these changes where they were made true, as a share of the step; None if one never was."""
    errors = [_checked().get(change.axis) for change in changes]
    return None if None in errors else max(filter(None, errors), default=0.0)
