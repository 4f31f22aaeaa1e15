# ruff: noqa: E501 (messages as they are)
"""A lack of memory is recognised however it is said, and nothing else is taken for one."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from tables import cases, rows

from lmbench.instruments.ending import out_of_memory

ABSURD_BYTES = 2**50


def _raised(function):
    with pytest.raises(BaseException) as raised:  # noqa: PT011 (whatever it raises is what is judged)
        function()
    return raised.value


def check(lack, requested_bytes, where):
    assert (lack.requested_bytes, lack.where) == (requested_bytes, where)
    assert lack.message
    assert "\n" not in lack.message


@cases(
    "allocate | requested_bytes",
    (lambda: torch.empty(ABSURD_BYTES, dtype=torch.uint8), ABSURD_BYTES),
    (lambda: np.empty(ABSURD_BYTES, np.uint8), ABSURD_BYTES),
    (lambda: bytearray(2**62), None),
)
def test_a_real_failure_of_the_host_is_recognised_with_its_bytes(allocate, requested_bytes):
    check(out_of_memory(_raised(allocate)), requested_bytes, "host")


GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 3.50 GiB is "
    "free. Process 1 has 136.21 GiB memory in use. Of the allocated memory 135.00 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
#: Of a RuntimeError.
OTHERS = """
CUDA error: device-side assert triggered
CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx
mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)
out of resource: shared memory, Required: 270336, Hardware limit: 232448
"""


# Whose memory, bytes asked for (0: none are told), and the message.
@cases(
    r"""
where | requested_bytes | text
device | 2097152 | CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has
device | 512 | CUDA out of memory. Tried to allocate 512 bytes. GPU 0
device | 0 | CUDA out of memory. Tried to allocate more than 1EB memory.
device | 1610612736 | HIP out of memory. Tried to allocate 1.50 GiB. GPU 0
device | 1073741824 | MPS backend out of memory (MPS allocated: 5.00 GB). Tried to allocate 1.00 GB on private pool.
device | 0 | CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported
device | 0 | CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
device | 0 | cuDNN error: CUDNN_STATUS_ALLOC_FAILED
device | 0 | cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
host | 0 | cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
device | 0 | cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`
device | 0 | cuFFT error: CUFFT_ALLOC_FAILED
device | 0 | NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'
device | 0 | Failed with cudaErrorMemoryAllocation
host | 4294967296000 | [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296000 bytes. Error code 12 (Cannot allocate memory)
host | 400 | [enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 400 bytes.
host | 4096 | unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)
""",
    ("device", 20 * 2**30, GPU),
)
def test_every_wording_is_recognised(where, requested_bytes, text):
    check(out_of_memory(RuntimeError(text.replace("\\n", "\n"))), int(requested_bytes) or None, where)


def test_the_line_that_tells_is_the_message_and_types_and_numbers_count_too():
    lack = out_of_memory(RuntimeError("Caught it in worker 0.\nTraceback:\n  CUDA error: out of memory\nCompile"))
    assert lack.message == "CUDA error: out of memory"
    assert out_of_memory(torch.OutOfMemoryError("worded anew")).where == "device"
    assert out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory")).where == "host"


def after(lack, error, **cause):
    """The error, raised while the lack of memory was handled, `from` a cause if one is given."""
    error.__context__ = lack
    if cause:
        error.__cause__ = cause["cause"]
    return error


def test_causes_contexts_and_groups_are_followed_but_no_suppressed_ones_and_no_circles():
    lack = torch.OutOfMemoryError(GPU)
    assert out_of_memory(after(lack, ValueError("compile failed"), cause=lack)).where == "device"
    assert out_of_memory(after(lack, ValueError("while handling"))).requested_bytes == 20 * 2**30
    assert out_of_memory(after(lack, ValueError("another matter"), cause=None)) is None
    assert out_of_memory(after(lack, KeyboardInterrupt())) is None
    group = ExceptionGroup("ranks", [ValueError("x"), ExceptionGroup("inner", [RuntimeError(GPU)])])
    assert out_of_memory(group).where == "device"
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert out_of_memory(first) is None


@cases(
    "error",
    *map(RuntimeError, rows(OTHERS)),
    ValueError("CUDA out of memory. is what a message may quote"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    OSError(errno.ENOSPC, "No space left on device"),
    SystemExit(1),
)
def test_other_errors_are_not_taken_for_it(error):
    assert out_of_memory(error) is None
