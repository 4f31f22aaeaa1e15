"""The schedule of a run (warm-up, window, probe steps), and the collection of garbage at the window's borders.

The session of a measured Trainer and the control arms of `lmbench overhead` share this module, so that only their loops
differ.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lmbench.errors import check_at_least

#: Steps in a round of the warm-up whose pace is timed, and rounds at most.
PACE_STEPS, MAX_PACE_ROUNDS = 5, 6
#: Two rounds are steady if their steps differ by less. The first steps of fsdp2 were slow on four H200s: 262 +- 21 ms,
#: falling by 16 % over the window.
STEADY_FRACTION = 0.03
#: A window that several ranks agree on is planned longer than asked for by this factor: its steps may get faster.
PLANNED_LENGTH = 1.05


class ProbeKind(StrEnum):
    """What a probe step examines; one thing each, since the examinations disturb each other."""

    #: Lets the queue fill again after the window's last synchronize, in as many steps as that takes.
    SETTLE = "settle"
    LAG = "lag"
    HOST = "host"
    MEMORY = "memory"
    SYNC = "sync"
    TRAINING = "training"
    # Taken only where an observer asks for them.
    DTYPES = "dtypes"
    RESIDENT = "resident"
    FED = "fed"
    SYNCHRONIZED = "synchronized"
    UNSYNCHRONIZED = "unsynchronized"


@dataclass
class Schedule:
    """When the window opens and closes, and the probe steps after it.

    Args:
        warmup_steps: steps before the window.
        steps: least number of steps in the window; None measures until training ends.
        min_window_s: least length of the window in seconds, on a command line also as 10m or 2h; a power-capped card
            slows down over seconds, so that a short window shows too high a speed.
        probe_steps: unmeasured steps after the window that look at the lag inside phases; 0 runs no probe step of any
            kind.
        collective_timeout_s: seconds that a rank waits for the other ranks, after the first step, before it ends the
            run.

    Raises:
        UsageError: a value below its minimum.
    """

    warmup_steps: int = 5
    steps: int | None = None
    min_window_s: float = 0.0
    probe_steps: int = 0
    collective_timeout_s: float = 100.0

    def __post_init__(self) -> None:
        # A record holds plain numbers, and a duration of the command line is a class of its own.
        self.min_window_s = float(self.min_window_s)
        minima = {"warmup_steps": 0, "steps": 1, "min_window_s": 0, "probe_steps": 0, "collective_timeout_s": 1}
        for name, minimum in minima.items():
            if (value := getattr(self, name)) is not None:
                check_at_least(minimum, "measure", **{name: value})

    def is_window_complete(self, steps_done: int, elapsed_s: float) -> bool:
        return self.steps is not None and steps_done >= self.steps and elapsed_s >= self.min_window_s

    def probe_plan(self) -> list[ProbeKind]:
        """The kinds of the probe steps in order."""
        if self.probe_steps == 0:
            return []
        return [
            ProbeKind.SETTLE,
            *[ProbeKind.LAG] * self.probe_steps,
            *[ProbeKind.HOST] * self.probe_steps,
            *[ProbeKind.MEMORY] * 2,
            ProbeKind.SYNC,
            ProbeKind.TRAINING,
        ]


def planned_steps(rounds_ns: Sequence[int], window_s: float) -> int | None:
    """Steps that last `window_s` at the pace of the last round of warm-up steps; None until that pace is steady.

    The pace is steady once two rounds differ by less than STEADY_FRACTION. Ranks have to agree on the number of the
    window's steps before the window opens, and one step of the warm-up tells too little: its synchronize alone can
    double it.

    Args:
        rounds_ns: times at which rounds of `PACE_STEPS` steps began, the next one included.
        window_s: the length.
    """
    steps_s = [(end_ns - begin_ns) * 1e-9 / PACE_STEPS for begin_ns, end_ns in pairwise(rounds_ns)]
    if len(steps_s) < 2:
        return None
    before_s, last_s = steps_s[-2:]
    is_steady = abs(last_s / before_s - 1) < STEADY_FRACTION or len(steps_s) >= MAX_PACE_ROUNDS
    return math.ceil(PLANNED_LENGTH * window_s / last_s) if is_steady else None


def quiet_collector(undo: ExitStack) -> float:
    """Collect garbage, freeze all objects, and switch the collector off until `undo` is closed.

    Returns the seconds of the collection.
    """
    began_s = time.perf_counter()
    gc.collect()
    length_s = time.perf_counter() - began_s
    # `gc.unfreeze` would also thaw objects that other code has frozen, so freeze only if there are none.
    if not gc.get_freeze_count():
        gc.freeze()
        undo.callback(gc.unfreeze)
    if gc.isenabled():
        gc.disable()
        undo.callback(gc.enable)
    return length_s
