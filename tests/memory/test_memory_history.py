"""A history replayed, against planted steps in which every byte is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import planted_memory
import pytest
from planted_memory import ENGINE, FORWARD, MIB, OPTIMIZER, Allocator, Step, notes_of, planted_run, write

from lmbench.errors import UsageError
from lmbench.memory.history.findings import Findings, as_record, examine


def recorded(folder: Path, step: Step, **notes: Any) -> Findings:
    """The findings of a planted recording of lmbench's."""
    folder.mkdir(exist_ok=True)
    path = write(folder / "memory_snapshot.pickle", step.memory)
    (folder / "memory_notes.json").write_bytes(notes_of(step, **notes))
    return examine(path)


def mib(sizes: object) -> dict[str, float]:
    assert isinstance(sizes, dict)
    return {name: size / MIB for name, size in sizes.items()}


def test_the_peak_is_what_was_planted_by_category(tmp_path: Path) -> None:
    step = planted_run()
    found = recorded(tmp_path, step)
    assert found.peak_bytes == step.memory.peak
    assert mib(found.by_category) == step.peak
    assert (found.peak_phase, found.peak_step) == ("backward", "7")
    assert found.is_complete
    assert [guard.status for guard in found.guards] == ["pass", "pass"]


def test_every_phase_has_its_own_peak(tmp_path: Path) -> None:
    found = recorded(tmp_path, planted_run())
    assert {each.phase: each.allocated_bytes / MIB for each in found.phases} == {
        # The backward's last free left 172, with which the gradients are zeroed.
        "forward": 208, "backward": 252, "optimizer": 179, "zero_grad": 172,
    }  # fmt: skip
    optimizer = next(each for each in found.phases if each.phase == "optimizer")
    assert mib(optimizer.by_category)["temporaries"] == 7
    assert "activations" not in optimizer.by_category


def test_a_phase_that_allocates_nothing_has_what_was_there(tmp_path: Path) -> None:
    step = planted_run()
    starts = [note["time_us"] for note in step.memory.annotations if note["name"] == "lmbench.phase:optimizer"]
    step.memory.entries = [
        entry for entry in step.memory.entries if not any(abs(entry["time_us"] - at) <= 12 for at in starts[:2])
    ]
    only_one = [note for note in step.memory.annotations if note["time_us"] <= max(starts[1], 0)]
    step.memory.annotations = only_one
    found = recorded(tmp_path, step)
    optimizer = next(each for each in found.phases if each.phase == "optimizer")
    assert mib(optimizer.by_category)["gradients"] == 40
    assert "temporaries" not in optimizer.by_category


def test_memory_belongs_to_the_parts_that_made_it(tmp_path: Path) -> None:
    parts = recorded(tmp_path, planted_run()).by_part
    assert mib(parts["blocks.*.ffn"]) == {
        "parameters": 40, "optimizer_state": 80, "gradients": 20, "activations": 40,
    }  # fmt: skip
    assert mib(parts["blocks.*"]) == {"activations": 20}
    assert mib(parts["head"]) == {"logits": 16}
    assert set(mib(parts[""])) == {"inputs", "temporaries", "workspaces", "unknown"}


def test_blocks_that_save_alike_stand_together_with_their_operators(tmp_path: Path) -> None:
    saved = recorded(tmp_path, planted_run()).saved
    assert [(each.first, each.last, each.count, each.each_bytes / MIB) for each in saved] == [
        ("blocks.0", "blocks.1", 2, 30),
        ("outside of blocks", "outside of blocks", 1, 16),
    ]
    assert mib(saved[0].by_operator) == {"AddBackward0": 10, "MmBackward0": 20}


def test_the_stream_between_blocks_is_seen_and_counted_at_the_peak(tmp_path: Path) -> None:
    residual = recorded(tmp_path, planted_run()).residual
    assert residual is not None
    assert residual.seen_bytes == {10 * MIB: 4}
    assert residual.at_peak == 2
    assert residual.computed_bytes is None


def test_the_largest_allocations_tell_where_they_are_from(tmp_path: Path) -> None:
    largest = recorded(tmp_path, planted_run()).largest
    assert [each.total_bytes for each in largest] == sorted((each.total_bytes for each in largest), reverse=True)
    saved = next(each for each in largest if each.operator == "MmBackward0")
    assert (saved.size_bytes, saved.count, saved.phase, saved.step) == (20 * MIB, 2, "forward", "7")
    assert saved.user_frame == "/home/someone/train.py:21 forward"
    assert saved.frames[0].endswith("linear.py:134 forward")


def test_a_history_that_is_full_is_not_complete(tmp_path: Path) -> None:
    found = recorded(tmp_path, planted_run(max_entries=50), max_entries=50)
    assert not found.is_complete
    assert "all that `--memory.max_entries` allows" in found.cuts[0]
    assert found.guards[1].status == "warn"


def test_sums_stay_exact_in_what_is_left_of_a_cut_history(tmp_path: Path) -> None:
    """What was allocated before the first entry is known from its end."""
    whole = recorded(tmp_path / "whole", planted_run()).played
    for kept in (10, 25, 44):
        cut = recorded(tmp_path / "cut", planted_run(max_entries=kept), max_entries=kept).played
        assert cut.allocated_bytes.tolist() == whole.allocated_bytes[-kept:].tolist()
        assert cut.reserved_bytes.tolist() == whole.reserved_bytes[-kept:].tolist()


def test_a_missing_free_is_counted(tmp_path: Path) -> None:
    step = planted_run()
    frees = [entry for entry in step.memory.entries if entry["action"].startswith("free_") and entry["size"] == 5 * MIB]
    step.memory.entries = [entry for entry in step.memory.entries if entry not in frees[:2]]
    found = recorded(tmp_path, step)
    assert found.played.holes == 1
    assert not found.is_complete


def test_a_block_is_held_until_it_is_given_back_and_then_waits(tmp_path: Path) -> None:
    memory = Allocator()
    first = memory.alloc(10 * MIB)
    memory.free(first, FORWARD, waits=True)
    memory.alloc(20 * MIB)
    found = examine(write(tmp_path / "s.pickle", memory))
    assert found.peak_bytes == 20 * MIB
    assert found.played.pending_bytes[found.peak] == 10 * MIB


def test_reserved_memory_and_free_pieces_are_told(tmp_path: Path) -> None:
    memory = Allocator()
    kept = [memory.alloc(4 * MIB) for _ in range(10)]
    for address in kept[::2]:
        memory.free(address, FORWARD)
    found = examine(write(tmp_path / "s.pickle", memory))
    assert found.peak_reserved_bytes == 40 * MIB
    assert (found.free.total_bytes, found.free.largest_bytes) == (20 * MIB, 4 * MIB)


def test_what_was_asked_for_is_told_from_what_was_taken(tmp_path: Path) -> None:
    memory = Allocator()
    for _ in range(3):
        memory.alloc(100)
    found = examine(write(tmp_path / "s.pickle", memory))
    assert (found.peak_requested_bytes, found.peak_bytes) == (300, 3 * 512)


def test_a_strangers_history_has_the_categories_that_its_stacks_allow(tmp_path: Path) -> None:
    """Switched on before the model was built: only what no frame tells is unknown."""
    memory = Allocator()
    memory.alloc(40 * MIB, planted_memory.BUILD)
    saved = memory.alloc(30 * MIB)
    passing = memory.alloc(5 * MIB)
    memory.free(passing, FORWARD)
    engine = memory.alloc(24 * MIB, ENGINE)
    gradient = memory.alloc(40 * MIB, ENGINE)
    memory.alloc(2 * MIB, (("elsewhere", "/home/someone/train.py", 5),))
    peak = memory.allocated
    memory.free(engine)
    memory.free(saved)
    memory.alloc(20 * MIB, OPTIMIZER)
    memory.free(gradient, planted_memory.ZERO_GRAD)
    found = examine(write(tmp_path / "theirs.pickle", memory))
    assert found.peak_bytes == peak
    assert mib(found.by_category) == {
        "parameters": 40, "activations": 30, "temporaries": 24, "gradients": 40, "unknown": 2,
    }  # fmt: skip
    assert found.is_complete


def test_a_strangers_history_that_began_late_leaves_unknown_and_says_so(tmp_path: Path) -> None:
    found = examine(write(tmp_path / "theirs.pickle", planted_run().memory))
    assert found.unknown_fraction > 0.05
    assert found.guards[0].status == "warn"
    assert "older than its first entry" in found.cuts[0]


def test_without_any_stacks_nothing_is_guessed(tmp_path: Path) -> None:
    step = planted_run()
    for entry in step.memory.entries:
        del entry["frames"]
    for block in step.memory.live.values():
        block["stack"] = None
    found = examine(write(tmp_path / "theirs.pickle", step.memory))
    assert set(found.by_category) == {"unknown"}


def test_of_two_devices_one_is_named(tmp_path: Path) -> None:
    first, second = Allocator(device=0), Allocator(device=1)
    first.alloc(MIB)
    second.alloc(2 * MIB)
    path = write(tmp_path / "s.pickle", first, second)
    with pytest.raises(UsageError, match="name one: --device 0, 1"):
        examine(path)
    assert examine(path, device=1).peak_bytes == 2 * MIB
    with pytest.raises(UsageError, match="--device 3 has no history"):
        examine(path, device=3)


def test_a_snapshot_without_history_says_how_to_record_one(tmp_path: Path) -> None:
    memory = Allocator(is_on=False)
    memory.alloc(MIB)
    with pytest.raises(UsageError, match="_record_memory_history"):
        examine(write(tmp_path / "s.pickle", memory))


def test_damaged_notes_are_said(tmp_path: Path) -> None:
    write(tmp_path / "memory_snapshot.pickle", planted_run().memory)
    (tmp_path / "memory_notes.json").write_text('{"moments": 3}')
    with pytest.raises(UsageError, match=r"memory_notes\.json"):
        examine(tmp_path / "memory_snapshot.pickle")


def test_the_record_is_json(tmp_path: Path) -> None:
    plain = json.loads(json.dumps(as_record(recorded(tmp_path, planted_run())), allow_nan=False))
    assert plain["peak"]["allocated_bytes"] == 252 * MIB
    assert plain["largest"][0]["frames"] == []


def test_a_replay_that_is_not_the_allocators_own_warns(tmp_path: Path) -> None:
    step = planted_run()
    peaks = {"allocated_bytes": 252 * MIB, "requested_bytes": 252 * MIB, "reserved_bytes": 264 * MIB}
    for asked, status in ((252 * MIB, "pass"), (253 * MIB, "warn")):
        found = recorded(tmp_path, step, peaks={**peaks, "requested_bytes": asked})
        assert {guard.name: guard.status for guard in found.guards}["memory_replay"] == status


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    step = planted_run()
    step.moments[0]["blocks"][0][0] = 1 << 70
    with pytest.raises(UsageError, match=r"memory_notes\.json"):
        recorded(tmp_path, step)
