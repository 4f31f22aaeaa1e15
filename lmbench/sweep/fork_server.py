"""The server that a sweep's processes are forked from. An environment's Python runs this file as a program.

The server imports everything once, so that a fork takes milliseconds. It must not touch the GPU, since a CUDA context
does not survive a fork. Its lmbench may be another revision than this file's. So beside the standard library this file
uses only `lmbench.cli` and `python -m lmbench`.

`multiprocessing.forkserver` does not fit. It starts once in a process, always with that process's Python, variables and
working directory. And it marks its children as children of a main process, which libraries check.

The arguments are two file descriptors: a connection of `multiprocessing`, and a pipe that closes when the sweep ends.
The server first sends the folder of its lmbench. A request is a list of processes to fork, each with its words, its
variables, the path of its log, and whether the end of a pipe follows. The server sends their ids. When all have ended,
it sends their exit codes, or minus the numbers of the signals that ended them. What a run imported of some packages is
imported before the next request's forks.
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
from collections.abc import Callable, Iterable
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36
#: A server that no request reaches for so long has time to spare.
_IDLE_S = 1.0
#: Packages that take seconds to import, and that a run imports only if it needs them.
_INHERITED = {"transformers", "torchao"}


def end_with(fd: int) -> None:
    """Let this process's group end as soon as the other end of a pipe closes, also when the other process is killed.

    The kernel then sends SIGIO to the group, which by default ends a process, so no thread has to wait. The pipe is
    opened anew, since an open file signals only one group. The caller must lead a session.
    """
    tie = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    fcntl.fcntl(tie, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(tie, fcntl.F_SETFL, fcntl.fcntl(tie, fcntl.F_GETFL) | os.O_ASYNC)


def import_everything() -> str:
    """Do once what every `lmbench fit` does first, and return the folder of lmbench."""
    cli = importlib.import_module("lmbench.cli")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # This builds the parsers too, which the forks inherit. AttentionLayer has parsers of its own, and a study of it
        # hundreds of runs.
        for words in ("fit", "validate", "fit --model lmbench.AttentionLayer --model.heads 1"):
            cli.main([*words.split(), "--print_config"])
    with contextlib.suppress(ImportError):
        # Needed at the end of a run, and half a second to import.
        importlib.import_module("scipy.stats")
    freeze()
    return str(Path(str(cli.__file__)).parent)


@cache
def import_inductor() -> None:
    """Import Inductor where there is a GPU, once, in time that is spare: most runs do without.

    On the host of an H200 this takes 2 to 4 s, in each run that compiles or records kernels. Without a GPU it takes
    1 s, beside half a minute of a C++ compiler.
    """
    if _leaves_gpu([], needs_gpu=True):
        import_modules(["torch._inductor.compile_fx"])


def import_modules(names: Iterable[str]) -> None:
    """Import modules that forks then have. One that is broken is reported by the runs that use it."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    freeze()


def freeze() -> None:
    """Keep a fork's garbage collector from visiting all these objects, which would copy their memory."""
    gc.collect()
    gc.freeze()


def _leaves_gpu(names: Iterable[str], needs_gpu: bool = False) -> bool:
    """Whether forks can use the GPU after their parent has imported modules and called `torch.cuda.is_available`.

    Importing Inductor calls that. It usually asks NVML; where PyTorch has to ask CUDA instead, or a module starts CUDA,
    a fork cannot use CUDA any more. A fork tries it here, so that this process stays as it is.

    Args:
        names: the modules to try.
        needs_gpu: whether the answer is no where there is no GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.backends.cuda.is_built():
        return not needs_gpu
    trial = os.fork()
    if not trial:
        is_left = False
        try:
            import_modules(names)
            is_available, fork = torch.cuda.is_available(), os.fork()
            if not fork:
                os._exit(torch.cuda._is_in_bad_fork())
            is_left = os.waitpid(fork, 0)[1] == 0 and (is_available or not needs_gpu)
        finally:
            os._exit(not is_left)
    return os.waitpid(trial, 0)[1] == 0


def serve(sweep: Connection, tie: int) -> list[str]:
    """Fork for each request. Returns only in a fork, with the words of its command line. The server never returns."""
    pids: list[int] = []
    refused = set[str]()
    heard, told = os.pipe()
    for end in (heard, told):
        os.set_blocking(end, False)
    while True:
        try:
            if not sweep.poll(_IDLE_S):
                # This server waits for its round.
                import_inductor()
            request = sweep.recv()
            pipes = [recv_handle(sweep) if has_pipe else None for *_, has_pipe in request]
        except EOFError:
            sys.exit()
        for pid in pids:
            os.waitpid(pid, 0)
        pids = []
        with contextlib.suppress(BlockingIOError):
            names = set(os.read(heard, 1 << 16).decode(errors="replace").split()) - set(sys.modules) - refused
            if names and _leaves_gpu(names):
                import_modules(names)
            # What takes the GPU away would in each run take as long to try as to import. On an H200 torchao 0.18 does,
            # which transformers imports where it is installed: it asks for the GPU's properties.
            refused |= names - set(sys.modules)
        for (words, variables, log, _), pipe in zip(request, pipes, strict=True):
            pid = os.fork()
            if not pid:
                sweep.close()
                # Another process's end has to close with that process.
                for fd in pipes:
                    if fd is not None and fd != pipe:
                        os.close(fd)
                become_command({**variables, "LMBENCH_TURNS_PIPE": str(pipe)} if pipe else variables, log, tie)
                atexit.register(tell_imports, told, set(sys.modules))
                return list(words)
            pids.append(pid)
        for fd in filter(None, pipes):
            os.close(fd)
        sweep.send(pids)
        if not any("--print_config" in words for words, *_ in request):
            import_inductor()
        # Processes stay zombies until the next request: the sweep kills their groups by their ids, which stay taken.
        ends = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) for pid in pids]
        sweep.send([end.si_status if end.si_code == os.CLD_EXITED else -end.si_status for end in filter(None, ends)])


def become_command(variables: dict[str, str], log: str, tie: int) -> None:
    """In a fork: leave the terminal, do not outlive the sweep, write to the log."""
    os.setsid()
    end_with(tie)
    with contextlib.suppress(OSError):
        # If the machine runs out of memory, the kernel kills this process before the sweep or any other.
        Path("/proc/self/oom_score_adj").write_text("500")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    # The server's choice is still stored here, and the variables name another folder.
    tempfile.tempdir = None


def tell_imports(told: int, known: set[str]) -> None:
    """In a fork, or a rank of it: write the names of the modules that later forks may inherit.

    Names for which the pipe has no room are lost: nobody reads while runs go on, so none may wait for it.
    """
    names = [name for name in {*sys.modules} - known if name.partition(".")[0] in _INHERITED]
    with contextlib.suppress(OSError):
        os.write(told, " ".join(["", *names, ""]).encode())


def be_lmbench(words: list[str]) -> NoReturn:
    """Run `lmbench WORDS` as if Python had been started for it, and end the process."""
    sys.argv = ["lmbench", *words]
    end_after(partial(runpy.run_module, "lmbench", run_name="__main__", alter_sys=True))


def end_after(run: Callable[[], object]) -> NoReturn:
    """In a fork: call `run` as if Python had been started for it, and end the process."""
    code = 0
    try:
        # Temporary folders belong to the parent, and removing PyTorch's operators takes 30 ms: finalize neither here.
        for inherited in weakref.finalize._registry:  # type: ignore[attr-defined]
            inherited.atexit = False
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        # Ctrl-C came before lmbench handled signals: nothing has begun, and a further Ctrl-C would raise below.
        os._exit(130)
    except BaseException:
        code = 1
        traceback.print_exc()
    # Python's own order: thread pools are told (Inductor keeps one open), threads are joined, `atexit` functions run.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Python's own end also flushes C's buffers. It then tears down all modules, which takes half a second: left out.
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    connection, tie_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    end_with(tie_fd)
    # Become the parent of every process whose own parent has ended (`man 2 prctl`), so that the sweep finds it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    connection.send(import_everything())
    be_lmbench(serve(connection, tie_fd))
