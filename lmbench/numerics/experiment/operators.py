"""Norms, softmax and cross entropy as written out in a 16-bit format, as PyTorch fuses them, and lmbench's own: where
each begins to fail as its input grows or shrinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lmbench.model.layers import NextTokenLoss, RMSNorm
from lmbench.numerics import limits
from lmbench.numerics.formats import FLOAT32, FORMATS, Format
from lmbench.numerics.record import Threshold
from lmbench.numerics.search import find_edges

#: The formats of interest; in float32 the same steps fail only where bfloat16 does.
SMALL_FORMATS = (FORMATS["float16"], FORMATS["bfloat16"])


@dataclass(frozen=True)
class Setting:
    """How wide the rows are that operators work on, the epsilon of norms, and where they run."""

    width: int
    eps: float
    device: torch.device

    def row(self, dtype: torch.dtype, x: float, *first: float) -> Tensor:
        """A row of x, but for its first places."""
        row = torch.full((self.width,), x, dtype=dtype, device=self.device)
        row[: len(first)] = torch.tensor(first, dtype=dtype, device=self.device)
        return row

    def alternating(self, dtype: torch.dtype, x: float) -> Tensor:
        """x and -x by turns: its mean is 0, and x is its root mean square."""
        row = self.row(dtype, x)
        row[1::2] = -x
        return row


#: What is computed, step by step, each with its name; the last step is what comes out.
Steps = Iterator[tuple[str, Tensor]]
#: The steps for an input that x scales, in a dtype.
Operator = Callable[[float, torch.dtype, Setting], Steps]
Formula = Callable[[Format, Setting], float | None]


@dataclass(frozen=True)
class Case:
    """One operator in one form on one kind of input, which a number x scales.

    `truth` is what it is compared with, in float64; None for its own steps. `above` and `below` are formulas of the x
    at which it has to fail, None where that depends on a kernel. `x_format` is x's own, None where x has the input's.
    """

    operator: str
    form: str
    input: str
    steps: Operator
    truth: Operator | None = None
    above: Formula | None = None
    below: Formula | None = None
    advice: str = ""
    x_format: Format | None = None


def thresholds(case: Case, of: Format, setting: Setting) -> list[Threshold]:
    """Where the case fails in a format: both sides where there are two, one that says so where it never does."""
    x_format = case.x_format or of
    below, above = find_edges(lambda x: failure(case, x, of, setting) is None, x_format)
    found = []
    for side, edge, formula in (("above", above, case.above), ("below", below, case.below)):
        if edge is not None:
            first, gives = failure(case, edge.fails_from, of, setting) or ("", "")
            found.append(
                Threshold(
                    operator=case.operator,
                    form=case.form,
                    dtype=of.name,
                    input=case.input,
                    side="above" if side == "above" else "below",
                    holds_to=edge.holds_to,
                    fails_from=edge.fails_from,
                    formula=None if formula is None else formula(of, setting),
                    first=first,
                    gives=gives,
                    advice=case.advice,
                )
            )
    holding = Threshold(operator=case.operator, form=case.form, dtype=of.name, input=case.input, side="above")
    return found or [holding]


def failure(case: Case, x: float, of: Format, setting: Setting) -> tuple[str, str] | None:
    """The step that fails first, and what comes out; None where what comes out is right."""
    found = list(case.steps(x, getattr(torch, of.name), setting))
    true = list((case.truth or case.steps)(x, torch.float64, setting))
    wrong = _wrong(found[-1][1], true[-1][1])
    if not wrong.any():
        return None
    first = found[-1][0]
    if case.truth is None:
        first = next(name for (name, here), (_, there) in zip(found, true, strict=True) if _wrong(here, there).any())
    return first, _told(found[-1][1][wrong].flatten()[0].item())


def _wrong(found: Tensor, true: Tensor) -> Tensor:
    """Where a number is not finite, is zero, or is off by a factor of two or more, and ought not to be."""
    wide, is_zero = found.double(), true == 0
    ratio = wide / torch.where(is_zero, 1.0, true)
    return ~wide.isfinite() | (~is_zero & ~((ratio > 0.5) & (ratio < 2)))


def _told(value: float) -> str:
    return f"{value:g}" if value == 0 or not math.isfinite(value) else "off by 2x or more"


def _layer_norm(x: Tensor, eps: float) -> Steps:
    centred = x - x.mean(-1, keepdim=True)
    yield "difference to the mean", centred
    yield "square", (square := centred * centred)
    yield "mean of squares", (variance := square.mean(-1, keepdim=True))
    yield "root", (root := torch.sqrt(variance + eps))
    yield "quotient", centred / root


def _rms_norm(x: Tensor, eps: float) -> Steps:
    yield "square", (square := x * x)
    yield "mean of squares", (mean := square.mean(-1, keepdim=True))
    yield "root", (root := torch.rsqrt(mean + eps))
    yield "product", x * root


def _rms_norm_by_sum(x: Tensor, eps: float) -> Steps:
    yield "square", (square := x * x)
    yield "sum", (total := square.sum(-1, keepdim=True))
    yield "root", (root := torch.rsqrt(total / x.shape[-1] + eps))
    yield "product", x * root


def _exp_over_sum(x: Tensor) -> Steps:
    """Of the first logit alone: what is small beside it may be zero."""
    yield "exponential", (power := torch.exp(x))[:1]
    yield "sum", (total := power.sum(-1, keepdim=True))
    yield "quotient", (power / total)[:1]


def _softmax(x: Tensor) -> Steps:
    power = torch.exp(x - x.max())
    if x.dtype == torch.float64:
        # The truth is small, and never zero.
        power = power.clamp_min(torch.finfo(x.dtype).tiny)
    yield "exponential", power
    yield "quotient", power / power.sum(-1, keepdim=True)


def _log_of_softmax(x: Tensor) -> Steps:
    yield "softmax", (probability := torch.softmax(x, -1)[1])
    yield "logarithm", -torch.log(probability)


def _result(value: Tensor) -> Steps:
    yield "result", value


def _loss(x: Tensor) -> Steps:
    return _result(functional.cross_entropy(x[None], _second(x)))


def _second(x: Tensor) -> Tensor:
    """The target of a row of logits."""
    return torch.ones(1, dtype=torch.int64, device=x.device)


def _norm(norm: Callable[[Tensor, float], Steps]) -> Operator:
    return lambda x, dtype, setting: norm(setting.alternating(dtype, x), setting.eps)


def _of_logits(function: Callable[[Tensor], Steps], *first: float) -> Operator:
    """A function of logits that are -x, but for the first."""
    return lambda x, dtype, setting: function(setting.row(dtype, -x, *(x * each for each in first)))


_SIGNS, _BELOW = "x and -x by turns", "all but one x below the largest"
_TARGET = "the target x below the largest"
_IN_FLOAT32 = "norms: square and add in float32 (x.float()), as torch's layer_norm and rms_norm and lmbench's do inside"
_SUBTRACT = "softmax: subtract the largest logit first, as torch.softmax does"
_LOGARITHM = "small probabilities: no softmax in 16 bit can hold them; log_softmax gives their logarithm"


def _mean_square(of: Format, setting: Setting) -> float:
    return limits.mean_square_overflows(of, setting.width)


def _no_square(of: Format, setting: Setting) -> float | None:
    return limits.square_underflows(of, setting.eps)


def _no_exponential(of: Format, setting: Setting) -> float:
    return limits.exponential_underflows(of)


CASES: tuple[Case, ...] = (
    Case("LayerNorm", "written out", _SIGNS, _norm(_layer_norm), None, _mean_square, _no_square, _IN_FLOAT32),
    Case("LayerNorm", "torch", _SIGNS, _norm(lambda x, eps: _result(functional.layer_norm(x, x.shape, eps=eps)))),
    Case("RMSNorm", "written out", _SIGNS, _norm(_rms_norm), None, _mean_square, _no_square, _IN_FLOAT32),
    Case(
        "RMSNorm", "sum / width", _SIGNS, _norm(_rms_norm_by_sum),
        above=lambda of, setting: limits.sum_of_squares_overflows(of, setting.width),
        below=_no_square, advice=_IN_FLOAT32,
    ),
    Case("RMSNorm", "torch", _SIGNS, _norm(lambda x, eps: _result(functional.rms_norm(x, x.shape, eps=eps)))),
    Case(
        "RMSNorm", "lmbench", _SIGNS,
        _norm(lambda x, eps: _result(RMSNorm(x.shape[-1], eps).to(x.device)(x))), truth=_norm(_rms_norm),
    ),
    Case(
        "eps of a norm", "written out", "a row of zeros, eps x",
        lambda x, dtype, setting: _layer_norm(setting.row(dtype, 0.0), x),
        below=lambda of, _: of.underflow, x_format=FLOAT32,
        advice="eps: what is zero in the format protects nothing; take a larger one, or add it in float32",
    ),
    Case(
        "softmax", "exp / sum, a logit", "a logit x, all others -x", _of_logits(_exp_over_sum, 1.0),
        above=lambda of, _: limits.exponential_overflows(of), advice=_SUBTRACT,
    ),
    Case(
        "softmax", "exp / sum, all", "all logits x", lambda x, dtype, setting: _exp_over_sum(setting.row(dtype, x)),
        above=lambda of, setting: limits.sum_of_exponentials_overflows(of, setting.width), advice=_SUBTRACT,
    ),
    Case("softmax", "max subtracted", _BELOW, _of_logits(_softmax, 0.0), above=_no_exponential, advice=_LOGARITHM),
    Case(
        "softmax", "torch", _BELOW, _of_logits(lambda x: _result(torch.softmax(x, -1)), 0.0),
        truth=_of_logits(_softmax, 0.0), above=_no_exponential, advice=_LOGARITHM,
    ),
    Case(
        "cross entropy", "-log(softmax)", _TARGET, _of_logits(_log_of_softmax, 0.0), above=_no_exponential,
        advice="cross entropy: torch's cross_entropy or log_softmax, never log(softmax(x))",
    ),
    Case("cross entropy", "torch", _TARGET, _of_logits(_loss, 0.0)),
    Case(
        "cross entropy", "lmbench", _TARGET,
        _of_logits(lambda x: _result(NextTokenLoss()(x[None, None], _second(x)[None])), 0.0),
        truth=_of_logits(_loss, 0.0),
    ),
)  # fmt: skip


def find_thresholds(setting: Setting, cases: Iterable[Case] = CASES) -> list[Threshold]:
    """Every case in every small format, float16 before bfloat16."""
    with torch.inference_mode():
        return [row for case in cases for of in SMALL_FORMATS for row in thresholds(case, of, setting)]
