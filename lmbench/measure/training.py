"""Which parameters got gradients, and which moved."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Parameters = Mapping[str, nn.Parameter]


def gradient_norms(parameters: Parameters) -> dict[str, float]:
    """The 2-norm of each parameter's gradient, by name, where there is one. Synchronizes."""
    return {
        name: float(torch.linalg.vector_norm(p.grad, dtype=torch.float32))
        for name, p in parameters.items()
        if p.grad is not None
    }


def gradient_facts(trainable: Collection[str], norms: Mapping[str, float], scale: float = 1.0) -> dict[str, Any]:
    """What the gradients of the `trainable` parameters are like, from their norms.

    Names of parameters without a gradient (`missing_gradients`), with one that is zero everywhere (`zero_gradients`)
    or not finite (`nonfinite_gradients`), their number, and the 2-norm of all gradients together, divided by `scale`.
    """
    return {
        "parameters": len(trainable),
        "missing_gradients": [name for name in trainable if name not in norms],
        "zero_gradients": [name for name, norm in norms.items() if norm == 0.0],
        "nonfinite_gradients": [name for name, norm in norms.items() if not math.isfinite(norm)],
        "gradient_norm": math.hypot(*norms.values()) / scale if norms else None,
    }


@dataclass
class MovementSample:
    """One element of each parameter, the one with the largest gradient, as it was before the update."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)

    def unmoved(self) -> list[str]:
        """Parameters whose sampled element is what it was."""
        return [
            name
            for name, index in self.indices.items()
            if torch.equal(self.parameters[name].detach().reshape(-1)[index], self.before[name])
        ]

    def add(self, parameters: Parameters) -> None:
        """Remember, for each new parameter with a gradient, its element with the largest one. Synchronizes."""
        for name, parameter in parameters.items():
            if name not in self.indices and parameter.grad is not None:
                index = _largest(parameter.grad)
                self.parameters[name], self.indices[name] = parameter, index
                self.before[name] = parameter.detach().reshape(-1)[index].clone()


def _largest(gradient: torch.Tensor) -> int:
    # Row by row: |gradient| of an embedding as a whole would be a second copy of it.
    rows = gradient.reshape(gradient.shape[0], -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    peaks = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1)
    row = int(peaks.argmax())
    return row * rows.shape[1] + int(rows[row].abs().argmax())
