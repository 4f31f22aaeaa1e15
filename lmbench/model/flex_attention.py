"""PyTorch's flex attention, compiled by itself: as Python it would be the formula, with all scores in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Flex attention's own choice.
_BLOCK = 128


class FlexCore(nn.Module):
    """Attention by a kernel that Inductor makes for it, causal by a mask of blocks."""

    def __init__(self, head_dim: int, is_causal: bool) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
        if not torch.is_grad_enabled():
            # On a CPU it refuses tensors that could have a gradient, also where none is computed.
            q, k, v = q.detach(), k.detach(), v.detach()
        output: Tensor = _compiled()(q, k, v, block_mask=mask)
        return output


def causal_block_mask(seq: int, device: torch.device | None = None) -> BlockMask:
    """Which blocks of the scores are computed: those on the diagonal with a mask, those below it whole; with one too
    where the last row of blocks is not whole itself.

    `create_block_mask` would find that out from all scores, ``seq seq`` of them.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-seq // _BLOCK)
    row = torch.arange(count, dtype=torch.int32, device=device)
    # The first places of a row count, as many as there are masked or whole blocks in it.
    masked, masked_count, whole_count = (
        torch.zeros(count, count, dtype=torch.int32, device=device),
        torch.ones_like(row),
        row.clone(),
    )
    masked[:, 0] = row
    if seq % _BLOCK:
        masked[-1], masked_count[-1], whole_count[-1] = row, count, 0
    return BlockMask.from_kv_blocks(
        masked_count[None, None],
        masked[None, None],
        whole_count[None, None],
        row.expand(count, count)[None, None].contiguous(),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_is_seen,
        seq_lengths=(seq, seq),
    )


def _is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Within a module that is compiled itself it becomes a part of that. As one graph it is refused after too many
    # shapes in one process, where PyTorch would otherwise go on with the formula.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
