"""A Python of its own for work that changes its process for good, or that must begin afresh."""

from __future__ import annotations

import subprocess
import sys

from lmbench.errors import ExitCode, UsageError

_LAST_LINES = 3


class ProcessFailed(Exception):
    """A process did not end well; its last lines in one, with the exit code to end with."""

    def __init__(self, reason: str, exit_code: ExitCode = ExitCode.INTERNAL) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def run_python(*words: str) -> str:
    """Run the installed lmbench's Python with these words, such as `-m lmbench fit`; returns what it printed.

    Raises:
        UsageError: the words are wrong.
        ProcessFailed: it did not end well.
    """
    # -P: the installed lmbench, as this process, whatever lies in the working directory.
    done = subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == ExitCode.USAGE:
        # The user's own code may have said something before it, and after it.
        raise UsageError(done.stderr.rpartition("lmbench: ")[2].partition("\n")[0])
    if done.returncode != ExitCode.OK:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = " | ".join(lines[-_LAST_LINES:]) or "nothing on standard error"
        is_known = done.returncode == ExitCode.OUT_OF_MEMORY
        exit_code = ExitCode.OUT_OF_MEMORY if is_known else ExitCode.INTERNAL
        raise ProcessFailed(f"failed with exit code {done.returncode}: {last}", exit_code)
    return done.stdout
