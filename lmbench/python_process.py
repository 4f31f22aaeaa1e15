"""A Python of its own for work that changes its process for good, or that must begin afresh."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

from lmbench.errors import ExitCode, Failure, UsageError

_LAST_LINES = 3
# Of Linux's prctl: the signal that a process gets when its parent ends, however it does.
_SET_PARENT_DEATH_SIGNAL = 1


class ProcessFailed(Failure):
    """A process did not end well; its last lines in one, with the exit code to end with."""


def tied_python(*words: str) -> list[str]:
    """The command line of a Python with these words that a SIGKILL of this process ends too."""
    # -P: the installed lmbench, as in this process, whatever lies in the working directory.
    return [sys.executable, "-P", "-m", "lmbench.python_process", str(os.getpid()), *words]


def run_python(*words: str, heard: Callable[[str], None] = lambda text: None) -> str:
    """Run the installed lmbench's Python with these words, such as `-m lmbench fit`; returns what it printed.

    `heard` is called with each line that it tells on standard error meanwhile, of where it stands.

    Raises:
        UsageError: the words are wrong.
        ProcessFailed: it did not end well.
    """
    lines = list[str]()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            tied_python(*words), stdout=output, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        try:
            for line in process.stderr or ():
                lines.append(line.strip())
                if line.startswith("lmbench: "):
                    heard(lines[-1].removeprefix("lmbench: "))
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        printed = output.read()
    if code == ExitCode.USAGE:
        # The user's own code may have said something before it, and after it.
        raise UsageError("\n".join(lines).rpartition("lmbench: ")[2].partition("\n")[0])
    if code != ExitCode.OK:
        last = " | ".join(list(filter(None, lines))[-_LAST_LINES:]) or "nothing on standard error"
        exit_code = ExitCode.OUT_OF_MEMORY if code == ExitCode.OUT_OF_MEMORY else ExitCode.INTERNAL
        raise ProcessFailed(f"failed with exit code {code}: {last}", exit_code)
    return printed


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends, however that does; where it cannot, nothing is changed."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() == int(sys.argv[1]):
        os.execv(sys.executable, [sys.executable, "-P", *sys.argv[2:]])
