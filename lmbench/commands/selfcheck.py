"""`lmbench selfcheck`: show that the numbers are true on this machine."""

from __future__ import annotations

from lmbench.errors import UsageError
from lmbench.report.answer import Answer


def selfcheck(device: str | None = None, /) -> Answer:
    """Plants known truths and checks that they come back.

    Exits with 1 when a check fails, and with 11 where the machine is too busy to tell.

    Args:
        device: cpu or cuda; by default cuda, where there is one
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"selfcheck takes cpu or cuda, not {device!r}")
    # The help does without torch.
    from lmbench.selfcheck.checks import check_truths

    return check_truths(device)
