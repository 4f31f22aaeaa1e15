"""Scalars of each step that live on the device (loss, loss scale), read without making the host wait."""

from __future__ import annotations

import torch


class ScalarRing:
    """Copies device scalars into pinned host memory, in stream order, and reads them once their step is done.

    A copy costs one asynchronous launch. A value may be read when an event recorded after its copy has been reached;
    the ring holds as many values as can be under way at once.

    Args:
        device: where the scalars live.
        size: values that may be under way at once. Older ones are overwritten.
    """

    def __init__(self, device: torch.device, size: int = 8192) -> None:
        self._host = torch.zeros(size, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._slots = self._host.unbind()
        self._next = 0

    def put(self, value: torch.Tensor) -> int:
        """Copy a one-element tensor; returns the slot to read later."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        # What Lightning hands out needs neither, and each would be one more call for every step.
        if value.requires_grad:
            value = value.detach()
        if value.ndim:
            value = value.reshape(())
        self._slots[slot].copy_(value, non_blocking=True)
        return slot

    def get(self, slot: int) -> float:
        return float(self._host[slot])
