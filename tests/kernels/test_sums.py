"""Kernel time by the user's own annotations and inside attention, against sums by hand."""

from __future__ import annotations

import pytest
from tables import cases
from trace_events import examined, planted

from lmbench.kernels.sums import Work, attention_times
from lmbench.records.run import Model

PLANTED = planted("""
# Kernels of 1, 2, 4, ... us, so that every sum tells which kernels are in it; thread 101 is autograd's.
program:
- [range, ProfilerStep#3, 0, 1000]
- [range, block, 0, 200]
- [launched, 5, sgemm, 1000, 1, {lasts: 2}]
- [range, attention, 10, 50]
- [launched, 20, sgemm, 1300, 2, {lasts: 2}]
- [range, attention, 70, 50]
- [launched, 75, sgemm, 1600, 4, {lasts: 2}]
# A recursive annotation, within one of the same name.
- [range, attention, 80, 20]
- [launched, 90, sgemm, 1900, 8, {lasts: 2}]
- [range, backward, 300, 300]
- [launched, 310, sgemm, 2200, 16, {lasts: 2, tid: 101}]
- [range, on autograd's own thread, 400, 50, 101]
- [launched, 410, sgemm, 2500, 32, {lasts: 2, tid: 101}]
- [range, nccl:all_reduce, 500, 50]
- [launched, 510, sgemm, 2800, 64, {lasts: 2}]
- [launched, 700, sgemm, 3100, 128, {lasts: 2}]
# Operators of 64, 2 and 6 us, of which the first is in no whole step.
foreign_steps:
- &first [op, aten::mm, 0, 64]
- [range, Optimizer.step#SGD.step, 80, 20]
- &second [op, aten::mm, 100, 2]
- [range, Optimizer.step#SGD.step, 180, 20]
- &third [op, aten::mm, 200, 6]
- [range, Optimizer.step#SGD.step, 280, 20]
own_steps:
- *first
- [step, 0, 0, 100]
- [phase, forward, 0, 70]
- *second
- [step, 1, 100, 100]
- [phase, forward, 100, 70]
- *third
- [step, 2, 200, 100]
- [phase, forward, 200, 70]
""")


def test_a_kernel_belongs_to_the_annotations_around_its_launch():
    findings = PLANTED["program"].examined()
    rows = findings.annotations.set_index("name")[["calls", "kernel_s", "own_s", "kernel_count"]].T.to_dict("list")
    assert rows == {
        "block": [1, pytest.approx(15e-6), pytest.approx(1e-6), 4],
        "attention": [2, pytest.approx(14e-6), pytest.approx(14e-6), 3],
        # Kernels of autograd's thread belong to its own annotations first, then to those of the main thread.
        "backward": [1, pytest.approx(80e-6), pytest.approx(80e-6), 2],
        "on autograd's own thread": [1, pytest.approx(32e-6), pytest.approx(32e-6), 1],
    }
    assert next(iter(rows)) == "backward"


@cases("name", "foreign_steps", "own_steps")
def test_operators_outside_of_the_clocked_steps_count_in_no_mean_per_step(name):
    PLANTED[name].metadata["steps"] = 3
    findings = PLANTED[name].examined()
    (row,) = findings.operators[["self_s", "call_count", "mean_s"]].to_dict("records")
    assert row == {"self_s": pytest.approx(4e-6), "call_count": 1, "mean_s": pytest.approx(4e-6)}


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
