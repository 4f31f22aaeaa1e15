"""Costs of PyTorch's and Lightning's defaults: compilation, the SIGTERM check, copies of gradients."""

from __future__ import annotations

import pytest
from paths import TRACES
from trace_events import HandWritten

from lmbench.kernels.answer import kernels_answer
from lmbench.kernels.findings import examine

NOTE = {"Collective name": "broadcast", "dtype": "Long", "In msg nelems": 1}
CHECK = "Lightning's SIGTERM check synchronizes each batch: training_epoch_loop.py, {} ms"


def words(answer, label):
    return [line.text for line in answer.headline if line.label == label]


def checked(note=NOTE, then="aten::item", at=100, steps=2, inside="forward"):
    """A trace of two steps, in `steps` of which a broadcast and an operator run; forward begins 1 ms into the step."""
    trace = HandWritten()
    for step in range(2):
        begin = 5_000 * step
        trace.step(step, begin, 5_000)
        trace.phase(inside, begin + 1_000, 3_000)
        trace.launched(begin + 1_010, "sgemm", begin + 1_020, 2_000)
        if step < steps:
            trace.op("c10d::broadcast_", begin + at, 200)
            trace.op("record_param_comms", begin + at + 10, 150, **note)
            trace.op(then, begin + at + 250, 550)
            trace.op("aten::_local_scalar_dense", begin + at + 260, 500)
    return trace


@pytest.mark.parametrize(
    ("trace", "texts"),
    [
        (checked(), [CHECK.format("0.800")]),
        # gloo notes no size.
        (checked({}), [CHECK.format("0.800")]),
        (checked({**NOTE, "In msg nelems": [1, 2]}), []),
        (checked(then="aten::add"), []),
        (checked(at=1_500), []),
        (checked(steps=1), []),
    ],
    ids=["nccl", "gloo", "damaged", "not_read", "in_forward", "not_each_step"],
)
def test_the_sigterm_check_is_a_read_broadcast_of_one_element_in_each_step_outside_of_the_phases(
    trace, texts, tmp_path
):
    assert words(kernels_answer(examine(trace.write(tmp_path / "t.json"))), "cost") == texts


def test_a_cost_before_the_first_whole_step_is_in_no_mean_per_step(tmp_path):
    """Steps that end with the optimizer's are whole from its first one on."""
    trace = HandWritten()
    for begin in (0, 5_000, 10_000):
        trace.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", begin, 20)
        trace.launched(begin + 2, "copy", begin + 30, 1_000)
        trace.op("c10d::broadcast_", begin + 1_100, 200)
        trace.op("aten::item", begin + 1_350, 550)
        trace.range("Optimizer.step#SGD.step", begin + 3_000, 1_000)
    assert words(kernels_answer(examine(trace.write(tmp_path / "t.json"))), "cost") == [
        CHECK.format("0.800"),
        "gradients are copied out of buckets: 1.000 ms; gradient_as_bucket_view=True spares it",
    ]


def test_a_real_rank_has_lightnings_check_and_copies_of_gradients():
    """On two H200s by lmbench's `ddp`, in Lightning's default, which copies gradients out of their buckets."""
    assert words(kernels_answer(examine(TRACES / "two_gpus" / "trace.json.gz")), "cost") == [
        CHECK.format("0.138"),
        "gradients are copied out of buckets: 0.130 ms; gradient_as_bucket_view=True spares it",
    ]


@pytest.mark.parametrize(
    ("cat", "name"),
    [
        ("cpu_op", "_compile.compile_inner (dynamo_timed)"),
        ("user_annotation", "entire_frame_compile (dynamo_timed)"),
        ("python_function", "torch/_dynamo/convert_frame.py(1633): _compile"),
    ],
)
def test_compilation_in_a_trace_is_told_and_is_the_cause_of_its_wait(cat, name, tmp_path):
    trace = HandWritten()
    trace.range("ProfilerStep#3", 0, 969_000)
    trace.launched(10, "sgemm", 20, 1_000)
    trace.add(cat, name, 20_000, 676_000)
    trace.op("aten::mm", 700_000, 30)
    trace.launched(700_010, "sgemm", 700_020, 268_000)
    path = trace.write(tmp_path / "t.json")
    answer = kernels_answer(examine(path))
    assert words(answer, "compiling") == ["676.00 of 969.00 ms: warm up before recording"]
    assert words(answer, "idle")[0].startswith("676.00 of 700.00 ms in compiling")
    assert "ms in compiling; warm up before recording" in words(answer, "outside")[0]
