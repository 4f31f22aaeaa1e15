"""The chart of a history: its sums are those of the replay, in a page and a picture."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from planted_memory import MIB, Allocator, planted_run, write, write_recording

from lmbench.memory.blocks import by_category, held_at
from lmbench.memory.findings import examine
from lmbench.memory.timeline import memory_chart


def planted(folder, max_entries=None):
    """The path of a planted history with lmbench's notes."""
    return write_recording(folder, planted_run(max_entries), max_entries=max_entries or 1_000_000)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    return planted(tmp_path_factory.mktemp("snapshots") / "full")


def test_every_column_sums_up_to_what_was_allocated(snapshot):
    """There are fewer entries than columns, so that each entry has a column."""
    findings = examine(snapshot)
    spec = memory_chart("x", findings).spec
    rows, areas, phases = spec["data"]["values"], spec["layer"][0], spec["layer"][-1]["data"]["values"]
    held = [sum(row[name] for name in areas["transform"][0]["fold"]) * 2**30 for row in rows[:-1]]
    assert held == pytest.approx(findings.played.entries["allocated_bytes"].tolist())
    assert (phases[0]["name"], phases[0]["start"]) == ("forward", 0)


def test_a_long_history_keeps_its_peak_in_few_columns(tmp_path):
    memory = Allocator()
    for number in range(2000):
        address = memory.alloc((200 if number == 1234 else 1) * MIB)
        memory.free(address)
    rows = memory_chart("x", examine(write(tmp_path / "s.pickle", memory))).spec["data"]["values"]
    assert (len(rows), max(row["allocated"] for row in rows) * 1024) == (481, 200)


def test_names_from_a_hostile_file_are_text(tmp_path, printed):
    memory = Allocator()
    memory.mark("<script>alert(1)</script>", "START")
    for _ in range(50):
        memory.alloc(MIB, (('"><img src=x onerror=alert(1)>', "<b>.py", 3),))
    memory.mark("<script>alert(1)</script>", "END")
    path, page, picture = write(tmp_path / "s.pickle", memory), tmp_path / "page.html", tmp_path / "s.svg"
    for target in (page, picture):
        printed("memory", path, "--output", target)
    assert not re.search("<script>alert|<img src=x", page.read_text())
    assert "alert" in "".join(ElementTree.parse(picture).getroot().itertext())


def test_notes_from_before_a_cut_history_are_not_used(tmp_path):
    """Addresses are reused: an activation of the second step has the address of a gradient of the first."""
    full, cut = (examine(planted(tmp_path / name, kept)) for name, kept in (("full", None), ("cut", 36)))
    captions = [memory_chart("x", findings).caption.startswith("Not complete: ") for findings in (full, cut)]
    assert captions == [False, True]
    lost = len(full.played.entries) - 36
    for entry in (1, 20, 35):
        in_full, in_cut = (by_category(held_at(f.blocks, at)) for f, at in ((full, entry + lost), (cut, entry)))
        for name in ("parameters", "optimizer_state", "gradients"):
            assert in_cut.get(name) == in_full.get(name), (name, entry)
