"""The timeline of one step as a chart: its spans are the trace's kernels; in a browser it fits and zooms."""

from __future__ import annotations

import gzip
import json
import shutil

import pandas as pd
import pytest
from browser import look, needs_browser, operate
from paths import TRACES

from lmbench.kernels import step_chart as module
from lmbench.kernels.findings import examine_run
from lmbench.kernels.step_chart import step_chart
from lmbench.kernels.step_timeline import TIMELINE_FILE, read_timeline
from lmbench.records.codec import DamagedRecord
from lmbench.report.answer import Answer
from lmbench.report.render import render
from lmbench.report.timeline import joined


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    shutil.copytree(TRACES / "small_bf16_compiled", folder)
    examine_run(folder)
    return folder


@pytest.fixture(scope="module")
def step(folder):
    return read_timeline(folder)


def spans_of(chart):
    """Host's phases and launches, the device's phases, parts and kernels."""
    return [layer["data"]["values"] for layer in chart.spec["layer"][:5]]


def test_the_file_has_the_kernels_of_a_step_and_those_before_it(step, folder):
    own = [kernel for kernel in step.kernels if kernel.launch_ns is not None]
    assert (len(own), len(step.kernels)) == (759, 765)
    assert sum(kernel.duration_ns for kernel in own) / 1e9 == pytest.approx(6.713e-3, rel=0.01)
    assert step.end_ns == max(kernel.start_ns + kernel.duration_ns for kernel in step.kernels)
    assert all(0 <= kernel.launch_ns <= kernel.start_ns + 1_000 for kernel in own if kernel.launch_ns is not None)
    assert (folder / TIMELINE_FILE).stat().st_size < 40_000


def test_rows_have_every_kernel_with_its_launch_and_phases_go_on_while_the_device_waits(step):
    _, launches, phases, parts, kernels = spans_of(step_chart("run", step))
    assert (len(launches), len(kernels)) == (759, 765)
    assert {round(span["start"] * 1e6) for span in kernels} == {max(kernel.start_ns, 0) for kernel in step.kernels}
    longest = max(kernel.duration_ns for kernel in step.kernels)
    assert kernels[0]["took"] == f"{longest / 1e3:,.1f} us"
    busy_ms = sum(span["end"] - span["start"] for span in kernels)
    assert sum(span["end"] - span["start"] for span in phases) >= busy_ms > 0
    assert len(phases) < len(parts) <= len(kernels)


def test_of_too_many_kernels_the_longest_are_drawn(step, monkeypatch):
    monkeypatch.setattr(module, "MAX_KERNELS", 10)
    chart = step_chart("run", step)
    spans = spans_of(chart)[4]
    assert len(spans) == 10
    longest_ns = max(kernel.duration_ns for kernel in step.kernels)
    assert max(span["end"] - span["start"] for span in spans) == pytest.approx(longest_ns / 1e6)
    assert "shorter ones are left out" in chart.caption


def test_spans_that_share_their_keys_are_one_up_to_a_gap():
    spans = pd.DataFrame({"part": [*"aaab"], "start": [0, 2, 9, 10], "end": [1, 3, 10, 11]})
    assert joined(spans, ["part"], 1).values.tolist() == [["a", 0, 3], ["a", 9, 10], ["b", 10, 11]]


KERNEL = [0, 900, "a", "gemm", "ffn", "forward", 0, 3]
TIMELINE = {"schema_version": 2, "end_ns": 4_000, "host_phases": [["forward", 0, 4_000]], "kernels": [KERNEL]}


@pytest.mark.parametrize(
    "change",
    [{"end_ns": 0}, {"end_ns": 1e300}, {"host_phases": None}, {"kernels": []}, {"kernels": [["x", *KERNEL[1:]]]},
     {"kernels": [KERNEL[:5]]}, {"schema_version": 99}],
    ids=str,
)  # fmt: skip
def test_a_timeline_with_values_that_do_not_fit_is_refused(change, tmp_path):
    path = tmp_path / TIMELINE_FILE
    path.write_bytes(gzip.compress(json.dumps(TIMELINE).encode()))
    assert len(read_timeline(tmp_path).kernels) == 1
    for content in (gzip.compress(json.dumps(TIMELINE | change).encode()), b"", b"no gzip", b"\x1f\x8b torn"):
        path.write_bytes(content)
        with pytest.raises(DamagedRecord):
            read_timeline(tmp_path)


@needs_browser
@pytest.mark.parametrize("width", [500, 1280])
def test_in_a_browser_it_fits_and_zooms(step, tmp_path, width):
    page = tmp_path / "page.html"
    page.write_text(render(Answer(charts=lambda: [step_chart("<script>alert(1)</script>", step)]), "html"))
    assert "<script>alert" not in page.read_text()
    seen = look(page, width)
    assert (seen["requests"], seen["scroll_width"]) == ([], seen["client_width"])
    pictures = operate(page, width, """
        while (!page.querySelector(".vega-controls")) await wait();
        const picture = async () => {
          for (let i = 0; i < 10; i++) await wait();
          return page.querySelector("canvas.marks").toDataURL();
        };
        const before = await picture();
        page.querySelector(".vega-controls button").click();
        const zoomed = await picture();
        page.querySelector(".vega").dispatchEvent(new view.KeyboardEvent("keydown", {key: "0"}));
        return [before, zoomed, await picture()];
    """)  # fmt: skip
    assert pictures[0] == pictures[2] != pictures[1]
