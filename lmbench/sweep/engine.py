"""How a cell's process is started: a new interpreter, or a fork of a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from lmbench.sweep.child import be_first_out, become_command, do_nothing, end_with
from lmbench.sweep.environments import Environment


@dataclass(frozen=True)
class Launch:
    """A process to start: `lmbench WORDS` in an environment, with further variables; its output goes to `log`."""

    words: list[str]
    log: Path
    environment: Environment
    variables: dict[str, str]


class Process(Protocol):
    """A process that was started; it leads a process group of its own."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code (minus a signal's number), None if it still runs after that time."""


class Engine(Protocol):
    """Starts processes. `start_s` is a guess of what a process takes beyond its steps, for an estimate."""

    name: str
    start_s: float

    def prepare(self) -> float | None:
        """Do what all processes share, where that is still to be done; returns the seconds that it took."""

    def start(self, launch: Launch) -> Process: ...


class ExecEngine:
    """A new interpreter each: nothing is shared, as when a user types the command."""

    name = "exec"
    start_s = 5.0

    def prepare(self) -> None:
        """Processes share nothing."""

    def start(self, launch: Launch) -> Process:
        inner, outer = os.pipe()
        try:
            with launch.log.open("ab") as log:
                process = subprocess.Popen(
                    # -P: a package in the working directory takes no part, as under the installed command.
                    [launch.environment.python, "-P", "-m", "lmbench", *launch.words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**launch.environment.process_variables(), **launch.variables},
                    cwd=launch.environment.folder,
                    start_new_session=True,
                    pass_fds=(inner,),
                    # Safe, as a sweep has no threads.
                    preexec_fn=partial(_prepare, inner),  # noqa: PLW1509
                )
        except BaseException:
            os.close(outer)
            raise
        finally:
            os.close(inner)
        return _Interpreter(process, outer)


def _prepare(fd: int) -> None:
    end_with(fd)
    be_first_out()


class _Interpreter:
    def __init__(self, process: subprocess.Popen[bytes], tie_fd: int) -> None:
        self._process = process
        self._tie_fd: int | None = tie_fd

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if self._tie_fd is not None:
            os.close(self._tie_fd)
            self._tie_fd = None
        return code


#: The variable behind Python's option -P.
SAFE_PATH = "PYTHONSAFEPATH"


class ForkserverEngine:
    """Forks of one server process that has imported PyTorch, Lightning and lmbench, and has no CUDA context.

    A fork takes milliseconds where imports take seconds. Forks share the server's hash seed and address layout.
    """

    name = "forkserver"
    start_s = 1.0

    def __init__(self) -> None:
        self._is_ready = False
        self._context = multiprocessing.get_context("forkserver")
        # By name: this process itself never imports torch.
        self._context.set_forkserver_preload(["lmbench.sweep.warm", "lmbench.sweep.child"])

    def prepare(self) -> float | None:
        if self._is_ready:
            return None
        started_s = time.monotonic()
        # The server imports everything before it forks for the first time.
        first = self._context.Process(target=do_nothing)
        with _without_working_directory():
            first.start()
        first.join()
        self._is_ready = True
        return time.monotonic() - started_s

    def start(self, launch: Launch) -> Process:
        words = (launch.words, str(launch.log), launch.variables)
        process = self._context.Process(target=become_command, args=words)
        process.start()
        return _Fork(process)


@contextmanager
def _without_working_directory() -> Iterator[None]:
    """A Python that starts now imports the installed lmbench, as this process did, also in the root of a checkout."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


class _Fork:
    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    def wait(self, timeout_s: float) -> int | None:
        # Woken by the end itself; `join` looks at it only now and then.
        wait([self._process.sentinel], timeout_s)
        code = self._process.exitcode
        if code is not None:
            self._process.join()
        return code


def make_engine(name: str) -> Engine:
    """The engine called `forkserver` or `exec`."""
    return ForkserverEngine() if name == "forkserver" else ExecEngine()


def prepare(engine: Engine, say: Callable[[str], None]) -> None:
    """Let an engine do what is to be done once, and tell what that cost."""
    if (took_s := engine.prepare()) is not None:
        say(f"imported PyTorch, Lightning and lmbench once for all runs, in {took_s:.1f} s")
