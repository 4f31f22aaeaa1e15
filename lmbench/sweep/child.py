"""The side of a sweep's processes: they hear nothing of the terminal, and do not outlive the sweep."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import runpy
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def end_with(fd: int) -> None:
    """End this process's group as soon as the other end of a pipe closes, also when its holder was killed.

    The kernel sends SIGIO to the group then, whose default is to end a process; until then nothing runs for it. Call
    it as the leader of a session of one's own.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def be_first_out() -> None:
    """Where the machine's memory runs out, the kernel shall end this process before the sweep or anything else."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def become_command(words: list[str], log: str, variables: dict[str, str]) -> None:
    """In a process forked from a warm server: be `lmbench WORDS` from here on, with the output going to a file."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with(parent.sentinel)
    be_first_out()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    os.environ.update(variables)
    # Kept from the server, whose folder it is.
    tempfile.tempdir = None
    sys.argv = ["lmbench", *words]
    runpy.run_module("lmbench", run_name="__main__", alter_sys=True)


def do_nothing() -> None:
    """For a process whose start is all that counts."""
