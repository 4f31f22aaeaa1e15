"""The part of a run's record that says whose work the host did in a step, by phase and owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lmbench.records.field import Count, about
from lmbench.records.vocabulary import Phase

#: The owner of the work of lmbench's own callbacks.
HARNESS = "lmbench"


class WorkOwner(NamedTuple):
    """A hook with its class, `self.log`, or another task; and the file and line of its code."""

    name: str
    location: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.location})" if self.location else self.name


class OwnedTime(Struct, frozen=True):
    """Work of one owner within a phase; `calls` and `host_s` are means per step, without other owners' work inside.

    `name` and `location` are those of a `WorkOwner`.
    """

    phase: Phase
    name: str
    location: str | None
    calls: float
    host_s: float

    def __str__(self) -> str:
        count = f"{self.calls:.3g} x " if self.calls > 1 else ""
        return f"{count}{WorkOwner(self.name, self.location)}"


@dataclass(slots=True)
class HostTime:
    """Host time: whose work the host did in steps that no statistic includes."""

    steps: Count = about(
        "Number of steps whose work was timed: probe steps; in your own Trainer the warm-up's steps after its first.",
        "steps with owners",
    )
    owners: list[OwnedTime] = about(
        "Work of hooks, loggers, `self.log`, the loader and garbage collection, the longest first: phase, name, "
        "location, calls, `host_s`. Owners of a phase sum to no more than the phase; the rest is Lightning's and "
        "PyTorch's own.",
        factory=list,
    )

    def owners_within(self, phase: Phase, phase_s: float) -> list[OwnedTime]:
        """The owners in a phase, scaled down to sum to no more than the phase's mean time in the window.

        Steps with timed owners may be slower than the window's, and a device that is behind hides the host's work.
        """
        owners = [owner for owner in self.owners if owner.phase == phase]
        scale = min(1.0, phase_s / (sum(owner.host_s for owner in owners) or 1.0))
        return [replace(owner, host_s=scale * owner.host_s) for owner in owners]
