"""The server that a sweep's processes are forked from: a program, run as a file by an environment's Python.

It imports everything once; a fork takes milliseconds then. Nothing in it may touch the GPU: a CUDA context does not
survive a fork. The lmbench that it serves may be another revision than this file's: beside the standard library it
needs `lmbench.cli` and `python -m lmbench`, nothing else.

Its arguments are two file descriptors: a pipe that closes when the sweep ends, and a socket. On the socket it says
that it is ready; for each request (words, variables; with two descriptors: the log, and a pipe to end with) it says
the process id and, when that process has ended, how. A line of JSON each.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any, NoReturn


def end_with(fd: int) -> None:
    """End this process's group as soon as the other end of a pipe closes, also when its holder was killed.

    The kernel sends SIGIO to the group then, whose default is to end a process; until then nothing runs for it. For
    the leader of a session of one's own, with a pipe of one's own: the pipe tells only the last who asked.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def import_everything() -> str:
    """Do once what every `lmbench fit` does first; returns which lmbench it is."""
    cli = importlib.import_module("lmbench.cli")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # Builds the parsers too, which the forks then have; also those of attention by itself, of which a study has
        # hundreds of runs.
        for words in ("fit", "validate", "fit --model lmbench.AttentionLayer --model.heads 1"):
            cli.main([*words.split(), "--print_config"])
    with contextlib.suppress(ImportError):
        # Needed at the end of a run, and a tenth of a second to import.
        importlib.import_module("scipy.special")
    if _has_gpu_after_fork():
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
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    asking = os.fork()
    if asking:
        return not os.waitstatus_to_exitcode(os.waitpid(asking, 0)[1])
    if not torch.cuda.is_available():
        os._exit(1)
    fork = os.fork()
    if not fork:
        os._exit(bool(torch.cuda._is_in_bad_fork()))
    os._exit(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))


def serve(sweep: socket.socket) -> list[str]:
    """Fork for each request. Returns in the forks, with the words of their command line; the server ends in it."""
    before: int | None = None
    while True:
        request, fds = _receive(sweep)
        if before is not None:
            os.waitpid(before, 0)
        if request is None:
            sys.exit()
        pid = os.fork()
        if not pid:
            sweep.close()
            return become_command(request, *fds)
        for fd in fds:
            os.close(fd)
        _send(sweep, {"pid": pid})
        # It is waited for at the next request: until then nobody else gets its id, by which its group is killed.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        before = pid
        _send(sweep, {"code": end.si_status if end.si_code == os.CLD_EXITED else -end.si_status})


def become_command(request: dict[str, Any], log: int, tie: int) -> list[str]:
    """In a fork: hear nothing of the terminal, do not outlive the sweep, write into the log."""
    os.setsid()
    end_with(tie)
    with contextlib.suppress(OSError):
        # Where the machine's memory runs out, the kernel shall end this process before the sweep or anything else.
        Path("/proc/self/oom_score_adj").write_text("500")
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    os.environ.update(request["variables"])
    # Kept from the server, whose folder it is.
    tempfile.tempdir = None
    words: list[str] = request["words"]
    return words


def be_lmbench(words: list[str]) -> NoReturn:
    """Run `lmbench WORDS` as if Python had been started for it, and end the process."""
    sys.argv = ["lmbench", *words]
    # What the server holds is not this process's to clean up: its folders; and PyTorch's operators, for 30 ms.
    for inherited in weakref.finalize._registry:  # type: ignore[attr-defined]
        inherited.atexit = False
    code = 1
    try:
        runpy.run_module("lmbench", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    # As Python ends: pools of threads are told (Inductor keeps one open), then threads waited for, then `atexit`.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's own end would take down everything that was imported, for half a second.
    os._exit(code)


def _receive(sweep: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A request with its descriptors; None where the sweep has no more."""
    line, fds = b"", []
    while not line.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(sweep, 2**16, 2)
        fds += more
        if not part:
            return None, fds
        line += part
    return json.loads(line), fds


def _send(sweep: socket.socket, answer: dict[str, Any]) -> None:
    try:
        sweep.sendall(json.dumps(answer).encode() + b"\n")
    except BrokenPipeError:
        sys.exit()


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    connection = socket.socket(fileno=int(sys.argv[2]))
    _send(connection, {"lmbench": import_everything()})
    be_lmbench(serve(connection))
