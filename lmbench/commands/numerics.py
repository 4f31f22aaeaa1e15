"""`lmbench numerics`: how wrong a sum in 16 bit is, and when norms and softmax overflow."""

from __future__ import annotations

from lmbench.report.answer import Answer


def numerics(*, device: str | None = None, width: int = 1024) -> Answer:
    """Shows how wrong published sums in 16 bit are, and when norms and softmax overflow.

    Runs the loops of the write-ups on this device, and finds the inputs from which on norms, softmax and cross entropy,
    written out and as PyTorch computes them, give zero or no finite number.

    Args:
        device: cuda or cpu; a GPU where there is one by default
        width: numbers in a row, which norms add up
    """
    from lmbench.numerics import measure_numerics

    return measure_numerics(device, width)
