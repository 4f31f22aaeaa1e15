"""Verdicts of phases, beside those of the lag, and advice that is true for the case."""

from __future__ import annotations

import json

from tables import cases
from test_clocks import simulated
from trace_events import planted

from lmbench.kernels.findings import examine

SOFTMAX = "void softmax_warp_forward<float>(float*)"


def run_folder(path, trace, **facts):
    """A result with a trace, whose record has these facts."""
    run = {"schema_version": 1, "outcome": "ok", "mode": "train_step", **facts}
    (path / "run.json").write_text(json.dumps(run))
    trace.write(path / "trace.json.gz")
    return path


def twice(phases, *kernels):
    """A trace of two steps with these phases, whose kernels have these names in turn."""
    trace = simulated(phases, 2)
    for index, event in enumerate(event for event in trace.events if event["cat"] == "kernel"):
        event["name"] = kernels[index % len(kernels)]
    for event in [event for event in trace.events if event["cat"] == "cuda_runtime" and kernels == (SOFTMAX,)]:
        trace.op("aten::_softmax", event["ts"], event["dur"])
    return trace


@cases("""
- [phases, kernels, verdict, words]
- [{forward: [40, 36, 10]}, [k], host-bound, "40 launches, one every 40.0 us"]
- [{forward: [5, 0, 900], optimizer: [400, 0, 3]}, [&adam void adam<float>(float*)], queued,
   a fused optimizer is one kernel]
- [{forward: [5, 0, 900], optimizer: [400, 0, 3]}, ["void at::native::multi_tensor_apply_kernel<
   at::native::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>"], queued, larger batch]
- [{forward: [5, 0, 900], optimizer: [5, 0, 900]}, [*adam], queued, reads and writes each byte once]
# Limits of long kernels.
- [&fast {forward: [40, 0, 100]}, [unheard_of], queued, 100.0 % are kernels of unknown kind]
- [*fast, [nvjet_tst_64x8], queued, fused attention take 100.0 %]
- [*fast, [ampere_sgemm_128x64_tn], queued, "100.0 % are products in float32: 16-bit"]
- [*fast, [nvjet_tst_64x8, nchwToNhwcKernel], queued, channels_last]
- [*fast, [void softmax_warp_forward<float>(float*)], queued, a fused attention]
- [*fast, ["void vectorized_elementwise_kernel<4>(int)"], queued, compile (torch.compile) fuses them]
- [*fast, [triton_poi_fused_silu_1], queued, fused already]
""")
def test_the_advice_is_true_for_the_launches_and_kernels_of_a_phase(phases, kernels, verdict, words):
    clock = twice(phases, *kernels).examined().phases.loc[[*phases][-1]]
    assert clock.verdict == verdict
    assert words in clock.advice


WAITING = planted("""
# The host synchronizes after each kernel of 50 us, then does work of its own: little of it, and much.
stops:
- [launched, 160, sgemm, 170, 50]
- [call, cudaStreamSynchronize, 165, 57]
- [launched, 320, sgemm, 330, 50]
- [call, cudaStreamSynchronize, 325, 57]
- [launched, 480, sgemm, 490, 50]
- [call, cudaStreamSynchronize, 485, 57]
long_stops:
- [launched, 900, sgemm, 910, 50]
- [call, cudaStreamSynchronize, 905, 57]
- [launched, 1800, sgemm, 1810, 50]
- [call, cudaStreamSynchronize, 1805, 57]
- [launched, 2700, sgemm, 2710, 50]
- [call, cudaStreamSynchronize, 2705, 57]
copies:
- [launched, 150, &copy Memcpy DtoH (Device -> Pageable), 160, 50, {lasts: 62, call: cudaMemcpyAsync}]
- [launched, 300, *copy, 310, 50, {lasts: 62, call: cudaMemcpyAsync}]
- [launched, 450, *copy, 460, 50, {lasts: 62, call: cudaMemcpyAsync}]
gaps:
- [phase, forward, 0, 100]
- [launched, 0, k, 10, 10, {lasts: 0.4}]
- [launched, 1, k, 29, 10, {lasts: 0.4}]
- [launched, 2, k, 48, 10, {lasts: 0.4}]
- [launched, 3, k, 67, 10, {lasts: 0.4}]
late_first:
- [phase, forward, 0, 1000]
- [phase, optimizer, 1000, 2000]
- [launched, 10, adam, 20, 970]
# The host does something else for part of the optimizer before it launches.
- [launched, 1500, adam, 1510, 1400]
# A collective, and a kernel after it, beside it, or long after it.
collective:
- &forward [phase, forward, 0, 100]
- &nccl [launched, 0, ncclDevKernel_AllReduce_Sum_f32_RING_LL, 10, 1000, 9]
- [launched, 5, elementwise_kernel, 1011, 30]
collective_beside:
- *forward
- *nccl
- [launched, 5, elementwise_kernel, 61, 900]
collective_before_idling:
- *forward
- *nccl
- [launched, 5, elementwise_kernel, 6000, 30]
""")


@cases("""
trace | phase | verdict | words
late_first | optimizer | host-bound | 0.500 ms in host code
stops | outside | host-bound | in cudaStreamSynchronize; fewer .item()
long_stops | outside | host-bound | in host code
copies | outside | host-bound | in cudaMemcpyAsync; fewer copies
gaps | forward | stalled | short kernels with gaps between them
collective | forward | communication-bound | 1.000 ms of ncclDevKernel_AllReduce
collective_beside | forward | queued | bound by memory
collective_before_idling | forward | stalled | 1.000 ms of ncclDevKernel_AllReduce
""")
def test_the_advice_names_what_the_device_waits_for(trace, phase, verdict, words):
    clock = WAITING[trace].examined().phases.loc[phase]
    assert clock.verdict == verdict
    assert words in clock.advice


@cases("""
- [plan, facts, words]
- [[40, 36, 10], {compile: {is_enabled: true, mode: default}}, compile mode reduce-overhead]
- [[40, 36, 10], {compile: {is_enabled: true, mode: reduce-overhead}}, a larger batch gives each]
- [[40, 0, 100], {precision: 32-true}, bf16-mixed or TF32 (--measure.matmul_precision high)]
""")
def test_advice_asks_for_nothing_that_the_run_does_already(tmp_path, plan, facts, words):
    phases = examine(run_folder(tmp_path, twice({"forward": plan}, "ampere_sgemm_128x64_tn"), **facts)).phases
    assert words in phases.advice["forward"]


@cases("""
- [lag, is_slowed]
- [queued, true]
- [host-bound, false]
""")
def test_advice_is_for_the_run_without_the_profiler(tmp_path, lag, is_slowed):
    probe = {"verdicts": {"forward": {"verdict": lag, "min_lag_s": 5e-3}}}
    clock = examine(run_folder(tmp_path, twice({"forward": [40, 36.0, 10.0]}, "k"), probe=probe)).phases.loc["forward"]
    assert (clock.verdict, clock.lag_verdict, clock.min_lag_s) == ("host-bound", lag, 5e-3)
    assert ("without the profiler it is queued" in clock.advice) == is_slowed
