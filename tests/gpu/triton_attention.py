"""Attention as a user would write it in Triton: forward and backward with no score in memory (Dao 2023), for
`--model.attention triton_attention:attention`; and the mistake that is easily made in it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Rows and columns of the scores that one program has in hand.
ROWS = COLUMNS = 32


@triton.jit
def _scores(q, k, row, column, scale, length, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAUSAL:
        scores = tl.where(row[:, None] >= column[None, :], scores, float("-inf"))
    if MASKED:
        scores = tl.where(column[None, :] < length, scores, float("-inf"))
    return scores


@triton.jit
def attention_forward_kernel(
    q_start, k_start, v_start, output_start, total_start, length, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The output of some rows, and the logarithm of each row's sum of exponentials."""
    # Inductor passes a Python number as float64.
    scale = tl.cast(scale, tl.float32)
    head = tl.program_id(1).to(tl.int64)
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    place = head * length * width + row[:, None] * width + lane[None, :]
    is_row = (row[:, None] < length) & (lane[None, :] < width)
    q = tl.load(q_start + place, mask=is_row, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    end = tl.minimum(length, (tl.program_id(0) + 1) * ROWS) if CAUSAL else length
    for begin in range(0, end, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        there = head * length * width + column[:, None] * width + lane[None, :]
        is_column = (column[:, None] < length) & (lane[None, :] < width)
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
    tl.store(total_start + head * length + row, largest + tl.log(total), mask=row < length)


@triton.jit
def attention_backward_q_kernel(
    q_start, k_start, v_start, grad_start, total_start, mean_start, dq_start, length, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    head = tl.program_id(1).to(tl.int64)
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    place = head * length * width + row[:, None] * width + lane[None, :]
    is_row = (row[:, None] < length) & (lane[None, :] < width)
    q = tl.load(q_start + place, mask=is_row, other=0.0)
    grad = tl.load(grad_start + place, mask=is_row, other=0.0)
    total = tl.load(total_start + head * length + row, mask=row < length, other=0.0)
    mean = tl.load(mean_start + head * length + row, mask=row < length, other=0.0)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    end = tl.minimum(length, (tl.program_id(0) + 1) * ROWS) if CAUSAL else length
    for begin in range(0, end, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        there = head * length * width + column[:, None] * width + lane[None, :]
        is_column = (column[:, None] < length) & (lane[None, :] < width)
        k = tl.load(k_start + there, mask=is_column, other=0.0)
        v = tl.load(v_start + there, mask=is_column, other=0.0)
        weights = tl.exp(_scores(q, k, row, column, scale, length, CAUSAL, MASKED) - total[:, None])
        of_weights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        of_scores = weights * (of_weights - mean[:, None]) * scale
        dq += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
    tl.store(dq_start + place, dq.to(q.dtype), mask=is_row)


@triton.jit
def attention_backward_kv_kernel(
    q_start, k_start, v_start, grad_start, total_start, mean_start, dk_start, dv_start, length, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    head = tl.program_id(1).to(tl.int64)
    column, lane = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    there = head * length * width + column[:, None] * width + lane[None, :]
    is_column = (column[:, None] < length) & (lane[None, :] < width)
    k = tl.load(k_start + there, mask=is_column, other=0.0)
    v = tl.load(v_start + there, mask=is_column, other=0.0)
    dk = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dv = tl.zeros([COLUMNS, WIDTH], tl.float32)
    first = tl.program_id(0) * COLUMNS // ROWS * ROWS if CAUSAL else 0
    for begin in range(first, length, ROWS):
        row = begin + tl.arange(0, ROWS)
        place = head * length * width + row[:, None] * width + lane[None, :]
        is_row = (row[:, None] < length) & (lane[None, :] < width)
        q = tl.load(q_start + place, mask=is_row, other=0.0)
        grad = tl.load(grad_start + place, mask=is_row, other=0.0)
        total = tl.load(total_start + head * length + row, mask=row < length, other=0.0)
        mean = tl.load(mean_start + head * length + row, mask=row < length, other=0.0)
        weights = tl.exp(_scores(q, k, row, column, scale, length, CAUSAL, MASKED) - total[:, None])
        dv += tl.dot(tl.trans(weights).to(grad.dtype), grad, input_precision="ieee")
        of_weights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        of_scores = weights * (of_weights - mean[:, None]) * scale
        dk += tl.dot(tl.trans(of_scores).to(q.dtype), q, input_precision="ieee")
    tl.store(dk_start + there, dk.to(k.dtype), mask=is_column)
    tl.store(dv_start + there, dv.to(k.dtype), mask=is_column)


def _grid(q: torch.Tensor) -> tuple[int, int]:
    return -(-q.shape[-2] // ROWS), q.shape[0] * q.shape[1]


def _settings(q: torch.Tensor, is_causal: bool, masked: bool) -> dict[str, Any]:
    width = max(16, 1 << (q.shape[-1] - 1).bit_length())
    return {"CAUSAL": is_causal, "MASKED": masked, "ROWS": ROWS, "COLUMNS": COLUMNS, "WIDTH": width}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, is_causal: bool, masked: bool) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        output = torch.empty_like(q)
        total = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        sizes = (q.shape[-2], q.shape[-1], q.shape[-1] ** -0.5)
        settings = _settings(q, is_causal, masked)
        attention_forward_kernel[_grid(q)](q, k, v, output, total, *sizes, **settings)
        ctx.save_for_backward(q, k, v, output, total)
        ctx.is_causal, ctx.masked = is_causal, masked
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, k, v, output, total = ctx.saved_tensors
        grad = grad.contiguous()
        mean = (grad.float() * output.float()).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        sizes = (q.shape[-2], q.shape[-1], q.shape[-1] ** -0.5)
        settings = _settings(q, ctx.is_causal, ctx.masked)
        given = (q, k, v, grad, total, mean)
        attention_backward_q_kernel[_grid(q)](*given, dq, *sizes, **settings)
        attention_backward_kv_kernel[_grid(q)](*given, dk, dv, *sizes, **settings)
        return dq, dk, dv, None, None


def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False) -> Any:
    return _Attention.apply(q, k, v, is_causal, True)


def forgets_the_edge(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
    """Keys beyond a length that the block does not divide are zeros that take part: right at lengths that it divides,
    and in causal attention, where no position sees them."""
    return _Attention.apply(q, k, v, is_causal, False)
