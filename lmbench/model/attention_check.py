"""Checks of attention: whether this machine has a kernel for it, and whether a user's function is right.

A function's output and gradients are compared with the formula before the measurement, at shapes where functions often
go wrong. After the measurement they are compared again at the run's own shape.

A deviation is computed for each row (the head_dim numbers of one position), relative to the row's expected size. This
is the root of the sum of squares of the products that are added up in the row, as if they were independent. The actual
size is no measure: gradients of q and k are differences, which may cancel (completely at the first position of causal
attention). The tensor's largest value is none either: late rows are small (a mean of n random values shrinks as
1 / sqrt(n)).
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

from lmbench.device import device_of, synchronize
from lmbench.errors import UsageError
from lmbench.instruments.ending import frame_location, user_lines
from lmbench.masking import one_line
from lmbench.model.attention import AttentionKind, Size
from lmbench.precision import PRECISIONS, dtype_name, find_precision
from lmbench.records.run import AttentionCheck
from lmbench.records.vocabulary import INCORRECT

#: The largest deviation of a right function, by the dtype of the products. A rounding is half the distance from 1 to
#: the next number. bfloat16 and float16 allow 16 roundings: the formula computed step by step in the dtype was off by
#: up to 7, PyTorch's fused kernels by up to 6, at every length from 1 to 8192. float32 and float64 allow 1024, since
#: the order of sums matters there: formula and kernels were off by up to 132. A function that leaves out one key of 100
#: is off by the size of a row. A scale that is 5 % too large is off by at least 30 roundings in bfloat16.
TOLERANCES = {
    torch.float64: 1024 * 2.0**-53,
    torch.float32: 1024 * 2.0**-24,
    torch.float16: 16 * 2.0**-11,
    torch.bfloat16: 16 * 2.0**-8,
}
#: TF32 has as many digits as float16.
TF32_TOLERANCE = TOLERANCES[torch.float16]

#: The compared tensors.
PARTS = ("output", "gradient of q", "gradient of k", "gradient of v")

# The formula computes at most this many scores at once.
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Use:
    """A use of attention, for q, k and v of a size and dtype on a device.

    Attributes:
        is_strided: whether v and the output's gradient lie in memory as in a model, ``batch seq heads head_dim``.
        context: makes the context of the forward pass, such as autocast.
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
    """The use of attention by a Trainer's module."""
    # A plugin may define a precision of its own. Most of these are low.
    precision = find_precision(str(trainer.precision)) or PRECISIONS["bf16-mixed"]
    device, context = trainer.strategy.root_device, trainer.precision_plugin.train_step_context
    return Use(size, is_causal, precision.compute_dtype(), device, stage == "fit", is_strided, context)


def check_attention(kind: AttentionKind, use: Use) -> AttentionCheck | None:
    """Try an implementation before it is measured. Returns the check's result for a user's function, else None.

    Nothing is tried on fake tensors, with which memory is predicted.

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
    """Check a user's function again after it was measured, at the run's own shape. Skipped if memory does not suffice.

    Raises:
        UsageError: the function is wrong now, for example because its results depend on the number of calls.
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
    """Raises UsageError with PyTorch's reason if this machine has no kernel."""
    # Attention written out is tried at a small size: its memory grows with the square of the length.
    size = use.size if kind.backend is not SDPBackend.MATH else use.size._replace(batch=1, seq=min(use.size.seq, 64))
    case = replace(use, size=size)
    try:
        with warnings.catch_warnings(record=True) as caught, kind.chosen():
            warnings.simplefilter("always")
            _attend(kind, case, _draw(case))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # PyTorch warns of every back end, with its reasons or that it is disabled at run time. For a kernel made by
        # torch.compile there are no such warnings, and the error has the reason.
        lines = [one_line(str(line.message).partition(" (Triggered")[0]) for line in caught if kind.backend]
        reasons = [line for line in lines if not line.endswith("because:") and "runtime disabled" not in line]
        reason = "; ".join(reasons or [str(error).partition("\n")[0]])[:400]
        raise UsageError(
            f"attention {kind.name!r} has no kernel for {dtype_name(use.dtype)}, {use} on {use.device.type}; "
            f"choose sdpa, which takes what there is, or naive: {reason}"
        ) from error
    finally:
        if (counters := device_of(use.device).counters) is not None:
            # The run's peak does not include this trial.
            counters.reset_peak_memory_stats(use.device)


def _check_function(kind: AttentionKind, use: Use, checked: list[Use]) -> AttentionCheck:
    """Compare a user's function with the formula, for each of the checked uses. Raises UsageError if it is wrong."""
    deviations = []
    refused = []
    for case in checked:
        try:
            by_part = zip(PARTS, _deviations(kind, case), strict=False)
            deviations += [(deviation, f"{part} at {case}") for part, deviation in by_part]
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            message = one_line(str(error))[:300]
            # A function may refuse a case that the run does not need. An error of the device ends all work on it.
            if case.size == use.size or "CUDA error" in message or "device-side assert" in message:
                where = "".join(f" at {frame_location(line)}" for line in user_lines(error)[-1:])
                raise UsageError(f"{kind.name} raised{where}, for {case}: {type(error).__name__}: {message}") from error
            refused.append(str(case))
    is_tf32 = use.device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    tolerance = TF32_TOLERANCE if is_tf32 and use.dtype is torch.float32 else TOLERANCES[use.dtype]
    # A wrong output has wrong gradients, whose deviation may be the larger one: the backward is told of a right output.
    wrong_outputs = [found for found in deviations if found[0] > tolerance and found[1].startswith(PARTS[0])]
    largest, largest_in = max(wrong_outputs or deviations)
    if largest > tolerance:
        raise UsageError(
            f"{INCORRECT}: {kind.name} is off by {largest:.2g} in the {largest_in}; allowed in "
            f"{dtype_name(use.dtype)} is {tolerance:.2g} of a row's size, against the formula in "
            f"{dtype_name(_wide(use.dtype))}"
        )
    return AttentionCheck(len(checked) - len(refused), largest, tolerance, refused)


def cases(use: Use) -> list[Use]:
    """Uses to check a function at: the run's own first, then small ones, causal and not.

    The small ones have length 1, lengths that no block size divides, and several head_dims, heads and batches.
    """
    heads, width = use.size.heads, use.size.head_dim
    sizes = [
        (2, 3, 1, width), (1, 2, 100, width), (2, heads, 129, width), (1, 2, 77, 32), (2, 1, 64, 64), (1, 1, 193, 128),
    ]  # fmt: skip
    small = [replace(use, size=Size(*size), is_causal=is_causal) for size in sizes for is_causal in (False, True)]
    return list(dict.fromkeys([use, *small]))


def _deviations(kind: AttentionKind, case: Use) -> list[float]:
    """The largest deviation of a row in each of `PARTS`. Large cases are compared in the first and last head only.

    Raises:
        UsageError: the function's output has another form than PyTorch's.
    """
    is_small = case.size.batch * case.size.heads * case.size.seq**2 <= _BLOCK_ELEMENTS

    def compared_heads(tensor: Tensor) -> Tensor:
        """A copy of the heads to compare, ``heads seq head_dim``. The function may write to its arguments."""
        heads = tensor.detach().flatten(0, 1)
        return (heads if is_small else heads[[0, -1]]).to(_wide(case.dtype), copy=True)

    inputs = _draw(case)
    copies = [compared_heads(tensor) for tensor in inputs]
    results = _attend(kind, case, inputs)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        expected = formula(copies, case.is_causal)
    finally:
        torch.set_float32_matmul_precision(precision)
    deviations = [
        torch.linalg.vector_norm(compared_heads(result) - values, dim=-1, keepdim=True) / sizes
        for result, (values, sizes) in zip(results, expected, strict=False)
    ]
    return [deviation.nan_to_num(math.inf, math.inf).max().item() for deviation in deviations]


def _attend(kind: AttentionKind, case: Use, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and with a backward pass the gradients of q, k and v.

    `inputs` are q, k, v and the gradient of the output.

    Raises:
        UsageError: a user's function returns something else than PyTorch's function, or has no gradient.
    """
    q, k, v, gradient = inputs
    mask = kind.mask(case.size.seq, case.is_causal, case.device)
    with case.context(), torch.set_grad_enabled(case.has_backward):
        output: object = kind.core(case.size.head_dim, case.is_causal)(q, k, v, mask)
    if not isinstance(output, Tensor):
        raise UsageError(f"{kind.name} returned a {type(output).__name__}; it must return a tensor")
    if _form(output) != _form(q):
        raise UsageError(f"{kind.name} returned a tensor of {_form(output)}, where q has {_form(q)}; q was {case}")
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


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {dtype_name(tensor.dtype)} on {tensor.device.type}"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _draw(use: Use) -> list[Tensor]:
    """Draw q, k, v and a gradient of the output, standard normal. The run's own random state is not touched."""
    generator = torch.Generator(use.device).manual_seed(0)
    inputs = [torch.randn(use.size, generator=generator, dtype=use.dtype, device=use.device) for _ in PARTS]
    if use.is_strided:
        inputs[2:] = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs[2:]]
    else:
        # AttentionLayer's q, k and v are parameters. A kernel compiled for a plain tensor is compiled again for those.
        inputs[:3] = map(nn.Parameter, inputs[:3])
    for tensor in inputs[:3]:
        tensor.requires_grad_(use.has_backward)
    return inputs


def formula(inputs: list[Tensor], is_causal: bool) -> list[tuple[Tensor, Tensor]]:
    """softmax(q k^T / sqrt(head_dim)) v and its gradients.

    `inputs` are q, k, v and the gradient of the output. The result has a pair for each of `PARTS`: its values, and the
    expected size of each row. Rows of q are computed in blocks, so that memory does not grow with the square of the
    length.
    """
    q, k, v, gradient = inputs
    seq, scale = q.shape[-2], q.shape[-1] ** -0.5
    squares = [x.square().sum(-1, keepdim=True) for x in inputs]
    values, sizes = [torch.zeros_like(x) for x in (q, q, k, v)], [torch.zeros_like(squares[0]) for _ in PARTS]
    positions = torch.arange(seq, device=q.device)
    for rows in positions.split(max(1, _BLOCK_ELEMENTS // (seq * q[..., 0, 0].numel()))):
        scores = q[..., rows, :] @ k.mT * scale
        if is_causal:
            scores = scores.masked_fill_(positions > rows[:, None], float("-inf"))
        weights, block = torch.softmax(scores, dim=-1), gradient[..., rows, :]
        del scores
        output = weights @ v
        score_gradients = weights * (block @ v.mT - (block * output).sum(-1, keepdim=True)) * scale
        # The expected square of a score's gradient adds the squares of all its products. The gradient itself is a
        # difference of two terms, which cancel by chance in some row of many.
        mean_squares = (block.square() * output.square()).sum(-1, keepdim=True)
        weight_squares = weights.square()
        score_squares = weight_squares * (block.square() @ v.square().mT + mean_squares) * scale**2
        for sums, (of_q, of_k, of_v, of_output), mixing, scoring in (
            (values, inputs, weights, score_gradients),
            (sizes, squares, weight_squares, score_squares),
        ):
            sums[0][..., rows, :], sums[1][..., rows, :] = mixing @ of_v, scoring @ of_k
            sums[2] += scoring.mT @ of_q[..., rows, :]
            sums[3] += mixing.mT @ of_output[..., rows, :]
    return [(value, size.sqrt()) for value, size in zip(values, sizes, strict=True)]
