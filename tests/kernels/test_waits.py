"""Causes of waits for the host, against planted ones and a plain count of moments."""

from __future__ import annotations

import pytest
from tables import cases
from trace_events import AUTOGRAD, MAIN, HandWritten


def paused(events, thread=MAIN):
    """A trace of a kernel up to 50 us, these events, and a second kernel that is launched at 5,000 us."""
    trace = HandWritten()
    trace.range("warm up", 0, 6_000)
    for at, kernel in ((10, "first"), (5_000, "second")):
        trace.launched(at, kernel, at + 10, 30, tid=thread)
    return trace.read(events)


@cases("""
- [events, cause, call, under, wait_us, calls]
- [[[op, aten::cat, 60, 4930], [op, aten::empty, 70, 4910], [call, cudaFree, 100, 1200], [call, cudaFree, 1400, 1200],
    [call, cudaFree, 2700, 600], [call, cudaMalloc, 3400, 900]],
   allocating, cudaFree, under aten::cat in warm up, 3000, 3]
- [[[launched, 60, new, 4070, 5, {lasts: 4000}]], loading, cudaLaunchKernel, in warm up, 4000, 1]
- [[[launched, 60, first, 4070, 5, {lasts: 4000}]], slow call, cudaLaunchKernel, in warm up, 4000, 1]
- [[[call, cudaGraphInstantiate, 100, 2500]], slow call, cudaGraphInstantiate, in warm up, 2500, 1]
- [[[call, cudaDeviceSynchronize, 45, 3000]], synchronizing, cudaDeviceSynchronize, in warm up, 2995, 1]
- [[[range, enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__, 100, 4500], [call, cudaMalloc, 200, 9]],
   data, "", "", 4500, 2]
- [[[op, aten::sort, 60, 4930], [op, aten::empty, 70, 4910]], host code, "", under aten::sort in warm up, 4930, 2]
- [[[range, mine, 100, 3000]], host code, "", in mine, 3000, 1]
""")
def test_the_largest_cause_is_the_planted_one(events, cause, call, under, wait_us, calls):
    largest = paused(events).examined().waits.iloc[0]
    assert (largest.cause, largest.call, largest.under) == (cause, call, under)
    assert (largest.wait_s, largest.calls) == (pytest.approx(wait_us * 1e-6), calls)


def test_a_cause_on_autograds_thread_is_under_its_own_operator():
    events = [["op", "MmBackward0", 60, 4930, AUTOGRAD], ["op", "aten::empty", 70, 4910, AUTOGRAD]]
    trace = paused([*events, ["call", "cudaMalloc", 100, 2500, AUTOGRAD]], AUTOGRAD)
    assert trace.examined().waits.under.iloc[0] == "under aten::empty in warm up"


@cases("""
- [functions, events, cause, under]
- [["train.py(3): <module>", &user "my/audio.py(31): resample", "re.py(185): sub"], [],
   host code, &mine "in my/audio.py(31): resample"]
- [[*user, &library "torchaudio/functional.py(12): resample", <built-in method sleep>], [], host code, *mine]
# An operator is the function's, and a function says more than a range.
- [[*user], [[range, mine, 60, 4930], [op, aten::sort, 80, 4880]], host code, *mine]
- [[*user], [[op, aten::item, 80, 4880], [call, cudaStreamSynchronize, 90, 4860]],
   synchronizing, "under aten::item in my/audio.py(31): resample"]
- [[*user], [[range, enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__, 70, 4900]], data, *mine]
- [[*library], [[range, mine, 60, 4930]], host code, in mine]
""")
def test_the_innermost_function_in_the_users_files_names_a_pause(functions, events, cause, under):
    trace = paused(events)
    # Each function is inside the one before it.
    for depth, function in enumerate(functions):
        trace.add("python_function", function, 61 + depth, 4_920 - 2 * depth)
    largest = trace.examined().waits.iloc[0]
    assert (largest.cause, largest.under) == (cause, under)
    assert largest.wait_s > 4.8e-3
