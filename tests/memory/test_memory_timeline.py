"""The timeline of a history: in a report's page, in a page of its own, as SVG; its sums are the replay's."""

from __future__ import annotations

import copy
import json
import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from paths import RUNS
from planted_memory import MIB, Allocator, notes_of, planted_run, write

from lmbench.cli import main
from lmbench.memory.history.findings import examine
from lmbench.memory.history.summary import examine_run
from lmbench.memory.timeline import TIMELINE_FILE, memory_timeline, read_timeline, write_timeline
from lmbench.memory.timeline_picture import memory_picture
from lmbench.records.codec import DamagedRecord, as_dict
from lmbench.records.instruments import MemoryHistoryRecord

H200 = json.loads((RUNS / "h200_run.json").read_text())


def remembered(folder: Path, max_entries: int | None = None) -> Path:
    """A run as lmbench leaves it, with a planted history."""
    folder.mkdir()
    step = planted_run(max_entries)
    write(folder / "memory_snapshot.pickle", step.memory)
    (folder / "memory_notes.json").write_bytes(notes_of(step, max_entries=max_entries or 1_000_000))
    record = MemoryHistoryRecord(steps=2, snapshot_file="memory_snapshot.pickle")
    (folder / "run.json").write_text(json.dumps({**H200, "memory_history": as_dict(record)}))
    record, _ = examine_run(folder)
    (folder / "run.json").write_text(json.dumps({**copy.deepcopy(H200), "memory_history": as_dict(record)}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    return remembered(tmp_path_factory.mktemp("runs") / "run")


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'data-memory="([^"]*)"', text)
    data: dict[str, Any] = json.loads(unescape(found))
    return data


def test_every_column_sums_up_to_what_was_allocated(run: Path) -> None:
    found = examine(run)
    timeline = memory_timeline(found)
    sums = [sum(sizes) for sizes in zip(*timeline.sizes_bytes, strict=True)]
    # There are fewer entries than columns: each has one of its own.
    assert sums == found.played.allocated_bytes.tolist()
    assert timeline.peak == found.peak
    assert next((band.name, band.first) for band in timeline.bands) == ("forward", 0)


def test_the_blocks_of_a_column_sum_up_to_it_too(run: Path) -> None:
    """Few blocks: none is too small to be among them."""
    timeline = memory_timeline(examine(run))
    for column in range(len(timeline.time_us)):
        own = sum(block.size_bytes for block in timeline.blocks if block.first <= column <= block.last)
        assert own == sum(sizes[column] for sizes in timeline.sizes_bytes)


def test_a_long_history_keeps_its_peak_in_few_columns(tmp_path: Path) -> None:
    memory = Allocator()
    for number in range(2000):
        address = memory.alloc((200 if number == 1234 else 1) * MIB)
        memory.free(address)
    timeline = memory_timeline(examine(write(tmp_path / "s.pickle", memory)))
    assert len(timeline.time_us) == 480
    assert timeline.sizes_bytes[0][timeline.peak] == 200 * MIB


def test_the_file_comes_back_and_a_damaged_one_is_refused(run: Path, tmp_path: Path) -> None:
    timeline = read_timeline(run)
    write_timeline(timeline, tmp_path)
    assert read_timeline(tmp_path) == timeline
    timeline.sizes_bytes[0].pop()
    write_timeline(timeline, tmp_path)
    with pytest.raises(DamagedRecord):
        read_timeline(tmp_path)
    (tmp_path / TIMELINE_FILE).write_bytes(b"torn")
    with pytest.raises(DamagedRecord):
        read_timeline(tmp_path)


def test_names_from_a_hostile_file_are_text(tmp_path: Path) -> None:
    memory = Allocator()
    memory.mark("<script>alert(1)</script>", "START")
    for _ in range(50):
        memory.alloc(MIB, (('"><img src=x onerror=alert(1)>', "<b>.py", 3),))
    memory.mark("<script>alert(1)</script>", "END")
    path, target = write(tmp_path / "s.pickle", memory), tmp_path / "page.html"
    assert main(["memory", str(path), "--html", str(target), "--svg", str(tmp_path / "s.svg")]) == 0
    text = target.read_text()
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "alert" in (tmp_path / "s.svg").read_text()
    ElementTree.fromstring((tmp_path / "s.svg").read_text())


@pytest.mark.parametrize("max_entries", [None, 44])
def test_a_cut_history_is_drawn_as_one(tmp_path: Path, max_entries: int | None) -> None:
    run = remembered(tmp_path / "run", max_entries)
    picture = memory_picture("run", read_timeline(run))
    is_cut = max_entries is not None
    assert ('class="cut"' in picture.svg) == is_cut
    assert ("Not complete" in picture.warning) == is_cut


def test_what_lay_at_an_address_before_a_cut_history_says_nothing(tmp_path: Path) -> None:
    """Addresses are used again: a gradient of the first step lay where an activation of the second does."""
    whole, cut = (examine(remembered(tmp_path / name, kept)) for name, kept in (("whole", None), ("cut", 36)))
    for column, entry in ((1, 45), (20, 64), (35, 79)):
        timeline = memory_timeline(cut)
        sizes = dict(zip(timeline.categories, timeline.sizes_bytes, strict=True))
        full = memory_timeline(whole)
        expected = dict(zip(full.categories, full.sizes_bytes, strict=True))
        for name in ("parameters", "optimizer_state", "gradients"):
            assert sizes[name][column] == expected[name][entry], (name, column)
