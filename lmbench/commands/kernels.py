"""`lmbench kernels RUN|TRACE`: which kernels and parts of the model take the time, and was the device working."""

from __future__ import annotations

from pathlib import Path

from jsonargparse.typing import PositiveInt

from lmbench.report.answer import Answer


def kernels(source: str, *, top: PositiveInt = 10, ceiling: Path | None = None) -> Answer:
    """Shows where the device's time goes, from a trace: kernels, their kinds and the parts of the model they work for,
    by phase; the device's and the host's clocks side by side, with a verdict; and what is inside attention.

    The answer comes first: a verdict on each phase and what to do, and what takes most; tables follow by name. A trace
    of a CPU has no kernels; its operators are shown instead. Needs no GPU and no PyTorch.

    Args:
        source: RUN|TRACE: a result recorded with `lmbench fit ... --trainer.profiler kernels`, or any trace of
            torch.profiler's on CUDA, ROCm or a CPU (torch 2; .json, .json.gz; at most 1 GiB unpacked).
        top: kernels shown per phase.
        ceiling: a record of `lmbench ceiling` (by default one of the same GPU beside the results).
    """
    # Here: help does not wait for it.
    from lmbench.kernels.answer import kernels_answer

    return kernels_answer(source, top, ceiling)
