"""Measures in turns with the process of another side, while both are alive."""

from __future__ import annotations

from lmbench.callbacks.observer import Observer
from lmbench.instruments.turns import TurnTaking
from lmbench.records.vocabulary import EXCLUDED, Stage


class Turns(Observer):
    """Lets two processes that compare two sides take turns in their windows, so that both see the same machine.

    Waiting is excluded from the window.

    Recorded:

    - `turn` of each StepRecord of the window.

    Args:
        turns: the turns with the other process.
    """

    def __init__(self, turns: TurnTaking) -> None:
        self._turns = turns

    def before_window(self) -> None:
        self._turns.begin(self.session.device, self.session.schedule)

    def step_ended(self) -> None:
        if self.session.stage is Stage.WINDOW:
            self.session.step.turn = self._turns.index
            self._turns.step_ended()

    def between_steps(self) -> None:
        if self.session.stage is Stage.WINDOW and self._turns.is_part_over:
            self.session.track.enter(EXCLUDED)
            self.session.paused_s += self._turns.pass_on()
            self.session.track.leave()

    def window_closed(self) -> None:
        self._turns.end()
        if self._turns.position and self.session.schedule.probe_steps:
            # The other process takes its probe steps first.
            self._turns.await_exit()
