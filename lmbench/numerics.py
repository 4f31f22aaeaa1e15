"""Errors of 16-bit arithmetic: published sums by a loop, run here, and inputs at which operators overflow.

The operators are norms, softmax and cross entropy. An operator fails at an input x where its result is zero or not
finite, although PyTorch's result in float64 is neither. Written out in a 16-bit format, it fails where one of its steps
does: a square from the root of the format's largest number on (|x| = 256 in float16), exp(x) from its logarithm on.
PyTorch's own operators compute in float32 internally.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lmbench.device import best_device, device_of
from lmbench.progress import progress
from lmbench.reference import Accumulation, load_rows
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.report.units import Unit

EPS = 1e-5
#: Length of a row, over which norms add up.
WIDTH = 1024
#: Formats, each with the integer type of as many bits. Positive numbers have the order of their bit patterns.
DTYPES = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
#: The rows that are multiplied by x: -1 everywhere but at some positions, with the value there.
ROWS: dict[str, tuple[slice, float]] = {
    "x and -x by turns": (slice(None, None, 2), 1.0),
    "one logit x, others -x": (slice(1), 1.0),
    "the target's logit -x": (slice(1), 0.0),
}
_NORM, _SOFTMAX, _CROSS_ENTROPY = ROWS


class Form(NamedTuple):
    """One way to compute an operator; `row` names its input in `ROWS`."""

    operator: str
    form: str
    row: str
    compute: Callable[[Tensor], Tensor]


def _layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean()
    return centred / torch.sqrt((centred * centred).mean() + EPS)


FORMS = (
    Form("LayerNorm", "written out", _NORM, _layer_norm),
    Form("LayerNorm", "torch", _NORM, lambda x: functional.layer_norm(x, x.shape, eps=EPS)),
    Form("RMSNorm", "written out", _NORM, lambda x: x * torch.rsqrt((x * x).mean() + EPS)),
    Form("RMSNorm", "torch", _NORM, lambda x: functional.rms_norm(x, x.shape, eps=EPS)),
    Form("softmax", "exp / sum", _SOFTMAX, lambda x: (torch.exp(x) / torch.exp(x).sum())[0]),
    Form("softmax", "torch", _SOFTMAX, lambda x: torch.softmax(x, -1)[0]),
    Form("cross entropy", "-log(softmax)", _CROSS_ENTROPY, lambda x: -torch.log(torch.softmax(x, -1)[1])),
    Form("cross entropy", "torch", _CROSS_ENTROPY, lambda x: functional.cross_entropy(x, torch.ones_like(x[0]).long())),
)
_TRUTHS = {form.operator: form.compute for form in FORMS if form.form == "torch"}


def overflows_from(form: Form, dtype: torch.dtype, width: int, device: torch.device) -> float | None:
    """The smallest positive normal number x of `dtype` from which on the form fails; None where it never does.

    Found by bisection over the numbers of the format; so the form must fail at every larger number too.
    """
    position, value = ROWS[form.row]
    row = torch.full((width,), -1.0, dtype=dtype, device=device)
    row[position] = value
    bits = DTYPES[dtype]

    def number(pattern: int) -> Tensor:
        return torch.tensor(pattern, dtype=bits, device=device).view(dtype)

    def fails(pattern: int) -> bool:
        scaled = number(pattern) * row
        result, truth = form.compute(scaled).double(), _TRUTHS[form.operator](scaled.double())
        is_wrong, is_expected = (result == 0) | ~result.isfinite(), truth.isfinite() & (truth != 0)
        return bool((is_wrong & is_expected).any())

    limits = torch.finfo(dtype)
    smallest, largest = torch.tensor([limits.tiny, limits.max], dtype=dtype).view(bits).tolist()
    first = smallest + bisect_left(range(smallest, largest + 1), True, key=fails)
    return None if first > largest else number(first).item()


def run_loop(loop: Accumulation, device: torch.device) -> float:
    """The sum of a published loop, computed here."""
    total = torch.tensor(0.0, dtype=getattr(torch, loop.accumulator), device=device)
    addend = torch.tensor(loop.addend, dtype=getattr(torch, loop.addend_dtype), device=device)
    for _ in range(loop.n):
        total += addend.float() if loop.is_cast else addend
    return float(total.item())


def published_sums(device: torch.device) -> Table:
    """Table of the published loops: the sum by the loop here, by `torch.sum`, and as published."""
    rows = []
    for loop in (loops := load_rows("accumulation.csv", Accumulation)):
        total = run_loop(loop, device)
        addends = torch.full((loop.n,), loop.addend, dtype=getattr(torch, loop.addend_dtype), device=device)
        plain_sum = addends.sum(dtype=getattr(torch, loop.accumulator)).item()
        addend = loop.addend_dtype + (".float()" if loop.is_cast else "")
        rows.append([f"{loop.accumulator} += {addend}", total, plain_sum, loop.results])
    unit = Unit("", 1.0, "{:.8g}".format)
    columns = [Column("total += addend"), Column("loop", unit), Column("torch.sum", unit), Column("published")]
    # Every write-up has the first loop.
    loop = loops[0]
    caption = f"{loop.n:,} x {loop.addend:g}, run here; as printed by write-ups {loop.sources}"
    return Table("sums", "Published sums", columns, rows, f"{caption} (lmbench/reference/README.md)")


def overflow_table(device: torch.device) -> Table:
    """Table of the forms: the x from which on each fails, by dtype."""
    columns = [Column("operator"), Column("form"), Column("x", name="input")]
    columns += [Column(str(dtype).removeprefix("torch."), Unit("", 1.0, "{:.4g}".format)) for dtype in DTYPES]
    with torch.inference_mode():
        rows = [[*form[:3], *(overflows_from(form, dtype, WIDTH, device) for dtype in DTYPES)] for form in FORMS]
    caption = f"the x from which on the result is 0 or not finite, - where it never is; rows of {WIDTH:,}, eps {EPS:g}"
    return Table("overflows", "Norms and softmax", columns, rows, caption)


def measure_numerics() -> Answer:
    """Both tables for the GPU, or for the CPU where there is none."""
    device = best_device()
    with progress("numerics"):
        sums, overflows = published_sums(device), overflow_table(device)
    _, loop_sum, plain_sum, *_ = sums.rows[0]
    failing = [f"{operator} ({form}) from x = {x:.4g}" for operator, form, _, x, *_ in overflows.rows if x is not None]
    headline = [
        Line("sums", f"1,000 x 0.01 is {loop_sum} by a loop in float16, and {plain_sum:g} by torch.sum"),
        Line("norms", f"in float16 {', '.join(failing)}; all others never"),
        Line("device", f"{device_of(device).name()}, torch {torch.__version__}"),
    ]
    return Answer(headline, [sums, overflows])
