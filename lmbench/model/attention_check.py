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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from lmbench.errors import UsageError
from lmbench.instruments.own_code import own_lines
from lmbench.model.attention import ATTENTION, AttentionKind, Size
from lmbench.model.flex_attention import FlexCore, refuse_flex
from lmbench.model.own_attention import Function
from lmbench.records.run import AttentionCheck
from lmbench.records.vocabulary import INCORRECT

#: By the dtype of the products, the largest deviation of a right function. In bfloat16 and float16 it is 16 roundings
#: of one number (half the distance from 1 to the next one): the formula computed step by step in the dtype was off by
#: up to 7 of them, PyTorch's fused kernels by up to 6, whatever the length (1 to 8192). In float32 and float64 the
#: order of sums counts: 1024 roundings, where those were off by up to 132. A function that leaves out one key of 100 is
#: off by the size of a row; one whose scale is 5 % too large, in bfloat16, by 30 roundings at least.
TOLERANCES: dict[torch.dtype, float] = {
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
_NO_CONTEXT: Callable[[], AbstractContextManager[Any]] = nullcontext


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
    context: Callable[[], AbstractContextManager[Any]] = _NO_CONTEXT

    def __str__(self) -> str:
        """`batch 1, heads 2, seq 100, head_dim 64, causal`."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.size._asdict().items())
        return f"{sizes}, {'causal' if self.is_causal else 'not causal'}"


def check_attention(kind: AttentionKind, use: Use) -> AttentionCheck | None:
    """Try an implementation before it is measured; returns what was found of a user's own function.

    On fake tensors, where memory is predicted, nothing can be tried.

    Raises:
        UsageError: this machine has no kernel for it, or the function is wrong.
    """
    if isinstance(torch.empty(0), FakeTensor):
        if kind.core is FlexCore:
            raise UsageError(
                "attention 'flex' is a kernel made by torch.compile, and a prediction compiles nothing; predict sdpa, "
                "which saves the same"
            )
        return None
    if kind.function is not None:
        return _check_function(kind.name, kind.function, use, cases(use))
    if kind.core is FlexCore:
        refuse_flex(use.device, use.has_backward)
    if kind.backend is not None or kind.core is FlexCore:
        _try_kernel(kind, use)
    return None


# back ends of PyTorch's


def _try_kernel(kind: AttentionKind, use: Use) -> None:
    reasons = _why_not(kind, use)
    if reasons is None:
        return
    others = [each for each in ATTENTION.values() if each.backend is not None and each is not kind]
    able = ", ".join(each.name for each in others if _why_not(each, use) is None)
    raise UsageError(
        f"attention {kind.name!r} has no kernel for {_named(use.dtype)}, {use} on {use.device.type}; "
        f"{f'{able} and ' if able else ''}naive can do it: {reasons}"
    )


def _why_not(kind: AttentionKind, use: Use) -> str | None:
    """Why a back end cannot do it, in PyTorch's words; None where it can."""
    # Written out, it takes memory with the square of the length; what it can do does not depend on that.
    size = use.size if kind.backend is not SDPBackend.MATH else use.size._replace(batch=1, seq=min(use.size.seq, 64))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            q, k, v, gradient = _draw(replace(use, size=size))
            with use.device:
                mask = kind.make_mask(size.seq) if kind.make_mask is not None and use.is_causal else None
            core = kind.core(size.head_dim, use.is_causal)
            with use.context(), kind.chosen(), torch.set_grad_enabled(use.has_backward):
                output = core(q, k, v, mask)
            if use.has_backward:
                torch.autograd.grad(output, (q, k, v), gradient)
            _wait(use.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Of flex it is the error that tells; warnings are of something else.
            return _reasons([str(one.message) for one in told] if kind.backend is not None else [], error)
        finally:
            if use.device.type == "cuda":
                # The trial is no part of the run.
                torch.cuda.reset_peak_memory_stats(use.device)
    return None


def _reasons(warned: list[str], error: Exception) -> str:
    """PyTorch warns of each back end with its reasons, of those that were not asked too: that they are off."""
    said = [" ".join(line.split(" (Triggered")[0].split()) for line in warned]
    said = [line for line in said if not line.endswith("because:") and "has been runtime disabled" not in line]
    return "; ".join(dict.fromkeys(said or [" ".join(str(error).split(". ")[0].split())]))[:400]


# functions of the user's own


@dataclass
class _Finding:
    """The largest deviation, with the case and the part it was in."""

    deviation: float = 0.0
    use: Use | None = None
    part: str = ""


def check_again(kind: AttentionKind, use: Use) -> None:
    """Once it was measured: is a user's own function still right, at the run's own shape? Not where no memory is left.

    Raises:
        UsageError: it is not: what it gives depends on how often it was called, say.
    """
    if kind.function is None:
        return
    try:
        _check_function(kind.name, kind.function, use, [use])
    except torch.OutOfMemoryError:
        return
    except UsageError as error:
        told = str(error).removeprefix(f"{INCORRECT}: ")
        raise UsageError(f"{INCORRECT}: after the run, though it was right before: {told}") from error


def _check_function(name: str, function: Function, use: Use, among: list[Use]) -> AttentionCheck:
    tolerance = tolerance_of(use)
    worst, refused, count = _Finding(), [], 0
    for case in among:
        try:
            deviations = _deviations(name, function, case)
        except _RaisedError as error:
            # What a function says it cannot do, it does not do wrong; after a device's error nothing can be done.
            if case.size == use.size or error.is_fatal:
                raise
            refused.append(str(case))
            continue
        count += 1
        for part, off in zip(PARTS, deviations, strict=False):
            if off > worst.deviation or worst.use is None:
                worst = _Finding(off, case, part)
    check = AttentionCheck(
        cases=count,
        refused=refused,
        tolerance_fraction=tolerance,
        deviation_fraction=worst.deviation,
        largest_in=f"{worst.part} at {worst.use}",
    )
    if not worst.deviation <= tolerance:
        against = f"against the formula in {_named(_wide(use.dtype))}{_hint(use, worst)}"
        raise UsageError(
            f"{INCORRECT}: {name} is off by {_share(worst.deviation)} in the {check.largest_in}; allowed in "
            f"{_named(use.dtype)} is {_share(tolerance)} of a row's size, {against}"
        )
    return check


def tolerance_of(use: Use) -> float:
    """The largest deviation of a right function."""
    is_tf32 = use.dtype is torch.float32 and use.device.type == "cuda"
    if is_tf32 and torch.get_float32_matmul_precision() != "highest":
        return TF32_TOLERANCE
    return TOLERANCES[use.dtype]


def cases(use: Use) -> list[Use]:
    """What to check at: first the run's own; then length 1, lengths that no block size divides, several head_dims,
    heads and batches, causal and not."""
    heads, width = use.size.heads, use.size.head_dim
    sizes = [
        Size(2, 3, 1, width), Size(1, 2, 100, width), Size(2, heads, 129, width), Size(1, 2, 77, 32),
        Size(2, 1, 64, 64), Size(1, 1, 193, 128),
    ]  # fmt: skip
    others = [replace(use, size=size, is_causal=is_causal) for size in sizes for is_causal in (False, True)]
    return list(dict.fromkeys([use, *others]))


def _deviations(name: str, function: Function, case: Use) -> list[float]:
    """By part, for one case: the largest deviation of a row, in all heads, or of many scores in the first and last."""
    q, k, v, gradient = _draw(case)
    # Copies: a function may write to what it is given.
    drawn = {
        place: [x[place].detach().to(_wide(case.dtype), copy=True) for x in (q, k, v, gradient)]
        for place in _places(case.size)
    }
    results = _call(name, function, case, q, k, v, gradient)
    found: list[float] = [0.0] * len(results)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for place, given in drawn.items():
            for letter, now, before in zip("qkv", (q, k, v), given, strict=False):
                if not torch.equal(now[place].detach().to(before.dtype), before):
                    raise UsageError(f"{INCORRECT}: {name} changes its {letter}, which others read too; q was {case}")
            wanted = formula(given[0], given[1], given[2], given[3], case.is_causal)
            for index, (result, rows) in enumerate(zip(results, wanted, strict=False)):
                found[index] = max(found[index], deviation(result[place], rows))
    finally:
        torch.set_float32_matmul_precision(precision)
    return found


def _places(size: Size) -> list[Any]:
    """Which heads are held against the formula, as indices."""
    if size.batch * size.heads * size.seq**2 <= _BLOCK_ELEMENTS:
        return [...]
    return list(dict.fromkeys([(0, 0), (size.batch - 1, size.heads - 1)]))


def _call(name: str, function: Function, case: Use, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output, and with a backward pass the gradients.

    Raises:
        UsageError: the output is not what PyTorch's function would give.
    """
    with _raising(name, case, "forward"):
        with case.context(), torch.set_grad_enabled(case.has_backward):
            output = function(q, k, v, is_causal=case.is_causal)
        _wait(case.device)
    if not isinstance(output, Tensor):
        raise UsageError(f"{name} returned a {type(output).__name__}; it must return a tensor")
    facts: list[tuple[str, object, object]] = [
        ("shape", tuple(output.shape), tuple(case.size)),
        ("dtype", output.dtype, case.dtype),
        ("device", output.device.type, case.device.type),
    ]
    for what, given, wanted in facts:
        if given != wanted:
            raise UsageError(
                f"{name} returned a tensor of {what} {_named(given)}, where q has {_named(wanted)}; q was {case}"
            )
    if not case.has_backward:
        return [output]
    if not output.requires_grad:
        raise UsageError(
            f"{name} returned a tensor without a gradient; it must be differentiable: by PyTorch's operators, a "
            "torch.autograd.Function, or torch.library's register_autograd"
        )
    with _raising(name, case, "backward"):
        gradients = torch.autograd.grad(output, (q, k, v), gradient, allow_unused=True)
        _wait(case.device)
    for letter, found in zip("qkv", gradients, strict=True):
        if found is None:
            raise UsageError(f"{name} gives {letter} no gradient; q was {case}")
    return [output.detach(), *gradients]


class _RaisedError(UsageError):
    """The function raised; `is_fatal` where the device can do nothing more."""

    is_fatal = False


@contextmanager
def _raising(name: str, case: Use, what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        lines = own_lines(error)
        place = f" at {lines[-1]}" if lines else ""
        said = " ".join(str(error).split())[:300]
        told = _RaisedError(f"{name} raised in its {what}{place}, for {case}: {type(error).__name__}: {said}")
        told.is_fatal = "CUDA error" in said or "device-side assert" in said
        raise told from error


def _hint(use: Use, worst: _Finding) -> str:
    is_tf32 = use.dtype is torch.float32 and use.device.type == "cuda" and worst.deviation <= TF32_TOLERANCE
    if not is_tf32:
        return ""
    return "; that is TF32's rounding: let it multiply in float32, or ask for TF32 with --measure.matmul_precision high"


def _named(value: object) -> str:
    return str(value).removeprefix("torch.")


def _share(fraction: float) -> str:
    return f"{fraction:.2g}" if math.isfinite(fraction) else "nan or infinity"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _draw(use: Use) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient of the output, standard normal, without touching the run's own random numbers."""
    generator = torch.Generator(use.device).manual_seed(0)

    def draw(is_strided: bool) -> Tensor:
        batch, heads, seq, head_dim = use.size
        if is_strided:
            return torch.randn(batch, seq, heads, head_dim, generator=generator, **kind).transpose(1, 2)
        return torch.randn(use.size, generator=generator, **kind)

    kind: Any = {"dtype": use.dtype, "device": use.device}
    q, k, v, gradient = draw(False), draw(False), draw(use.is_strided), draw(use.is_strided)
    if not use.is_strided:
        # As they are in attention by itself: what is compiled for a parameter is compiled again for another tensor.
        q, k, v = nn.Parameter(q), nn.Parameter(k), nn.Parameter(v)
    for tensor in (q, k, v):
        tensor.requires_grad_(use.has_backward)
    return q, k, v, gradient


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# the formula


class Rows(NamedTuple):
    """One result, and the size that each of its rows has if its products are independent (one number a row)."""

    values: Tensor
    sizes: Tensor


def formula(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, is_causal: bool) -> list[Rows]:
    """softmax(q k^T / sqrt(head_dim)) v and its gradients for a gradient of the output, in the order of `PARTS`.

    Rows of q are taken in blocks, so that memory does not grow with the square of the length.
    """
    seq, scale = q.shape[-2], q.shape[-1] ** -0.5
    k_squares, v_squares = (x.square().sum(-1, keepdim=True) for x in (k, v))
    q_squares, gradient_squares = (x.square().sum(-1, keepdim=True) for x in (q, gradient))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dk_squares, dv_squares = torch.zeros_like(k_squares), torch.zeros_like(v_squares)
    outputs: list[Rows] = []
    dqs: list[Rows] = []
    step = max(1, _BLOCK_ELEMENTS // (seq * q[..., 0, 0].numel()))
    for start in range(0, seq, step):
        rows = slice(start, min(start + step, seq))
        scores = q[..., rows, :] @ k.transpose(-2, -1) * scale
        if is_causal:
            later = torch.arange(seq, device=q.device) > torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            scores = scores.masked_fill_(later, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        del scores
        output = weights @ v
        of_weights = gradient[..., rows, :] @ v.transpose(-2, -1)
        mean = (gradient[..., rows, :] * output).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - mean) * scale
        outputs.append(Rows(output, (weights.square() @ v_squares).sqrt()))
        # The two terms of a score's gradient are independent, and so are the products that each is a sum of; what is
        # left of them may be nothing, and is that by chance in some row of many.
        of_weights_squares = gradient[..., rows, :].square() @ v.square().transpose(-2, -1)
        mean_squares = (gradient[..., rows, :].square() * output.square()).sum(-1, keepdim=True)
        squares = weights.square() * (of_weights_squares + mean_squares) * scale**2
        dqs.append(Rows(of_scores @ k, (squares @ k_squares).sqrt()))
        dk += of_scores.transpose(-2, -1) @ q[..., rows, :]
        dk_squares += squares.transpose(-2, -1) @ q_squares[..., rows, :]
        dv += weights.transpose(-2, -1) @ gradient[..., rows, :]
        dv_squares += weights.square().transpose(-2, -1) @ gradient_squares[..., rows, :]
    return [_joined(outputs), _joined(dqs), Rows(dk, dk_squares.sqrt()), Rows(dv, dv_squares.sqrt())]


def _joined(blocks: list[Rows]) -> Rows:
    return Rows(torch.cat([block.values for block in blocks], -2), torch.cat([block.sizes for block in blocks], -2))


def deviation(found: Tensor, wanted: Rows) -> float:
    """The largest deviation of a row; infinity where one is not finite."""
    off = torch.linalg.vector_norm(found.to(wanted.values.dtype) - wanted.values, dim=-1, keepdim=True) / wanted.sizes
    largest = off.max().item()
    return math.inf if math.isnan(largest) else largest
