"""Costs of PyTorch's and Lightning's defaults: compilation, the SIGTERM check, copies of gradients."""

from __future__ import annotations

from tables import cases, texts_of
from trace_events import HandWritten, examined, planted

from lmbench.kernels.answer import kernels_answer

NOTE = {"Collective name": "broadcast", "dtype": "Long", "In msg nelems": 1}
CHECK = "Lightning's SIGTERM check synchronizes each batch: training_epoch_loop.py, {} ms"


def costs(findings):
    """What the answer says of costs."""
    return texts_of(kernels_answer(findings).headline, "cost")


def checked(note=NOTE, then="aten::item", at=100, steps=2):
    """A trace of two steps, in `steps` of which a broadcast and an operator run; forward begins 1 ms into the step."""
    trace = HandWritten()
    for step in range(2):
        begin = 5_000 * step
        trace.step(step, begin, 5_000)
        trace.phase("forward", begin + 1_000, 3_000)
        trace.launched(begin + 1_010, "sgemm", begin + 1_020, 2_000)
        if step < steps:
            trace.op("c10d::broadcast_", begin + at, 200)
            trace.op("record_param_comms", begin + at + 10, 150, **note)
            trace.op(then, begin + at + 250, 550)
            trace.op("aten::_local_scalar_dense", begin + at + 260, 500)
    return trace


@cases(
    """
- [changes, is_told]
- [{}, true]
- [{note: {}}, true]
- [{note: {Collective name: broadcast, dtype: Long, In msg nelems: [1, 2]}}, false]
- [{then: 'aten::add'}, false]
- [{at: 1500}, false]
- [{steps: 1}, false]
""",
    ids=str,
)
def test_the_sigterm_check_is_a_read_broadcast_of_one_element_in_each_step_outside_of_the_phases(changes, is_told):
    assert costs(checked(**changes).examined()) == [CHECK.format("0.800")] * is_told


#: Steps that end with the optimizer's are whole from its first one on.
OWN_LOOP = """
own loop:
- [op, &copy torch.distributed.ddp.reducer::copy_bucket_to_grad, 0, 20]
- [launched, 2, copy, 30, 1000]
- [op, c10d::broadcast_, 1100, 200]
- [op, aten::item, 1350, 550]
- [range, &step Optimizer.step#SGD.step, 3000, 1000]
- [op, *copy, 5000, 20]
- [launched, 5002, copy, 5030, 1000]
- [op, c10d::broadcast_, 6100, 200]
- [op, aten::item, 6350, 550]
- [range, *step, 8000, 1000]
"""


def test_a_cost_before_the_first_whole_step_is_in_no_mean_per_step():
    assert costs(planted(OWN_LOOP)["own loop"].examined()) == [
        CHECK.format("0.800"),
        "gradients are copied out of buckets: 1.000 ms; gradient_as_bucket_view=True spares it",
    ]


def test_a_real_rank_has_lightnings_check_and_copies_of_gradients():
    """On two H200s by lmbench's `ddp`, in Lightning's default, which copies gradients out of their buckets."""
    assert costs(examined("two_gpus")) == [
        CHECK.format("0.138"),
        "gradients are copied out of buckets: 0.130 ms; gradient_as_bucket_view=True spares it",
    ]


@cases("""
cat | name
cpu_op | _compile.compile_inner (dynamo_timed)
user_annotation | entire_frame_compile (dynamo_timed)
python_function | torch/_dynamo/convert_frame.py(1633): _compile
""")
def test_compilation_in_a_trace_is_told_and_is_the_cause_of_its_wait(cat, name):
    trace = HandWritten()
    trace.range("ProfilerStep#3", 0, 969_000)
    trace.launched(10, "sgemm", 20, 1_000)
    trace.add(cat, name, 20_000, 676_000)
    trace.op("aten::mm", 700_000, 30)
    trace.launched(700_010, "sgemm", 700_020, 268_000)
    headline = kernels_answer(trace.examined()).headline
    assert texts_of(headline, "compiling") == ["676.00 of 969.00 ms: warm up before recording"]
    assert texts_of(headline, "idle")[0].startswith("676.00 of 700.00 ms in compiling")
    assert "ms in compiling; warm up before recording" in texts_of(headline, "outside")[0]
