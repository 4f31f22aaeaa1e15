"""Which parameters got gradients, and which moved."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lmbench.records.measured import TrainingFacts

Parameters = Mapping[str, nn.Parameter]


def gradient_norms(parameters: Parameters) -> dict[str, float]:
    """The 2-norm of each parameter's gradient, by name, where there is one. Synchronizes."""
    return {
        name: float(torch.linalg.vector_norm(p.grad, dtype=torch.float32))
        for name, p in parameters.items()
        if p.grad is not None
    }


def gradient_facts(trainable: Collection[str], norms: Mapping[str, float], scale: float = 1.0) -> TrainingFacts:
    """What the gradients of the `trainable` parameters are like, from their norms.

    Names of parameters without a gradient (`missing_gradients`), with one that is zero everywhere (`zero_gradients`)
    or not finite (`nonfinite_gradients`), their number, and the 2-norm of all gradients together, divided by `scale`.
    """
    return TrainingFacts(
        parameters=len(trainable),
        missing_gradients=[name for name in trainable if name not in norms],
        zero_gradients=[name for name, norm in norms.items() if norm == 0.0],
        nonfinite_gradients=[name for name, norm in norms.items() if not math.isfinite(norm)],
        gradient_norm=math.hypot(*norms.values()) / scale if norms else None,
    )


@dataclass
class MovementSample:
    """One row of each parameter, the one with the largest gradient, as it was before the update.

    A single element can come to rest by chance: where its momentum crosses zero.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)

    def unmoved(self) -> list[str]:
        """Parameters of whose sampled row every element is what it was."""
        return [
            name
            for name, row in self.rows.items()
            if torch.equal(_as_rows(self.parameters[name].detach())[row], self.before[name])
        ]

    def add(self, parameters: Parameters) -> None:
        """Remember, for each new parameter with a gradient, its row with the largest one. Synchronizes."""
        for name, parameter in parameters.items():
            if name not in self.rows and parameter.grad is not None:
                # Row by row: |gradient| of an embedding as a whole would be a second copy of it.
                peaks = torch.linalg.vector_norm(_as_rows(parameter.grad), ord=float("inf"), dim=1)
                row = int(peaks.argmax())
                self.parameters[name], self.rows[name] = parameter, row
                self.before[name] = _as_rows(parameter.detach())[row].clone()


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
