"""Kernel time by the user's own annotations and inside attention, against sums by hand."""

from __future__ import annotations

import pytest
from trace_events import AUTOGRAD, MAIN, HandWritten, examined

from lmbench.kernels.sums import Work, attention_times, host_times
from lmbench.records.run import Model


def a_program():
    """A trace with kernels of 1, 2, 4, ... us, so that every sum tells which kernels are in it."""
    trace = HandWritten()
    trace.range("ProfilerStep#3", 0, 1000)
    trace.range("block", 0, 200)
    trace.range("attention", 10, 50)
    trace.range("attention", 70, 50)
    # A recursive annotation, within one of the same name.
    trace.range("attention", 80, 20)
    trace.range("backward", 300, 300)
    trace.range("on autograd's own thread", 400, 50, AUTOGRAD)
    trace.range("nccl:all_reduce", 500, 50)
    threads = {310: AUTOGRAD, 410: AUTOGRAD}
    for number, at in enumerate((5, 20, 75, 90, 310, 410, 510, 700)):
        trace.launched(at, "sgemm", 1000 + 300 * number, 2.0**number, lasts=2, tid=threads.get(at, MAIN))
    return trace


def test_a_kernel_belongs_to_the_annotations_around_its_launch():
    findings = a_program().examined()
    rows = findings.annotations.set_index("name")[["calls", "kernel_s", "own_s", "kernel_count"]].T.to_dict("list")
    assert rows == {
        "block": [1, pytest.approx(15e-6), pytest.approx(1e-6), 4],
        "attention": [2, pytest.approx(14e-6), pytest.approx(14e-6), 3],
        # Kernels of autograd's thread belong to its own annotations first, then to those of the main thread.
        "backward": [1, pytest.approx(80e-6), pytest.approx(80e-6), 2],
        "on autograd's own thread": [1, pytest.approx(32e-6), pytest.approx(32e-6), 1],
    }
    assert next(iter(rows)) == "backward"


@pytest.mark.parametrize(("name", "at"), [("Optimizer.step#SGD.step", 80), ("lmbench.step:{}", 0)])
def test_operators_outside_of_the_clocked_steps_count_in_no_mean_per_step(name, at):
    trace = HandWritten()
    trace.metadata["steps"] = 3
    for number, lasts in enumerate((64, 2, 6)):
        trace.range(name.format(number), 100 * number + at, 100 - at)
        if name.startswith("lmbench"):
            trace.phase("forward", 100 * number, 70)
        trace.op("aten::mm", 100 * number, lasts)
    findings = trace.examined()
    (row,) = findings.operators[["self_s", "call_count", "mean_s"]].to_dict("records")
    assert row == {"self_s": pytest.approx(4e-6), "call_count": 1, "mean_s": pytest.approx(4e-6)}
    assert host_times(findings.graph).operators_s.sum() == pytest.approx(row["self_s"])


def test_inside_attention_are_four_parts_with_both_ratios():
    findings = examined("small_fp32_inference")
    ((phase, times),) = findings.attention.items()
    parts = findings.work.seconds("part", phase)
    assert times.softmax_s == parts["softmax"]
    assert times.softmax_matmul_time_ratio == pytest.approx(parts["softmax"] / times.matmul_s)
    assert times.softmax_matmul_flop_ratio == pytest.approx(5 / (4 * 64))
    rows = findings.work.rows.assign(phase="backward")
    backward = attention_times(Work(rows, 1), Model(d_model=1280, num_heads=20))["backward"]
    assert backward.softmax_matmul_flop_ratio == pytest.approx(4 / (8 * 64))
    # A softmax that is fused with another part has no ratio.
    assert examined("small_bf16_compiled").attention == {}
