"""The banner before a measurement."""

from __future__ import annotations

from contextlib import suppress

from lmbench.callbacks import Observer, RunRecorder
from lmbench.report.answer import Answer
from lmbench.report.render import Output, give
from lmbench.report.run import banner


class Announcement(Observer):
    """Prints what is about to be measured, once the recorder knows it."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def run_started(self) -> None:
        # An output that cannot be written is told of at the end; the measurement goes on.
        with suppress(OSError):
            give(Answer(banner(self._recorder.run)), Output())
