"""Attention as a user would write it in Triton: forward and backward with no score in memory (Dao 2023), for
`--model.attention triton_attention:attention`; and the mistake that is easily made in it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Rows and columns of the scores that one program has in hand.
BLOCK = 32


@triton.jit
def _place(index, length, width, WIDTH: tl.constexpr):
    """Offsets of some rows of this program's head, and which of them exist."""
    lane = tl.arange(0, WIDTH)[None, :]
    head = tl.program_id(1).to(tl.int64)
    return (head * length + index[:, None]) * width + lane, (index[:, None] < length) & (lane < width)


@triton.jit
def _scores(q, k, row, column, scale, length, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    # Inductor passes a Python number as float64.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * tl.cast(scale, tl.float32)
    if CAUSAL:
        scores = tl.where(row[:, None] >= column[None, :], scores, float("-inf"))
    if MASKED:
        scores = tl.where(column[None, :] < length, scores, float("-inf"))
    return scores


@triton.jit
def attention_forward_kernel(
    q_start, k_start, v_start, output_start, total_start, length, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The output of some rows, and the logarithm of each row's sum of exponentials."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, is_row = _place(row, length, width, WIDTH)
    q = tl.load(q_start + place, mask=is_row, other=0.0)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, WIDTH], tl.float32)
    end = tl.minimum(length, (tl.program_id(0) + 1) * BLOCK) if CAUSAL else length
    for begin in range(0, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        there, is_column = _place(column, length, width, WIDTH)
        k = tl.load(k_start + there, mask=is_column, other=0.0)
        v = tl.load(v_start + there, mask=is_column, other=0.0)
        scores = _scores(q, k, row, column, scale, length, CAUSAL, MASKED)
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - above[:, None])
        kept = tl.exp(largest - above)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = above
    tl.store(output_start + place, (mixed / total[:, None]).to(q.dtype), mask=is_row)
    tl.store(total_start + tl.program_id(1).to(tl.int64) * length + row, largest + tl.log(total), mask=row < length)


@triton.jit
def attention_backward_kernel(
    q_start, k_start, v_start, grad_start, total_start, mean_start, dq_start, dk_start, dv_start, length, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FOR_Q: tl.constexpr,
):  # fmt: skip
    """The gradient of some rows of q, over all columns; or of some rows of k and v, over all rows of q."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    first = 0
    end = length
    if CAUSAL:
        if FOR_Q:
            end = tl.minimum(length, (tl.program_id(0) + 1) * BLOCK)
        else:
            first = tl.program_id(0) * BLOCK
    for begin in range(first, end, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        if FOR_Q:
            row = mine
            column = other
        else:
            row = other
            column = mine
        place, is_row = _place(row, length, width, WIDTH)
        there, is_column = _place(column, length, width, WIDTH)
        q = tl.load(q_start + place, mask=is_row, other=0.0)
        grad = tl.load(grad_start + place, mask=is_row, other=0.0)
        k = tl.load(k_start + there, mask=is_column, other=0.0)
        v = tl.load(v_start + there, mask=is_column, other=0.0)
        total = tl.load(total_start + head * length + row, mask=row < length, other=0.0)
        mean = tl.load(mean_start + head * length + row, mask=row < length, other=0.0)
        weights = tl.exp(_scores(q, k, row, column, scale, length, CAUSAL, MASKED) - total[:, None])
        of_weights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        of_scores = weights * (of_weights - mean[:, None]) * tl.cast(scale, tl.float32)
        if FOR_Q:
            dq += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
        else:
            dk += tl.dot(tl.trans(of_scores).to(q.dtype), q, input_precision="ieee")
            dv += tl.dot(tl.trans(weights).to(grad.dtype), grad, input_precision="ieee")
    place, is_mine = _place(mine, length, width, WIDTH)
    if FOR_Q:
        tl.store(dq_start + place, dq.to(dq_start.dtype.element_ty), mask=is_mine)
    else:
        tl.store(dk_start + place, dk.to(dk_start.dtype.element_ty), mask=is_mine)
        tl.store(dv_start + place, dv.to(dv_start.dtype.element_ty), mask=is_mine)


def _grid(q: torch.Tensor) -> tuple[int, int]:
    return -(-q.shape[-2] // BLOCK), q.shape[0] * q.shape[1]


def _settings(q: torch.Tensor, is_causal: bool, masked: bool) -> dict[str, Any]:
    width = max(16, 1 << (q.shape[-1] - 1).bit_length())
    return {"CAUSAL": is_causal, "MASKED": masked, "BLOCK": BLOCK, "WIDTH": width}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, is_causal: bool, masked: bool) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        output = torch.empty_like(q)
        total = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        sizes = (q.shape[-2], q.shape[-1], q.shape[-1] ** -0.5)
        attention_forward_kernel[_grid(q)](q, k, v, output, total, *sizes, **_settings(q, is_causal, masked))
        ctx.save_for_backward(q, k, v, output, total)
        ctx.is_causal, ctx.masked = is_causal, masked
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, k, v, output, total = ctx.saved_tensors
        grad = grad.contiguous()
        mean = (grad.float() * output.float()).sum(-1)
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        sizes = (q.shape[-2], q.shape[-1], q.shape[-1] ** -0.5)
        settings = _settings(q, ctx.is_causal, ctx.masked)
        for for_q in (True, False):
            attention_backward_kernel[_grid(q)](q, k, v, grad, total, mean, *gradients, *sizes, **settings, FOR_Q=for_q)
        return *gradients, None, None


def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False) -> Any:
    return _Attention.apply(q, k, v, is_causal, True)


def forgets_the_edge(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
    """Keys beyond a length that the block does not divide are zeros that take part: right at lengths that it divides,
    and in causal attention, where no position sees them."""
    return _Attention.apply(q, k, v, is_causal, False)
