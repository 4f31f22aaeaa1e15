"""The timeline of one step as a chart: its spans are the trace's kernels; in a browser it fits and zooms."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from browser import look, needs_browser, operate
from paths import TRACES

from lmbench.kernels import step_chart as module
from lmbench.kernels.findings import examine_run
from lmbench.kernels.step_chart import step_chart
from lmbench.kernels.step_timeline import StepTimeline, read_timeline
from lmbench.report.answer import Answer, Chart
from lmbench.report.render import render
from lmbench.report.timeline import runs_of


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> StepTimeline:
    folder = tmp_path_factory.mktemp("runs") / "run"
    shutil.copytree(TRACES / "small_bf16_compiled", folder)
    examine_run(folder)
    return read_timeline(folder)


def spans_of(chart: Chart) -> list[list[dict[str, Any]]]:
    """Host's phases and launches, the device's phases, parts and kernels."""
    return [layer["data"]["values"] for layer in chart.spec["layer"][:5]]


def test_the_kernels_row_has_every_kernel_with_its_time_and_a_launch_each(step: StepTimeline) -> None:
    _, launches, _, _, kernels = spans_of(step_chart("run", step))
    assert len(kernels) == len(step.kernels.start_ns)
    assert len(launches) == sum(launch is not None for launch in step.kernels.launch_ns)
    starts = {round(span["start"] * 1e6) for span in kernels}
    assert starts == {max(start, 0) for start in step.kernels.start_ns}
    longest = max(kernels, key=lambda span: span["end"] - span["start"])
    assert longest["took"] == f"{max(step.kernels.duration_ns) / 1e3:,.1f} us"


def test_the_devices_phases_go_on_while_it_waits_and_parts_do_not(step: StepTimeline) -> None:
    _, _, phases, parts, kernels = spans_of(step_chart("run", step))
    busy_ms = sum(span["end"] - span["start"] for span in kernels)
    assert sum(span["end"] - span["start"] for span in phases) >= busy_ms > 0
    assert len(phases) < len(parts) <= len(kernels)


def test_of_too_many_kernels_the_longest_are_drawn(step: StepTimeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KERNELS", 10)
    chart = step_chart("run", step)
    assert len(spans_of(chart)[4]) == 10
    assert max(step.kernels.duration_ns) / 1e6 == pytest.approx(
        max(span["end"] - span["start"] for span in spans_of(chart)[4])
    )
    assert "shorter ones are left out" in chart.caption


def test_spans_that_share_their_keys_are_one_up_to_a_gap() -> None:
    spans = [
        {"part": part, "start": start, "end": start + 1} for part, start in (("a", 0), ("a", 2), ("a", 9), ("b", 10))
    ]
    assert [(span["part"], span["start"], span["end"]) for span in runs_of(spans, ("part",), 1)] == [
        ("a", 0, 3), ("a", 9, 10), ("b", 10, 11),
    ]  # fmt: skip


@needs_browser
@pytest.mark.parametrize("width", [500, 1280])
def test_in_a_browser_it_fits_and_zooms(step: StepTimeline, tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(Answer(charts=[step_chart("<script>alert(1)</script>", step)]), "html"))
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
