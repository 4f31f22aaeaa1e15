"""`lmbench ceiling`: what this device attains at best, beside its datasheet."""

from __future__ import annotations

from pathlib import Path

from lmbench.commands.parser import PositiveFloat
from lmbench.report.answer import Answer


def ceiling(*, sustained_s: PositiveFloat = 3.0, results_dir: Path = Path("results")) -> Answer:
    """Measures what matrix products and copies attain on this device, in bursts of 40 ms and held for seconds, with the
    clock and power they ran at.

    Args:
        sustained_s: seconds held.
        results_dir: the result goes to ceiling_NAME.json in this folder, where `lmbench kernels` looks for it.
    """
    # Here: help does not wait for these.
    from lmbench.kernels.ceiling import ceiling_answer, store_ceiling
    from lmbench.kernels.recording.ceiling import measure_ceiling

    record = measure_ceiling(sustained_s)
    return ceiling_answer(record, store_ceiling(record, results_dir))
