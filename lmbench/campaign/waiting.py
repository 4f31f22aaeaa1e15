"""How threads of runs wait for each other on a machine whose cores other processes take, too."""

from __future__ import annotations

import os
import sys

import psutil

from lmbench.progress import tell_before_work
from lmbench.records.vocabulary import WAIT_POLICY

_BUSY_PERCENT, _BUSY_INTERVAL_S = 25.0, 0.3


def give_way(is_comparison: bool) -> None:
    """Let threads of this process and of those that it starts give their cores away while they wait.

    Comparisons do so in any case: their sides share the cores, and the machine may become busy in the minutes that they
    take. Others do so if other processes take cores now, and tell it once their work begins. The user's own variable
    stays. PyTorch reads it when imported.
    """
    if WAIT_POLICY in os.environ or "torch" in sys.modules:
        return
    if is_comparison:
        os.environ[WAIT_POLICY] = "passive"
    elif percent := taken_percent():
        os.environ[WAIT_POLICY] = "passive"
        tell_before_work(
            f"other processes take {percent:.0f} % of the cores: set {WAIT_POLICY}=passive, so that waiting threads "
            "give their cores away"
        )


def taken_percent() -> float:
    """The share of the cores that other processes take now, while this one waits; 0 on a machine that is not busy."""
    percent = psutil.cpu_percent(_BUSY_INTERVAL_S)
    return percent if percent > _BUSY_PERCENT else 0.0
