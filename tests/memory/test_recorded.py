"""A history that an H200 recorded (tests/data/memory), against the allocator's own counters and a count of our own."""

from __future__ import annotations

import pickle
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from recorded_memory import GOLDEN, printed, unpack

from lmbench.memory.findings import Findings, examine

MIB = 1 << 20
#: Batch x context x d_model, in float32: autocast leaves the stream in it.
STREAM_BYTES = 4 * 512 * 768 * 4
SHARE = {"alloc": 1, "free_requested": -1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def found(run: Path) -> Findings:
    return examine(run)


@pytest.fixture(scope="module")
def plain(run: Path) -> dict[str, Any]:
    """The snapshot without any of lmbench's reader: it is our own."""
    content: dict[str, Any] = pickle.loads((run / "memory_snapshot.pickle").read_bytes())
    return content


def held_over_time(snapshot: dict[str, Any]) -> list[tuple[int, int]]:
    """Time, and what was asked for of all that is held after each entry: counted back from what is there at the end."""
    entries = snapshot["device_traces"][0]
    changes = [SHARE.get(entry["action"], 0) * entry["size"] for entry in entries]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    at_end = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    held = list(accumulate(changes, initial=at_end - sum(changes)))[1:]
    return [(entry["time_us"], size) for entry, size in zip(entries, held, strict=True)]


def border_us(snapshot: dict[str, Any], stage: str, phase: str) -> int:
    """When a phase of the last step began or ended."""
    name = f"lmbench.phase:{phase}"
    notes = snapshot["external_annotations"]
    return max(int(note["time_us"]) for note in notes if note["name"] == name and note["stage"] == stage)


def test_the_replayed_peak_is_the_allocators_and_that_of_a_plain_count(found: Findings, plain: dict[str, Any]) -> None:
    assert found.notes is not None
    assert found.notes.peaks is not None
    own = int(found.played.requested_bytes.max())
    assert own == found.notes.peaks.requested_bytes == max(size for _, size in held_over_time(plain))
    assert int(found.played.reserved_bytes.max()) == found.notes.peaks.reserved_bytes
    assert found.is_complete
    assert [guard.status for guard in found.guards] == ["pass", "pass", "pass"]


def test_the_peak_has_the_models_parameters_and_states_and_nothing_unknown(found: Findings) -> None:
    assert found.run is not None
    assert found.run.model.parameter_count is not None
    weights = 4 * found.run.model.parameter_count
    sizes = found.by_category
    assert (found.peak_phase, found.peak_step) == ("backward", "5")
    assert sizes["parameters"] == pytest.approx(weights, rel=0.005)
    assert sizes["optimizer_state"] == pytest.approx(2 * weights, rel=0.005)
    assert sum(sizes.values()) == found.peak_bytes
    assert sizes["unknown"] < MIB
    assert found.attribution.unmatched == 0
    optimizer = next(each for each in found.phases if each.phase == "optimizer")
    assert optimizer.by_category["gradients"] == pytest.approx(weights, rel=0.005)


def test_twelve_blocks_make_the_softmax_and_the_stream(found: Findings) -> None:
    softmax = found.largest[0]
    # Batch x heads x context x context in float32, which autocast computes a softmax in.
    assert (softmax.owner, softmax.count) == ("network.blocks.*.attention.core.softmax", 12)
    assert softmax.size_bytes == 4 * 12 * 512 * 512 * 4
    assert softmax.operator == "SoftmaxBackward0"
    assert found.residual is not None
    assert found.residual.computed_bytes == STREAM_BYTES
    assert found.residual.seen_bytes == {STREAM_BYTES: 36}
    assert found.residual.at_peak == 12


def test_what_is_saved_is_what_a_forward_leaves(found: Findings, plain: dict[str, Any]) -> None:
    begin_us, end_us = border_us(plain, "START", "forward"), border_us(plain, "END", "forward")
    held = held_over_time(plain)
    before = [size for time_us, size in held if time_us <= begin_us][-1]
    after = [size for time_us, size in held if time_us <= end_us][-1]
    saved = sum(each.each_bytes * each.count for each in found.saved)
    assert saved == pytest.approx(after - before, rel=0.01)
    blocks = max(found.saved, key=lambda each: each.count)
    assert (blocks.first, blocks.last, blocks.count) == ("network.blocks.0", "network.blocks.11", 12)
    assert blocks.each_bytes > 0.9 * saved / 12


def test_its_tables_say_first_what_the_peak_is_made_of_and_cut_no_name(run: Path) -> None:
    text = printed(run.parent)
    assert text == GOLDEN.read_text(encoding="utf-8"), "python tests/support/recorded_memory.py writes it anew"
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    first = " ".join(" ".join(lines[:24]).split())
    assert "activations 2.23 GiB (56.1 %)" in first
    assert "blocks.*.attention.core.softmax: 0.56 GiB (14.1 %)" in first
    # The whole table of categories is on the first screen.
    assert "unknown" in first
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("By part")) :]
    assert len(set(table[: table.index("")])) == table.index("")
