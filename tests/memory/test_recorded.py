"""Histories that an H200 recorded (tests/data/memory), against the allocator's own counters, the counts of the recorded
process, and a plain count."""

from __future__ import annotations

import pickle
import re
from itertools import accumulate

import pytest
from recorded_memory import foreign, unpack
from tables import cases

from lmbench.memory.findings import examine

from conftest import check_golden

SHARE = {"alloc": 1, "free_requested": -1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def findings(run):
    return examine(run)


@pytest.fixture(scope="module")
def plain(run):
    """The snapshot, read without lmbench's reader."""
    return pickle.loads((run / "memory_snapshot.pickle").read_bytes())


def held_over_time(snapshot):
    """The time of each entry and the requested bytes held after it, counted back from the blocks at the end."""
    entries = snapshot["device_traces"][0]
    changes = [SHARE.get(entry["action"], 0) * entry["size"] for entry in entries]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    at_end = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    held = list(accumulate(changes, initial=at_end - sum(changes)))[1:]
    return [(entry["time_us"], size) for entry, size in zip(entries, held, strict=True)]


def test_the_peak_agrees_with_the_allocator_and_a_plain_count(findings, plain):
    highest, peaks = findings.played.entries.max(), findings.notes.peaks
    assert highest["requested_bytes"] == peaks.requested_bytes == max(size for _, size in held_over_time(plain))
    assert highest["reserved_bytes"] == peaks.reserved_bytes
    assert findings.cuts == []
    assert [guard.status for guard in findings.guards] == ["pass", "pass", "pass"]


def test_saved_storages_are_the_memory_that_a_forward_leaves(findings, plain):
    # Count the memory at both borders of the last forward.
    ranges = [note["time_us"] for note in plain["external_annotations"] if note["name"] == "lmbench.phase:forward"]
    before, after = (
        [size for time_us, size in held_over_time(plain) if time_us <= border][-1] for border in sorted(ranges)[-2:]
    )
    assert findings.saved_storages["size_bytes"].sum() == pytest.approx(after - before, rel=0.01)
    # Batch x context x d_model in float32, which the residual stream keeps under autocast.
    assert findings.summary.residual_computed_bytes == 4 * 512 * 768 * 4


def test_the_tables_are_the_golden_file_and_fit_80_columns(run, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(run.parent)
    text = printed("memory", "recorded", "--all")
    check_golden("memory_history.txt", text)
    assert max(map(len, text.splitlines())) <= 80


#: The counts of the process that recorded the foreign histories: bytes of its tensors, and bytes left by its forward.
PARAMETERS, GRADIENTS, STATES = 70_565_888, 70_565_888, 141_131_776
LEFT = {"all": 128_983_552, "late": 128_983_552, "python": 128_983_552, "ck": 41_951_744}


@cases("name", *LEFT)
def test_stacks_of_a_foreign_history_agree_with_the_counts_of_its_process(name, tmp_path):
    """The histories have C++ frames or none, a checkpointed forward in the backward, and parameters that a constructor
    made or that were moved. Memory from before the history is unknown."""
    path = foreign(tmp_path, name)
    findings = examine(path)
    # The allocator rounds requests up to 512 bytes, and may not split a block.
    sizes = findings.phases.fillna(0)
    assert sizes.loc["optimizer", "gradients"] == pytest.approx(GRADIENTS, rel=0.002)
    assert sizes.loc["forward", "activations"] == pytest.approx(LEFT[name], rel=0.025)
    lasting = {"parameters": PARAMETERS, "optimizer_state": STATES}
    if name == "late":
        lasting = {"unknown": PARAMETERS + STATES}
    for category in ("parameters", "optimizer_state", "unknown"):
        assert sizes[category].max() == pytest.approx(lasting.get(category, 0), rel=0.015, abs=20_000), category
    assert sum(findings.by_category.values()) == findings.peak["allocated_bytes"]
    held = held_over_time(pickle.loads(path.read_bytes()))
    assert int(findings.played.entries["requested_bytes"].max()) == max(size for _, size in held)
    files = {line.partition(":")[0] for line in findings.largest["user_frame"]}
    assert files - {"aten", ""} == {"/tmp/s.py"}


def test_a_history_that_ran_out_of_memory_in_a_forward_has_right_categories(tmp_path):
    sizes = examine(foreign(tmp_path, "oom")).by_category
    assert sizes["parameters"] == pytest.approx(PARAMETERS, rel=0.015)
    assert sizes["optimizer_state"] == pytest.approx(STATES, rel=0.015)
    assert "gradients" not in sizes


def test_without_a_history_what_was_held_is_shown(tmp_path, printed, answered):
    path = foreign(tmp_path, "none")
    segments = pickle.loads(path.read_bytes())["segments"]
    held = sum(block["size"] for segment in segments for block in segment["blocks"] if block["state"] != "inactive")
    assert re.match(
        ".*the history is not complete: it has no history.* held at the end: workspaces 66.0 MiB.*aten::mm.*",
        printed("memory", path), re.DOTALL,
    )  # fmt: skip
    answer = answered("memory", path)
    assert (answer["entries"], answer["peak"]["allocated_bytes"]) == (0, held)
