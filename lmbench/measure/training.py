"""Which parameters got gradients, and which moved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def gradient_facts(module: nn.Module, scale: float = 1.0) -> dict[str, Any]:
    """What the gradients of a module's trainable parameters are like, before clipping. Synchronizes.

    Names of parameters without a gradient (`missing_gradients`), with one that is zero everywhere (`zero_gradients`)
    or not finite (`nonfinite_gradients`), their number, and the 2-norm of all gradients together, divided by `scale`.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    norms = {
        name: float(torch.linalg.vector_norm(p.grad, dtype=torch.float32))
        for name, p in trainable.items()
        if p.grad is not None
    }
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

    parameters: dict[str, nn.Parameter]
    indices: dict[str, int]
    before: dict[str, torch.Tensor]

    def unmoved(self) -> list[str]:
        """Parameters whose sampled element is what it was."""
        return [
            name
            for name, index in self.indices.items()
            if torch.equal(self.parameters[name].detach().reshape(-1)[index], self.before[name])
        ]


def sample_parameters(module: nn.Module) -> MovementSample:
    """Remember, for each parameter with a gradient, its element with the largest gradient. Synchronizes."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad and p.grad is not None}
    indices = {n: _largest(p.grad) for n, p in parameters.items() if p.grad is not None}
    before = {n: p.detach().reshape(-1)[indices[n]].clone() for n, p in parameters.items()}
    return MovementSample(parameters, indices, before)


def _largest(gradient: torch.Tensor) -> int:
    # Row by row: |gradient| of an embedding as a whole would be a second copy of it.
    rows = gradient.reshape(gradient.shape[0], -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    peaks = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1)
    row = int(peaks.argmax())
    return row * rows.shape[1] + int(rows[row].abs().argmax())
