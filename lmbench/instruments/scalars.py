"""A ring of device scalars that are on their way to the host."""

from __future__ import annotations

import torch

from lmbench.device import Device

#: Values that can be on their way to the host at once; older ones are overwritten.
_RING_SIZE = 8192


class ScalarRing:
    """Copies device scalars into pinned host memory, in stream order, for reading when their step is done.

    A copy costs one asynchronous launch. Its value may be read once the device has reached an event recorded after it.

    Args:
        device: device of the scalars.
    """

    def __init__(self, device: Device) -> None:
        self._host = torch.zeros(_RING_SIZE, dtype=torch.float32, pin_memory=device.pins_memory)
        self._slots = self._host.unbind()
        self._next = 0

    def put(self, value: torch.Tensor) -> int:
        """Copy a one-element tensor to the host; returns the slot to read later."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        # Lightning's losses need neither call, so test first and save two calls a step.
        if value.requires_grad:
            value = value.detach()
        if value.ndim:
            value = value.reshape(())
        self._slots[slot].copy_(value, non_blocking=True)
        return slot

    def get(self, slot: int) -> float:
        return float(self._host[slot])
