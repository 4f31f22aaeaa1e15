"""The part of a run's record that says whose work the host did in a step, by phase and owner."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from lmbench.records.field import Count, about, record
from lmbench.records.vocabulary import Phase

#: The owner of the work of lmbench's own callbacks.
HARNESS = "lmbench"


class OwnedTime(Struct, frozen=True):
    """Work of one owner within a phase; `calls` and `host_s` are means per step, without other owners' work inside.

    `owner` is a hook with its class, `self.log` or another task, with file and line: `Slow.on_train_end (slow.py:14)`.
    """

    phase: Phase
    owner: str
    calls: float
    host_s: float

    def __str__(self) -> str:
        return f"{self.calls:.3g} x {self.owner}" if self.calls > 1 else self.owner


@record
class HostTime:
    """Host time: whose work the host did in steps that no statistic includes."""

    steps: Count = about(
        "Number of steps whose work was timed: probe steps; in your own Trainer the warm-up's steps after its first."
    )
    owners: list[OwnedTime] = about(
        "Work of hooks, loggers, `self.log`, the loader and garbage collection, the longest first: phase, owner, "
        "calls, `host_s`. Owners of a phase sum to no more than the phase; the rest is Lightning's and PyTorch's own.",
        factory=list,
    )

    def owners_within(self, phase: Phase, phase_s: float) -> list[OwnedTime]:
        """The owners in a phase, scaled down to sum to no more than the phase's mean time in the window.

        Steps with timed owners may be slower than the window's, and a device that is behind hides the host's work.
        """
        owners = [owned for owned in self.owners if owned.phase == phase]
        scale = min(1.0, phase_s / (sum(owned.host_s for owned in owners) or 1.0))
        return [replace(owned, host_s=scale * owned.host_s) for owned in owners]
