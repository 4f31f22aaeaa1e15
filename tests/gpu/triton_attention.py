"""Attention as a user would write it in Triton, for `--model.attention triton_attention:attention`: the forward pass
with no score in memory (Dao 2023), the backward pass by the formula."""

from __future__ import annotations

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
def attention_forward_kernel(
    q_start, k_start, v_start, output_start, total_start, length, width, scale,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
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
        # Inductor passes a Python number as float64.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * tl.cast(scale, tl.float32)
        if CAUSAL:
            scores = tl.where(row[:, None] >= column[None, :], scores, float("-inf"))
        scores = tl.where(column[None, :] < length, scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - above[:, None])
        kept = tl.exp(largest - above)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = above
    tl.store(output_start + place, (mixed / total[:, None]).to(q.dtype), mask=is_row)
    tl.store(total_start + tl.program_id(1).to(tl.int64) * length + row, largest + tl.log(total), mask=row < length)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        output = torch.empty_like(q)
        total = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        sizes = (q.shape[-2], q.shape[-1], q.shape[-1] ** -0.5)
        width = max(16, 1 << (q.shape[-1] - 1).bit_length())
        grid = (-(-q.shape[-2] // BLOCK), q.shape[0] * q.shape[1])
        attention_forward_kernel[grid](q, k, v, output, total, *sizes, CAUSAL=is_causal, BLOCK=BLOCK, WIDTH=width)
        ctx.save_for_backward(q, k, v, output, total)
        ctx.is_causal = is_causal
        return output

    @staticmethod
    def backward(ctx, grad):
        dtype = grad.dtype
        q, k, v, output, total, grad = (tensor.float() for tensor in (*ctx.saved_tensors, grad))
        scale = q.shape[-1] ** -0.5
        weights = (q @ k.mT * scale - total[..., None]).exp()
        weights = weights.tril() if ctx.is_causal else weights
        of_scores = weights * (grad @ v.mT - (grad * output).sum(-1, keepdim=True)) * scale
        gradients = of_scores @ k, of_scores.mT @ q, weights.mT @ grad
        return *(gradient.to(dtype) for gradient in gradients), None


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    return _Attention.apply(q, k, v, is_causal)
