"""Where the time goes, as means per step: on the device by phase, kernel, kind and part, inside attention and by the
user's own annotations; on the host, of a trace without kernels, by operator."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lmbench.kernels.host import ENGINE, Nesting
from lmbench.kernels.kinds import MATMUL, short_name
from lmbench.kernels.phases import PHASE_ORDER
from lmbench.kernels.trace import KernelTable, Trace
from lmbench.records.intervals import NONE, Integers
from lmbench.records.run import Model
from lmbench.records.vocabulary import Phase

#: Parts of attention where it is written out.
ATTENTION_PARTS = ("scores", "mask", "softmax", "values")
# FLOPs per element of the scores. Forward: softmax finds the maximum, subtracts it, exponentiates, sums and divides;
# the products of q and k and of weights and v cost 2 * head_dim each. Backward: softmax multiplies, sums, subtracts and
# multiplies; each product has two of the same size, for the gradients of both factors.
_SOFTMAX_FLOPS: dict[Phase, int] = {"forward": 5, "backward": 4}
_PRODUCTS: dict[Phase, int] = {"forward": 2, "backward": 4}
# Ranges of lmbench, of Lightning, of PyTorch's profiler, optimizers, loaders and compiler, and of collectives: what
# they tell is in phases, parts and kinds already.
_NOT_THE_USERS = re.compile(
    r"^(lmbench\.|\[pl\]|ProfilerStep#|PyTorch Profiler|Optimizer\.\w+#|enumerate\(DataLoader\)#"
    r"|## Call CompiledFxGraph |(nccl|gloo|hccl|xccl|ucc|mpi|rccl):)"
)


class Work(NamedTuple):
    """All launches of one kernel in one phase that work for one part: their number and summed time over the trace."""

    phase: str
    name: str
    kind: str
    part: str
    total_ns: int
    instances: int


@dataclass(frozen=True)
class KernelRow:
    """One kernel within a phase: time and number of launches per step, by part too; its share of the phase's time."""

    phase: str
    name: str
    kind: str
    parts_s: dict[str, float]
    kernel_s: float
    instances: float
    share_fraction: float

    @property
    def mean_s(self) -> float:
        return self.kernel_s / self.instances

    @property
    def short_name(self) -> str:
        return short_name(self.name)

    @property
    def part(self) -> str:
        """The part with the most of its time."""
        return max(self.parts_s, key=self.parts_s.__getitem__)


@dataclass(frozen=True)
class PhaseShares:
    """A phase's (or the whole step's) kernel time per step, by kind and by part (largest first), and its kernels."""

    phase: str
    kernel_s: float
    instances: float
    kinds_s: dict[str, float]
    parts_s: dict[str, float]
    rows: list[KernelRow]

    def share(self, seconds: float) -> float:
        """Share of the phase's kernel time."""
        return seconds / self.kernel_s if self.kernel_s else 0.0

    def fraction_of(self, *kinds: str) -> float:
        """Share of kernels of these kinds."""
        return self.share(sum(self.kinds_s.get(kind, 0.0) for kind in kinds))

    @property
    def matmul_fraction(self) -> float:
        """Share of matrix products; fused attention, which has some inside, is a kind of its own and does not count."""
        return self.fraction_of(MATMUL)

    @property
    def top_other(self) -> KernelRow | None:
        """The kernel with the most time that is no matrix product."""
        return next((row for row in self.rows if row.kind != MATMUL), None)


def work_of(kernels: KernelTable) -> list[Work]:
    """The kernels of a trace, summed up by phase, name, kind and part."""
    times: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    keys = zip(kernels.phases, kernels.events.names.tolist(), kernels.kinds, kernels.parts, strict=True)
    for key, duration in zip(keys, kernels.duration_ns.tolist(), strict=True):
        times[key].append(duration)
    return [Work(*key, sum(durations), len(durations)) for key, durations in times.items()]


def shares_by_phase(work: Sequence[Work], steps: int) -> list[PhaseShares]:
    """Each phase that has kernels, `outside` and `unlinked` among them, in the order of a step."""
    present = {each.phase for each in work}
    return [
        shares_of(phase, [each for each in work if each.phase == phase], steps)
        for phase in PHASE_ORDER
        if phase in present
    ]


def shares_of(name: str, work: Sequence[Work], steps: int) -> PhaseShares:
    """The shares of some work; `name` is the phase's, or `step` for all that was traced."""
    total_ns = sum(each.total_ns for each in work)
    by_kernel: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for each in work:
        by_kernel[each.name, each.kind].append(each)
    rows = []
    for (kernel, kind), members in by_kernel.items():
        kernel_ns = sum(each.total_ns for each in members)
        rows.append(
            KernelRow(
                name,
                kernel,
                kind,
                _summed(((each.part, each.total_ns) for each in members), steps),
                kernel_ns / 1e9 / steps,
                sum(each.instances for each in members) / steps,
                kernel_ns / total_ns if total_ns else 0.0,
            )
        )
    return PhaseShares(
        name,
        total_ns / 1e9 / steps,
        sum(each.instances for each in work) / steps,
        _summed(((each.kind, each.total_ns) for each in work), steps),
        _summed(((each.part, each.total_ns) for each in work), steps),
        sorted(rows, key=lambda row: (-row.kernel_s, row.name)),
    )


def _summed(times_ns: Iterable[tuple[str, int]], steps: int) -> dict[str, float]:
    """Seconds per step by name, the largest first."""
    sums: dict[str, int] = defaultdict(int)
    for name, value in times_ns:
        sums[name] += value
    return {name: value / 1e9 / steps for name, value in sorted(sums.items(), key=lambda item: -item[1])}


@dataclass(frozen=True)
class AttentionTimes:
    """Kernel time per step of one phase: all kernels of each part, and the matrix products among those of scores and
    values. Ratios are softmax to matrix products, of time and of FLOPs (None without the model's shape)."""

    phase: Phase
    parts_s: dict[str, float]
    matmul_s: float
    time_ratio: float
    flop_ratio: float | None


def attention_times(work: Sequence[Work], steps: int, model: Model) -> list[AttentionTimes]:
    """Forward and backward, where both the products and softmax have kernels of their own; else nothing.

    A kernel that does one of these parts together with anything else leaves the phase out: its time cannot be divided.
    """
    times = []
    for phase in _PRODUCTS:
        of_phase = (each for each in work if each.phase == phase)
        members = [each for each in of_phase if not set(ATTENTION_PARTS).isdisjoint(each.part.split("+"))]
        sums = dict.fromkeys(ATTENTION_PARTS, 0.0) | _summed(((each.part, each.total_ns) for each in members), steps)
        products = (each for each in members if each.kind == MATMUL and each.part in ("scores", "values"))
        matmul_s = sum(each.total_ns for each in products) / 1e9 / steps
        if len(sums) == len(ATTENTION_PARTS) and matmul_s and sums["softmax"]:
            times.append(AttentionTimes(phase, sums, matmul_s, sums["softmax"] / matmul_s, flop_ratio(phase, model)))
    return times


def flop_ratio(phase: Phase, model: Model) -> float | None:
    """FLOPs of softmax to those of the two products, from the model's head_dim; the scores' size cancels out."""
    if not model.d_model or not model.num_heads:
        return None
    return _SOFTMAX_FLOPS[phase] / (_PRODUCTS[phase] * 2 * model.d_model / model.num_heads)


@dataclass(frozen=True)
class AnnotationTimes:
    """One annotation's kernels per step: of all of its `calls`, in `own_s` without the annotations inside.

    An annotation within one of the same name counts once.
    """

    name: str
    calls: float
    kernel_s: float
    own_s: float
    instances: float


def annotation_times(trace: Trace) -> tuple[list[AnnotationTimes], float]:
    """Kernel time by the user's own annotations (`record_function`), the longest first, and that in none, per step.

    A kernel belongs to the innermost annotation around its launch, on the launch's thread or else on the main one,
    which waits while autograd's thread works; a kernel whose launch tells none, to the one that the profiler drew
    around it on its stream (`gpu_user_annotation`).
    """
    kernels, launches, steps = trace.kernels, trace.events.launches, trace.timeline.steps
    ranges = [events.take(events.is_range) for events in (trace.events.host, trace.events.drawn)]
    host, drawn = (each.take(each.where(lambda name: not _NOT_THE_USERS.match(name))) for each in ranges)
    on_host, on_device = Nesting.of(host, host.thread), Nesting.of(drawn, drawn.stream)
    by_thread = on_host.around(launches.thread, launches.start_ns)
    by_main = on_host.around(np.full_like(launches.thread, trace.events.main_thread), launches.start_ns)
    launched = np.append(np.where(by_thread != NONE, by_thread, by_main), NONE)[kernels.launch]
    beside = on_device.around(kernels.events.stream, kernels.events.start_ns)
    calls: dict[str, set[tuple[bool, int]]] = defaultdict(set)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    none_ns = 0
    for index, other, duration in zip(launched.tolist(), beside.tolist(), kernels.duration_ns.tolist(), strict=True):
        nesting, innermost = (on_host, index) if index != NONE else (on_device, other)
        # The outermost of each name.
        around = {nesting.names[event]: event for event in nesting.climb(innermost)}
        if innermost == NONE:
            none_ns += duration
        for name, event in around.items():
            calls[name].add((nesting is on_host, event))
            sums[name][0] += duration
            sums[name][1] += duration * (name == nesting.names[innermost])
            sums[name][2] += 1
    rows = [
        AnnotationTimes(name, len(calls[name]) / steps, total / 1e9 / steps, own / 1e9 / steps, count / steps)
        for name, (total, own, count) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.kernel_s, row.name)), none_ns / 1e9 / steps


@dataclass(frozen=True)
class OperatorRow:
    """One operator's time on the host within a phase, without operators inside it, and its calls, per step;
    `share_fraction` is of the phase's time in operators."""

    phase: str
    name: str
    self_s: float
    share_fraction: float
    calls: float

    @property
    def mean_s(self) -> float:
        return self.self_s / self.calls


def operator_times(trace: Trace) -> dict[str, list[OperatorRow]]:
    """By phase, in the order of a step: its operators, the longest first."""
    events, steps = trace.host.events, trace.timeline.steps
    times: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    columns = (trace.timeline.at(events.start_ns), trace.host.names, _self_times(trace).tolist(), events.is_range)
    for phase, name, self_ns, is_range in zip(*columns, strict=True):
        if not is_range:
            # The engine's own work around each node; the node's function is an event of its own.
            times[phase]["autograd engine" if name.startswith(ENGINE) else name].append(self_ns)
    rows = {}
    for phase in PHASE_ORDER:
        total_ns = sum(map(sum, times[phase].values())) or 1
        of_phase = [
            OperatorRow(phase, name, sum(own) / 1e9 / steps, sum(own) / total_ns, len(own) / steps)
            for name, own in times[phase].items()
        ]
        if of_phase:
            rows[str(phase)] = sorted(of_phase, key=lambda row: (-row.self_s, row.name))
    return rows


def _self_times(trace: Trace) -> Integers:
    """Each event's time without the operators directly inside; ranges of modules take none away."""
    events, parent = trace.host.events, trace.host.nesting.parent
    is_range = np.append(events.is_range, False)
    holder, above = parent.copy(), np.append(parent, NONE)
    while (is_range[holder]).any():
        holder = np.where(is_range[holder], above[holder], holder)
    inside = np.flatnonzero((holder != NONE) & ~events.is_range)
    own_ns = events.end_ns - events.start_ns
    taken = np.minimum(own_ns[inside], events.end_ns[holder[inside]] - events.start_ns[inside])
    np.subtract.at(own_ns, holder[inside], taken)
    return np.asarray(np.maximum(own_ns, 0))
