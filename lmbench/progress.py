"""Progress of long work on standard error.

A terminal or a notebook shows one live line, which each new text replaces. A log (a pipe, a file, a dumb terminal) gets
a line after 5 s, then after pauses that double up to 60 s.
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

from lmbench.errors import tell
from lmbench.masking import masked_message, one_line
from lmbench.report.units import duration

_LIVE_EVERY_S = 1.0
_LOG_AFTER_S, _LOG_EVERY_AT_MOST_S = 5.0, 60.0
#: Lines that are told before the first text of a status line.
_WAITING = list[str]()


def tell_before_work(line: str) -> None:
    """Tell a line once long work begins, so that a mistake in the command is answered by one line alone."""
    _WAITING.append(line)


class StatusLine:
    """A line that the next one replaces. A terminal that has gone away is ignored, so that the work goes on."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        is_notebook = type(self._stream).__module__.startswith("ipykernel")
        is_terminal = bool(self._stream and self._stream.isatty()) and os.environ.get("TERM") != "dumb"
        self.is_live = is_notebook or is_terminal
        self._width = 0
        self.restart()

    def restart(self) -> None:
        """Start the pauses between a log's lines anew, as other work begins."""
        self._pause_s = _LOG_AFTER_S
        self._written_s = time.monotonic()

    @property
    def wait_s(self) -> float:
        """Seconds until the next line is due."""
        return _LIVE_EVERY_S if self.is_live else max(self._written_s + self._pause_s - time.monotonic(), 0.1)

    def show(self, text: str) -> None:
        """Show a text; a log gets it only when its next line is due."""
        lines, _WAITING[:] = _WAITING[:], []
        for line in lines:
            tell(line)
        text = one_line(masked_message(text))
        if self.is_live:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        elif time.monotonic() - self._written_s >= self._pause_s:
            self._written_s = time.monotonic()
            self._pause_s = min(2 * self._pause_s, _LOG_EVERY_AT_MOST_S)
            self._write(f"lmbench: {text}\n")

    def keep(self, text: str) -> None:
        """Write a text that stays, above the line."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Wipe the line from the terminal."""
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
    """Work in parts with its status line: title, current part, time so far, and time left.

    The time left assumes that the remaining parts take as long as those that ended. It needs `total`, their number.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        self._title, self.total = title, total
        self._begun, self._part, self._note = 0, "", ""
        self._earlier = 0
        self._began_s = time.monotonic()
        self.line = StatusLine()

    def begin(self, part: str) -> None:
        """Begin the next part."""
        self._begun, self._part, self._note = self._begun + 1, part, ""
        self.show()

    def skip(self) -> None:
        """Count a part that ended before this task began, and took none of its time."""
        self._earlier += 1

    def note(self, text: str) -> None:
        """Say in the line how far the part is."""
        self._note = text

    def keep(self, text: str) -> None:
        """Write a line that stays, above the status line."""
        self.line.keep(f"lmbench: {self._title}: {one_line(masked_message(text))}")

    def show(self) -> None:
        elapsed_s, ended = time.monotonic() - self._began_s, self._begun - 1
        number = str(self._begun + self._earlier) if self._begun else ""
        if number and self.total:
            number += f" of {self.total}"
        words = [" ".join(filter(None, [number, self._part])), self._note, f"{duration(elapsed_s)} so far"]
        if self.total and ended > 0:
            words.append(f"about {duration(elapsed_s / ended * (self.total - self._earlier - ended))} left")
        self.line.show(f"{self._title}: {', '.join(filter(None, words))}")


@contextmanager
def refreshing(line: StatusLine, show: Callable[[], None]) -> Iterator[None]:
    """Within, a thread calls `show` each time the line is due."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(line.wait_s):
            show()

    thread = threading.Thread(target=run, name="lmbench-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def progress(title: str, total: int | None = None, is_measured_here: bool = False) -> Iterator[Task]:
    """Show the progress of the block: from a thread, or only between its parts where this process is measured."""
    task = Task(title, total)
    try:
        with nullcontext() if is_measured_here else refreshing(task.line, task.show):
            yield task
    finally:
        task.line.clear()
