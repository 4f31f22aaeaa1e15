"""`lmbench overhead`: what the harness costs, against a bare PyTorch loop and a plain Lightning Trainer."""

from __future__ import annotations

import shlex
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.masking import masked_words
from lmbench.overhead.arms import measure_overhead
from lmbench.report.answer import Answer
from lmbench.scratch import ScratchFolder


def overhead(*, rounds: int = 5, settings: list[str]) -> Answer:
    """Measures what the harness costs.

    The same model, data and optimizer, in fresh processes and rotating order: in a plain PyTorch loop, in Lightning's
    Trainer with everything off, and in `lmbench fit`. Takes every option of `lmbench fit`; a first run settles how many
    steps each window has.

    Args:
        rounds: processes of each arm, at least 2
        settings: options of `lmbench fit`
    """
    if rounds < 2:
        raise UsageError(f"--rounds is {rounds}; an interval needs at least 2")
    repeat = shlex.join(masked_words(["lmbench", "overhead", "--rounds", str(rounds), *settings]))
    with ScratchFolder("overhead") as folder:
        return measure_overhead(settings, rounds, Path(folder), repeat)
