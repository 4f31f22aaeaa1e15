"""Rotary position embedding (Su et al. 2021), half-split: dimension i rotates with i + head_dim/2."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rope_tables(context_length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * base^(-2i / head_dim), each float32 of shape ``seq head_dim/2``.

    Angles are taken in float64: in float32 an angle at position 100 000 would be off by some thousandths.
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64)
    position = torch.arange(context_length, dtype=torch.float64)
    angle = torch.outer(position, base ** (-pair / head_dim))
    return angle.cos().float(), angle.sin().float()


class RotaryEmbedding(nn.Module):
    """Rotate queries or keys; it holds no tables, the model keeps one pair for all its blocks."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``batch heads seq head_dim`` by tables of shape ``seq head_dim/2`` in the dtype of x."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
