"""Is this exception a lack of memory? In all the ways that PyTorch, its libraries and Python say so."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

#: PyTorch's MPS allocator writes GB and means 2^30, as its other allocators do.
_POWERS = " KMGTPE"
_AMOUNT = re.compile(
    r"(?:[Tt]ried to allocate|[Uu]nable to (?:allocate|mmap)) "
    rf"(?P<number>\d+(?:\.\d+)?) ?(?P<power>[{_POWERS.strip()}]?)(?:i?B|bytes?)\b"
)

#: What each library says when the device's memory is used up.
_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) out of memory"
    r"|(?:CUDA|HIP) error: out of memory|[Cc]uda failure[^\n]*out of memory|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_(?:STATUS_)?(?:\w*_)?ALLOC(?:ATION)?_FAILED"
)

#: The same for the host's memory; cuDNN has a name of its own for that.
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc"
    r"|[Uu]nable to allocate [\d.]+ ?[KMGTPE]?i?(?:B|bytes?) for an array"
    r"|[Uu]nable to mmap \d+ bytes[^\n]*Cannot allocate memory"
    r"|CUDNN_STATUS_\w*HOST_ALLOCATION_FAILED"
)


@dataclass(frozen=True)
class OutOfMemory:
    """A lack of memory: `where` it was, bytes asked for if the message says, and the message in one line."""

    requested_bytes: int | None
    where: Literal["device", "host"]
    message: str


def out_of_memory(exc: BaseException) -> OutOfMemory | None:
    """The lack of memory behind an exception: itself, one that caused it, or one in its group; None if none.

    A Ctrl-C stays one even while such an error is being handled. Bytes asked for are as exact as the message:
    for a GPU, PyTorch rounds to two decimals of its unit.
    """
    if isinstance(exc, KeyboardInterrupt):
        return None
    for link in _chain(exc):
        if (where := _where(link)) is not None:
            amount = _AMOUNT.search(str(link))
            size = amount and round(float(amount["number"]) * 1024 ** _POWERS.index(amount["power"] or " "))
            # The line of the message that tells of memory, else its first one, else the exception's name.
            lines = [" ".join(line.split()) for line in str(link).splitlines() if line.strip()]
            telling = [line for line in lines if _HOST.search(line) or _DEVICE.search(line)]
            return OutOfMemory(size, where, next(iter(telling or lines), type(link).__name__)[:500])
    return None


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """The exception, then what it was raised from or during, then the members of a group; each once."""
    seen: set[int] = set()
    waiting: list[BaseException] = [exc]
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting.extend(link.exceptions)
        context = None if link.__suppress_context__ else link.__context__
        waiting.extend(cause for cause in (link.__cause__, context) if cause is not None)


def _where(exc: BaseException) -> Literal["device", "host"] | None:
    if isinstance(exc, MemoryError):
        return "host"
    if isinstance(exc, OSError):
        return "host" if exc.errno == errno.ENOMEM else None
    # PyTorch raises RuntimeError and subclasses; other exceptions may quote such words without meaning them.
    if not isinstance(exc, RuntimeError):
        return None
    text = str(exc)
    if _HOST.search(text):
        return "host"
    # torch.OutOfMemoryError, told by its name so that this module needs no torch.
    if _DEVICE.search(text) or any(base.__name__ == "OutOfMemoryError" for base in type(exc).__mro__):
        return "device"
    return None
