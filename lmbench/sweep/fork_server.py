"""The server that a sweep's processes are forked from: a program, run as a file by an environment's Python.

It imports everything once; a fork takes milliseconds then. Nothing in it may touch the GPU: a CUDA context does not
survive a fork. The lmbench that it serves may be another revision than this file's: beside the standard library it
needs `lmbench.cli` and `python -m lmbench`, nothing else.

`multiprocessing.forkserver` would not serve: it starts this process's own Python, with this process's variables and
working directory, once in a process, and marks its children as children of a main process, which libraries ask for.

The arguments are two file descriptors: a connection of `multiprocessing`, and a pipe that closes when the sweep ends.
On the connection the server sends where its lmbench lies; for each request (words, variables, path of the log) it sends
the process id and, when that process has ended, its exit code or minus the number of the signal that ended it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import runpy
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn


def end_with(fd: int) -> None:
    """End this process's group as soon as the other end of a pipe closes, also when its holder was killed.

    The kernel sends SIGIO to the group then, whose default is to end a process; until then nothing runs for it. The
    pipe is opened anew, since an open file tells only one group. Call it as the leader of a session.
    """
    tie = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    fcntl.fcntl(tie, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(tie, fcntl.F_SETFL, fcntl.fcntl(tie, fcntl.F_GETFL) | os.O_ASYNC)


def import_everything() -> str:
    """Do once what every `lmbench fit` does first; returns the folder of its lmbench."""
    cli = importlib.import_module("lmbench.cli")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # Builds the parsers too, which the forks then have; also those of attention by itself, of which a study has
        # hundreds of runs.
        for words in ("fit", "validate", "fit --model lmbench.AttentionLayer --model.heads 1"):
            cli.main([*words.split(), "--print_config"])
    with contextlib.suppress(ImportError):
        # Needed at the end of a run, and a tenth of a second to import.
        importlib.import_module("scipy.special")
    if "torch" in sys.modules and _has_gpu_after_fork():
        # Each run that compiles or has its kernels recorded would take 2 to 4 s for it on the host of an H200. Without
        # a GPU it is one, of the half minute of a C++ compiler.
        importlib.import_module("torch._inductor.compile_fx")
    # A fork's collector would otherwise walk over all of it, and so copy it.
    gc.collect()
    gc.freeze()
    return str(Path(str(cli.__file__)).parent)


def _has_gpu_after_fork() -> bool:
    """Whether there is a GPU, and a process that has asked for it leaves its forks able to use it.

    Importing Inductor asks. The answer is NVML's as a rule; where PyTorch has to ask CUDA, that is no more of use in a
    fork.
    """
    cuda = sys.modules["torch"].cuda
    asking = os.fork()
    if not asking:
        is_usable = cuda.is_available()
        fork = os.fork()
        os._exit(os.waitpid(fork, 0)[1] != 0 if fork else not is_usable or cuda._is_in_bad_fork())
    return os.waitpid(asking, 0)[1] == 0


def serve(sweep: Connection, tie: int) -> list[str]:
    """Fork for each request. Returns in the forks, with the words of their command line; the server ends in it."""
    ended: int | None = None
    while True:
        try:
            words, variables, log = sweep.recv()
        except EOFError:
            sys.exit()
        if ended is not None:
            os.waitpid(ended, 0)
        pid = os.fork()
        if not pid:
            sweep.close()
            become_command(variables, log, tie)
            return list(words)
        sweep.send(pid)
        # It is waited for at the next request: until then nobody else gets its id, by which its group is killed.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        ended = pid
        sweep.send(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def become_command(variables: dict[str, str], log: str, tie: int) -> None:
    """In a fork: hear nothing of the terminal, do not outlive the sweep, write into the log."""
    os.setsid()
    end_with(tie)
    with contextlib.suppress(OSError):
        # Where the machine's memory runs out, the kernel shall end this process before the sweep or anything else.
        Path("/proc/self/oom_score_adj").write_text("500")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    # Kept from the server, whose folder it is.
    tempfile.tempdir = None


def be_lmbench(words: list[str]) -> NoReturn:
    """Run `lmbench WORDS` as if Python had been started for it, and end the process."""
    sys.argv = ["lmbench", *words]
    end_after(partial(runpy.run_module, "lmbench", run_name="__main__", alter_sys=True))


def end_after(run: Callable[[], object]) -> NoReturn:
    """In a fork: call this as if Python had been started for it, and end the process."""
    # What the parent holds is not this process's to clean up: its folders; and PyTorch's operators, for 30 ms.
    for inherited in weakref.finalize._registry:  # type: ignore[attr-defined]
        inherited.atexit = False
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        # Before lmbench itself listened.
        code = 130
    except BaseException:
        code = 1
        traceback.print_exc()
    # As Python ends: pools of threads are told (Inductor keeps one open), then threads waited for, then `atexit`.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Python's own end would write C's buffers, too, and take down everything that was imported, for half a second.
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    connection, tie_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    end_with(tie_fd)
    connection.send(import_everything())
    be_lmbench(serve(connection, tie_fd))
