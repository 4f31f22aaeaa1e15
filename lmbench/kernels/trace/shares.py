"""Where the time goes. On the device by phase, kernel, kind and part, and inside attention: sums of kernel durations
over the whole trace. On the host, of a trace without kernels, by operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from lmbench.kernels.trace.events import NONE, Integers
from lmbench.kernels.trace.kernels import KernelTable, Trace
from lmbench.kernels.trace.kinds import MATMUL, UNCLASSIFIED, short_name
from lmbench.kernels.trace.phases import OUTSIDE, PHASE_ORDER
from lmbench.kernels.trace.scopes import ENGINE
from lmbench.records.run import Model
from lmbench.records.vocabulary import Phase

#: Parts of attention where it is written out.
ATTENTION_PARTS = ("scores", "mask", "softmax", "values")
# FLOPs per element of the scores. Forward: softmax finds the maximum, subtracts it, exponentiates, sums and divides;
# the products of q and k and of weights and v cost 2 * head_dim each. Backward: softmax multiplies, sums, subtracts and
# multiplies; each product has two of the same size, for the gradients of both factors.
_SOFTMAX_FLOPS: dict[Phase, int] = {"forward": 5, "backward": 4}
_PRODUCTS: dict[Phase, int] = {"forward": 2, "backward": 4}
# The engine's own work around each node; the node's function is an event of its own.
_ENGINE_NAME = "autograd engine"


@dataclass(frozen=True)
class KernelRow:
    """One kernel's launches within a phase; `share_fraction` is of the phase's kernel time, `parts_s` by part."""

    phase: str
    name: str
    kind: str
    parts_s: dict[str, float]
    total_s: float
    share_fraction: float
    instances: int
    mean_s: float

    @property
    def short_name(self) -> str:
        return short_name(self.name)

    @property
    def part(self) -> str:
        """The part with the most of its time."""
        return max(self.parts_s, key=self.parts_s.__getitem__)


@dataclass(frozen=True)
class PhaseShares:
    """A phase's kernel time by kind and by part (largest first), and its kernels."""

    phase: str
    kernel_s: float
    instances: int
    kinds_s: dict[str, float]
    parts_s: dict[str, float]
    rows: list[KernelRow]

    @property
    def matmul_fraction(self) -> float:
        """Share of matrix products; fused attention, which has some inside, is a kind of its own and does not count."""
        return self.kinds_s.get(MATMUL, 0.0) / self.kernel_s if self.kernel_s else 0.0

    @property
    def top_other(self) -> KernelRow | None:
        """The kernel with the most time that is no matrix product."""
        return next((row for row in self.rows if row.kind != MATMUL), None)


def shares_by_phase(kernels: KernelTable) -> list[PhaseShares]:
    """Each phase that has kernels, `outside` and `unlinked` among them, in the order of a step."""
    by_phase: dict[str, list[int]] = defaultdict(list)
    for index, phase in enumerate(kernels.phases):
        by_phase[phase].append(index)
    return [_phase(kernels, phase, by_phase[phase]) for phase in PHASE_ORDER if phase in by_phase]


def whole_step(phases: Iterable[PhaseShares]) -> PhaseShares:
    """All that was traced: every phase, what lies outside of any, and what has no launch."""
    members = list(phases)
    rows = [row for phase in members for row in phase.rows]
    total = sum(phase.kernel_s for phase in members)
    return PhaseShares(
        "step",
        total,
        sum(phase.instances for phase in members),
        _added(phase.kinds_s for phase in members),
        _added(phase.parts_s for phase in members),
        sorted(_merged(rows, total), key=lambda row: -row.total_s),
    )


def unclassified_s(phases: Iterable[PhaseShares]) -> tuple[float, float]:
    """Kernel time whose kind, and whose part, is unknown."""
    members = list(phases)
    return (
        sum(share.kinds_s.get(UNCLASSIFIED, 0.0) for share in members),
        sum(share.parts_s.get(UNCLASSIFIED, 0.0) for share in members),
    )


def captured_s(kernels: KernelTable) -> float:
    """Time of all kernels, copies and fills of the trace."""
    return float(kernels.duration_ns.sum()) / 1e9


def _phase(kernels: KernelTable, phase: str, members: list[int]) -> PhaseShares:
    duration = kernels.duration_ns
    total_ns = int(duration[members].sum())
    by_name: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in members:
        by_name[kernels.names[index], kernels.kinds[index]].append(index)
    rows = []
    for (name, kind), own in by_name.items():
        own_ns = int(duration[own].sum())
        share = own_ns / total_ns if total_ns else 0.0
        parts = _summed(own, duration, lambda index: kernels.parts[index])
        rows.append(KernelRow(phase, name, kind, parts, own_ns / 1e9, share, len(own), own_ns / len(own) / 1e9))
    rows.sort(key=lambda row: (-row.total_s, row.name))
    return PhaseShares(
        phase,
        total_ns / 1e9,
        len(members),
        _summed(members, duration, lambda index: kernels.kinds[index]),
        _summed(members, duration, lambda index: kernels.parts[index]),
        rows,
    )


def _summed(members: Iterable[int], duration: np.ndarray, key: Callable[[int], str]) -> dict[str, float]:
    sums: dict[str, int] = defaultdict(int)
    for index in members:
        sums[key(index)] += int(duration[index])
    return {name: value / 1e9 for name, value in sorted(sums.items(), key=lambda item: -item[1])}


def _added(groups: Iterable[dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for group in groups:
        for name, value in group.items():
            sums[name] += value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _merged(rows: Iterable[KernelRow], total_s: float) -> Iterable[KernelRow]:
    by_name: dict[tuple[str, str], list[KernelRow]] = defaultdict(list)
    for row in rows:
        by_name[row.name, row.kind].append(row)
    for (name, kind), own in by_name.items():
        own_s, instances = sum(row.total_s for row in own), sum(row.instances for row in own)
        share = own_s / total_s if total_s else 0.0
        yield KernelRow("step", name, kind, _added(r.parts_s for r in own), own_s, share, instances, own_s / instances)


def matmul_fractions(shares: list[PhaseShares], whole: PhaseShares, mode: str | None) -> dict[str, float]:
    """Share of matrix products in kernel time: of inference or forward, of backward, and of the whole step."""
    found = {}
    for share in shares:
        if share.phase in ("forward", "backward"):
            name = "inference" if share.phase == "forward" and mode == "inference" else share.phase
            found[name] = share.matmul_fraction
    found["step"] = whole.matmul_fraction
    return found


@dataclass(frozen=True)
class AttentionTimes:
    """Kernel time per step of one phase: all kernels of each part, and the matrix products among those of scores and
    values. Ratios are softmax to matrix products, of time and of FLOPs (None without the model's shape)."""

    phase: Phase
    parts_s: dict[str, float]
    matmul_s: float
    time_ratio: float
    flop_ratio: float | None


def attention_times(kernels: KernelTable, steps: int, model: Model) -> list[AttentionTimes]:
    """Forward and backward, where both the products and softmax have kernels of their own; else nothing.

    A kernel that does one of these parts together with anything else leaves the phase out: its time cannot be divided.
    """
    found = []
    fused = {
        phase
        for phase, part in set(zip(kernels.phases, kernels.parts, strict=True))
        if "+" in part and not set(part.split("+")).isdisjoint(ATTENTION_PARTS)
    }
    for phase in _PRODUCTS:
        if phase in fused:
            continue
        parts = dict.fromkeys(ATTENTION_PARTS, 0)
        matmul = 0
        for duration, of, part, kind in zip(
            kernels.duration_ns.tolist(), kernels.phases, kernels.parts, kernels.kinds, strict=True
        ):
            if of == phase and part in parts:
                parts[part] += duration
                matmul += duration if kind == MATMUL and part in ("scores", "values") else 0
        if matmul and parts["softmax"]:
            per_step = {part: value / 1e9 / steps for part, value in parts.items()}
            ratio = parts["softmax"] / matmul
            found.append(AttentionTimes(phase, per_step, matmul / 1e9 / steps, ratio, flop_ratio(phase, model)))
    return found


def flop_ratio(phase: Phase, model: Model) -> float | None:
    """FLOPs of softmax to those of the two products, from the model's head_dim; the scores' size cancels out."""
    if not model.d_model or not model.num_heads:
        return None
    return _SOFTMAX_FLOPS[phase] / (_PRODUCTS[phase] * 2 * model.d_model / model.num_heads)


@dataclass(frozen=True)
class OperatorRow:
    """One operator's calls within a phase; `share_fraction` is of the phase's time in operators."""

    phase: str
    name: str
    self_s: float
    share_fraction: float
    calls: int
    mean_s: float


def operator_times(trace: Trace) -> dict[str, list[OperatorRow]]:
    """By phase, in the order of a step: its operators, the longest first."""
    host = trace.host
    own_ns = _self_times(trace)
    piece = trace.timeline.at(host.start_ns)
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index in np.flatnonzero(~host.is_range):
        phase = trace.timeline.phases[piece[index]] if piece[index] != NONE else OUTSIDE
        sums[phase][_ENGINE_NAME if host.names[index].startswith(ENGINE) else host.names[index]].append(
            int(own_ns[index])
        )
    return {phase: _rows(phase, sums[phase]) for phase in PHASE_ORDER if phase in sums}


def _rows(phase: str, times: dict[str, list[int]]) -> list[OperatorRow]:
    total = sum(sum(of_name) for of_name in times.values()) or 1
    rows = [
        OperatorRow(phase, name, own / 1e9, own / total, len(of_name), own / len(of_name) / 1e9)
        for name, of_name in times.items()
        for own in [sum(of_name)]
    ]
    return sorted(rows, key=lambda row: (-row.self_s, row.name))


def _self_times(trace: Trace) -> Integers:
    """Each event's time without the operators directly inside; ranges of modules take none away."""
    host = trace.host
    duration = host.end_ns - host.start_ns
    own = duration.copy()
    around: list[int] = []
    is_range = host.is_range.tolist()
    for index, parent in enumerate(trace.scopes.parent.tolist()):
        # Parents come first: what is around a range is around what lies in it.
        holder = around[parent] if parent != NONE and is_range[parent] else parent
        around.append(holder)
        if holder != NONE and not is_range[index]:
            own[holder] -= min(int(duration[index]), int(host.end_ns[holder] - host.start_ns[index]))
    positive: Integers = np.maximum(own, 0)
    return positive
