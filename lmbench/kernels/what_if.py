"""What-ifs: the graph of the traced steps simulated again with other times, as a user asks for by words.

Several changes at once are simulated together, since what one saves another may not save again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

from lmbench.errors import UsageError, unknown
from lmbench.kernels.events import where
from lmbench.kernels.graph import Graph
from lmbench.kernels.names import KINDS, PARTS, UNCLASSIFIED
from lmbench.kernels.pieces import DATA, LAUNCHING, UNEXPLAINED
from lmbench.kernels.sums import ATTENTION_PARTS
from lmbench.kernels.trace import PHASE_ORDER
from lmbench.kernels.verdicts import FUSED_OPTIMIZER
from lmbench.records.examined import WHAT_IFS
from lmbench.records.intervals import NONE
from lmbench.reference import load_rows
from lmbench.report.units import percent

#: The changes whose effect is kept in run.json, for reports and for the tuner.
RECORDED: Final = (*WHAT_IFS, "layers=0.5", "attention=0", "part:loss=0", "phase:optimizer=0")
# Parts that are outside of the blocks, which `layers` does not change.
_OUTSIDE_BLOCKS = ("", "embedding", "head", "loss", "data", "comm", "optimizer", UNCLASSIFIED)
# Half the layers are no known change where a larger share of the work has no part.
_MOST_UNKNOWN = 0.1
# AdamW in a loop or by foreach reads and writes 20 numbers for each weight (lerp 3, mul 2, addcmul 3, sqrt 2, div 2,
# add 2, addcdiv 4, decay 2); fused, it reads weight, gradient and both moments, and writes all but the gradient.
_FUSED_FRACTION = 7 / 20
# Phases that get a batch to the device.
_LOADING_PHASES = ("data", "transfer")
# Phases whose work goes with the number of parameters.
_UPDATE_PHASES = ("clip", "optimizer", "zero_grad")
# The form of a change; some take no number.
_CHANGE = re.compile(
    r"(launches|data)=0|rank=median|(optimizer|attention)=fused"
    r"|(collectives|attention|layers|host|device|(kind|part|phase):\w+)=(?P<number>\d*\.?\d+(e-?\d+)?)(?P<unit>x|GB/s)?"
)
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
    axis, _, name = words.partition("=")[0].partition(":")
    named = {"kind": KINDS, "part": PARTS, "phase": PHASE_ORDER}.get(axis)
    if named and name not in named:
        raise unknown(f"--what_if {axis}", name, named)
    match = _CHANGE.fullmatch(words)
    number, unit = (float(match["number"] or 0), match["unit"]) if match else (math.inf, "")
    if number == math.inf or (unit and not number) or (unit == "GB/s" and axis != "collectives"):
        raise UsageError(f"--what_if {words[:60]!r} is no change; give {_FORMS}")
    if unit == "GB/s":
        return GraphChange(words, axis, gb_per_s=number)
    return GraphChange(words, axis, name, 1 / number if unit else number)


class WhatIf:
    """The graph simulated with changes; lengths are those of a step, in s.

    A profiler slows the host, and not the device. Where the run knows its host's time without one
    (`profile.host_step_s`), launching takes as much less in every simulation.

    Raises:
        UsageError: the steps take no time, as in a damaged trace.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        if not graph.measured.length_ns > 0:
            path = graph.first.path
            raise UsageError(f"the steps of {str(path)!r} take no time; give a trace as torch.profiler wrote it")
        recorded = self._base = graph.simulate(graph.links.ns)
        #: How much longer the simulation of the recording is than the recording, as a share of it.
        self.residual_fraction = recorded.length_ns / graph.measured.length_ns - 1
        self.traced_s = float(graph.measured.length_ns / 1e9 / graph.steps)
        self.traced_host_s, self.host_s, launching_factor = self._host()
        is_launching = graph.pieces.thread.notna() & (graph.pieces.cause == LAUNCHING)
        self._piece_ns = graph.pieces.ns * np.where(is_launching, launching_factor, 1.0)
        if launching_factor != 1:
            self._base = graph.simulate(self._link_ns(self._piece_ns))
        #: The step without a change, and without what the profiler costs the host.
        self.step_s = self.traced_s + (self._base.length_ns - recorded.length_ns) / 1e9 / graph.steps

    def recorded(self) -> dict[str, float]:
        """How much longer the step is, in s, with each change of `RECORDED`; 0 if the traces have nothing to change.

        One trace knows nothing of a straggler.
        """
        changes_s = dict.fromkeys(RECORDED, 0.0)
        if len(self.graph.traces) == 1:
            del changes_s["rank=median"]
        for words in changes_s:
            with suppress(UsageError):
                changes_s[words] = self.ask(read_changes(words))[0] - self.step_s
        return changes_s

    def _host(self) -> tuple[float, float, float]:
        """The host's time for a step as traced and without the profiler, in s, and the factor that is on launching.

        Waiting for the device and for the loader does not count.
        """
        pieces, steps = self.graph.pieces, self.graph.steps * len(self.graph.traces)
        works = pieces.link_kind.isin(("program", "call")) & pieces.is_inside & (pieces.phase != "data")
        traced_s, launching_s = (
            float(pieces.ns[rows].sum() / 1e9 / steps) for rows in (works, works & (pieces.cause == LAUNCHING))
        )
        profile = self.graph.first.record.profile
        host_s = profile.host_step_s if profile and profile.host_step_s else traced_s
        saved_s = traced_s - host_s
        if not 0 < saved_s < launching_s:
            return traced_s, traced_s, 1.0
        return traced_s, host_s, 1 - saved_s / launching_s

    def ask(self, changes: Sequence[GraphChange]) -> tuple[float, pd.Series]:
        """The step with all of these changes, and the shares of causes in its critical path, the largest first.

        Raises:
            UsageError: the trace does not have what a change needs.
        """
        pieces, count = self.graph.pieces, len(self.graph.links)
        piece_ns = self._piece_ns * np.prod([*map(self._factors, changes)], axis=0)
        link_ns, solution = self._link_ns(piece_ns), self._base
        if changes:
            solution = self.graph.simulate(link_ns, any(change.axis == "rank" for change in changes))
        step_s = self.step_s + (solution.length_ns - self._base.length_ns) / 1e9 / self.graph.steps
        link, start_ns, end_ns = np.array(solution.path).reshape(-1, 3).T
        # Time of a link on the path counts for the causes of its pieces.
        path_ns = np.bincount(link.astype(int), end_ns - start_ns, count)
        scale = np.divide(path_ns, link_ns, out=np.zeros(count), where=link_ns > 0)[pieces.link]
        shares = (piece_ns * scale / (solution.length_ns or 1.0)).groupby(pieces.cause, observed=True).sum()
        return float(step_s), shares[shares > 0].sort_values(ascending=False)

    def _link_ns(self, piece_ns: pd.Series) -> npt.NDArray[np.float64]:
        return np.bincount(self.graph.pieces.link, piece_ns, len(self.graph.links)).astype(np.float64)

    def _block_fraction(self) -> float:
        """The share of the blocks in the parameters.

        Raises:
            UsageError: the trace does not tell what is in the blocks.
        """
        model, pieces = self.graph.first.record.model, self.graph.pieces
        work = pieces[~pieces.kind.isin(["", "comm"]) & ~pieces.phase.isin(_UPDATE_PHASES)]
        unknown = work.ns[work.part.isin(["", UNCLASSIFIED])].sum() / (work.ns.sum() or 1)
        if unknown > _MOST_UNKNOWN or not (model.parameter_count and model.vocab_size and model.d_model):
            raise UsageError(
                f"--what_if layers: what is in the blocks is unknown: {percent(unknown)} of the work has no known "
                "part, or vocab_size and d_model are in no run.json; name modules as Llama does, or give part:NAME=F"
            )
        # Weights of embedding and head may be one.
        return max(0.0, 1 - 2 * model.vocab_size * model.d_model / model.parameter_count)

    def _factors(self, change: GraphChange) -> Any:
        """The factor that a change has on the time of each piece of a link."""
        axis, factor, pieces = change.axis, change.factor, self.graph.pieces
        if axis == "rank":
            if len(self.graph.traces) == 1:
                raise UsageError(
                    f"--what_if {change.words} needs the traces of several ranks; give a folder with all of them"
                )
            return np.ones(len(pieces))
        is_selected, is_kernel = _selected(pieces, change), pieces.link_kind == "kernel"
        is_host, is_launching = pieces.thread.notna(), pieces.cause == LAUNCHING
        work = np.where(is_selected, _FUSED_FRACTION if axis == "optimizer" else factor, 1.0)
        launch = pd.Series(1.0, pieces.index)
        if change.gb_per_s is not None:
            work = np.where(is_selected, (pieces.bus_bytes / change.gb_per_s / pieces.ns).fillna(1.0), 1.0)
        elif axis == "layers" or (factor == 0 and axis != "device"):
            # Kernels that are gone need no launches, and half as many layers half as many.
            launch[is_selected] = factor
        if axis == "layers":
            # Updates and gradients go with the parameters, of which embedding and head keep theirs.
            is_kept = ~is_host & (pieces.phase.isin(_UPDATE_PHASES) | (pieces.kind == "comm"))
            work[is_kept] = launch[is_kept] = 1 - self._block_fraction() * (1 - factor)
        # The time of a launch call goes with the kernels that it launches.
        of_kernel = launch.where(is_kernel & (pieces.launch != NONE))
        of_call = of_kernel.groupby([pieces["rank"], pieces.launch]).transform("mean").fillna(1.0)
        # On a CPU operators compute; the host's other time in a block goes with the block alone.
        is_operator = is_host & ((pieces.kind != "") | (axis == "layers"))
        flags = [is_kernel, is_host & is_launching, is_operator, ~is_host & (pieces.cause != UNEXPLAINED)]
        factors = np.select(flags, [work, of_call, work, launch], 1.0)
        if axis == "data":
            factors[is_host & ((pieces.cause == DATA) | pieces.phase.isin(_LOADING_PHASES))] = 0.0
        elif axis == "host":
            factors[is_host & (pieces.kind == "")] = factor
        elif axis == "launches":
            factors[is_launching] = 0.0
        if (factors == 1.0).all():
            raise UsageError(f"--what_if {change.words} changes nothing: the trace has none of it, or it is so already")
        return factors


def _selected(pieces: pd.DataFrame, change: GraphChange) -> Any:
    """A flag for each piece: whether it is of a kernel, or operator on a CPU, that a change acts on."""
    axis, is_comm = change.axis, pieces.kind == "comm"
    if axis in ("kind", "part", "phase"):
        is_selected = pieces[axis] == change.name
    elif axis in ("collectives", "device"):
        is_selected = is_comm == (axis == "collectives")
    elif axis == "attention":
        # Fused, it has its matrix products alone: the scores never are in memory.
        is_selected = pieces.part.isin(("attention", *ATTENTION_PARTS))
        # A softmax alone may be that of a loss or of a router.
        is_selected &= (is_selected & (pieces.part != "softmax")).any()
        if change.words == "attention=fused":
            # One that is fused already has nothing to save.
            is_selected &= (pieces.kind != "gemm") & ~(pieces.kind == "attention").any()
    elif axis == "layers":
        is_selected = ~pieces.part.isin(_OUTSIDE_BLOCKS)
    elif axis == "optimizer":
        is_fused = where(pieces.name.astype(str), FUSED_OPTIMIZER.search)
        # Muon's matrix products stay what they are.
        is_selected = (pieces.phase == "optimizer") & ~is_comm & ~is_fused & (pieces.kind != "gemm")
    else:
        is_selected = pieces.phase.isin(_LOADING_PHASES) & (axis == "data")
    return is_selected


class _Check(Struct, frozen=True):
    """The step of a run that made a what-if true, beside the predicted one (reference/what_if.csv)."""

    what_if: str
    predicted_s: float
    measured_s: float

    @property
    def axis(self) -> str:
        return read_changes(self.what_if)[0].axis


def checked_fraction(changes: Sequence[GraphChange]) -> float | None:
    """The largest error of these changes where they were made true, as a share of the step; None if one never was."""
    axes = {change.axis for change in changes}
    checks: list[_Check] = [check for check in load_rows("what_if.csv", _Check) if check.axis in axes]
    if {check.axis for check in checks} != axes:
        return None
    return max(abs(check.predicted_s / check.measured_s - 1) for check in checks)
