"""How threads of runs wait for each other on a machine whose cores other processes take, too."""

from __future__ import annotations

from collections.abc import Container

import psutil

from lmbench.errors import tell

#: Threads of PyTorch that wait for each other hold their cores, by default, and on a busy machine wait for whole time
#: slices of other processes: a step of 25 ms took 70 to 2,000 ms beside two spinning processes on two cores.
WAITING = "OMP_WAIT_POLICY"
_BUSY_PERCENT, _BUSY_INTERVAL_S = 25.0, 0.3


def gives_way(variables: Container[str]) -> bool:
    """Whether threads are to give their cores away while they wait, since other processes take some, and none of these
    variables says how they wait; that is told."""
    busy_percent = psutil.cpu_percent(_BUSY_INTERVAL_S)
    if busy_percent <= _BUSY_PERCENT or WAITING in variables:
        return False
    tell(
        f"other processes take {busy_percent:.0f} % of the cores: threads of all runs give theirs away while they wait "
        f"({WAITING}=passive)"
    )
    return True
