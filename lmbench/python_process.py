"""Runs a Python process for work that changes its process for good, or that needs a fresh one, and ends processes."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection

import psutil

from lmbench.errors import ExitCode, Failure, UsageError

_LAST_LINES = 3
# Options of Linux's prctl: the signal that the process gets when its parent ends, and whether it adopts orphans.
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
#: Variables that tell a process what started it: the folder of its sweep; where it takes turns with another one, its
#: coin's seed and position (`17 0`), its pipe's descriptor, and the process id of the command that measures both.
SWEEP, TURNS, TURNS_PIPE, PAIR = "LMBENCH_SWEEP", "LMBENCH_TURNS", "LMBENCH_TURNS_PIPE", "LMBENCH_PAIR"
#: Variables with which glibc keeps the memory of its heap. By default it may give it back and take it again in every
#: step, where the kernel zeroes each page: how often is a matter of where small objects lie. Its own largest threshold
#: for blocks outside of the heap is 32 MiB.
KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
#: The word for a guard on this module's command line, and the variable that tells whose programs it ends.
_GUARD, _STARTED_BY = "guard", "LMBENCH_STARTED_BY"


class ProcessFailed(Failure):
    """A Python process failed; has its last lines, joined into one, and the exit code for this process."""


def tied_python(*words: str) -> list[str]:
    """The command line of a Python process that ends when this process ends, even by a SIGKILL.

    Args:
        words: arguments of the interpreter, such as `-m lmbench fit`.
    """
    # With -P the child imports the installed lmbench, not one in the working directory.
    return [sys.executable, "-P", "-m", "lmbench.python_process", str(os.getpid()), *words]


def run_python(
    *words: str,
    heard: Callable[[str], None] = lambda text: None,
    variables: Mapping[str, str] = {},
    pipe: Connection | None = None,
) -> str:
    """Run a Python process with the installed lmbench, and return its standard output.

    Args:
        words: arguments of the interpreter, such as `-m lmbench fit`.
        heard: called with each progress line on the process's standard error, without its beginning `lmbench: `.
        variables: environment variables beside those of this process.
        pipe: its end of a pipe to a process with which it takes turns. Starting it closes this end here.

    Raises:
        UsageError: the process ended with a usage error.
        ProcessFailed: the process ended with any other error.
    """
    lines = []
    fds = [pipe.fileno()] if pipe else []
    turns = {TURNS_PIPE: str(pipe.fileno())} if pipe else {}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with pipe or nullcontext():
            process = subprocess.Popen(
                tied_python(*words),
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **variables, **turns},
                pass_fds=fds,
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
        # The user's own code may have printed lines before and after the error on standard error.
        raise UsageError(printed or "\n".join(lines).rpartition("lmbench: ")[2].partition("\n")[0])
    if code != ExitCode.OK:
        last = " | ".join(list(filter(None, lines))[-_LAST_LINES:]) or "nothing on standard error"
        exit_code = ExitCode.OUT_OF_MEMORY if code == ExitCode.OUT_OF_MEMORY else ExitCode.INTERNAL
        raise ProcessFailed(f"failed with exit code {code}: {last}", exit_code)
    return printed


def die_with_parent() -> None:
    """Let Linux kill this process when its parent ends for any reason; does nothing on other systems."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def leave_no_process() -> None:
    """Let every process below this one end when this process exits, also with a session of its own or without a parent.

    Even after a SIGKILL a guard, which is another process, ends the programs that this one started, by a variable that
    they inherit. It does not know forks that run no other program: they are not told of the variable. A sweep ends what
    its runs started, so these have no guard.

    Call it before anything else is registered with `atexit`, since then it comes last. W&B's hook, for example, waits
    for a process that sends the rest of a run.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    atexit.register(kill_processes_below)
    if sys.platform != "linux" or SWEEP in os.environ:
        return
    os.environ[_STARTED_BY] = str(os.getpid())
    subprocess.Popen(
        [sys.executable, "-P", "-m", "lmbench.python_process", _GUARD, str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _guard(parent: int) -> None:
    """Wait for the parent's end, and end what it started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGUSR1)
    if os.getppid() == parent:
        signal.sigwait({signal.SIGUSR1})
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_STARTED_BY) == str(parent):
                process.kill()


def kill_processes_below(pid: int | None = None) -> None:
    """Kill all processes below a process, by default below this one, also those with a session of their own."""
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                process.kill()


if __name__ == "__main__" and sys.argv[1] == _GUARD:
    _guard(int(sys.argv[2]))
elif __name__ == "__main__":
    die_with_parent()
    if os.getppid() == int(sys.argv[1]):
        os.execv(sys.executable, [sys.executable, "-P", *sys.argv[2:]])
