"""`lmbench kernels RUN|TRACE`: which kernels and parts of the model take the time, and was the device working."""

from __future__ import annotations

from pathlib import Path

from lmbench.commands.parser import PositiveInt
from lmbench.errors import UsageError
from lmbench.report.answer import Answer


def kernels(*results: str, top: PositiveInt = 10, ceiling: Path | None = None) -> Answer:
    """Shows where the device's time goes, from a trace.

    The answer comes first: a verdict, why the device was idle, what to do, and what takes most. Tables follow by name:
    kernels, their kinds and the parts of the model they work for, by phase; the clocks of device and host; what is
    inside attention. A trace of a CPU has no kernels; its operators are shown instead. Needs no GPU and no PyTorch.

    Args:
        results: RUN|TRACE: a result recorded with `lmbench fit ... --trainer.profiler kernels`, or any trace of
            torch.profiler's on CUDA, ROCm or a CPU (torch 2; .json, .json.gz; at most 1 GiB unpacked).
        top: kernels shown per phase.
        ceiling: a record of `lmbench ceiling` (by default one of the same GPU beside the results).
    """
    # Here: help does not wait for it.
    from lmbench.kernels.answer import kernels_answer

    if len(results) != 1:
        reason = "`lmbench compare --kernels A B` compares two" if results else "give a result or a trace"
        raise UsageError(f"lmbench kernels shows one trace, {len(results)} given; {reason}")
    return kernels_answer(results[0], top, ceiling)
