"""What 16-bit arithmetic does: published sums by a loop, run here, and the inputs at which norms, softmax and cross
entropy overflow.

An operator fails at an input x where its result is zero or not finite, and torch's in float64 is neither. Written out
in a 16-bit format it fails where a step does: a square from the root of the format's largest number on (|x| = 256 in
float16), exp(x) from its logarithm on. PyTorch's own operators, and lmbench's, compute in float32 inside.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lmbench.errors import UsageError
from lmbench.instruments.environment import capture_environment
from lmbench.model.layers import NextTokenLoss, RMSNorm
from lmbench.reference.published import Accumulation, load_accumulations
from lmbench.report.answer import Answer, Column, Line, Table, Value
from lmbench.report.units import Unit

EPS = 1e-5
MOST_WIDTH = 2**16
#: Each with the integers that have as many bits; positive numbers are in the order of their bits.
DTYPES = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}

_SUM, _INPUT = Unit("", 1.0, "{:.8g}".format), Unit("", 1.0, "{:.4g}".format)


def _alternating(x: Tensor, width: int) -> Tensor:
    """x and -x by turns: the mean is 0, and x is the root mean square."""
    return torch.stack([x, -x]).repeat(width // 2)


def _outlier(x: Tensor, width: int) -> Tensor:
    """Logits of which the first is x and all others are -x."""
    return torch.cat([x[None], (-x).expand(width - 1)])


def _below(x: Tensor, width: int) -> Tensor:
    """Logits of which the first is 0 and all others, with the target, are -x."""
    return torch.cat([torch.zeros_like(x)[None], (-x).expand(width - 1)])


def _layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean()
    return centred / torch.sqrt((centred * centred).mean() + EPS)


def _exp_over_sum(x: Tensor) -> Tensor:
    power = torch.exp(x)
    return (power / power.sum())[0]


def _target(x: Tensor) -> Tensor:
    return torch.ones(1, dtype=torch.int64, device=x.device)


#: A row of some width that a number x scales.
Row = Callable[[Tensor, int], Tensor]


class Form(NamedTuple):
    """One way to compute an operator, on rows that a number x scales."""

    operator: str
    form: str
    row: Row
    compute: Callable[[Tensor], Tensor]


FORMS = (
    Form("LayerNorm", "written out", _alternating, _layer_norm),
    Form("LayerNorm", "torch", _alternating, lambda x: functional.layer_norm(x, x.shape, eps=EPS)),
    Form("RMSNorm", "written out", _alternating, lambda x: x * torch.rsqrt((x * x).mean() + EPS)),
    Form("RMSNorm", "sum / width", _alternating, lambda x: x * torch.rsqrt((x * x).sum() / len(x) + EPS)),
    Form("RMSNorm", "torch", _alternating, lambda x: functional.rms_norm(x, x.shape, eps=EPS)),
    Form("RMSNorm", "lmbench", _alternating, lambda x: RMSNorm(len(x), EPS).to(x.device)(x)),
    Form("softmax", "exp / sum", _outlier, _exp_over_sum),
    Form("softmax", "torch", _outlier, lambda x: torch.softmax(x, -1)[0]),
    Form("cross entropy", "-log(softmax)", _below, lambda x: -torch.log(torch.softmax(x, -1)[1])),
    Form("cross entropy", "torch", _below, lambda x: functional.cross_entropy(x[None], _target(x))),
    Form("cross entropy", "lmbench", _below, lambda x: NextTokenLoss()(x[None, None], _target(x)[None])),
)


_TRUTHS = {form.operator: form.compute for form in FORMS if form.form == "torch"}


def overflows_from(form: Form, dtype: torch.dtype, width: int, device: torch.device) -> float | None:
    """The smallest positive normal number x of `dtype` from which on the form fails, None where it never does.

    Found by halving the numbers of the format, so the form has to fail from one number on to the largest.
    """
    bits = DTYPES[dtype]

    def number(place: int) -> Tensor:
        return torch.tensor(place, dtype=bits, device=device).view(dtype)

    def fails(place: int) -> bool:
        x = number(place)
        result = form.compute(form.row(x, width)).double()
        truth = _TRUTHS[form.operator](form.row(x.double(), width))
        return bool(((result == 0) | ~result.isfinite())[truth.isfinite() & (truth != 0)].any())

    limits = torch.finfo(dtype)
    holds, failing = torch.tensor([limits.tiny, limits.max], dtype=dtype).view(bits).tolist()
    if not fails(failing):
        return None
    if fails(holds):
        return limits.tiny
    while failing - holds > 1:
        middle = (holds + failing) // 2
        holds, failing = (holds, middle) if fails(middle) else (middle, failing)
    return number(failing).item()


def run_loop(
    n: int, addend: float, dtype: str, addend_dtype: str, device: torch.device, is_cast: bool = False
) -> float:
    """The sum of `n` times `total += addend` from zero; with `is_cast` the addend is converted to float32 first."""
    total = torch.tensor(0.0, dtype=getattr(torch, dtype), device=device)
    term = torch.tensor(addend, dtype=getattr(torch, addend_dtype), device=device)
    for _ in range(n):
        total += term.float() if is_cast else term
    return float(total.item())


def _loop(accumulation: Accumulation) -> tuple[str, str, bool]:
    return accumulation.accumulator, accumulation.addend_dtype, accumulation.is_cast


def published_sums(device: torch.device) -> Table:
    """A row for each published loop: its sum here, by `torch.sum`, and as printed; `equal` where the sum here, rounded
    to the printed decimals, is what was printed."""
    rows: list[list[Value]] = []
    loops = sorted(load_accumulations(), key=_loop)
    for (dtype, addend_dtype, is_cast), group in groupby(loops, _loop):
        published = list(group)
        n, addend = published[0].n, published[0].addend
        total = run_loop(n, addend, dtype, addend_dtype, device, is_cast)
        addends = torch.full((n,), addend, dtype=getattr(torch, addend_dtype), device=device)
        figures = list(dict.fromkeys(each.result for each in published))
        rounded = [f"{total:.{len(figure.partition('.')[2])}f}" for figure in figures]
        rows.append([
            f"{dtype} += {addend_dtype}{'.float()' if is_cast else ''}",
            total,
            addends.sum(dtype=getattr(torch, dtype)).item(),
            ", ".join(figures),
            "equal" if rounded == figures else f"{', '.join(rounded)} here",
        ])  # fmt: skip
    columns = [
        Column("total += addend"), Column("loop", _SUM, "loop"), Column("torch.sum", _SUM, "torch_sum"),
        Column("published"), Column("agreement"),
    ]  # fmt: skip
    sources = ", ".join(sorted({each.source for each in loops}))
    caption = f"{n:,} x {addend:g}, run here; as printed by write-ups {sources} (lmbench/reference/README.md)"
    return Table("sums", "Published sums", columns, rows, caption)


def overflow_table(width: int, device: torch.device) -> Table:
    """A row for each form: the x at which it begins to fail, by dtype."""
    columns = [Column("operator"), Column("form"), Column("x", name="input")]
    columns += [Column(name, _INPUT, name) for name in (str(dtype).removeprefix("torch.") for dtype in DTYPES)]
    inputs: dict[Row, str] = {
        _alternating: "x and -x by turns",
        _outlier: "one logit x, others -x",
        _below: "the target's logit -x",
    }
    with torch.inference_mode():
        rows = [
            [
                form.operator,
                form.form,
                inputs[form.row],
                *(overflows_from(form, dtype, width, device) for dtype in DTYPES),
            ]
            for form in FORMS
        ]
    caption = f"the x from which on the result is 0 or not finite, - where it never is; rows of {width:,}, eps {EPS:g}"
    return Table("overflows", "Norms and softmax", columns, rows, caption)


def measure_numerics(device_name: str | None, width: int) -> Answer:
    """Both tables for a device (`cuda` or `cpu`; None: a GPU where there is one).

    Raises:
        UsageError: there is no such device, or the width is out of its range.
    """
    has_gpu = torch.cuda.is_available()
    if device_name not in (None, "cuda", "cpu"):
        raise UsageError(f"--device is {device_name!r}; choose cuda or cpu")
    if device_name == "cuda" and not has_gpu:
        raise UsageError("--device is 'cuda', and PyTorch sees no GPU here; choose cpu")
    if not 2 <= width <= MOST_WIDTH or width % 2:
        raise UsageError(f"--width is {width:,}; it must be an even number from 2 to {MOST_WIDTH:,}")
    device = torch.device(device_name or ("cuda" if has_gpu else "cpu"))
    environment = capture_environment(device)
    sums, overflows = published_sums(device), overflow_table(width, device)
    half = next(row for row in sums.records() if row["total_addend"] == "float16 += float16")
    failing = [
        f"{row['operator']} ({row['form']}) from x = {row['float16']:.4g}"
        for row in overflows.records()
        if row["float16"] is not None
    ]
    name = environment.gpu.name or environment.host.cpu_model or "CPU"
    headline = [
        Line("sums", f"1,000 x 0.01 is {half['loop']} by a loop in float16, and {half['torch_sum']:g} by torch.sum"),
        Line("norms", f"in float16 {', '.join(failing)}; all others never"),
        Line("device", f"{name}, torch {environment.versions.torch}"),
    ]
    advice = [
        Line("do", "norms: square and add in float32 (x.float()), as torch's and lmbench's do inside"),
        Line("", "softmax: subtract the largest logit first, as torch.softmax does"),
        Line("", "cross entropy: torch's cross_entropy or log_softmax, never log(softmax(x))"),
    ]
    return Answer(headline, [sums, overflows], advice)
