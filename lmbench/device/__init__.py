"""Devices: the one place that knows how a kind of device is waited for, timed, counted and read.

The kind is found by `torch.device.type`. Another vendor is a class in a file of its own, with its sensor, and an entry
in `DEVICES`.
"""

from __future__ import annotations

import torch

from lmbench.device.cpu import Cpu
from lmbench.device.cuda import Cuda
from lmbench.device.protocol import Device as Device
from lmbench.errors import UsageError

#: The kinds of devices by the type that PyTorch gives them; of those that a machine has, the first is the best.
DEVICES: dict[str, type[Device]] = {"cuda": Cuda, "cpu": Cpu}


def device_of(device: torch.device) -> Device:
    """The device behind PyTorch's name for it.

    Raises:
        UsageError: the device is of a kind that lmbench does not know; its clock would measure launches, not work.
    """
    kind = DEVICES.get(device.type)
    if kind is None:
        raise UsageError(f"device {device}: not measured; measured are {', '.join(DEVICES)}: set trainer.accelerator")
    return kind(device)


def best_device() -> torch.device:
    """A GPU if there is one, or else the CPU."""
    return torch.device(next(name for name, kind in DEVICES.items() if kind.is_available()))


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its work; return at once on a CPU."""
    device_of(device).synchronize()
