"""Kernel time by the user's own annotations, against sums made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_events import AUTOGRAD, HandWritten

from lmbench.kernels.answer import answer_of
from lmbench.kernels.findings import examine, summarize
from lmbench.report.render import render


def annotate(trace: HandWritten, name: str, ts: float, dur: float, tid: int | None = None) -> None:
    trace.add("user_annotation", name, ts, dur, **({} if tid is None else {"tid": tid}))


def a_program() -> HandWritten:
    """Kernels of 1, 2, 4, ... us, so that every sum tells what is in it."""
    trace = HandWritten()
    annotate(trace, "ProfilerStep#3", 0, 1000)
    annotate(trace, "block", 0, 200)
    annotate(trace, "attention", 10, 50)
    annotate(trace, "attention", 70, 50)
    # Recursion: within its like.
    annotate(trace, "attention", 80, 20)
    annotate(trace, "backward", 300, 300)
    annotate(trace, "on autograd's own thread", 400, 50, AUTOGRAD)
    annotate(trace, "nccl:all_reduce", 500, 50)
    launches = [
        (5, None),
        (20, None),
        (75, None),
        (90, None),
        (310, AUTOGRAD),
        (410, AUTOGRAD),
        (510, None),
        (700, None),
    ]
    for number, (at, thread) in enumerate(launches):
        trace.launch(number, at, 2, **({} if thread is None else {"tid": thread}))
        trace.kernel(number, "sgemm", 1000 + 300 * number, 2.0**number)
    return trace


def test_a_kernel_belongs_to_the_annotations_around_its_launch(tmp_path: Path) -> None:
    found = examine(a_program().write(tmp_path / "t.json"))
    rows = {row.name: (row.calls, row.kernel_s * 1e6, row.own_s * 1e6, row.instances) for row in found.annotations}
    assert rows == {
        "block": (1, pytest.approx(1 + 2 + 4 + 8), pytest.approx(1), 4),
        "attention": (2, pytest.approx(2 + 4 + 8), pytest.approx(2 + 4 + 8), 3),
        # Autograd's thread works while the main one waits; its own annotations come first.
        "backward": (1, pytest.approx(16 + 64), pytest.approx(16 + 64), 2),
        "on autograd's own thread": (1, pytest.approx(32), pytest.approx(32), 1),
    }
    assert next(iter(rows)) == "backward"
    assert found.no_annotation_s == pytest.approx(128e-6)
    assert summarize(found).annotations[0].kernel_s == pytest.approx(80e-6)
    text = render(answer_of(found, 2), "markdown")
    for words in ("Kernel time by annotation", "| backward ", "2 more annotations", "in no annotation"):
        assert words in text


def test_what_has_no_launch_belongs_to_the_annotation_drawn_around_it_on_its_stream(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.add("gpu_user_annotation", "decode", 0, 100, 7, stream=7)
    trace.add("gpu_user_annotation", "elsewhere", 0, 100, 8, stream=8)
    trace.add("gpu_user_annotation", "layer", 40, 20, 7, stream=7)
    for at in (10, 45, 200):
        trace.kernel(None, "sgemm", at, 10)
    found = examine(trace.write(tmp_path / "t.json"))
    assert [(row.name, row.instances) for row in found.annotations] == [("decode", 2), ("layer", 1)]
    assert found.no_annotation_s == pytest.approx(10e-6)


def test_without_annotations_there_is_no_table_of_them(tmp_path: Path) -> None:
    trace = HandWritten()
    annotate(trace, "ProfilerStep#0", 0, 100)
    trace.phase("forward", 0, 100)
    trace.module("blocks.0", 0, 100)
    trace.launch(1, 5)
    trace.kernel(1, "sgemm", 20, 10)
    found = examine(trace.write(tmp_path / "t.json"))
    assert found.annotations == []
    assert "annotations" not in {table.name for table in answer_of(found).tables}
