"""The CPU: what it is told to do it does at once, so there is nothing to wait for."""

from __future__ import annotations

from lmbench.device.clock import HostClock
from lmbench.device.protocol import Device
from lmbench.device.sensor import Sensor


class Cpu(Device):
    """The host itself; both clocks are the host's."""

    @staticmethod
    def is_available() -> bool:
        return True

    def name(self) -> str:
        return "CPU"

    def synchronize(self) -> None:
        """Return at once."""

    def clock(self, name: str) -> HostClock:
        return HostClock()

    def sensor(self) -> Sensor:
        return Sensor()
