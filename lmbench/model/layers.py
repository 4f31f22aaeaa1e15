"""The layers of the Transformer except attention. Shapes are written as ``batch seq embed``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Projection(nn.Linear):
    """A linear map without bias. Its weights are normal with standard deviation `std`.

    The weights are float32 whatever the default dtype, so that one seed gives the same weights in every precision. With
    several `parts` one product computes as many maps of one input, each to `out_features`. Parts are drawn one after
    the other, so that one seed gives them the same weights as separate projections.
    """

    def __init__(self, in_features: int, out_features: int, std: float, parts: int = 1) -> None:
        self.std, self.parts = std, parts
        super().__init__(in_features, parts * out_features, bias=False, dtype=torch.float32)

    def reset_parameters(self) -> None:
        for part in self.weight.detach().chunk(self.parts):
            nn.init.normal_(part, std=self.std)


#: Fused projections by name, with the separate projections that each computes in one product.
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def convert_projections(network: Any, state: dict[str, Tensor], *_: Any) -> None:
    """Convert a state dict in place, so that a network whose projections are fused loads that of separate ones, and
    vice versa; a hook of `load_state_dict`."""
    fused = {name: parts for name, parts in FUSED.items() if network.fused in (True, name)}
    fused_names = {part: name for name, parts in fused.items() for part in parts}
    pieces = defaultdict[str, list[Tensor]](list)
    for name, weight in state.items():
        *path, layer, kind = name.split(".")
        parts = FUSED.get(layer, (layer,))
        for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
            pieces[".".join([*path, fused_names.get(part, part), kind])].append(piece)
    state.clear()
    state.update({name: torch.cat(parts) for name, parts in pieces.items()})


class SplitParts(torch.autograd.Function):
    """Split a fused projection's result into equal parts of the last dimension, as views.

    The backward pass concatenates more than 8 slices of the gradients. Of up to 8 (MAX_COMPLEX_POINTWISE_CAT), Inductor
    2.11 makes one kernel of masked loads; of more it writes each slice to its place. Compiled, `large` at 16 x 1024 in
    bfloat16 took 208 ms a step this way on an H200, and 227 ms with the gradient of `chunk`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        # 12 slices of q, k and v rather than 9: widths of the named sizes are multiples of 4, so slices stay aligned.
        ctx.slices = 4 if parts == 3 else 5
        return x.chunk(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat([piece for part in gradients for piece in part.chunk(ctx.slices, -1)], -1), None


class Embedding(nn.Embedding):
    """Token embedding with unit-normal weights, float32 whatever the default dtype.

    `output_dtype` is the dtype of the vectors; None keeps that of the weights.
    """

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
    """Gated feed-forward layer, down(silu(gate(x)) * up(x)) (Shazeer 2020).

    With `is_fused` one matrix product computes gate and up.
    """

    def __init__(self, d_model: int, d_ff: int, residual_scale: float, is_fused: bool) -> None:
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
    """The residual addition. It is a module, so that its kernels can be told from others."""

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch


class NextTokenLoss(nn.Module):
    """Mean cross entropy over all tokens, computed in float32 whatever the logits' dtype."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def rope_tables(context_length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of rotary position embedding (Su et al. 2021), float32.

    The cosines are ``seq 1 head_dim/2``, the sines ``seq 2 head_dim/2`` with the first half negated. The angles are
    position * 10000^(-2i / head_dim). They are computed in float64, since in float32 an angle at position 100 000 is
    off by some thousandths.
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64)
    position = torch.arange(context_length, dtype=torch.float64)
    angle = torch.outer(position, 10_000.0 ** (-pair / head_dim)).unsqueeze(1)
    return angle.cos().float(), torch.cat((-angle.sin(), angle.sin()), 1).float()


class RotaryEmbedding(nn.Module):
    """Rotate queries or keys by position, half-split: dimension i rotates with i + head_dim/2.

    The model has one pair of tables for all blocks. Halves are swapped by `flip`, since Inductor makes a kernel of
    masked loads for a concatenation. Compiled, `large` at 32 x 1024 in fp8 took 3 % less time with `flip` (H200, torch
    2.11).
    """

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """Rotate ``batch heads seq head_dim`` by tables of `rope_tables` in the dtype of x."""
        halves = x.unflatten(-1, (2, -1))
        return (halves * cos + halves.flip(-2) * sin).flatten(-2)
