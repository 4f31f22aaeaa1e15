"""Where work that takes long stands: one line on standard error, written over itself on a terminal and in a notebook.

Elsewhere (a pipe, a file, a terminal that is dumb) it is a line after 5 s, and then ever less often.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

from lmbench.masking import masked_message, one_line
from lmbench.report.units import duration

#: What the lines of a process begin with that its parent hands on.
HEAD = "lmbench: "
_LIVE_EVERY_S = 1.0
_LOG_AFTER_S, _LOG_EVERY_AT_MOST_S = 5.0, 60.0


class StatusLine:
    """A line that the next one replaces. It never ends what it tells of: a terminal that is gone is left alone."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        is_notebook = type(self._stream).__module__.startswith("ipykernel")
        is_terminal = bool(self._stream and self._stream.isatty()) and os.environ.get("TERM") != "dumb"
        self.is_live = is_notebook or is_terminal
        self._width = 0
        self.restart()

    def restart(self) -> None:
        """Something else begins: a log hears of it again after a few seconds."""
        self._pause_s = _LOG_AFTER_S
        self._written_s = time.monotonic()

    @property
    def wait_s(self) -> float:
        """Seconds until the next line is due."""
        return _LIVE_EVERY_S if self.is_live else max(self._written_s + self._pause_s - time.monotonic(), 0.1)

    def show(self, text: str) -> None:
        """Where things stand; in a log only when it is time for a line."""
        text = one_line(masked_message(text))
        if self.is_live:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        elif time.monotonic() - self._written_s >= self._pause_s:
            self._written_s = time.monotonic()
            self._pause_s = min(2 * self._pause_s, _LOG_EVERY_AT_MOST_S)
            self._write(f"{HEAD}{text}\n")

    def keep(self, text: str) -> None:
        """Text that stays, above the line."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Take the line away; may be called again."""
        if self._width:
            self._write(f"\r{' ' * self._width}\r")
            self._width = 0

    def _write(self, text: str) -> None:
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class Task:
    """Task in parts, with the line that tells of it: `what`, which part, for how long, and how long the others take if
    they take as long as those before."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._begun, self._part, self._note = 0, "", ""
        self._began_s = time.monotonic()
        self.line = StatusLine()

    def begin(self, part: str) -> None:
        """The next part begins."""
        self._begun, self._part, self._note = self._begun + 1, part, ""
        self.show()

    def leave_out(self) -> None:
        """One of the parts was done before."""
        self._total = self._total and self._total - 1

    def note(self, text: str) -> None:
        """Where the part stands."""
        self._note = text

    def keep(self, text: str) -> None:
        """A line that stays."""
        self.line.keep(f"lmbench: {self._what}: {one_line(masked_message(text))}")

    def show(self) -> None:
        elapsed_s, ended = time.monotonic() - self._began_s, self._begun - 1
        place = f"{self._begun}{f' of {self._total}' if self._total else ''}" if self._begun else ""
        words = [" ".join(filter(None, [place, self._part])), self._note, f"{duration(elapsed_s)} so far"]
        if self._total and ended > 0:
            words.append(f"about {duration(elapsed_s / ended * (self._total - ended))} left")
        self.line.show(f"{self._what}: {', '.join(filter(None, words))}")


@contextmanager
def told(line: StatusLine, tell: Callable[[], None]) -> Iterator[None]:
    """Within, a thread tells where things stand, as often as the line is due."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(line.wait_s):
            tell()

    teller = threading.Thread(target=run, name="lmbench-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


@contextmanager
def progress(what: str, total: int | None = None, is_measured_here: bool = False) -> Iterator[Task]:
    """Tell where the block stands: from a thread, or only between its parts where this process is measured."""
    task = Task(what, total)
    try:
        with nullcontext() if is_measured_here else told(task.line, task.show):
            yield task
    finally:
        task.line.clear()
