"""Causes of waits for the host, against planted ones and a plain count of moments."""

from __future__ import annotations

import pytest
from trace_events import AUTOGRAD, MAIN, HandWritten

LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def paused(name, *calls, operator="", thread=MAIN):
    """A trace of a kernel up to 50 us, calls of the host, and a second kernel that is launched at 5,000 us."""
    trace = HandWritten()
    trace.range("warm up", 0, 6_000)
    for at, kernel in ((10, "first"), (5_000, "second")):
        trace.launched(at, kernel, at + 10, 30, tid=thread)
    if operator:
        trace.op(operator, 60, 4_930, thread)
        trace.op("aten::empty", 70, 4_910, thread)
    for call, at, duration in calls:
        trace.add("user_annotation" if call == name else "cuda_runtime", call, at, duration, thread)
    return trace


def slow_launch(kernel):
    trace = paused("")
    trace.launched(60, kernel, 4_070, 5, lasts=4_000)
    return trace


@pytest.mark.parametrize(
    ("trace", "cause", "call", "under", "wait_us", "calls"),
    [
        (paused("", *(("cudaFree", 100 + 130 * n, 120) for n in range(25)), ("cudaMalloc", 3_400, 900),
                operator="aten::cat"), "allocating", "cudaFree", "under aten::cat in warm up", 3_000, 25),
        (paused("", ("cudaMalloc", 100, 2_500), operator="MmBackward0", thread=AUTOGRAD),
         "allocating", "cudaMalloc", "under aten::empty in warm up", 2_500, 1),
        (slow_launch("new"), "loading", "cudaLaunchKernel", "in warm up", 4_000, 1),
        (paused("", ("cudaGraphInstantiate", 100, 2_500)), "slow call", "cudaGraphInstantiate", "in warm up", 2_500, 1),
        (slow_launch("first"), "slow call", "cudaLaunchKernel", "in warm up", 4_000, 1),
        (paused("", ("cudaDeviceSynchronize", 45, 3_000)), "synchronizing", "cudaDeviceSynchronize", "in warm up",
         2_995, 1),
        (paused(LOADER, (LOADER, 100, 4_500), ("cudaMalloc", 200, 9)), "data", "", "", 4_500, 2),
        (paused("", operator="aten::sort"), "host code", "", "under aten::sort in warm up", 4_930, 2),
        (paused("mine", ("mine", 100, 3_000)), "host code", "", "in mine", 3_000, 1),
    ],
)  # fmt: skip
def test_the_largest_cause_is_the_planted_one(trace, cause, call, under, wait_us, calls):
    waits = trace.examined().waits
    largest = waits.iloc[0]
    assert (largest.cause, largest.call, largest.under) == (cause, call, under)
    assert (largest.wait_s, largest.calls) == (pytest.approx(wait_us * 1e-6), calls)


def stacked(*functions, operator="", call="", range_name="", loader=False):
    """A trace with a pause of 4,900 us in these Python functions, each inside the one before it."""
    trace = paused(range_name, *([(range_name, 60, 4_930)] if range_name else []))
    for depth, function in enumerate(functions):
        trace.add("python_function", function, 61 + depth, 4_920 - 2 * depth)
    if operator:
        trace.op(operator, 80, 4_880)
    if call:
        trace.call(call, 90, 4_860)
    if loader:
        trace.range(LOADER, 70, 4_900)
    return trace


USER, LIBRARY = "my/audio.py(31): resample", "torchaudio/functional.py(12): resample"


@pytest.mark.parametrize(
    ("trace", "cause", "under"),
    [
        (stacked("train.py(3): <module>", USER, "re.py(185): sub"), "host code", f"in {USER}"),
        (stacked(USER, LIBRARY, "<built-in method sleep>"), "host code", f"in {USER}"),
        # An operator is the function's, and a function says more than a range.
        (stacked(USER, operator="aten::sort", range_name="mine"), "host code", f"in {USER}"),
        (stacked(USER, operator="aten::item", call="cudaStreamSynchronize"), "synchronizing",
         f"under aten::item in {USER}"),
        (stacked(USER, loader=True), "data", f"in {USER}"),
        (stacked(LIBRARY, range_name="mine"), "host code", "in mine"),
    ],
)  # fmt: skip
def test_the_innermost_function_in_the_users_files_names_a_pause(trace, cause, under):
    largest = trace.examined().waits.iloc[0]
    assert (largest.cause, largest.under) == (cause, under)
    assert largest.wait_s > 4.8e-3
