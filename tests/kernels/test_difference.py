"""Two traces side by side: every sum adds up, and each change has its word."""

from __future__ import annotations

import shutil

import pytest
from paths import TRACES
from runs import make_run
from tables import texts_of
from trace_events import HandWritten, planted

from lmbench.kernels.difference import compared, difference_answer
from lmbench.kernels.findings import examine
from lmbench.report.render import render

from conftest import check_golden

EAGER, COMPILED = TRACES / "small_fp32_inference", TRACES / "small_bf16_compiled"


def written(path, kernels, steps=1):
    """The findings of a trace in which each step's forward has these kernels, given with their us."""
    trace = HandWritten()
    for step in range(steps):
        begin = 50_000.0 * step
        trace.step(step, begin, 50_000)
        trace.phase("forward", begin, 50_000)
        for number, (name, duration) in enumerate(kernels.items()):
            trace.launched(begin + 12 + 20 * number, name, begin + 100 + 900 * number, duration)
    return examine(trace.write(path / f"{steps}.json"))


def test_each_change_has_its_word_and_times_are_per_step(tmp_path):
    a = written(tmp_path, {"gone_kernel": 100, "kept": 50, "slower": 30, "faster": 60})
    b = written(tmp_path, {"kept": 50, "slower": 45, "faster": 20, "new_kernel": 10}, steps=3)
    rows = compared(a, b, "short_name").set_index("name")
    assert rows.change.to_dict() == {
        "gone_kernel": "gone", "faster": "shrank", "slower": "grew", "new_kernel": "new", "kept": "",
    }  # fmt: skip
    assert rows.difference_s["slower"] == pytest.approx(15e-6)
    assert rows.b_count["new_kernel"] == pytest.approx(1.0)


def test_the_answer_is_the_golden_file():
    text = render(difference_answer(EAGER, COMPILED), "markdown").replace(str(TRACES), "TRACES")
    check_golden("kernels_difference.md", text)


def test_an_option_that_changed_is_named(tmp_path):
    for name, choice in (("a", False), ("b", True)):
        make_run(tmp_path / name, {"trainer.compile": choice})
        shutil.copy(EAGER / "trace.json.gz", tmp_path / name)
    lines = difference_answer(tmp_path / "a", tmp_path / "b").headline
    assert texts_of(lines, "differs") == ["trainer.compile: false -> true"]


#: The optimizer's collective, and that of the backward.
MOVED = """
a:
- &step [step, 0, 0, 400]
- &backward [phase, backward, 0, 100]
- &optimizer [phase, optimizer, 100, 300]
- [launched, 5, ampere_sgemm_64x64_nn, 10, 100]
- [launched, 120, ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL, 130, 50]
b:
- *step
- *backward
- *optimizer
- [launched, 5, ampere_sgemm_64x64_nn, 10, 101]
- [launched, 20, ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL, 130, 50]
"""


def test_work_that_moves_to_another_phase_is_on_the_first_screen(tmp_path):
    sides = [trace.write(tmp_path / f"{name}.json") for name, trace in planted(MOVED).items()]
    headline = difference_answer(*sides).headline
    assert texts_of(headline, "phases") == ["backward +0.051 ms, optimizer -0.050 ms"]
    assert texts_of(headline, "kinds") == ["gemm +0.001 ms"]
    assert any("of exposed communication" in line.text for line in headline)
