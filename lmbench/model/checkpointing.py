"""Activation checkpointing by name: which blocks are computed again in the backward pass, and what that costs.

A checkpointed block keeps its input instead of what its operators save, and runs again when its backward begins
(Chen et al. 2016). `selective` keeps what the linear layers and fused attention give, and computes the rest again:
norms, rotation, gating, and attention written out, whose tensors grow with the square of the length (Korthikanti et al.
2022).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmbench.errors import unknown
from lmbench.sizes import ModelShape

#: What `selective` keeps, by the operator's name without its overload.
_KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }
)


class Checkpointing(NamedTuple):
    """Every which block is checkpointed, from the first (None: no block), and whether matmuls are kept all the same."""

    every: int | None
    keeps_matmuls: bool = False


CHECKPOINTS: dict[str, Checkpointing] = {
    "none": Checkpointing(None),
    "block": Checkpointing(1),
    "every_2": Checkpointing(2),
    "selective": Checkpointing(1, keeps_matmuls=True),
}


def check_checkpoint(name: str) -> None:
    """Raises UsageError where there is no choice of that name."""
    if name not in CHECKPOINTS:
        raise unknown("checkpoint", name, CHECKPOINTS)


def run_checkpointed(
    name: str,
    function: Callable[..., Tensor],
    inputs: tuple[Any, ...],
    backend: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """`function(*inputs)`, of which the backward pass gets the inputs, and with `selective` what that keeps.

    `backend` chooses that of fused attention; it is asked again where the function runs again, long after the pass.
    """

    def again(*inputs: Any) -> Tensor:
        with backend():
            return function(*inputs)

    # Nothing in a block is random, so that no state of a generator has to be kept.
    done: Tensor = checkpoint(
        again, *inputs, use_reentrant=False, preserve_rng_state=False, **_CONTEXTS[CHECKPOINTS[name].keeps_matmuls]
    )
    return done


def is_checkpointed(name: str, index: int) -> bool:
    """Whether block `index` (from 0) is."""
    every = CHECKPOINTS[name].every
    return every is not None and index % every == 0


def recomputed_flops(name: str, shape: ModelShape, context_length: int, is_written_out: bool) -> int:
    """Matmul FLOPs that a backward pass does again, per token (terms as in `lmbench.flops.forward_flops`).

    A block is computed again up to the last tensor that its backward needs, the input of its last product: all of it
    but that product (2 * d_model * d_ff). What a fused attention computes again inside its own kernel is not counted.
    `is_written_out` says that attention is matmul, mask, softmax, matmul.
    """
    every, keeps = CHECKPOINTS[name]
    if every is None:
        return 0
    attention = 4 * context_length * shape.d_model
    if keeps:
        again = attention if is_written_out else 0
    else:
        again = 8 * shape.d_model**2 + 4 * shape.d_model * shape.d_ff + attention
    return again * len(range(0, shape.num_layers, every))


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator.name().partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS: dict[bool, dict[str, Any]] = {
    False: {},
    True: {"context_fn": partial(create_selective_checkpoint_contexts, _policy)},
}
