"""Activation checkpointing by name: which blocks are computed again in the backward pass, and what that costs.

A checkpointed block keeps its input instead of what its operators save, and runs again when its backward begins
(Chen et al. 2016). `selective` keeps what the linear layers and fused attention give, and computes the rest again:
norms, rotation, gating, and attention written out, whose tensors grow with the square of the length (Korthikanti et al.
2022).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmbench.sizes import ModelShape

#: What `selective` keeps, by the operator's name without its overload.
_KEPT = re.compile(
    "aten::(mm|addmm|_scaled_dot_product_(flash_attention(_for_cpu)?|efficient_attention|cudnn_attention"
    "|fused_attention_overrideable))"
)


class Checkpointing(NamedTuple):
    """Every which block is checkpointed, from the first (None: no block), and whether matmuls are kept all the same."""

    every: int | None
    keeps_matmuls: bool = False

    def blocks(self, num_layers: int) -> range:
        """The checkpointed blocks, from 0."""
        return range(0, num_layers if self.every else 0, self.every or 1)


CHECKPOINTS: dict[str, Checkpointing] = {
    "none": Checkpointing(None),
    "block": Checkpointing(1),
    "every_2": Checkpointing(2),
    "selective": Checkpointing(1, keeps_matmuls=True),
}


def run_checkpointed(keeps_matmuls: bool, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, of which the backward pass gets the inputs, and the matmuls' results if they are kept.

    The function runs again long after the forward pass: it chooses its back end of attention itself.
    """
    contexts: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if keeps_matmuls else {}
    )
    # Nothing in a block is random, so that no state of a generator has to be kept.
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)
    return output


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = _KEPT.fullmatch(operator.name().partition(".")[0])
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed_flops(name: str, shape: ModelShape, context_length: int, is_written_out: bool) -> int:
    """Matmul FLOPs that a backward pass does again, per token (terms as in `lmbench.flops.forward_flops`).

    A block is computed again up to the last tensor that its backward needs, the input of its last product: all of it
    but that product (2 * d_model * d_ff). What a fused attention computes again inside its own kernel is not counted.
    `is_written_out` says that attention is matmul, mask, softmax, matmul.
    """
    checkpointing = CHECKPOINTS[name]
    again = 4 * context_length * shape.d_model
    if not checkpointing.keeps_matmuls:
        again += 8 * shape.d_model**2 + 4 * shape.d_model * shape.d_ff
    elif not is_written_out:
        again = 0
    return again * len(checkpointing.blocks(shape.num_layers))
