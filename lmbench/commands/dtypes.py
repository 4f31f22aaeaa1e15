"""`lmbench dtypes RUN...`: which dtype every tensor of a step had, and why."""

from __future__ import annotations

from lmbench.report.answer import Answer


def dtypes(*runs: str) -> Answer:
    """Shows the dtypes of runs that were recorded with `lmbench fit ... --dtypes.record true`.

    Parameters, batch, logits, loss, gradients and optimizer state; what every module gets and returns; and the
    operators of the forward pass, each with the reason for its casts: the list of autocast that it is in on the run's
    device. Several runs (two precisions, say) stand side by side. Needs no GPU and no PyTorch.

    Args:
        runs: folders of runs
    """
    from lmbench.dtypes.answer import dtypes_answer, examine

    return dtypes_answer([examine(run) for run in runs])
