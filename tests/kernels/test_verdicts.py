"""Verdicts of phases, beside those of the lag, and advice that is true for the case."""

from __future__ import annotations

import json

import pytest
from test_clocks import Plan, simulated
from trace_events import HandWritten

from lmbench.kernels.findings import examine

MANY_SLOW, MANY_FAST = Plan("forward", 40, 36.0, 10.0), Plan("forward", 40, 0.0, 100.0)
FUSED = (
    "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>"
)
ADAM = "void adam<float>(float*)"
SGEMM, SOFTMAX = "ampere_sgemm_128x64_tn", "void softmax_warp_forward<float>(float*)"


def run_folder(path, trace, **facts):
    """A result with a trace, whose record has these facts."""
    run = {"schema_version": 1, "outcome": "ok", "mode": "train_step", **facts}
    (path / "run.json").write_text(json.dumps(run))
    trace.write(path / "trace.json").rename(path / "trace.json.gz")
    return path


def twice(*plans, kernels=("k",)):
    """A trace of two steps with these plans, whose kernels have these names in turn."""
    trace = simulated([plans, plans])
    for index, event in enumerate(event for event in trace.events if event["cat"] == "kernel"):
        event["name"] = kernels[index % len(kernels)]
    for event in [event for event in trace.events if event["cat"] == "cuda_runtime" and kernels == (SOFTMAX,)]:
        trace.op("aten::_softmax", event["ts"], event["dur"])
    return trace


def update(phase, launches, kernel_us, kernel):
    return twice(Plan("forward", 5, 0.0, 900.0), Plan(phase, launches, 0.0, kernel_us), kernels=(kernel,))


def late_first():
    """A trace in which the host does something else for part of the optimizer before it launches."""
    trace = HandWritten()
    for step in range(2):
        at = step * 3000.0
        trace.step(step, at, 3000)
        trace.phase("forward", at, 1000)
        trace.phase("optimizer", at + 1000, 2000)
        trace.launched(at + 10, "adam", at + 20, 970)
        trace.launched(at + 1500, "adam", at + 1510, 1400)
    return trace


def stopping(period_us=160.0):
    """A trace of 20 kernels of 50 us: the host synchronizes after each, then does work of its own."""
    trace = HandWritten()
    for number in range(1, 21):
        at = period_us * number
        trace.launched(at, SGEMM, at + 10, 50)
        trace.call("cudaStreamSynchronize", at + 5, 57, correlation=1000 + number)
    return trace


def waited_copies():
    trace = HandWritten()
    for number in range(1, 21):
        at = 150.0 * number
        trace.launched(at, "Memcpy DtoH (Device -> Pageable)", at + 10, 50, lasts=62, call="cudaMemcpyAsync")
    return trace


def gapped():
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    for number in range(100):
        trace.launched(0.5 * number, "k", 10 + number * 19.0, 10.0, lasts=0.4)
    return trace


def communicating(beside_us, until=1011):
    """A trace of a collective, and a kernel beside it or after it."""
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    trace.launched(0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 1000, stream=9)
    trace.launched(5, "elementwise_kernel", until - (950 if beside_us else 0), max(beside_us, 30.0))
    return trace


@pytest.mark.parametrize(
    ("trace", "phase", "verdict", "words"),
    [
        (twice(MANY_SLOW), "forward", "host-bound", "40 launches, one every 40.0 us"),
        (update("optimizer", 400, 3.0, ADAM), "optimizer", "queued", "a fused optimizer is one kernel"),
        (update("optimizer", 400, 3.0, FUSED), "optimizer", "queued", "larger batch"),
        (update("optimizer", 5, 900.0, ADAM), "optimizer", "queued", "reads and writes each byte once"),
        (late_first(), "optimizer", "host-bound", "0.590 ms in host code"),
        # Limits of long kernels.
        (twice(MANY_FAST, kernels=("unheard_of",)), "forward", "queued", "100.0 % are kernels of unknown kind"),
        (twice(MANY_FAST, kernels=("nvjet_tst_64x8",)), "forward", "queued", "fused attention take 100.0 %"),
        (twice(MANY_FAST, kernels=(SGEMM,)), "forward", "queued", "100.0 % are products in float32: 16-bit"),
        (twice(MANY_FAST, kernels=("nvjet_tst_64x8", "nchwToNhwcKernel")), "forward", "queued", "channels_last"),
        (twice(MANY_FAST, kernels=(SOFTMAX,)), "forward", "queued", "a fused attention"),
        (twice(MANY_FAST, kernels=("void vectorized_elementwise_kernel<4>(int)",)), "forward", "queued",
         "compile (torch.compile) fuses them"),
        (twice(MANY_FAST, kernels=("triton_poi_fused_silu_1",)), "forward", "queued", "fused already"),
        # Waits of the host.
        (stopping(), "outside", "host-bound", "in cudaStreamSynchronize; fewer .item()"),
        (stopping(900.0), "outside", "host-bound", "in host code"),
        (waited_copies(), "outside", "host-bound", "in cudaMemcpyAsync; fewer copies"),
        # Gaps and communication.
        (gapped(), "forward", "stalled", "short kernels with gaps between them"),
        (communicating(0.0), "forward", "communication-bound", "1.000 ms of ncclDevKernel_AllReduce"),
        (communicating(900.0), "forward", "queued", "bound by memory"),
        (communicating(0.0, until=6_000), "forward", "stalled", "1.000 ms of ncclDevKernel_AllReduce"),
    ],
)  # fmt: skip
def test_the_advice_is_true_for_the_case(trace, phase, verdict, words):
    clock = trace.examined().phases.loc[phase]
    assert clock.verdict == verdict
    assert words in clock.advice


@pytest.mark.parametrize(
    ("plan", "facts", "words"),
    [
        (MANY_SLOW, {"compile": {"is_enabled": True, "mode": "default"}}, "compile mode reduce-overhead"),
        (MANY_SLOW, {"compile": {"is_enabled": True, "mode": "reduce-overhead"}}, "a larger batch gives each"),
        (MANY_FAST, {"precision": "32-true"}, "bf16-mixed or TF32 (--measure.matmul_precision high)"),
    ],
    ids=["compiled", "graphs", "fp32"],
)
def test_advice_asks_for_nothing_that_the_run_does_already(tmp_path, plan, facts, words):
    phases = examine(run_folder(tmp_path, twice(plan, kernels=(SGEMM,)), **facts)).phases
    assert words in phases.advice["forward"]


@pytest.mark.parametrize(("lag", "is_slowed"), [("queued", True), ("host-bound", False)])
def test_advice_is_for_the_run_without_the_profiler(tmp_path, lag, is_slowed):
    probe = {"verdicts": {"forward": {"verdict": lag, "min_lag_s": 5e-3}}}
    clock = examine(run_folder(tmp_path, twice(MANY_SLOW), probe=probe)).phases.loc["forward"]
    assert (clock.verdict, clock.lag_verdict, clock.min_lag_s) == ("host-bound", lag, 5e-3)
    assert ("without the profiler it is queued" in clock.advice) == is_slowed
