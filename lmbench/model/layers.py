"""The layers of the Transformer, apart from attention. Shapes are written as ``batch seq embed``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def split_blocks(blocks: str, **layers: str) -> dict[str, str]:
    """How the linear layers of alike blocks are split over devices: of each layer all by columns, but the last by rows,
    so that one sum over devices follows (Shoeybi et al. 2019)."""
    plan = dict[str, str]()
    for layer, names in layers.items():
        *first, last = (f"{blocks}.{layer}.{name}" for name in names.split())
        plan |= {f"{blocks}.{layer}": "shared_input", **dict.fromkeys(first, "colwise"), last: "rowwise"}
    return plan


class Projection(nn.Linear):
    """A linear map without bias, its weights drawn from a normal distribution of the given deviation.

    The weights are float32 whatever the default dtype, so that one seed gives the same weights in every
    precision. With several `parts` it is as many maps of one input to `out_features` each, in one product; they are
    drawn one after the other, so that one seed also gives the same weights to projections of their own.
    """

    def __init__(self, in_features: int, out_features: int, std: float, parts: int = 1) -> None:
        self.std, self.parts = std, parts
        super().__init__(in_features, parts * out_features, bias=False, dtype=torch.float32)

    def reset_parameters(self) -> None:
        for part in self.weight.detach().chunk(self.parts):
            nn.init.normal_(part, std=self.std)


#: Projections of one input that may be one product, by its name.
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def convert_projections(state: Mapping[str, Tensor], is_fused: bool) -> dict[str, Tensor]:
    """Tensors by the names of parameters (weights, or what an optimizer keeps of them) as a network has them whose
    projections are fused, or not fused; in the order of its parameters."""
    wholes = {part: whole for whole, parts in FUSED.items() for part in parts} if is_fused else {}
    pieces = defaultdict[str, list[Tensor]](list)
    for name, tensor in state.items():
        *path, layer, kind = name.split(".")
        parts = FUSED.get(layer, (layer,))
        # A count of steps belongs to each part.
        tensors = tensor.chunk(len(parts)) if tensor.dim() else [tensor] * len(parts)
        for part, piece in zip(parts, tensors, strict=True):
            pieces[".".join([*path, wholes.get(part, part), kind])].append(piece)
    return {name: torch.cat(parts) if parts[0].dim() else parts[0] for name, parts in pieces.items()}


class SplitParts(torch.autograd.Function):
    """The results of several projections that are one product: views of the last dimension's equal parts.

    Their gradients are put together from slices, more than 8 of them: up to that many Inductor 2.11 makes of a
    concatenation one kernel of masked loads (its MAX_COMPLEX_POINTWISE_CAT), beyond it writes each to its place.
    Compiled, `large` at 16 x 1024 in bfloat16 took 208 ms a step so on an H200, 227 with the gradient of `chunk`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        # 12 slices of q, k and v rather than 9: the sizes' widths are multiples of 4, and slices stay aligned.
        ctx.slices = 4 if parts == 3 else 5
        return x.chunk(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat([piece for part in gradients for piece in part.chunk(ctx.slices, -1)], -1), None


class Embedding(nn.Embedding):
    """Token embedding with unit-normal weights, float32 whatever the default dtype; `output_dtype` is that of the
    vectors it gives, None for the weights'."""

    def __init__(self, vocab_size: int, d_model: int, output_dtype: torch.dtype | None = None) -> None:
        super().__init__(vocab_size, d_model, dtype=torch.float32)
        self._output_dtype = output_dtype

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x if self._output_dtype is None else x.to(self._output_dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, x / sqrt(mean(x^2) + 1e-5) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
        return (wide * scale * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """Gated feed-forward layer, down(silu(gate(x)) * up(x)) (Shazeer 2020); gate and up are one product if fused."""

    def __init__(self, d_model: int, d_ff: int, residual_scale: float, is_fused: bool = False) -> None:
        super().__init__()
        if is_fused:
            self.gate_up = Projection(d_model, d_ff, d_model**-0.5, parts=2)
        else:
            self.gate = Projection(d_model, d_ff, d_model**-0.5)
            self.up = Projection(d_model, d_ff, d_model**-0.5)
        self.down = Projection(d_ff, d_model, residual_scale * d_ff**-0.5)
        self._is_fused = is_fused

    def forward(self, x: Tensor) -> Any:
        if self._is_fused:
            gate, up = SplitParts.apply(self.gate_up(x), 2)  # type: ignore[no-untyped-call]
            return self.down(functional.silu(gate) * up)
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    """The residual addition; a module of its own so that its kernels can be told from others."""

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch


class NextTokenLoss(nn.Module):
    """Mean cross entropy over all tokens, reduced in float32 whatever the logits' dtype."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def rope_tables(context_length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Tables of rotary position embedding (Su et al. 2021), float32: cosine ``seq 1 head_dim/2`` and sine
    ``seq 2 head_dim/2``, the first half's negated.

    They are of position * base^(-2i / head_dim).
    Angles are taken in float64: in float32 an angle at position 100 000 would be off by some thousandths.
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64)
    position = torch.arange(context_length, dtype=torch.float64)
    angle = torch.outer(position, base ** (-pair / head_dim)).unsqueeze(1)
    return angle.cos().float(), torch.cat((-angle.sin(), angle.sin()), 1).float()


class RotaryEmbedding(nn.Module):
    """Rotate queries or keys by position, half-split: dimension i rotates with i + head_dim/2.

    It holds no tables; the model keeps one pair for all its blocks. The halves are flipped rather than put together
    again: Inductor makes a kernel of masked loads for each concatenation, and for a flip none (compiled, `large` at
    32 x 1024 in fp8 took 3 % less time on an H200, torch 2.11).
    """

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """Rotate ``batch heads seq head_dim`` by tables of `rope_tables` in the dtype of x."""
        halves = x.unflatten(-1, (2, -1))
        return (halves * cos + halves.flip(-2) * sin).flatten(-2)
