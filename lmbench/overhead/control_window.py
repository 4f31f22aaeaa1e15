"""The window of a control run: warm-up, steps and counters like the harness's, and nothing else."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

from lmbench.measure.clock import synchronize
from lmbench.measure.host import peak_rss_bytes
from lmbench.measure.schedule import Schedule


class ControlWindow:
    """Clocks a number of steps between two synchronizes; told of every step's end, it says when to stop.

    Garbage is collected, frozen and off inside the window, as the harness has it: one policy for all arms.

    Args:
        schedule: `warmup_steps`, `steps` and `min_window_s` count; a control has no probe steps.
        device: what is waited for at both ends, and whose peak memory is read.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self.schedule = schedule
        self.device = device
        self.record: dict[str, Any] = {}
        self._steps_done = 0
        self._start_ns: int | None = None
        self._first_losses: list[Tensor] = []
        self._run_peak = 0

    def begin(self) -> None:
        """The first step is about to begin."""
        if self.schedule.warmup_steps == 0:
            self._open()

    def step_ended(self, losses: list[Tensor]) -> bool:
        """A step ended, with its micro-batches' losses, still on the device; True if it was the last one."""
        if not self._first_losses:
            self._first_losses = losses
        self._steps_done += 1
        if self._start_ns is None:
            if self._steps_done == self.schedule.warmup_steps:
                self._open()
            return False
        steps = self._steps_done - self.schedule.warmup_steps
        if not self.schedule.is_window_complete(steps, (time.perf_counter_ns() - self._start_ns) * 1e-9):
            return False
        self._close(steps, losses)
        return True

    def _open(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        if self.device.type == "cuda":
            self._run_peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronize(self.device)
        self._start_ns = time.perf_counter_ns()

    def _close(self, steps: int, losses: list[Tensor]) -> None:
        synchronize(self.device)
        assert self._start_ns is not None
        wall_s = (time.perf_counter_ns() - self._start_ns) * 1e-9
        window_peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        gc.unfreeze()
        gc.enable()
        self.record = {
            "steps": steps,
            "wall_s": wall_s,
            "steady_peak_allocated_bytes": window_peak,
            "run_peak_allocated_bytes": None if window_peak is None else max(window_peak, self._run_peak),
            "host_peak_rss_bytes": peak_rss_bytes(),
            "first_loss": _mean(self._first_losses),
            "last_loss": _mean(losses),
        }


def _mean(losses: list[Tensor]) -> float | None:
    return float(torch.stack(losses).double().mean()) if losses else None
