"""What the clocks mean: verdicts, their agreement with the lag's, advice that is true for the case, and the guards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import TRACES
from test_trace_clocks import Plan, simulated
from trace_events import HandWritten

from lmbench.kernels.trace.findings import Findings, examine, summarize
from lmbench.kernels.trace.kernels import load_trace
from lmbench.kernels.trace.shares import attention_times, flop_ratio
from lmbench.kernels.trace.verdicts import PhaseVerdict
from lmbench.records.run import Model

MANY_SLOW = Plan("forward", 40, 36.0, 10.0)
MANY_FAST = Plan("forward", 40, 0.0, 100.0)


def run_folder(path: Path, trace: HandWritten, **facts: Any) -> Path:
    """A result with a trace, steps 5 and 6, and the facts given."""
    run = {
        "schema_version": 1,
        "outcome": "ok",
        "mode": "train_step",
        "profile": {"first_step": 5, "steps": 2},
        **facts,
    }
    (path / "run.json").write_text(json.dumps(run))
    spans = [{"step": 5, "forward_s": 9.0}, {"step": 6, "forward_s": 1.5e-3, "forward_host_s": 1.6e-3}]
    (path / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in spans))
    trace.write(path / "trace.json").rename(path / "trace.json.gz")
    return path


def lag(verdict: str, least_s: float) -> dict[str, Any]:
    return {"verdicts": {"forward": {"verdict": verdict, "min_lag_s": least_s}}}


def forward(found: Findings) -> PhaseVerdict:
    return next(one for one in found.verdicts if one.phase == "forward")


def guards(found: Findings) -> dict[str, str]:
    return {guard.name: guard.status for guard in found.guards}


def test_a_slow_host_is_host_bound_and_the_figure_is_named(tmp_path: Path) -> None:
    one = forward(examine(simulated([[MANY_SLOW], [MANY_SLOW]]).write(tmp_path / "t.json")))
    assert one.verdict == "host-bound"
    assert f"{100 * (one.clock.wait_fraction or 0):.1f} %" in one.reason
    assert "40 launches of" in one.advice
    assert one.lag_verdict is None
    assert one.agreement == ""


def test_a_fast_host_is_queued(tmp_path: Path) -> None:
    assert forward(examine(simulated([[MANY_FAST], [MANY_FAST]]).write(tmp_path / "t.json"))).verdict == "queued"


def test_spans_are_those_of_the_steps_that_the_clocks_are_over(tmp_path: Path) -> None:
    one = forward(examine(run_folder(tmp_path, simulated([[MANY_SLOW], [MANY_SLOW]]))))
    assert one.device_span_s == pytest.approx(1.5e-3)
    assert one.host_span_s == pytest.approx(1.6e-3)


@pytest.mark.parametrize(
    ("plan", "lag_says", "least_s", "words"),
    [
        (MANY_SLOW, "host-bound", 1e-5, "agree"),
        (MANY_FAST, "queued", 2e-2, "agree"),
        (MANY_SLOW, "queued", 5e-3, "the profiler slows the host"),
        (MANY_FAST, "host-bound", 1e-5, "the host catches up within it"),
        (MANY_FAST, "mixed", 2e-4, "the host catches up within it"),
        (MANY_SLOW, "mixed", 2e-4, "the profiler slows the host"),
    ],
)
def test_both_verdicts_agree_or_the_difference_is_explained(
    tmp_path: Path, plan: Plan, lag_says: str, least_s: float, words: str
) -> None:
    found = examine(run_folder(tmp_path, simulated([[plan], [plan]]), probe=lag(lag_says, least_s)))
    assert words in forward(found).agreement
    assert forward(found).lag_verdict == lag_says
    # Advice is for the run as it is without the profiler.
    assert ("launches of" in forward(found).advice) == (plan is MANY_SLOW and lag_says != "queued")


@pytest.mark.parametrize(
    ("facts", "words", "not_words"),
    [
        ({}, "--trainer.compile", "reduce-overhead"),
        ({"compile": {"is_enabled": True, "mode": "default"}}, "reduce-overhead", "--trainer.compile"),
        ({"compile": {"is_enabled": True, "mode": "reduce-overhead"}}, "larger batch", "reduce-overhead"),
    ],
)
def test_advice_asks_for_nothing_that_the_run_does_already(
    tmp_path: Path, facts: dict[str, Any], words: str, not_words: str
) -> None:
    advice = forward(examine(run_folder(tmp_path, simulated([[MANY_SLOW], [MANY_SLOW]]), **facts))).advice
    assert words in advice
    assert not_words not in advice


FUSED = (
    "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>"
)


def renamed(trace: HandWritten, name: str) -> HandWritten:
    for event in trace.events:
        if event["cat"] == "kernel":
            event["name"] = name
    return trace


def verdict_of(found: Findings, phase: str) -> PhaseVerdict:
    return next(one for one in found.verdicts if one.phase == phase)


@pytest.mark.parametrize(
    ("kernel", "words"), [("void adam<float>(float*)", "a fused optimizer"), (FUSED, "larger batch")]
)
def test_an_optimizer_of_many_short_kernels_is_told_of_the_fused_one_unless_it_is(
    tmp_path: Path, kernel: str, words: str
) -> None:
    step = [Plan("forward", 5, 0.0, 900.0), Plan("optimizer", 400, 0.0, 3.0)]
    one = verdict_of(examine(renamed(simulated([step, step]), kernel).write(tmp_path / "t.json")), "optimizer")
    assert one.verdict == "queued"
    assert words in one.advice


@pytest.mark.parametrize(
    ("phase", "kernel", "words"),
    [
        ("optimizer", "void adam<float>(float*)", "a fused optimizer reads and writes each byte once"),
        ("optimizer", FUSED, "each byte is moved once already"),
        ("clip", "void at::native::multi_tensor_apply_kernel<LpNormFunctor>", "every gradient is read for the norm"),
    ],
)
def test_an_update_of_long_kernels_is_told_of_its_bytes(tmp_path: Path, phase: str, kernel: str, words: str) -> None:
    step = [Plan("forward", 5, 0.0, 900.0), Plan(phase, 5, 0.0, 900.0)]
    one = verdict_of(examine(renamed(simulated([step, step]), kernel).write(tmp_path / "t.json")), phase)
    assert words in one.advice


def test_kernels_of_unknown_kind_are_not_bound_by_memory(tmp_path: Path) -> None:
    trace = renamed(simulated([[MANY_FAST], [MANY_FAST]]), "unheard_of_kernel")
    advice = forward(examine(trace.write(tmp_path / "t.json"))).advice
    assert advice == "100 % are kernels of unknown kind: what bounds them the trace does not say"
    # Of every three kernels one is known.
    for index, event in enumerate(event for event in trace.events if event["cat"] == "kernel"):
        event["name"] = ("ampere_sgemm_128x64_tn", "unheard_of_kernel", "unheard_of_kernel")[index % 3]
    assert "bound by memory" not in forward(examine(trace.write(tmp_path / "t.json"))).advice


def test_nothing_is_said_of_products_that_the_trace_does_not_tell(tmp_path: Path) -> None:
    trace = renamed(simulated([[MANY_FAST], [MANY_FAST]]), "ampere_sgemm_128x64_tn")
    advice = forward(examine(trace.write(tmp_path / "t.json"))).advice
    assert advice == "matrix products take 100 %: what is left is their efficiency, which the trace does not tell"


@pytest.mark.parametrize(
    ("kernel", "words", "not_words"),
    [
        ("void softmax_warp_forward<float>(float*)", "a fused attention", "fused already"),
        ("void vectorized_elementwise_kernel<4>(int)", "compile (torch.compile)", "fused attention"),
        ("triton_poi_fused_silu_1", "fused already", "torch.compile"),
        ("void vectorized_gather_kernel<16, long>(char*)", "moves data (index 100 %)", "torch.compile"),
    ],
)
def test_kernels_bound_by_memory_are_told_of_what_is_there_to_save(
    tmp_path: Path, kernel: str, words: str, not_words: str
) -> None:
    trace = renamed(simulated([[MANY_FAST], [MANY_FAST]]), kernel)
    for event in [event for event in trace.events if event["cat"] == "cuda_runtime" and "softmax" in kernel]:
        trace.op("aten::_softmax", event["ts"], event["dur"])
    advice = forward(examine(trace.write(tmp_path / "t.json"))).advice
    assert words in advice
    assert not_words not in advice


def test_a_wait_before_the_first_kernel_is_not_blamed_on_launches(tmp_path: Path) -> None:
    trace = HandWritten()
    for step in range(2):
        at = step * 3000.0
        trace.step(step, at, 3000)
        trace.phase("forward", at, 1000)
        trace.phase("optimizer", at + 1000, 2000)
        for number, (host, device, duration) in enumerate([(10, 20, 970), (1500, 1510, 1400)], start=2 * step + 1):
            trace.launch(number, at + host)
            trace.kernel(number, "adam", at + device, duration)
    found = examine(trace.write(tmp_path / "t.json"))
    (one,) = (one for one in found.verdicts if one.phase == "optimizer")
    assert one.verdict == "host-bound"
    assert "before the first kernel" in one.advice
    assert "launches of" not in one.advice


def stopping(count: int, period_us: float = 160.0) -> HandWritten:
    """Kernels of 50 us that the host waits for one by one, and work of its own behind each."""
    trace = HandWritten()
    for number in range(1, count + 1):
        at = period_us * number
        trace.launch(number, at)
        trace.kernel(number, "ampere_sgemm_128x64_tn", at + 10, 50)
        trace.add("cuda_runtime", "cudaStreamSynchronize", at + 5, 57, correlation=1000 + number)
    return trace


def test_what_stops_of_the_host_can_have_cost_is_said_and_is_not_in_the_cost_of_launches(tmp_path: Path) -> None:
    (one,) = examine(stopping(20).write(tmp_path / "t.json")).verdicts
    assert (one.verdict, one.clock.stops) == ("host-bound", 20)
    assert one.clock.stopped_s == pytest.approx(20 * 57e-6, rel=0.02)
    assert one.clock.stop_wait_s == pytest.approx(19 * 57e-6, rel=0.02)
    assert one.clock.host_s_per_launch == pytest.approx((19 * 160 + 50) * 1e-6 / 20 - 57e-6, rel=0.05)
    assert "20 times the host stops until the device is done (1.13 ms in all)" in one.advice


def test_a_stop_is_not_blamed_for_more_than_it_took(tmp_path: Path) -> None:
    (one,) = examine(stopping(20, period_us=300.0).write(tmp_path / "t.json")).verdicts
    assert one.clock.stop_wait_s < one.clock.host_wait_s / 4
    assert "launches of" in one.advice
    assert "20 times the host stops" in one.advice
    (one,) = examine(stopping(20, period_us=900.0).write(tmp_path / "u.json")).verdicts
    assert "20 launches in" in one.advice
    assert "does something else there than launching" in one.advice


def test_a_copy_that_its_call_waits_for_is_a_stop(tmp_path: Path) -> None:
    trace = HandWritten()
    for number in range(1, 21):
        trace.launch(number, 150.0 * number, 62, name="cudaMemcpyAsync")
        trace.kernel(number, "Memcpy DtoH (Device -> Pageable)", 150.0 * number + 10, 50)
    (one,) = examine(trace.write(tmp_path / "t.json")).verdicts
    assert one.clock.stops == pytest.approx(20, abs=1)
    assert "times the host stops" in one.advice


def test_a_wait_on_a_thread_that_launches_nothing_stops_nobody(tmp_path: Path) -> None:
    trace = stopping(20)
    for event in trace.events:
        if event["name"] == "cudaStreamSynchronize":
            event["tid"] = 777
    (one,) = examine(trace.write(tmp_path / "t.json")).verdicts
    assert (one.clock.stops, one.clock.stopped_s, one.clock.stop_wait_s) == (0, 0, 0)
    assert "launches of" in one.advice


def test_who_has_graphs_is_not_told_of_them_as_of_something_new(tmp_path: Path) -> None:
    trace = simulated([[MANY_SLOW], [MANY_SLOW]])
    [event for event in trace.events if "Launch" in event["name"]][-1]["name"] = "cudaGraphLaunch"
    advice = forward(examine(trace.write(tmp_path / "t.json"))).advice
    assert "CUDA graphs for more of it (1 of the calls launch one)" in advice


def test_queued_matmuls_in_fp32_are_told_of_lower_precisions(tmp_path: Path) -> None:
    trace = renamed(simulated([[MANY_FAST], [MANY_FAST]]), "ampere_sgemm_128x64_tn")
    facts = {"precision": "32-true", "matmul_precision": "highest"}
    assert "bf16-mixed or TF32" in forward(examine(run_folder(tmp_path, trace, **facts))).advice
    facts["matmul_precision"] = "high"
    assert "TF32" not in forward(examine(run_folder(tmp_path, trace, **facts))).advice


def test_a_whole_trace_passes_every_guard() -> None:
    for name in ("small_fp32_inference", "small_bf16_compiled"):
        assert set(guards(examine(TRACES / name)).values()) <= {"pass", "n/a"}


def test_kernels_without_launch_are_unlinked_unclassified_and_said(tmp_path: Path) -> None:
    trace = simulated([[MANY_FAST], [MANY_FAST]])
    for event in trace.events:
        if event["cat"] == "kernel" and event["args"]["correlation"] <= 8:
            del event["args"]["correlation"]
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.completeness.kernels_without_launch == 8
    unlinked = found.phases[-1]
    assert (unlinked.phase, unlinked.instances) == ("unlinked", 8)
    status = guards(found)
    assert status["kernels_without_launch"] == "fail"
    assert status["launches_without_kernel"] == "fail"
    assert status["outside"] == "pass"
    assert status["phase_sum"] == "pass"


def test_a_trace_without_phases_is_all_of_one_step(tmp_path: Path) -> None:
    trace = HandWritten()
    for number, name in enumerate(
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn", "softmax_warp_forward"), start=1
    ):
        trace.launch(number, 10.0 * number)
        trace.kernel(number, name, 10.0 * number + 5, 4)
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.step.kernel_s == found.captured_s == pytest.approx(12e-6)
    assert found.matmul_fractions == {"step": pytest.approx(2 / 3)}


def test_the_step_is_all_of_what_was_traced_outside_of_phases_and_without_launch_included(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.step(0, 0, 1_000)
    trace.phase("backward", 100, 100)
    for number, (at, name) in enumerate(((110, "ampere_sgemm_128x64_tn"), (300, "ncclDevKernel_AllReduce")), start=1):
        trace.launch(number, at)
        trace.kernel(number, name, at + 10, 10 * number)
    trace.kernel(99, "ampere_sgemm_128x64_tn", 400, 30)
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.step.kernel_s == pytest.approx(found.captured_s) == pytest.approx(60e-6)
    assert found.step.kinds_s == {"gemm": pytest.approx(40e-6), "comm": pytest.approx(20e-6)}
    assert found.matmul_fractions == {"backward": pytest.approx(1.0), "step": pytest.approx(4 / 6)}
    assert found.step.top_other
    assert found.step.top_other.share_fraction == pytest.approx(2 / 6)
    summary = summarize(found)
    assert summary.phases.step
    assert summary.phases.step.kernel_s == pytest.approx(summary.kernel_s)


def test_launches_without_any_kernel_are_no_trace_of_a_cpu(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.op("aten::mm", 0, 50)
    trace.launch(1, 10)
    found = examine(trace.write(tmp_path / "t.json"))
    assert "the device was not recorded" in found.why_no_kernels
    assert guards(found) == {"device_recorded": "fail"}
    # Calls are noted with the host's activities, too: it need not be a matter of permission.
    assert "ProfilerActivity.CUDA" in found.guards[0].advice
    other = HandWritten()
    other.op("aten::mm", 0, 50)
    found = examine(other.write(tmp_path / "u.json"))
    assert found.why_no_kernels == "a trace of a CPU has operators and no kernels"
    assert guards(found) == {"device_recorded": "n/a"}


def test_a_runs_record_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, simulated([[MANY_FAST], [MANY_FAST]]))
    (folder / "run.json").write_text("{")
    found = examine(folder)
    assert found.run is None
    assert guards(found)["run_record"] == "warn"


def test_launches_that_share_an_id_are_said_to(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    for at in (10, 20):
        trace.launch(1, at)
    trace.kernel(1, "k", 30, 5)
    (guard,) = (
        one for one in examine(trace.write(tmp_path / "t.json")).guards if one.name == "launches_without_kernel"
    )
    assert guard.status == "fail"
    assert "1 share the correlation id of another" in guard.message


def test_a_kernel_before_its_launch_fails_a_guard(tmp_path: Path) -> None:
    trace = simulated([[MANY_FAST], [MANY_FAST]])
    kernel = next(event for event in trace.events if event["cat"] == "kernel" and event["args"]["correlation"] == 1)
    kernel["ts"] -= 9.0
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.completeness.kernels_before_launch == 1
    assert guards(found)["kernels_before_launch"] == "fail"


def test_spans_that_differ_from_the_window_warn(tmp_path: Path) -> None:
    found = examine(run_folder(tmp_path, simulated([[MANY_FAST], [MANY_FAST]])))
    assert guards(found)["device_span"] == "warn"
    assert forward(found).clock.window_s > 4e-3


def test_inside_attention_are_four_parts_with_both_ratios() -> None:
    found = examine(TRACES / "small_fp32_inference")
    (times,) = found.attention
    assert times.phase == "forward"
    assert set(times.parts_s) == {"scores", "mask", "softmax", "values"}
    for part, seconds in times.parts_s.items():
        assert seconds * found.steps == pytest.approx(found.phases[0].parts_s[part])
    # Scores and values are bmm kernels, and a copy of the values.
    assert times.matmul_s < times.parts_s["scores"] + times.parts_s["values"]
    assert times.time_ratio == pytest.approx(times.parts_s["softmax"] / times.matmul_s)
    assert times.flop_ratio == pytest.approx(5 / (4 * 64))
    assert examine(TRACES / "small_bf16_compiled").attention == []


def test_a_softmax_that_is_partly_fused_with_others_has_no_ratio(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    for number, part in enumerate(("scores", "softmax", "values"), start=1):
        trace.module(f"blocks.0.attention.core.{part}", 20.0 * number, 15)
        trace.op("aten::bmm" if part != "softmax" else "aten::_softmax", 20.0 * number + 1, 10)
        trace.launch(number, 20.0 * number + 2)
        trace.kernel(number, "gemm" if part != "softmax" else "softmax_warp_forward", 20.0 * number + 8, 5)
    table = load_trace(trace.write(tmp_path / "t.json")).kernels
    assert [times.phase for times in attention_times(table, 1, Model())] == ["forward"]
    partly = replace(table, parts=[*table.parts[:2], "values+output"])
    assert attention_times(partly, 1, Model()) == []


def test_flop_ratios_need_the_models_shape() -> None:
    assert flop_ratio("forward", Model()) is None
    assert flop_ratio("backward", Model(d_model=1280, num_heads=20)) == pytest.approx(4 / (8 * 64))


def test_matmul_shares_are_named_by_mode() -> None:
    assert examine(TRACES / "small_fp32_inference").matmul_fractions.keys() == {"inference", "step"}
    assert examine(TRACES / "small_bf16_compiled").matmul_fractions.keys() == {"forward", "backward", "step"}


def paused(launch_us: float) -> HandWritten:
    """Forty short kernels, one gap of 463 ms, and forty again; the launch behind the gap comes then."""
    trace = HandWritten()
    trace.phase("forward", 0, max(launch_us, 600.0) + 200)
    for number in range(80):
        late = 463_000.0 if number >= 40 else 0.0
        trace.launch(number, 0.1 * number + (launch_us if number >= 40 else 0.0), 0.05)
        trace.kernel(number, "ampere_sgemm_128x64_tn", 10 + 11.0 * number + late, 10)
    return trace


def test_one_long_gap_is_a_pause_and_no_matter_of_short_kernels(tmp_path: Path) -> None:
    one = forward(examine(paused(0.0).write(tmp_path / "t.json")))
    assert one.verdict == "stalled"
    assert "99." in one.reason
    assert "pause, the longest of 463.0 ms" in one.advice
    assert "short kernels" not in one.advice


def test_a_host_that_pauses_is_not_told_of_its_launches(tmp_path: Path) -> None:
    one = forward(examine(paused(463_000.0).write(tmp_path / "t.json")))
    assert one.verdict == "host-bound"
    assert "pause" in one.advice
    assert "launches of" not in one.advice


def test_kernels_shorter_than_their_gaps_are_not_called_queued(tmp_path: Path) -> None:
    short = clocked(tmp_path, gap_us=9.0, kernel_us=10.0)
    assert short.verdict == "stalled"
    assert short.clock.gap_fraction == pytest.approx(0.47, abs=0.03)
    assert "short kernels with gaps between them" in short.advice


def clocked(path: Path, gap_us: float, kernel_us: float) -> PhaseVerdict:
    trace = HandWritten()
    trace.phase("forward", 0, 100)
    for number in range(100):
        trace.launch(number, 0.5 * number, 0.4)
        trace.kernel(number, "k", 10 + number * (gap_us + kernel_us), kernel_us)
    return forward(examine(trace.write(path / "c.json")))


@pytest.mark.parametrize(("beside_us", "says"), [(0.0, "1.00 of them beside nothing"), (900.0, None)])
def test_communication_is_told_by_what_was_measured_of_it(tmp_path: Path, beside_us: float, says: str | None) -> None:
    trace = HandWritten()
    trace.phase("backward", 0, 100)
    trace.launch(1, 0)
    trace.kernel(1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 1000, stream=9)
    trace.launch(2, 5)
    trace.kernel(2, "elementwise_kernel", 1011 - (1000 - 50 if beside_us else 0), max(beside_us, 30.0))
    one = verdict_of(examine(trace.write(tmp_path / "t.json")), "backward")
    assert one.verdict == "queued"
    assert (says in one.advice) if says else ("communication" not in one.advice)
    assert "larger batch" not in one.advice or not says


def test_the_lag_and_a_stall_agree_that_it_is_not_the_host(tmp_path: Path) -> None:
    found = examine(run_folder(tmp_path, paused(0.0), probe=lag("queued", 5e-3)))
    assert forward(found).agreement.startswith("agree")
    assert "without the profiler" not in forward(found).advice
