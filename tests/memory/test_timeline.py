"""The timeline of a history: its sums are the replay's; as a chart, in a report's page and as a file."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from browser import look, needs_browser, operate
from msgspec.structs import replace
from paths import RUNS
from planted_memory import MIB, Allocator, notes_of, planted_run, write

from lmbench.cli import main
from lmbench.memory.findings import examine
from lmbench.memory.timeline import (
    TIMELINE_FILE,
    examine_run,
    memory_chart,
    memory_timeline,
    read_timeline,
)
from lmbench.records.codec import as_dict, write_packed
from lmbench.records.measured import MemoryHistoryRecord

H200 = json.loads((RUNS / "h200_run.json").read_text())


def remembered(folder, max_entries=None):
    """A run as lmbench leaves it, with a planted history."""
    folder.mkdir()
    step = planted_run(max_entries)
    write(folder / "memory_snapshot.pickle", step.memory)
    (folder / "memory_notes.json").write_bytes(notes_of(step, max_entries=max_entries or 1_000_000))
    record = MemoryHistoryRecord(steps=2, snapshot_file="memory_snapshot.pickle")
    (folder / "run.json").write_text(json.dumps({**H200, "memory_history": as_dict(record)}))
    record, _ = examine_run(folder)
    (folder / "run.json").write_text(json.dumps({**H200, "memory_history": as_dict(record)}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return remembered(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def page(run):
    target = run.parent / "page.html"
    assert main(["memory", str(run), "--output", str(target)]) == 0
    return target


def test_every_column_and_the_blocks_in_it_sum_up_to_what_was_allocated(run):
    """There are fewer entries than columns, so each has one of its own, and few blocks, so none is left out."""
    findings = examine(run)
    timeline = memory_timeline(findings)
    sums = [sum(sizes) for sizes in zip(*timeline.sizes_bytes.values(), strict=True)]
    assert sums == findings.played.entries["allocated_bytes"].tolist()
    assert timeline.peak == findings.peak["entry"]
    assert timeline.bands[0][:2] == ("forward", 0)
    for column, total in enumerate(sums):
        held = [block.size_bytes for block in timeline.blocks if block.first <= column <= block.last]
        assert sum(held) == total


def test_a_long_history_keeps_its_peak_in_few_columns(tmp_path):
    memory = Allocator()
    for number in range(2000):
        address = memory.alloc((200 if number == 1234 else 1) * MIB)
        memory.free(address)
    timeline = memory_timeline(examine(write(tmp_path / "s.pickle", memory)))
    assert len(timeline.time_us) == 480
    (sizes,) = timeline.sizes_bytes.values()
    assert sizes[timeline.peak] == 200 * MIB


def test_names_from_a_hostile_file_are_text(tmp_path):
    memory = Allocator()
    memory.mark("<script>alert(1)</script>", "START")
    for _ in range(50):
        memory.alloc(MIB, (('"><img src=x onerror=alert(1)>', "<b>.py", 3),))
    memory.mark("<script>alert(1)</script>", "END")
    path, page, picture = write(tmp_path / "s.pickle", memory), tmp_path / "page.html", tmp_path / "s.svg"
    for target in (page, picture):
        assert main(["memory", str(path), "--output", str(target)]) == 0
    assert not re.search("<script>alert|<img src=x", page.read_text())
    assert "alert" in "".join(ElementTree.parse(picture).getroot().itertext())


def test_what_lay_at_an_address_before_a_cut_history_says_nothing(tmp_path):
    """Addresses are used again: a gradient of the first step lay where an activation of the second does."""
    full, cut = (
        memory_timeline(examine(remembered(tmp_path / name, kept))) for name, kept in (("full", None), ("cut", 36))
    )
    captions = [memory_chart("run", timeline).caption.startswith("Not complete: ") for timeline in (full, cut)]
    assert captions == [False, True]
    for column, entry in ((1, 45), (20, 64), (35, 79)):
        for name in ("parameters", "optimizer state", "gradients"):
            assert cut.sizes_bytes[name][column] == full.sizes_bytes[name][entry], (name, column)


@pytest.mark.parametrize("damage", ["", "torn", "peak", "blocks"])
def test_the_report_shows_it_or_says_that_it_is_damaged(tmp_path, damage):
    run, target = remembered(tmp_path / "run"), tmp_path / "page.html"
    history = read_timeline(run)
    if damage == "torn":
        (run / TIMELINE_FILE).write_bytes(b"torn")
    elif damage == "peak":
        write_packed(replace(history, peak=10_000), run / TIMELINE_FILE)
    elif damage == "blocks":
        write_packed(replace(history, blocks=[replace(history.blocks[0], category="x")]), run / TIMELINE_FILE)
    assert main(["report", str(run), "--output", str(target)]) == 0
    assert ("cannot be used" if damage else '"optimizer state"') in target.read_text()


@needs_browser
@pytest.mark.parametrize("width", [500, 1280])
def test_in_a_browser_it_fits_and_tells_what_a_block_is(page, width):
    seen = look(page, width)
    assert seen["requests"] == []
    assert seen["scroll_width"] <= seen["client_width"] <= width
    legends, size, told, is_read = operate(page, width, """
        while (!page.querySelector(".vega[data-rows]")) await wait();
        const marks = page.querySelector("svg.marks");
        const block = [...marks.querySelectorAll("path")].find(path => path.__data__?.datum?.part === "blocks.1.ffn");
        const {x, y} = block.getBoundingClientRect();
        block.dispatchEvent(new view.PointerEvent("pointermove", {bubbles: true, clientX: x + 1, clientY: y + 1}));
        await wait();
        return [
          [...marks.querySelectorAll(".role-legend")].map(legend => legend.textContent),
          view.getComputedStyle(marks.querySelector("text")).fontSize,
          page.querySelector("#vg-tooltip-element").textContent,
          [...page.querySelectorAll("caption div")].every(text => text.getBoundingClientRect().right < view.innerWidth),
        ];
    """)  # fmt: skip
    assert re.match("parametersoptimizer state.* forwardbackwardoptimizer", " ".join(legends))
    assert (float(size.removesuffix("px")) >= 10, is_read) == (True, True)
    assert re.search("MiB.*blocks.1.ffn", told, re.DOTALL)
