"""The banner before a measurement."""

from __future__ import annotations

from contextlib import suppress

from lmbench.callbacks import Observer, RunRecorder
from lmbench.records.codec import decode_run
from lmbench.records.encoding import encode
from lmbench.report.terminal import print_banner


class Announcement(Observer):
    """Prints what is about to be measured, once the recorder knows it."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def run_started(self) -> None:
        facts = {"window": self.session.facts["window"], "compile": self.session.facts.get("compile", {})}
        # An output that cannot be written is told of at the end; the measurement goes on.
        with suppress(OSError):
            print_banner(decode_run(encode(self._recorder.run | facts).encode()))
