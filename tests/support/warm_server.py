"""A process that has imported everything once, and forks a real process for each that a test asks for.

A fork is there in 20 ms where a fresh interpreter imports for 4 s. It has a process id, a process group, an
environment, streams and limits of its own, and ends as Python ends: it can be killed, stopped and starved for real.
Nothing may use torch before the fork, or its threads would be missing afterwards.

The server is that of `multiprocessing`; each of pytest's workers has one, from the first process it asks for.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from multiprocessing import connection, forkserver, process
from pathlib import Path
from unittest import mock

from paths import SUPPORT

import lmbench
from lmbench.records.load import load_run
from lmbench.sweep.fork_server import be_lmbench

#: multiprocessing reads how a process ended from a pipe, once, and looks at all of its processes when it starts one: of
#: two threads that read at once the second finds an end of 255.
_READING = threading.Lock()


class WarmProcess:
    """One forked process, which leads a process group of its own; `folder` is its working directory."""

    def __init__(self, process, folder):
        self._process, self.pid, self.folder = process, process.pid, folder

    def poll(self):
        with _READING:
            return self._process.exitcode

    def wait(self, timeout_s=240):
        """The exit code as a shell would see it."""
        connection.wait([self._process.sentinel], timeout_s)
        code = self.poll()
        assert code is not None, f"still running after {timeout_s} s"
        return code if code >= 0 else 128 - code

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)

    def signal_after(self, seconds, *signals):
        time.sleep(seconds)
        for signum in signals:
            self.send_signal(signum)

    def wait_until(self, happened):
        """Until it has happened, or the process has ended without it (which a test then finds out)."""
        while not happened() and self.poll() is None:
            time.sleep(0.005)

    def wait_for_step(self, count):
        """Until so many steps have ended."""
        self.wait_until(lambda: len(self.ticks) >= count)

    @property
    def err(self):
        return (self.folder / "err").read_text()

    @property
    def out(self):
        return (self.folder / "out").read_text()

    @property
    def ticks(self):
        return [int(line) for line in (self.folder / "ticks").read_text().split()]

    @property
    def results(self):
        return [load_run(path) for path in sorted((self.folder / "results").glob("*"))]


@cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_imports"])
    # This process's lmbench, whatever the working directory. One thread: the machine is full of such processes.
    path = os.pathsep.join([str(SUPPORT), str(Path(lmbench.__file__).parents[1])])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def start(
    *words, target=None, folder=None, variables=None, streams=(None, None, None), before=None, has_own_session=False
):
    """Start `lmbench WORDS`, or a function that can be pickled; `before` is called first, in the new process.

    A stream that is None is `/dev/null`. The environment is this process's if no other is given.
    """
    fds = [os.open(os.devnull, os.O_RDWR) if stream is None else os.dup(stream) for stream in streams]
    # Files that pickle as what they are.
    files, (waiting, ready) = [connection.Connection(fd) for fd in fds], multiprocessing.Pipe(duplex=False)
    variables = dict(os.environ if variables is None else variables)
    settings = (words, target, str(folder or Path.cwd()), variables, files, ready, before, has_own_session)
    # pytest's end is its end.
    forked = _server().Process(target=_become, args=settings, daemon=True)
    with _READING:
        forked.start()
    for file in (*files, ready):
        file.close()
    # Closed in the new process, too: a signal meets what was asked for.
    waiting.poll(60)
    return WarmProcess(forked, folder)


def run(*words, timeout_s=240, **settings):
    """Run a process to its end, as `subprocess.run` does with its output captured as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = start(*words, streams=(None, out.fileno(), err.fileno()), **settings).wait(timeout_s)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def _become(words, target, folder, variables, files, ready, before, has_own_session):
    """Be what was asked for, from a state as a new interpreter has it."""
    # No child of pytest's: it may have children of its own.
    process._parent_process = None
    process.current_process()._config["daemon"] = False
    multiprocessing.set_start_method(None, force=True)
    if has_own_session:
        os.setsid()
    else:
        os.setpgid(0, 0)
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.clear()
    os.environ.update(variables)
    # What the server's own start has left is no other process's.
    tempfile.tempdir = None
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    ready.close()
    if before is not None:
        before()
    if target is None:
        be_lmbench(words)
    target()
