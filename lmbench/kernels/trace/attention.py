"""Inside attention written out: what scores, mask, softmax and values take, and softmax against the matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from lmbench.kernels.trace.kernels import KernelTable
from lmbench.kernels.trace.kinds import MATMUL
from lmbench.records.paths import number
from lmbench.records.vocabulary import Record

ATTENTION_PARTS = ("scores", "mask", "softmax", "values")
_PHASES = ("forward", "backward")
# FLOPs per element of the scores. Forward: softmax finds the maximum, subtracts it, exponentiates, sums and divides;
# the products of q and k and of weights and v cost 2 * head_dim each. Backward: softmax multiplies, sums, subtracts and
# multiplies; each product has two of the same size, for the gradients of both factors.
SOFTMAX_FLOPS = {"forward": 5, "backward": 4}
_PRODUCTS = {"forward": 2, "backward": 4}


@dataclass(frozen=True)
class AttentionTimes:
    """Kernel time per step of one phase: all kernels of each part, and the matrix products among those of scores and
    values. Ratios are softmax to matrix products, of time and of FLOPs (None without the model's shape)."""

    phase: str
    parts_s: dict[str, float]
    matmul_s: float
    time_ratio: float
    flop_ratio: float | None


def attention_times(kernels: KernelTable, steps: int, run: Record) -> list[AttentionTimes]:
    """Forward and backward, where both the products and softmax have kernels of their own; else nothing.

    A kernel that does one of these parts together with anything else leaves the phase out: its time cannot be divided.
    """
    found = []
    fused = {
        phase
        for phase, part in set(zip(kernels.phases, kernels.parts, strict=True))
        if "+" in part and not set(part.split("+")).isdisjoint(ATTENTION_PARTS)
    }
    for phase in _PHASES:
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
            found.append(AttentionTimes(phase, per_step, matmul / 1e9 / steps, ratio, flop_ratio(phase, run)))
    return found


def flop_ratio(phase: str, run: Record) -> float | None:
    """FLOPs of softmax to those of the two products, from the model's head_dim; the scores' size cancels out."""
    width, heads = number(run, "model.d_model"), number(run, "model.num_heads")
    if not width or not heads:
        return None
    return SOFTMAX_FLOPS[phase] / (_PRODUCTS[phase] * 2 * width / heads)
