"""Keeps Python's garbage collector out of the window."""

from __future__ import annotations

from lmbench.callbacks.observer import Observer
from lmbench.instruments.window import QuietCollector


class QuietHost(Observer):
    """Collects and freezes garbage before the window, turns collection off in it, and restores it afterwards.

    In a Trainer of your own, whose window has no end but training's, it leaves the collector alone. Leaves `gc_policy`.
    """

    def __init__(self) -> None:
        self._collector = QuietCollector()

    def before_window(self) -> None:
        run = self.session.run
        if self.session.only_watches:
            run.gc_policy = "left alone"
            return
        run.gc_policy = "collected and frozen, off in the window"
        self._collector.begin(None if run.environment is None else run.environment.gc.frozen_count)

    def window_closed(self) -> None:
        self._collector.end()

    def run_closing(self, exception: BaseException | None) -> None:
        self._collector.end()
