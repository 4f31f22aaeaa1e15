"""Reading a pickle that may be hostile: nothing in it is called, and the memory and time it may take are bounded.

A pickle is a program. This one may make plain containers, text and numbers only, and it runs in a process of its own
with limits on memory and processor time, since ten bytes can ask for a memo of 64 GiB, and one for a new set. That
process checks the types of what came out, and hands on columns.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from lmbench.errors import UsageError
from lmbench.memory.history.snapshot import Malformed, Snapshot, decode, encode, snapshot_of

#: A history of some 30 million entries.
MAX_FILE_BYTES = 2 << 30
#: A snapshot of a million entries (60 MB) takes 0.45 GB to unpickle and check, 7.5 times its size.
_FREE_BYTES, _BYTES_PER_BYTE = 1 << 30, 12
#: It takes 2 s on a busy core.
_FREE_S, _S_PER_BYTE = 20, 1 / 4e6
#: How the reading process ends when it has something to say, as the last line of standard error.
_REFUSED = 3


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file.

    Raises:
        UsageError: there is no such file, it is too large, no snapshot, truncated, or wants to run code or to take more
            memory or time than a snapshot of its size does.
    """
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if not path.is_file():
        raise UsageError(f"{path} is no file; name a snapshot that PyTorch pickled")
    if size_bytes > MAX_FILE_BYTES:
        raise UsageError(
            f"{path} has {size_bytes / 2**30:.1f} GiB; up to {MAX_FILE_BYTES >> 30} GiB are read: record fewer steps, "
            "or give _record_memory_history a max_entries"
        )
    memory_bytes = _FREE_BYTES + _BYTES_PER_BYTE * size_bytes
    time_s = int(_FREE_S + _S_PER_BYTE * size_bytes)
    command = [sys.executable, "-P", "-c", _CHILD, str(path), str(memory_bytes), str(time_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONMALLOC": "pymalloc"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        try:
            return decode(done.stdout)
        except msgspec.MsgspecError:
            raise UsageError(f"{path}: its reader was cut off; read it again") from None
    if done.returncode == _REFUSED:
        # The last line is its own; the interpreter may have complained before.
        told = done.stderr.decode(errors="replace").splitlines()
        raise UsageError(f"{path}: {' '.join(told[-1].split())[:300]}")
    if done.returncode < 0:
        raise UsageError(
            f"{path}: reading it was stopped (signal {-done.returncode}); a snapshot of its size takes less than "
            f"{memory_bytes / 2**30:.1f} GiB and {time_s} s, so it is damaged or hostile"
        )
    complaint = done.stderr.decode(errors="replace").split("\n")
    raise UsageError(f"{path}: its reader failed: {' '.join(complaint)[-200:] or done.returncode}")


_CHILD = "from lmbench.memory.history.pickled import read_and_leave; read_and_leave()"


def read_and_leave() -> NoReturn:
    """The reading process: limits first, then the file; the columns on standard output, or a line on standard error.

    Its words are the file, bytes of memory, seconds of processor time.
    """
    path, memory_bytes, time_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (time_s, time_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Walking over millions of containers, none of them garbage, would take more than half of the time.
    gc.disable()
    told, code = b"", 0
    try:
        with Path(path).open("rb") as file:
            told = encode(snapshot_of(load_plain(file)))
    except MemoryError:
        told = b"it wants more memory than a snapshot of its size does (damaged or hostile)"
        code = _REFUSED
    except (Malformed, Unplain) as error:
        told = f"no snapshot of PyTorch's: {' '.join(str(error).split())}".encode(errors="replace")
        code = _REFUSED
    stream = sys.stderr.buffer if code else sys.stdout.buffer
    stream.write(b"\n" + told if code else told)
    stream.flush()
    # Taking apart what was read is of no use to anybody.
    os._exit(code)


class Unplain(Exception):
    """What is no pickle, or one of more than plain values."""


class PlainUnpickler(pickle.Unpickler):
    """Makes containers, text and numbers; refuses every name of a class or function, and persistent ids."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise Unplain(f"it names {module_name}.{global_name}, and a snapshot names nothing; not run")

    def persistent_load(self, pid: Any) -> Any:
        raise Unplain("it has a persistent id, and a snapshot has none")


def load_plain(file: io.BufferedReader) -> Any:
    """The value of a pickle of plain values.

    Raises:
        Unplain: it is no pickle, a torn one, or names a class or function.
    """
    try:
        return PlainUnpickler(file).load()
    except (Unplain, MemoryError):
        raise
    except EOFError:
        raise Unplain("the file ends too early (empty, or cut off)") from None
    except RecursionError:
        raise Unplain("it is nested too deeply") from None
    except Exception as error:
        # A damaged pickle raises whatever its nonsense leads to: UnpicklingError, KeyError, TypeError, ValueError, ...
        raise Unplain(f"it cannot be unpickled ({type(error).__name__}: {str(error)[:120]})") from None
