"""Finds code that makes the host wait for the device."""

from __future__ import annotations

from lmbench.callbacks.observer import Observer
from lmbench.instruments.schedule import ProbeKind
from lmbench.instruments.sync_trap import SyncTrap


class SyncFinder(Observer):
    """Runs one unmeasured step under CUDA's sync debug mode and lists where it synchronized.

    Leaves `probe.hidden_syncs`: a list of `{location, stack, count}`; null on a CPU, where nothing is asynchronous.
    """

    def __init__(self) -> None:
        self._trap: SyncTrap | None = None

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.SYNC and self.session.device.type == "cuda":
            self._trap = SyncTrap()
            self._trap.arm()

    def probe_ended(self, kind: ProbeKind) -> None:
        if self._trap is not None:
            self.session.run.probe.hidden_syncs = self._trap.disarm()
            self._trap = None

    def run_closing(self, exception: BaseException | None) -> None:
        # An exception in the probe step itself: its warnings are the user's again.
        if self._trap is not None:
            self._trap.disarm()
            self._trap = None
