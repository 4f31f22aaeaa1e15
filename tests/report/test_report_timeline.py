"""The timeline of one step in the page: a static picture, which a script makes one that can be zoomed and panned."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, look, needs_browser, operate
from paths import RUNS, TRACES

from lmbench.cli import main
from lmbench.kernels.findings import examine_run
from lmbench.kernels.step_picture import MAX_KERNELS, MAX_TIMELINES, ROWS, step_picture
from lmbench.kernels.step_timeline import (
    TIMELINE_FILE,
    StepTimeline,
    TimelineKernels,
    read_timeline,
    write_timeline,
)
from lmbench.records.codec import as_dict

H200 = json.loads((RUNS / "h200_run.json").read_text())


def profiled_run(folder: Path, trace: str = "small_bf16_compiled") -> Path:
    """A run as lmbench leaves it, with a real trace's summary and timeline."""
    shutil.copytree(TRACES / trace, folder)
    own = json.loads((folder / "run.json").read_text())
    kernels, _ = examine_run(folder)
    run = {**H200, **{name: own[name] for name in ("mode", "model", "precision", "compile") if name in own}}
    record = {**run, "is_profiled": True, "kernels": as_dict(kernels)}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def page_of(tmp_path: Path, *runs: Path) -> Path:
    page = tmp_path / "page.html"
    assert main(["report", "--view", "kernels", *map(str, runs), "--html", str(page)]) == 0
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return page_of(
        folder, *(profiled_run(folder / name, name) for name in ("small_bf16_compiled", "small_fp32_inference"))
    )


def data_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(unescape(found)) for found in re.findall(r'data-timeline="([^"]*)"', text)]


def test_the_page_holds_the_steps_kernels_and_nothing_points_outside(page: Path) -> None:
    text = page.read_text()
    counts = [sum(kernel[6] * kernel[9] for kernel in data["kernels"]) for data in data_of(text)]
    assert sorted(counts) == [551, 759]
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "://" not in without_names
    assert re.search(r"<link|@import|\ssrc=", without_names) is None


#: On every page, whatever it shows.
SORTS = (files("lmbench.report") / "table.js").read_text()


def test_only_the_two_scripts_may_run(page: Path) -> None:
    text = page.read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    inline = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert inline == [(files("lmbench.kernels") / "timeline.js").read_text(), SORTS]
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inline]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"


def test_without_a_script_there_is_a_picture_of_the_whole_step(page: Path) -> None:
    pictures = re.findall(r'<svg class="timeline-picture".*?</details>', page.read_text(), flags=re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        assert all(f">{row}</text>" in picture for row in ROWS)
        assert 100 < picture.count("<rect") < 2_000
        ends = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)%" y="\d+" width="([\d.]+)%"', picture)]
        assert max(ends) <= 100.1
        assert "forward</text>" in picture


def test_the_picture_is_filled_as_much_as_the_device_was_busy(page: Path, tmp_path: Path) -> None:
    timeline = read_timeline(profiled_run(tmp_path / "run"))
    kernels = timeline.kernels
    busy = sum(d for d, own in zip(kernels.duration_ns, kernels.is_own, strict=True) if own) / timeline.end_ns
    svg = step_picture("one", timeline).svg
    row = ROWS.index("device: kernels by kind")
    bars = re.findall(rf'y="{38 * row + 15}" width="([\d.]+)%" height="20" fill="[^"]*"(?: opacity="([\d.]+)")?', svg)
    filled = sum(float(width) / 100 * float(opacity or 1) for width, opacity in bars)
    assert filled == pytest.approx(busy, rel=0.1)


def huge(count: int) -> StepTimeline:
    """A timeline of very many short kernels."""
    starts = [1_000 * index for index in range(count)]
    kinds = [index % 3 for index in range(count)]
    columns = TimelineKernels(
        start_ns=starts, duration_ns=[900] * count, name=kinds, kind=kinds, part=kinds, phase=[0] * count,
        stream=[7] * count, launch_ns=[*starts], launch_duration_ns=[300] * count, is_own=[1] * count,
    )  # fmt: skip
    return StepTimeline(
        schema_version=1, end_ns=1_000 * count, host_phases=[("forward", 0, 1_000 * count)], names=["a", "b", "c"],
        kinds=["gemm", "softmax", "norm"], parts=["ffn", "softmax", "norm"], phases=["forward"], kernels=columns,
    )  # fmt: skip


def test_a_step_of_very_many_kernels_stays_small() -> None:
    picture = step_picture("many", huge(200_000))
    kernels = json.loads(picture.data)["kernels"]
    assert len(kernels) <= MAX_KERNELS
    assert sum(kernel[9] for kernel in kernels) == 200_000
    assert len(picture.data) + len(picture.svg) < 600_000
    assert "joined" in picture.note


def test_a_page_of_many_runs_stays_under_a_few_megabytes(tmp_path: Path) -> None:
    run = profiled_run(tmp_path / "runs" / "r0")
    for index in range(12):
        copy = tmp_path / "runs" / f"r{index + 1}"
        shutil.copytree(run, copy)
        record = json.loads((copy / "run.json").read_text())
        record["data"] = {**record["data"], "context_length": 16 * (index + 1)}
        (copy / "run.json").write_text(json.dumps(record))
        write_timeline(huge(50_000), copy)
    page = page_of(tmp_path, tmp_path / "runs")
    assert page.stat().st_size < 5_000_000
    assert "more timelines are left out" in page.read_text()


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b'{"schema_version": 1}'), gzip.compress(b'{"schema_version": 1, "kernels": 3}')],
    ids=["empty", "no gzip", "no kernels", "a number of kernels"],
)
def test_a_timeline_that_cannot_be_read_is_left_out(content: bytes, tmp_path: Path) -> None:
    run = profiled_run(tmp_path / "run")
    (run / TIMELINE_FILE).write_bytes(content)
    text = page_of(tmp_path, run).read_text()
    assert "data-timeline" not in text
    assert re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL) == [SORTS]
    assert "1 more timeline is not shown, as the file cannot be used: run (" in text
    assert "left out" not in text


def test_only_what_had_no_room_is_counted_as_left_out(tmp_path: Path) -> None:
    run = profiled_run(tmp_path / "runs" / "r0")
    for index in range(MAX_TIMELINES + 3):
        copy = tmp_path / "runs" / f"copy{index:02d}"
        shutil.copytree(run, copy)
        record = json.loads((copy / "run.json").read_text())
        record["data"] = {**record["data"], "context_length": 16 * (index + 1)}
        (copy / "run.json").write_text(json.dumps(record))
        if index in (0, MAX_TIMELINES + 2):
            (copy / TIMELINE_FILE).write_bytes(b"torn")
    text = page_of(tmp_path, tmp_path / "runs").read_text()
    assert text.count("data-timeline") == MAX_TIMELINES
    assert "2 more timelines are left out: the page would become too large." in text
    assert re.search(r"2 more timelines are not shown, as the file cannot be used: copy00 \(.*\), copy10 \(", text)


def two_of_a_part(gap_ns: int) -> StepTimeline:
    """Two kernels of the same part, phase and kind with that much between them."""
    timeline = huge(2)
    timeline.end_ns, timeline.host_phases = 300_000, [("forward", 0, 10_000)]
    columns = timeline.kernels
    columns.start_ns, columns.duration_ns = [1_000, 101_000 + gap_ns], [100_000, 100_000]
    columns.name, columns.kind, columns.part, columns.launch_ns = [0, 0], [0, 0], [0, 0], [0, 500]
    return timeline


def bars_of(svg: str, row: str) -> list[tuple[float, float]]:
    """Left and width of a row's bars in percent."""
    found = re.findall(rf'<rect x="([\d.]+)%" y="{38 * ROWS.index(row) + 15}" width="([\d.]+)%"', svg)
    return [(float(x), float(width)) for x, width in found]


def test_idle_between_kernels_of_a_part_is_no_bar() -> None:
    near, far = (step_picture("one", two_of_a_part(gap_ns)).svg for gap_ns in (1_000, 50_000))
    assert len(bars_of(near, "device: parts of the model")) == 1
    (left, width), (second, _) = bars_of(far, "device: parts of the model")
    assert second - left - width == pytest.approx(50 / 3, abs=0.1)
    # A phase goes on while the device waits within it.
    assert len(bars_of(far, "device: phases")) == 1


def test_every_colour_of_every_row_is_explained(page: Path) -> None:
    text = page.read_text()
    for drawn, legend in zip(data_of(text), re.findall(r'<dl class="timeline-legend">(.*?)</dl>', text), strict=True):
        told = {
            row: set(re.findall(r"</i>([^<]+)</span>", names))
            for row, names in re.findall(r"<dt>(\w+)</dt><dd>(.*?)</dd>", legend)
        }
        parts = {"several" if "+" in name else name for name, _ in drawn["parts"]}
        assert told["parts"] == parts
        assert told["kinds"] == {name for name, _ in drawn["kinds"]}
        assert told["phases"] == {name for name, _ in drawn["phases"]} | {name for name, _, _ in drawn["host"]}


def test_a_kernels_name_is_no_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(1)>"
    run = profiled_run(tmp_path / "run")
    timeline = read_timeline(run)
    timeline.names, timeline.kinds = [evil] * len(timeline.names), [evil] * len(timeline.kinds)
    timeline.parts, timeline.phases = [evil] * len(timeline.parts), [evil] * len(timeline.phases)
    timeline.host_phases = [(evil, 0, 10_000_000)]
    write_timeline(timeline, run)
    page = page_of(tmp_path, run)
    text = page.read_text()
    assert text.count("<script") == 2
    assert "<img" not in text
    if CHROMIUM is not None:
        found = operate(
            page, 1280, "return page.querySelectorAll('img').length + page.querySelectorAll('script').length"
        )
        assert found == 2


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_it_fits_and_asks_for_nothing(page: Path, width: int) -> None:
    seen = look(page, width)
    assert seen["requests"] == []
    assert seen["scroll_width"] <= seen["client_width"] <= width
    assert seen["smallest_text_px"] >= 8.5


# What a person sees of an open timeline: its bars by row, the times on its axis, the line about a kernel.
_SEE = """
  const box = page.querySelector(".timeline"), svg = box.querySelector("svg");
  while (!svg.querySelector("[data-bar]")) await wait();
  const see = () => ({
    axis: [...svg.querySelectorAll("text.row")].slice(5).map(t => t.textContent),
    kernels: [...svg.querySelectorAll("rect")].filter(r => r.getAttribute("y") == 167).length,
    labels: [...svg.querySelectorAll("text.on")].map(t => t.textContent),
    info: box.querySelector(".timeline-info").textContent, hidden: box.querySelector(".timeline-controls").hidden,
    over: Math.max(...[...svg.querySelectorAll("rect")].map(r => r.getBoundingClientRect().right))
      - svg.getBoundingClientRect().right,
  });
  const press = async name => { box.querySelector(`[data-action=${name}]`).click(); await wait(); };
  const range = seen => parseFloat(seen.axis[4]) - parseFloat(seen.axis[0]);
"""


@needs_browser
def test_buttons_zoom_and_pan_and_come_back(page: Path) -> None:
    whole, near, later, back = operate(
        page, 1280,
        _SEE + "const a = see(); await press('in'); await press('in'); const b = see(); await press('right');"
        "const c = see(); await press('all'); return [a, b, c, see()];",
    )  # fmt: skip
    assert not whole["hidden"]
    times = [[float(text.split()[0]) for text in seen["axis"]] for seen in (whole, near, later)]
    spans = [axis[4] - axis[0] for axis in times]
    assert spans[1] == pytest.approx(spans[0] / 4, rel=0.02)
    assert times[2][0] == pytest.approx(times[1][0] + spans[1] / 4, rel=0.02)
    assert back["axis"] == whole["axis"]
    assert all(seen["over"] <= 1 for seen in (whole, near, later))


@needs_browser
def test_near_enough_every_kernel_has_its_bar_and_its_name(page: Path) -> None:
    """Zoomed in around the middle: what the page draws there is what its data has there."""
    seen = operate(page, 1280, _SEE + "for (let i = 0; i < 5; i++) await press('in'); return see();")
    (data,) = data_of(page.read_text())[:1]
    assert seen["axis"][4].endswith(" ms") or seen["axis"][4].endswith(" us")
    scale = 10_000 if seen["axis"][4].endswith("ms") else 10
    start, end = (float(seen["axis"][place].split()[0]) * scale for place in (0, 4))
    assert end - start == pytest.approx(data["end"] / 2**5, rel=0.05)
    inside = [k for k in data["kernels"] if k[0] + k[1] >= start and k[0] <= end]
    assert 5 < len(inside) - 2 <= seen["kernels"] <= len(inside)
    names = {data["names"][kernel[2]] for kernel in inside}
    assert names & set(seen["labels"])


@needs_browser
def test_the_script_draws_idle_between_kernels_of_a_part_as_such(tmp_path: Path) -> None:
    for gap_ns, count in ((1_000, 1), (50_000, 2)):
        run = profiled_run(tmp_path / f"run{gap_ns}")
        write_timeline(two_of_a_part(gap_ns), run)
        bars = operate(
            page_of(tmp_path, run), 1280,
            _SEE + "return [...svg.querySelectorAll('rect')].filter(r => r.getAttribute('y') == 129).length;",
        )  # fmt: skip
        assert bars == count


@needs_browser
def test_pointing_at_a_kernel_tells_of_it_and_its_launch(page: Path) -> None:
    info = operate(
        page, 1280,
        _SEE + "for (let i = 0; i < 6; i++) await press('in');"
        "for (const bar of [...svg.querySelectorAll('rect')].filter(r => r.getAttribute('y') == 167)) {"
        "  bar.dispatchEvent(new view.PointerEvent('pointermove', {bubbles: true, pointerId: 1}));"
        "  if (see().info.includes('launched at')) break; }"
        "await wait(); return [see().info, svg.querySelectorAll('.link').length];",
    )  # fmt: skip
    assert re.search(r"us from [\d,.]+ us; \w+, [\w+]+, \w+; launched at [\d,.]+ us", info[0])
    assert info[1] == 1


@needs_browser
def test_keys_wheel_and_drag_move_it_and_the_plain_wheel_is_the_pages(page: Path) -> None:
    spans = operate(
        page, 1280,
        _SEE + "const found = [range(see())];"
        "svg.dispatchEvent(new view.KeyboardEvent('keydown', {key: '+', bubbles: true, cancelable: true}));"
        "await wait(); found.push(range(see()));"
        "const wheel = options => svg.dispatchEvent(new view.WheelEvent('wheel', {bubbles: true, cancelable: true, "
        "clientX: 600, deltaY: 100, ...options}));"
        "const plain = wheel({}); const zoomed = wheel({ctrlKey: true, deltaY: -100}); await wait();"
        "found.push(range(see())); const before = see().axis[0];"
        "const point = (type, x) => svg.dispatchEvent(new view.PointerEvent(type, {bubbles: true, pointerId: 5, "
        "clientX: x})); svg.setPointerCapture = () => {};"
        "point('pointerdown', 600); point('pointermove', 500); point('pointerup', 500);"
        "await wait(); return {found, plain, zoomed, before, after: see().axis[0]};",
    )  # fmt: skip
    first, second, third = spans["found"]
    assert second == pytest.approx(first / 2, rel=0.02)
    assert third < second
    assert (spans["plain"], spans["zoomed"]) == (True, False)
    assert float(spans["after"].split()[0]) > float(spans["before"].split()[0])
