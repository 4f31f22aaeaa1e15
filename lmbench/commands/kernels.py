"""`lmbench kernels RUN|TRACE|FOLDER`: what takes the time, was the device working, which rank do others wait for."""

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

    Of several ranks (a run of theirs, a folder of their traces, or several files) it says what each does, which one the
    others wait for and why, and what communication costs by kind.

    Args:
        results: RUN|TRACE|FOLDER: a result recorded with `lmbench fit ... --trainer.profiler kernels`, or any trace of
            torch.profiler's on CUDA, ROCm or a CPU (torch 2; .json, .json.gz; at most 1 GiB unpacked).
        top: kernels shown per phase.
        ceiling: a record of `lmbench ceiling` (by default one of the same GPU beside the results).
    """
    # Here: help does not wait for it.
    from lmbench.kernels.ranks import ranks_answer

    if not results:
        raise UsageError("lmbench kernels shows a result, a trace, or the traces of several ranks; give one")
    return ranks_answer(results, top, ceiling)
