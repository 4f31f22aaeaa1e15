"""Two processes that take turns at measuring, so that both see the same machine."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from random import Random

import torch

from lmbench.device import synchronize
from lmbench.instruments.window import Schedule
from lmbench.python_process import TURNS, TURNS_PIPE

#: Turns in a window of the least length on a GPU, whose clocks and power take time to follow, and steps of each. On a
#: busy CPU single steps in turn had the least spread: 5 % of a round's difference, and turns of four steps more.
_TURNS_OF_WINDOW, _LEAST_STEPS = 8, 2
_OVER = "over"


class TurnTaking:
    """One of two processes that take turns in their windows.

    Each turn has a part for either process, and a coin decides which part comes first. The process that waits does so
    between two steps, on an idle device. The windows begin when both processes are warm, and neither process goes on
    before both windows are over. If one process ends, or takes no turns, the other one measures alone.

    Attributes:
        index: index of the turn that runs.
        own_steps_s: mean seconds of a step in each part of this process, from its start to the end of the device's
            work.
        other_steps_s: those of the other process, by its own clock.

    Args:
        other: connection with the other process.
        seed: seed of the coins, the same in both processes.
        position: 0 or 1, another one in each process.
    """

    def __init__(self, other: Connection, seed: str, position: int) -> None:
        self._other, self._coins, self.position = other, Random(seed), position
        self.index, self._is_alone = -1, False
        self.own_steps_s, self.other_steps_s = list[float](), list[float]()

    @classmethod
    def of_environment(cls) -> TurnTaking | None:
        """The turns that the environment's variables ask for; None without them."""
        if TURNS not in os.environ or TURNS_PIPE not in os.environ:
            return None
        # A process that this one starts takes no turns.
        seed, position = os.environ.pop(TURNS).split()
        return cls(Connection(int(os.environ.pop(TURNS_PIPE))), seed, int(position))

    def begin(self, device: torch.device, schedule: Schedule) -> None:
        """Wait until the other process is warm, and for this process's first part."""
        self._device = device
        self._least_s, self._least_steps = 0.0, 1
        if device.type != "cpu":
            self._least_s = schedule.min_window_s / _TURNS_OF_WINDOW
            self._least_steps = max(_LEAST_STEPS, (schedule.steps or 0) // _TURNS_OF_WINDOW)
        self._tell(0.0)
        self._wait()
        self.other_steps_s.clear()
        self._begin_part()

    def step_ended(self) -> None:
        self._steps += 1

    @property
    def is_part_over(self) -> bool:
        """Whether the other process is to measure before this one's next step."""
        has_lasted = time.perf_counter() - self._began_s >= self._least_s
        return not self._is_alone and self._steps >= self._least_steps and has_lasted

    def pass_on(self) -> float:
        """End this process's part, and wait for the next one; returns the seconds waited."""
        synchronize(self._device)
        ended_s = time.perf_counter()
        self.own_steps_s.append((ended_s - self._began_s) / self._steps)
        self._tell(self.own_steps_s[-1])
        if self._is_first:
            self._wait()
        self._begin_part()
        return self._began_s - ended_s

    def end(self) -> None:
        """End this process's window, and wait for the end of the other one."""
        self._tell(_OVER)
        while not self._is_alone:
            self._wait()

    def await_exit(self) -> None:
        """Wait until the other process has closed its end of the connection."""
        while not self._other.closed:
            self._wait()

    def _wait(self) -> None:
        """Wait for the other process's part to end. Where its window or the process ended, this one is alone."""
        try:
            message = self._other.recv()
        except (EOFError, OSError):
            message = _OVER
            self._other.close()
        self._is_alone = message == _OVER
        if not self._is_alone:
            self.other_steps_s.append(message)

    def _begin_part(self) -> None:
        """Begin the next turn, after the other process's part if that comes first."""
        self.index, self._steps = self.index + 1, 0
        self._is_first = (self._coins.random() < 0.5) == (self.position == 0)
        if not self._is_first and not self._is_alone:
            self._wait()
        self._began_s = time.perf_counter()

    def _tell(self, message: float | str) -> None:
        try:
            self._other.send(message)
        except OSError:
            self._is_alone = True
