"""All of `lmbench numerics` on one device."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from lmbench.errors import UsageError
from lmbench.instruments.environment import capture_environment
from lmbench.numerics.experiment.operators import Setting, find_thresholds
from lmbench.numerics.experiment.sums import curve, published_sum, sum_up
from lmbench.numerics.formats import Format
from lmbench.numerics.record import Numerics
from lmbench.reference.published import Accumulation, load_accumulations

#: Accumulator and addends.
Pair = tuple[Format, Format]
#: More curves than this are too many for one picture.
MAX_CURVES = 4


def find_device(name: str | None) -> torch.device:
    """`cuda` or `cpu`; without a name a GPU where there is one.

    Raises:
        UsageError: it is another one, or there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name not in (None, "cuda", "cpu"):
        raise UsageError(f"--device is {name!r}; choose cuda or cpu")
    if name == "cuda" and not has_gpu:
        raise UsageError("--device is 'cuda', and PyTorch sees no GPU here; choose cpu")
    return torch.device(name or ("cuda" if has_gpu else "cpu"))


def measure_numerics(
    n: int, addend: float, pairs: Sequence[Pair], width: int, eps: float, device: torch.device
) -> Numerics:
    """Sums by each pair of formats, the published ones, and where operators fail.

    Raises:
        UsageError: the addend is infinite in its format.
    """
    sums = [sum_up(n, addend, *pair, device) for pair in pairs]
    drawn = pairs if len(pairs) <= MAX_CURVES else [pair for pair in pairs if pair[0] is pair[1]]
    loops: dict[object, list[Accumulation]] = {}
    for each in load_accumulations():
        loops.setdefault((each.accumulator, each.addend_dtype, each.is_cast), []).append(each)
    return Numerics(
        schema_version=1,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=capture_environment(device),
        n=n,
        addend=addend,
        width=width,
        eps=eps,
        published=[published_sum(alike, device) for alike in loops.values()],
        sums=sums,
        curves=[curve(n, addend, *pair, device) for pair in drawn],
        thresholds=find_thresholds(Setting(width, eps, device)),
    )
