"""Is this exception a lack of memory? In all the ways that PyTorch, its libraries and Python say so."""

from __future__ import annotations

import errno
import re

from lmbench.records.measured import RunError

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


def out_of_memory(exc: BaseException) -> RunError | None:
    """The lack of memory behind an exception, as a record has it: itself, one that caused it, or one in its group.

    It has the bytes asked for if the message says, whose memory it was, and the message in one line.

    A Ctrl-C stays one even while such an error is being handled. Bytes asked for are as exact as the message:
    for a GPU, PyTorch rounds to two decimals of its unit.
    """
    if isinstance(exc, KeyboardInterrupt):
        return None
    links: list[BaseException] = [exc]
    for link in links:
        if (where := _where(link)) is not None:
            amount = _AMOUNT.search(str(link))
            size = amount and round(float(amount["number"]) * 1024 ** _POWERS.index(amount["power"] or " "))
            # The line of the message that tells of memory, else its first one, else the exception's name.
            lines = [" ".join(line.split()) for line in str(link).splitlines() if line.strip()]
            telling = [line for line in lines if _HOST.search(line) or _DEVICE.search(line)]
            message = next(iter(telling or lines), type(link).__name__)[:500]
            return RunError(type(exc).__name__, message, requested_bytes=size, where=where)
        # What it was raised from or during, and the members of a group.
        context = None if link.__suppress_context__ else link.__context__
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        links += [other for other in (*members, link.__cause__, context) if other is not None and other not in links]
    return None


def _where(exc: BaseException) -> str | None:
    text = str(exc)
    # PyTorch raises RuntimeError and subclasses; other exceptions may quote such words without meaning them.
    is_torchs = isinstance(exc, RuntimeError)
    if (
        isinstance(exc, MemoryError)
        or getattr(exc, "errno", None) == errno.ENOMEM
        or (is_torchs and _HOST.search(text))
    ):
        return "host"
    # torch.OutOfMemoryError, told by its name so that this module needs no torch.
    if is_torchs and (_DEVICE.search(text) or "OutOfMemoryError" in [base.__name__ for base in type(exc).__mro__]):
        return "device"
    return None
