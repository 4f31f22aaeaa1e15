"""A process that has imported everything once, and forks a real process for each that a test asks for.

A fork is there in 20 ms where a fresh interpreter imports for 4 s. It has a process id, a process group, an
environment, streams and limits of its own, and ends as Python ends: it can be killed, stopped and starved for real.
Nothing may use torch before the fork, or its threads would be missing afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

_INT = struct.Struct("=i")
_STREAMS = 3


class WarmProcess:
    """One forked process, with the manners of `subprocess.Popen`; it leads a process group of its own."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = _INT.unpack(_read(status, _INT.size))[0]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._receive(0)

    def wait(self, timeout_s: float = 240) -> int:
        """The exit code; minus a signal's number where that ended it."""
        code = self._receive(timeout_s)
        assert code is not None, f"still running after {timeout_s} s"
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def _receive(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(_INT.unpack(_read(self._status, _INT.size))[0])
            self._status.close()
        return self.returncode


class WarmServer:
    """The server as its client sees it; ends with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno())]
            # Its own session: a terminal's Ctrl-C is for pytest. One thread: the machine is full of such processes.
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], env=variables, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def start(
        self,
        *words: str,
        target: Callable[[], object] | None = None,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
        streams: tuple[int | None, int | None, int | None] = (None, None, None),
        before: Callable[[], object] | None = None,
        has_own_session: bool = False,
    ) -> WarmProcess:
        """Start `lmbench WORDS`, or a function that can be pickled; `before` is called first, in the new process.

        A stream that is None is `/dev/null`. The environment is this process's if no other is given.
        """
        where = str(folder or Path.cwd())
        asked = {
            "words": words,
            "target": pickle.dumps(target),
            "folder": where,
            # As `python -m` has it.
            "path": [where, *sys.path],
            "variables": dict(os.environ if variables is None else variables),
            "before": pickle.dumps(before),
            "has_own_session": has_own_session,
        }
        request = pickle.dumps(asked)
        ours, theirs = socket.socketpair()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            fds = [theirs.fileno(), *(null if stream is None else stream for stream in streams)]
            with self._lock:
                socket.send_fds(self._control, [_INT.pack(len(request))], fds)
                self._control.sendall(request)
        finally:
            os.close(null)
            theirs.close()
        return WarmProcess(ours)

    def run(self, *words: str, timeout_s: float = 240, **given: Any) -> subprocess.CompletedProcess[str]:
        """Run a process to its end, as `subprocess.run` does with its output captured as text."""
        with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
            code = self.start(*words, streams=(None, out.fileno(), err.fileno()), **given).wait(timeout_s)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(list(words), code, *texts)


@cache
def warm_server() -> WarmServer:
    """The server of this process (of each of pytest's workers), started when it is first asked for."""
    return WarmServer()


# The server's side.


def _read(stream: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = stream.recv(size - len(found))
        if not piece:
            raise EOFError("the warm server is gone")
        found += piece
    return found


def _import_everything() -> None:
    import planted_faults  # noqa: F401
    import pytest  # noqa: F401 (test modules are imported for their functions)

    from lmbench.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # Builds the parser too, which the forks then have.
        main(["fit", "--print_config"])
    # A fork's collector would otherwise walk over all of it, and so copy it.
    gc.collect()
    gc.freeze()


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for every request; returns, in a fork only, what it is to become."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(running[pid], _INT.pack(status))
                    os.close(running.pop(pid))
        if control in ready:
            header, fds, _, _ = socket.recv_fds(control, _INT.size, 1 + _STREAMS)
            if not header:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            request = pickle.loads(_read(control, _INT.unpack(header)[0]))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in (control.detach(), woken.detach(), waker.detach(), fds[0], *running.values()):
                    os.close(fd)
                return request, fds[1:]
            os.write(fds[0], _INT.pack(pid))
            running[pid] = fds[0]
            for fd in fds[1:]:
                os.close(fd)


def _become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Be what was asked for, from a state as a new interpreter has it."""
    if request["has_own_session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.path[:] = request["path"]
    # What the server's own start has left is no other process's.
    tempfile.tempdir = None
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 (file descriptors)
    sys.stdout = sys.__stdout__ = _text(1, "strict")
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace")
    before, target = (pickle.loads(request[name]) for name in ("before", "target"))
    if before is not None:
        before()
    if target is not None:
        target()
        # As the command does: Python's end would walk over everything otherwise.
        gc.freeze()
    else:
        sys.argv = ["lmbench", *request["words"]]
        runpy.run_module("lmbench", run_name="__main__", alter_sys=True)
    sys.exit()


def _text(fd: int, errors: str) -> io.TextIOWrapper:
    line_by_line = fd == 2 or os.isatty(fd)
    return io.TextIOWrapper(open(fd, "wb", closefd=False), errors=errors, line_buffering=line_by_line)


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    _become(*_serve(connection))
