"""A process that has imported everything once, and forks a real process for each that a test asks for.

A fork is there in 20 ms where a fresh interpreter imports for 4 s. It has a process id, a process group, an
environment, streams and limits of its own, and ends as Python ends: it can be killed, stopped and starved for real.
Nothing may use torch before the fork, or its threads would be missing afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from lmbench.sweep.fork_server import be_lmbench


class WarmProcess:
    """One forked process, with the manners of `subprocess.Popen`; it leads a process group of its own."""

    def __init__(self, status):
        self._status = status
        self.pid = status.recv()
        self.returncode = None

    def poll(self, timeout_s=0):
        if self.returncode is None and self._status.poll(timeout_s):
            self.returncode = os.waitstatus_to_exitcode(self._status.recv())
        return self.returncode

    def wait(self, timeout_s=240):
        """The exit code; minus a signal's number where that ended it."""
        code = self.poll(timeout_s)
        assert code is not None, f"still running after {timeout_s} s"
        return code

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)


class WarmServer:
    """The server as its client sees it; ends with this process."""

    def __init__(self):
        self._control, of_server = socket.socketpair()
        with of_server:
            # Its own session: a terminal's Ctrl-C is for pytest. One thread: the machine is full of such processes.
            subprocess.Popen(
                [sys.executable, __file__, str(of_server.fileno())], pass_fds=[of_server.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._requests = Connection(os.dup(self._control.fileno()))
        self._lock = threading.Lock()

    def start(
        self,
        *words,
        target=None,
        folder=None,
        variables=None,
        streams=(None, None, None),
        before=None,
        has_own_session=False,
    ):
        """Start `lmbench WORDS`, or a function that can be pickled; `before` is called first, in the new process.

        A stream that is None is `/dev/null`. The environment is this process's if no other is given.
        """
        home = str(folder or Path.cwd())
        request = {
            "words": list(words), "folder": home, "path": [home, *sys.path], "has_own_session": has_own_session,
            "variables": dict(os.environ if variables is None else variables),
            # Decoded in the new process alone: what a test's module imports would stay in the server.
            "functions": pickle.dumps((before, target)),
        }  # fmt: skip
        ours, of_server = socket.socketpair()
        with of_server, Path(os.devnull).open("r+b", buffering=0) as null, self._lock:
            fds = [of_server.fileno(), *(null.fileno() if stream is None else stream for stream in streams)]
            socket.send_fds(self._control, [b"f"], fds)
            self._requests.send(request)
        return WarmProcess(Connection(ours.detach()))

    def run(self, *words, timeout_s=240, **settings):
        """Run a process to its end, as `subprocess.run` does with its output captured as text."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code = self.start(*words, streams=(None, out.fileno(), err.fileno()), **settings).wait(timeout_s)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(list(words), code, out.read(), err.read())


@cache
def warm_server():
    """The server of this process (of each of pytest's workers), started when it is first asked for."""
    return WarmServer()


# The server's side.


def _import_everything():
    import planted_faults  # noqa: F401
    import pytest  # noqa: F401 (test modules are imported for their functions)

    from lmbench.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # Builds the parser too, which the forks then have.
        main(["fit", "--print_config"])
    # A fork's collector would otherwise walk over all of it, and so copy it.
    gc.collect()
    gc.freeze()


def _serve(control):
    """Fork twice for every request: a process that waits and tells the status, and the one that is asked for, in which
    alone this returns, with what it is to become."""
    requests = Connection(os.dup(control.fileno()))
    # Nobody waits for those that wait.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        header, fds, _, _ = socket.recv_fds(control, 1, 4)
        if not header:
            os._exit(0)
        request = requests.recv()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            requests.close()
            status, *streams = fds
            pid = os.fork()
            if pid == 0:
                os.close(status)
                return request, streams
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(BrokenPipeError), Connection(status) as connection:
                connection.send(pid)
                connection.send(os.waitpid(pid, 0)[1])
            os._exit(0)
        for fd in fds:
            os.close(fd)


def _become(request, streams):
    """Be what was asked for, from a state as a new interpreter has it."""
    if request["has_own_session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.path[:] = request["path"]
    # What the server's own start has left is no other process's.
    tempfile.tempdir = None
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    before, target = pickle.loads(request["functions"])
    if before is not None:
        before()
    if target is not None:
        target()
        sys.exit()
    be_lmbench(request["words"])


if __name__ == "__main__":
    # Whoever started the tests may have turned these off.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    _become(*_serve(connection))
