"""Model sizes: named shapes, exact parameter counts, and model FLOPs per token.

The FLOPs of lmbench's Transformer follow from an exact formula; `lmbench.flop_counter` counts those of other modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from lmbench.errors import UsageError, check_at_least, unknown
from lmbench.records.vocabulary import BACKWARD_MODES

DEFAULT_VOCAB_SIZE = 10_000


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder-only Transformer (RMSNorm, RoPE, SwiGLU, untied embedding and head, no biases).

    Raises:
        UsageError: a value is below 1, the heads do not divide the width, or head_dim is odd (RoPE rotates pairs).
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def __post_init__(self) -> None:
        check_at_least(1, "model", **asdict(self))
        if self.d_model % self.num_heads:
            raise UsageError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}; change one of them")
        if self.head_dim % 2:
            raise UsageError(
                f"head_dim is {self.head_dim} (d_model {self.d_model} / num_heads {self.num_heads}); "
                "rotary embeddings need an even head_dim: change num_heads or d_model"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def parameter_count(self) -> int:
        """Exact number of parameters.

        Embedding and head have 2 * vocab * d_model. Each layer has 4 * d_model^2 (q, k, v, output), 3 * d_model * d_ff
        (gate, up, down) and two norms of d_model. The last norm has d_model.
        """
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocab_size * self.d_model + self.num_layers * layer + self.d_model


#: The named sizes with their d_model, d_ff, num_layers and num_heads.
_TABLE = """
tiny      64    128   2   4
small    768   3072  12  12
medium  1024   4096  24  16
large   1280   5120  36  20
xl      1600   6400  48  25
2.7B    2560  10240  32  32
xl_2026 2560  10240  32  32
10B     4608  12288  50  36
"""
SIZES = {name: ModelShape(*map(int, numbers)) for name, *numbers in map(str.split, _TABLE.strip().splitlines())}
#: What Stanford's course CS336 calls a size in assignment 2, by year. In 2026 it gave the name of one size to another.
COURSE_NAMES = {
    **dict.fromkeys(("small", "medium", "large"), "2025, 2026"),
    "xl": "2025", "2.7B": "2025", "xl_2026": "2026, as xl", "10B": "2026",
}  # fmt: skip


def resolve_shape(size: str | None, vocab_size: int = DEFAULT_VOCAB_SIZE, **dimensions: int | None) -> ModelShape:
    """The shape of a named size, with some dimensions overridden; without a size all four dimensions are needed.

    Args:
        size: a name of `SIZES`, in letters of any case, or None.
        vocab_size: number of token ids.
        dimensions: d_model, d_ff, num_layers and num_heads; None leaves that of the size.

    Raises:
        UsageError: the size is unknown, a dimension is missing, or :class:`ModelShape` refuses the shape.
    """
    overrides = {name: value for name, value in dimensions.items() if value is not None}
    named: dict[str, int] = {}
    if size is not None:
        shapes = {name.lower(): shape for name, shape in SIZES.items()}
        if size.lower() not in shapes:
            raise unknown("model size", size, SIZES, ", or give all dimensions")
        named = asdict(shapes[size.lower()])
    shape = named | overrides | {"vocab_size": vocab_size}
    missing = [name for name in ("d_model", "d_ff", "num_layers", "num_heads") if name not in shape]
    if missing:
        raise UsageError(f"without a model size, {', '.join(missing)} must be given too (sizes: {', '.join(SIZES)})")
    return ModelShape(**shape)


def size_name(shape: ModelShape) -> str | None:
    """The first name of a shape's size, whatever the vocabulary; None for a shape without a name."""
    return next((name for name, named in SIZES.items() if replace(named, vocab_size=shape.vocab_size) == shape), None)


FORMULA_SOURCE = "formula: sum of 2mnk over the matmuls"


@dataclass(frozen=True)
class FlopCount:
    """Model FLOPs of one forward pass, per token.

    Attributes:
        per_token_flops: count with attention in full, as torchtitan counts.
        causal_per_token_flops: count with half of attention, as Megatron counts; None where attention cannot be told
            from other matrix products.
        source: how the FLOPs were counted.
        recomputed_per_token_flops: FLOPs that activation checkpointing adds to a backward pass; None where unknown.
        backward_per_token_flops: count of the backward pass; None where it is twice the forward pass.
    """

    per_token_flops: int
    causal_per_token_flops: int | None
    source: str
    recomputed_per_token_flops: int | None = None
    backward_per_token_flops: int | None = None


def mode_multiplier(mode: str) -> int:
    """Model FLOPs of one batch in a mode, in forward passes: 1, or 3 with a backward pass.

    For each product of the forward pass, the backward pass has two: for the gradients of the input and of the weight.
    """
    return 3 if mode in BACKWARD_MODES else 1


def forward_flops(shape: ModelShape, context_length: int) -> FlopCount:
    """Exact FLOPs of the matrix products of one forward pass, per token.

    A product of [m, k] and [k, n] costs 2mnk, since a multiply-add counts as two. For each layer: q, k, v and output
    8 * d_model^2; gate, up and down 6 * d_model * d_ff; scores and values 4 * context * d_model. Once: the head
    2 * d_model * vocab. The embedding is a look-up; norms, softmax and other elementwise work are not model FLOPs.
    """
    dense = shape.num_layers * (8 * shape.d_model**2 + 6 * shape.d_model * shape.d_ff)
    dense += 2 * shape.d_model * shape.vocab_size
    attention = shape.num_layers * 4 * context_length * shape.d_model
    return FlopCount(dense + attention, dense + attention // 2, FORMULA_SOURCE)


def runs_again(count: int, group: int, is_nested: bool) -> tuple[int, int]:
    """How often recomputing runs blocks again: to their end, and only up to what their backward pass needs.

    PyTorch ends a recomputation there, so the end of a group's last block is left out. A nested group is first run up
    to its last block's input, and then each block by itself.

    Args:
        count: blocks that are computed again.
        group: number of blocks that are computed again together.
        is_nested: whether each block of a group is then computed again by itself.
    """
    groups = -(-count // group)
    return count - groups, count if is_nested else groups


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], is_backward: bool = False) -> int:
    """FLOPs of fused attention; its keys may have fewer heads than its queries, which torch 2.11's counter refuses.

    Args:
        query, key, value: shapes (batch, heads, length, width).
        is_backward: count the backward, which computes the scores again.
    """
    query_products, value_products = (3, 2) if is_backward else (1, 1)
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (query_products * query[-1] + value_products * value[-1])
