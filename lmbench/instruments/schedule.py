"""How a run is divided: warm-up, the window, probe steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lmbench.errors import check_at_least

# A queue that has not filled again after this many steps will not.
MAX_SETTLE_STEPS = 50
# Several ranks cannot end by what each sees of its own queue.
SETTLE_STEPS_OF_RANKS = 10


class ProbeKind(StrEnum):
    """What a probe step looks at; one thing each, since they disturb each other."""

    SETTLE = "settle"  # lets the queue fill again after the window's last synchronize; as many steps as that takes
    LAG = "lag"
    MEMORY = "memory"
    SYNC = "sync"
    TRAINING = "training"
    DTYPES = "dtypes"  # only where an observer asks for it


@dataclass(frozen=True)
class Schedule:
    """When the window opens and closes, and the probe steps after it.

    Args:
        warmup_steps: steps before the window.
        steps: the window's steps at least; None measures until training ends by itself.
        min_window_s: the window's length at least; a power-capped card slows over seconds, and short bursts flatter it.
        probe_steps: steps that look at the lag inside phases; 0 leaves out every kind of probe.
        collective_timeout_s: how long a rank waits for the others once the first step is done.
    """

    warmup_steps: int = 5
    steps: int | None = None
    min_window_s: float = 0.0
    probe_steps: int = 0
    collective_timeout_s: float = 100.0

    def __post_init__(self) -> None:
        least = {"warmup_steps": 0, "steps": 1, "min_window_s": 0, "probe_steps": 0, "collective_timeout_s": 1}
        for name, limit in least.items():
            if (value := getattr(self, name)) is not None:
                check_at_least(limit, **{f"measure.{name}": value})

    def is_window_complete(self, steps_done: int, elapsed_s: float) -> bool:
        return self.steps is not None and steps_done >= self.steps and elapsed_s >= self.min_window_s

    def probe_plan(self) -> list[ProbeKind]:
        """The probe steps in order."""
        if self.probe_steps == 0:
            return []
        return [
            ProbeKind.SETTLE,
            *[ProbeKind.LAG] * self.probe_steps,
            *[ProbeKind.MEMORY] * 2,
            ProbeKind.SYNC,
            ProbeKind.TRAINING,
        ]
