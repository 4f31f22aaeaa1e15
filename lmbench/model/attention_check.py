"""Before attention is measured: has this machine a kernel for it, and is a user's own function right?

A function's output and gradients are held against the formula, at shapes where functions go wrong, and at the run's own
shape once more when it was measured.

A deviation is that of a row (one position's head_dim numbers), as a share of the size that the row has where the
products that make it up are independent: the root of the sum of their squares. The row's own size would not do, since
gradients of q and k are differences that may cancel to nothing (the first position of causal attention has none at
all), and neither would the tensor's largest value, beside which late rows are small (the mean of n random values
shrinks as 1 / sqrt(n)).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from lmbench.errors import UsageError
from lmbench.instruments.clock import synchronize
from lmbench.instruments.ending import own_lines, place
from lmbench.masking import one_line
from lmbench.model.attention import AttentionKind, Size
from lmbench.precision import PRECISIONS, find_precision
from lmbench.records.run import AttentionCheck
from lmbench.records.vocabulary import INCORRECT

#: By the dtype of the products, the largest deviation of a right function. In bfloat16 and float16 it is 16 roundings
#: of one number (half the distance from 1 to the next one): the formula computed step by step in the dtype was off by
#: up to 7 of them, PyTorch's fused kernels by up to 6, whatever the length (1 to 8192). In float32 and float64 the
#: order of sums counts: 1024 roundings, where those were off by up to 132. A function that leaves out one key of 100 is
#: off by the size of a row; one whose scale is 5 % too large, in bfloat16, by 30 roundings at least.
TOLERANCES = {
    torch.float64: 1024 * 2.0**-53,
    torch.float32: 1024 * 2.0**-24,
    torch.float16: 16 * 2.0**-11,
    torch.bfloat16: 16 * 2.0**-8,
}
#: TF32 has as many digits as float16.
TF32_TOLERANCE = TOLERANCES[torch.float16]

#: What is compared.
PARTS = ("output", "gradient of q", "gradient of k", "gradient of v")

# Rows are taken in blocks of at most so many scores.
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Use:
    """How attention is going to be used: q, k and v of a size, a dtype and on a device.

    `is_strided` says that v and the output's gradient come as a model has them, ``batch seq heads head_dim`` in memory;
    `context` is that of the forward pass (autocast).
    """

    size: Size
    is_causal: bool
    dtype: torch.dtype
    device: torch.device
    has_backward: bool = True
    is_strided: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __str__(self) -> str:
        """`batch 1, heads 2, seq 100, head_dim 64, causal`."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.size._asdict().items())
        return f"{sizes}, {'causal' if self.is_causal else 'not causal'}"


def use_in(trainer: Trainer, size: Size, is_causal: bool, stage: str, is_strided: bool) -> Use:
    """How a Trainer's module uses attention."""
    # A precision that a plugin made up may be anything; most are lower ones.
    precision = find_precision(str(trainer.precision)) or PRECISIONS["bf16-mixed"]
    device, context = trainer.strategy.root_device, trainer.precision_plugin.train_step_context
    return Use(size, is_causal, precision.compute_dtype(), device, stage == "fit", is_strided, context)


def check_attention(kind: AttentionKind, use: Use) -> AttentionCheck | None:
    """Try an implementation before it is measured; returns the result for a user's own function.

    On fake tensors, where memory is predicted, nothing can be tried.

    Raises:
        UsageError: this machine has no kernel for it, or the function is wrong.
    """
    if isinstance(torch.empty(0), FakeTensor):
        if kind.is_compiled:
            raise UsageError(
                f"attention {kind.name!r} is a kernel made by torch.compile, and a prediction compiles nothing; "
                "predict sdpa, which saves the same"
            )
        return None
    if kind.is_users:
        return _check_function(kind, use, cases(use))
    if kind.is_compiled and use.device.type == "cpu" and use.has_backward:
        raise UsageError(
            f"attention {kind.name!r} has no backward pass on a CPU (PyTorch's own limit); choose sdpa or naive, or "
            "measure inference with lmbench validate"
        )
    if kind.is_compiled or kind.backend is not None:
        _check_kernel(kind, use)
    return None


def check_again(kind: AttentionKind, use: Use) -> None:
    """Once it was measured: is a user's own function still right, at the run's own shape? Not where no memory is left.

    Raises:
        UsageError: it is not: its results depend on how often it was called, say.
    """
    try:
        if kind.is_users:
            _check_function(kind, use, [use])
    except torch.OutOfMemoryError:
        return
    except UsageError as error:
        reason = str(error).removeprefix(f"{INCORRECT}: ")
        raise UsageError(f"{INCORRECT}: after the run, though it was right before: {reason}") from error


def _check_kernel(kind: AttentionKind, use: Use) -> None:
    """Raises UsageError, in PyTorch's words, where this machine has no kernel."""
    # Written out, it takes memory with the square of the length; what it can do does not depend on that.
    size = use.size if kind.backend is not SDPBackend.MATH else use.size._replace(batch=1, seq=min(use.size.seq, 64))
    case = replace(use, size=size)
    try:
        with warnings.catch_warnings(record=True) as caught, kind.chosen():
            warnings.simplefilter("always")
            _attend(kind, case, _draw(case))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # PyTorch warns of each back end with its reasons, of those that were not asked too: that they are off.
        # A kernel of torch.compile's has no such warnings; the error tells.
        lines = [one_line(str(line.message).partition(" (Triggered")[0]) for line in caught if kind.backend]
        reasons = [line for line in lines if not line.endswith("because:") and "runtime disabled" not in line]
        reason = "; ".join(reasons or [str(error).partition("\n")[0]])[:400]
        raise UsageError(
            f"attention {kind.name!r} has no kernel for {_named(use.dtype)}, {use} on {use.device.type}; "
            f"choose sdpa, which takes what there is, or naive: {reason}"
        ) from error
    finally:
        if use.device.type == "cuda":
            # The trial is no part of the run.
            torch.cuda.reset_peak_memory_stats(use.device)


def _check_function(kind: AttentionKind, use: Use, tried: list[Use]) -> AttentionCheck:
    deviations: list[tuple[float, str]] = []
    refused: list[str] = []
    for case in tried:
        try:
            largest = _deviations(kind, case)
            deviations += [(off, f"{part} at {case}") for part, off in zip(PARTS, largest, strict=False)]
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            message = one_line(str(error))[:300]
            # What a function says it cannot do, it does not do wrong; after a device's error nothing can be done.
            if case.size == use.size or "CUDA error" in message or "device-side assert" in message:
                where = "".join(f" at {place(line)}" for line in own_lines(error)[-1:])
                raise UsageError(f"{kind.name} raised{where}, for {case}: {type(error).__name__}: {message}") from error
            refused.append(str(case))
    worst, largest_in = max(deviations)
    is_tf32 = use.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    tolerance = TF32_TOLERANCE if is_tf32 and use.dtype is torch.float32 else TOLERANCES[use.dtype]
    if worst > tolerance:
        raise UsageError(
            f"{INCORRECT}: {kind.name} is off by {worst:.2g} in the {largest_in}; allowed in {_named(use.dtype)} is "
            f"{tolerance:.2g} of a row's size, against the formula in {_named(_wide(use.dtype))}"
        )
    return AttentionCheck(len(tried) - len(refused), worst, tolerance, largest_in, refused)


def cases(use: Use) -> list[Use]:
    """What to check at: first the run's own; then length 1, lengths that no block size divides, several head_dims,
    heads and batches, causal and not."""
    heads, width = use.size.heads, use.size.head_dim
    sizes = [
        (2, 3, 1, width), (1, 2, 100, width), (2, heads, 129, width), (1, 2, 77, 32), (2, 1, 64, 64), (1, 1, 193, 128),
    ]  # fmt: skip
    others = [replace(use, size=Size(*size), is_causal=is_causal) for size in sizes for is_causal in (False, True)]
    return list(dict.fromkeys([use, *others]))


def _deviations(kind: AttentionKind, case: Use) -> list[float]:
    """By part, for one case: the largest deviation of a row, in all heads, or of many scores in the first and last.

    Raises:
        UsageError: the function's output is not what PyTorch's would be.
    """
    is_small = case.size.batch * case.size.heads * case.size.seq**2 <= _BLOCK_ELEMENTS

    def chosen(tensor: Tensor) -> Tensor:
        """A copy of its heads, ``heads seq head_dim``: a function may write to its arguments."""
        heads = tensor.detach().flatten(0, 1)
        return (heads if is_small else heads[[0, -1]]).to(_wide(case.dtype), copy=True)

    drawn = _draw(case)
    before = [chosen(tensor) for tensor in drawn]
    results = _attend(kind, case, drawn)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        rows = formula(before, case.is_causal)
    finally:
        torch.set_float32_matmul_precision(precision)
    deviations = [
        torch.linalg.vector_norm(chosen(result) - values, dim=-1, keepdim=True) / sizes
        for result, (values, sizes) in zip(results, rows, strict=False)
    ]
    return [off.nan_to_num(math.inf, math.inf).max().item() for off in deviations]


def _attend(kind: AttentionKind, case: Use, drawn: list[Tensor]) -> list[Tensor]:
    """The output for q, k and v, and with a backward pass the gradients for the output's gradient, which comes last.

    Raises:
        UsageError: a user's function does not return what PyTorch's would.
    """
    q, k, v, gradient = drawn
    mask = kind.mask(case.size.seq, case.is_causal, case.device)
    with case.context(), torch.set_grad_enabled(case.has_backward):
        output: object = kind.core(case.size.head_dim, case.is_causal)(q, k, v, mask)
    if not isinstance(output, Tensor):
        raise UsageError(f"{kind.name} returned a {type(output).__name__}; it must return a tensor")
    if _looks(output) != _looks(q):
        raise UsageError(f"{kind.name} returned a tensor of {_looks(output)}, where q has {_looks(q)}; q was {case}")
    results = [output.detach()]
    if case.has_backward:
        gradients: tuple[Tensor | None, ...] = (None,)
        if output.requires_grad:
            gradients = torch.autograd.grad(output, (q, k, v), gradient, allow_unused=True)
        for letter, result in zip("qkv", gradients, strict=False):
            if result is None:
                raise UsageError(
                    f"{kind.name} gives {letter} no gradient, for {case}; it must be differentiable: by PyTorch's "
                    "operators, a torch.autograd.Function, or torch.library's register_autograd"
                )
            results.append(result)
    synchronize(case.device)
    return results


def _looks(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {_named(tensor.dtype)} on {tensor.device.type}"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _draw(use: Use) -> list[Tensor]:
    """q, k, v and a gradient of the output, standard normal, without touching the run's own random numbers."""
    generator = torch.Generator(use.device).manual_seed(0)
    drawn = [torch.randn(use.size, generator=generator, dtype=use.dtype, device=use.device) for _ in PARTS]
    if use.is_strided:
        drawn[2:] = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in drawn[2:]]
    else:
        # As they are in attention by itself: a kernel compiled for a parameter is compiled again for another tensor.
        drawn[:3] = map(nn.Parameter, drawn[:3])
    for tensor in drawn[:3]:
        tensor.requires_grad_(use.has_backward)
    return drawn


def formula(drawn: list[Tensor], is_causal: bool) -> list[tuple[Tensor, Tensor]]:
    """softmax(q k^T / sqrt(head_dim)) v and its gradients for a gradient of the output, which is the fourth of those
    that are drawn; in the order of `PARTS`.

    Returns for each its values, and the size that each of its rows has if the row's products are independent (one
    number a row). Rows of q are taken in blocks, so that memory does not grow with the square of the length.
    """
    q, k, v, gradient = drawn
    seq, scale = q.shape[-2], q.shape[-1] ** -0.5
    squares = [x.square().sum(-1, keepdim=True) for x in drawn]
    values, sizes = [torch.zeros_like(x) for x in (q, q, k, v)], [torch.zeros_like(squares[0]) for _ in PARTS]
    positions = torch.arange(seq, device=q.device)
    for rows in positions.split(max(1, _BLOCK_ELEMENTS // (seq * q[..., 0, 0].numel()))):
        scores = q[..., rows, :] @ k.mT * scale
        if is_causal:
            scores = scores.masked_fill_(positions > rows[:, None], float("-inf"))
        weights, block = torch.softmax(scores, dim=-1), gradient[..., rows, :]
        del scores
        output = weights @ v
        of_scores = weights * (block @ v.mT - (block * output).sum(-1, keepdim=True)) * scale
        # The two terms of a score's gradient are independent, and so are the products that each is a sum of; their
        # difference may be nothing, and is that by chance in some row of many.
        mean_squares = (block.square() * output.square()).sum(-1, keepdim=True)
        weight_squares = weights.square()
        score_squares = weight_squares * (block.square() @ v.square().mT + mean_squares) * scale**2
        for sums, (of_q, of_k, of_v, of_output), mixing, scoring in (
            (values, drawn, weights, of_scores),
            (sizes, squares, weight_squares, score_squares),
        ):
            sums[0][..., rows, :], sums[1][..., rows, :] = mixing @ of_v, scoring @ of_k
            sums[2] += scoring.mT @ of_q[..., rows, :]
            sums[3] += mixing.mT @ of_output[..., rows, :]
    return [(value, size.sqrt()) for value, size in zip(values, sizes, strict=True)]
