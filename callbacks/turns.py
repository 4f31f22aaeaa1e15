"""Measures in turns with the process of another side, while both are alive."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from random import Random

from lmbench.callbacks.observer import Observer
from lmbench.device import synchronize
from lmbench.python_process import TURNS, TURNS_PIPE
from lmbench.records.vocabulary import EXCLUDED, Stage

#: Turns in a window of the least length on a GPU, whose clocks and power take time to follow, and steps of each. On a
#: busy CPU single steps in turn had the least spread: 5 % of a round's difference, and turns of four steps more.
_TURNS_OF_WINDOW, _LEAST_STEPS = 8, 2
_DONE, _OVER = "done", "over"


class Turns(Observer):
    """Lets two processes that compare two sides take turns in their windows, so that both see the same machine.

    Each turn has a part for either process, and a coin decides which part comes first. The process that waits does so
    between two steps, on an idle device, and its waiting is excluded from the window. The windows open when both
    processes are warm, and neither process leaves its window before both windows are over. If one process ends, or
    takes no turns, the other one measures alone.

    Recorded:

    - `turn` of each StepRecord of the window.

    Args:
        other: connection with the other process.
        seed: seed of the coins, the same in both processes.
        position: 0 or 1, another one in each process.
    """

    def __init__(self, other: Connection, seed: str, position: int) -> None:
        self._other, self._coins, self._position = other, Random(seed), position
        self._is_alone = False

    @classmethod
    def of_environment(cls) -> list[Turns]:
        """The turns that the environment's variables ask for, none without them."""
        if TURNS not in os.environ or TURNS_PIPE not in os.environ:
            return []
        # A process that this one starts takes no turns.
        seed, position = os.environ.pop(TURNS).split()
        return [cls(Connection(int(os.environ.pop(TURNS_PIPE))), seed, int(position))]

    def before_window(self) -> None:
        self._turn = -1
        self._tell(_DONE)
        self._wait()
        self._begin_turn()

    def window_opened(self) -> None:
        self._began_s = time.perf_counter()

    def step_ended(self) -> None:
        if self.session.stage is Stage.WINDOW:
            self.session.step.turn = self._turn
            self._steps += 1

    def between_steps(self) -> None:
        if self.session.stage is not Stage.WINDOW or self._is_alone:
            return
        now_s, least_s = time.perf_counter(), self.session.schedule.min_window_s / _TURNS_OF_WINDOW
        is_gpu = self.session.device.type != "cpu"
        if is_gpu and (self._steps < _LEAST_STEPS or now_s - self._began_s < least_s):
            return
        self.session.track.enter(EXCLUDED)
        synchronize(self.session.device)
        self._tell(_DONE)
        if self._is_first:
            self._wait()
        self._begin_turn()
        self._began_s = time.perf_counter()
        self.session.paused_s += self._began_s - now_s
        self.session.track.leave()

    def window_closed(self) -> None:
        self._tell(_OVER)
        while not self._is_alone:
            self._wait()
        while self._position and self.session.schedule.probe_steps and not self._other.closed:
            # The other process takes its probe steps first.
            self._wait()

    def _begin_turn(self) -> None:
        """Begin the next turn, after the other process's part if that comes first."""
        self._turn, self._steps = self._turn + 1, 0
        self._is_first = (self._coins.random() < 0.5) == (self._position == 0)
        if not self._is_first and not self._is_alone:
            self._wait()

    def _tell(self, message: str) -> None:
        try:
            self._other.send(message)
        except OSError:
            self._is_alone = True

    def _wait(self) -> None:
        """Wait for the other process's part to end. Where its window or the process ended, this one is alone."""
        try:
            self._is_alone = self._other.recv() == _OVER
        except (EOFError, OSError):
            self._is_alone = True
            self._other.close()
