"""Keeps Python's garbage collector out of the window."""

from __future__ import annotations

import gc

from lmbench.callbacks.observer import Observer


class QuietHost(Observer):
    """Collects and freezes garbage before the window, turns collection off in it, and restores it afterwards.

    In a Trainer of your own, whose window has no end but training's, it leaves the collector alone. Leaves `gc_policy`.
    """

    def __init__(self) -> None:
        self._is_off = False

    def before_window(self) -> None:
        if self.session.only_watches:
            self.session.run.gc_policy = "left alone"
            return
        self.session.run.gc_policy = "collected and frozen, off in the window"
        self._was_enabled = gc.isenabled()
        gc.collect()
        # Objects frozen by somebody else must stay so afterwards, and unfreezing knows no difference. To count them
        # takes 50 ms in a fork of a sweep's server; the record has them counted.
        environment = self.session.run.environment
        self._is_frozen = not (gc.get_freeze_count() if environment is None else environment.gc.frozen_count)
        if self._is_frozen:
            gc.freeze()
        gc.disable()
        self._is_off = True

    def window_closed(self) -> None:
        if self._is_off:
            if self._is_frozen:
                gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._is_off = False

    def run_closing(self, exception: BaseException | None) -> None:
        self.window_closed()
