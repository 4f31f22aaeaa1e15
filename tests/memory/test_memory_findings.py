"""A history replayed, against planted steps in which every byte is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import planted_memory
import pytest
from planted_memory import ENGINE, FORWARD, MIB, OPTIMIZER, Allocator, Step, notes_of, planted_run, write

from lmbench.errors import UsageError
from lmbench.memory.findings import Findings, examine


def recorded(folder: Path, step: Step | None = None, **notes: Any) -> Findings:
    """The findings of a planted recording of lmbench's."""
    step = step or planted_run()
    folder.mkdir(exist_ok=True)
    path = write(folder / "memory_snapshot.pickle", step.memory)
    (folder / "memory_notes.json").write_bytes(notes_of(step, **notes))
    return examine(path)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return recorded(tmp_path_factory.mktemp("planted"))


def mib(sizes: Any) -> dict[str, float]:
    return {name: size / MIB for name, size in sizes.items()}


def test_the_peak_is_what_was_planted_by_category(planted: Findings) -> None:
    step = planted_run()
    assert planted.peak_bytes == step.memory.peak
    assert mib(planted.by_category) == step.peak
    assert (planted.peak_phase, planted.peak_step, planted.is_complete) == ("backward", "7", True)
    assert [guard.status for guard in planted.guards] == ["pass", "pass"]


def test_every_phase_has_its_own_peak(planted: Findings) -> None:
    assert {each.phase: each.allocated_bytes / MIB for each in planted.phases} == {
        # The backward's last free left 172, with which the gradients are zeroed.
        "forward": 208, "backward": 252, "optimizer": 179, "zero_grad": 172,
    }  # fmt: skip
    optimizer = next(mib(each.by_category) for each in planted.phases if each.phase == "optimizer")
    assert (optimizer["temporaries"], optimizer.get("activations")) == (7, None)


def test_a_phase_that_allocates_nothing_has_what_was_there(tmp_path: Path) -> None:
    step = planted_run()
    starts = [note["time_us"] for note in step.memory.annotations if note["name"] == "lmbench.phase:optimizer"]
    step.memory.entries = [
        entry for entry in step.memory.entries if not any(abs(entry["time_us"] - at) <= 12 for at in starts[:2])
    ]
    step.memory.annotations = [note for note in step.memory.annotations if note["time_us"] <= starts[1]]
    phases = recorded(tmp_path, step).phases
    optimizer = next(mib(each.by_category) for each in phases if each.phase == "optimizer")
    assert (optimizer["gradients"], optimizer.get("temporaries")) == (40, None)


def test_memory_belongs_to_the_parts_that_made_it(planted: Findings) -> None:
    parts = planted.by_part
    assert mib(parts["blocks.*.ffn"]) == {
        "parameters": 40, "optimizer_state": 80, "gradients": 20, "activations": 40,
    }  # fmt: skip
    assert mib(parts["blocks.*"]) == {"activations": 20}
    assert mib(parts["head"]) == {"logits": 16}
    assert set(parts[""]) == {"inputs", "temporaries", "workspaces", "unknown"}


def test_blocks_that_save_alike_stand_together_and_the_stream_between_them_is_counted(planted: Findings) -> None:
    assert [(each.first, each.last, each.count, each.each_bytes / MIB) for each in planted.saved] == [
        ("blocks.0", "blocks.1", 2, 30),
        ("outside of blocks", "outside of blocks", 1, 16),
    ]
    assert mib(planted.saved[0].by_operator) == {"AddBackward0": 10, "MmBackward0": 20}
    assert planted.residual == (None, {10 * MIB: 4}, 2)


def test_the_largest_allocations_tell_where_they_are_from(planted: Findings) -> None:
    totals = [each.total_bytes for each in planted.largest]
    assert totals == sorted(totals, reverse=True)
    saved = next(each for each in planted.largest if each.operator == "MmBackward0")
    assert (saved.size_bytes, saved.count, saved.phase, saved.step) == (20 * MIB, 2, "forward", "7")
    assert saved.user_frame == "/home/someone/train.py:21 forward"
    assert saved.frames[0].endswith("linear.py:134 forward")


def test_a_full_history_is_not_complete_and_its_sums_stay_exact(planted: Findings, tmp_path: Path) -> None:
    """What was allocated before the first entry is known from its end."""
    for kept in (10, 25, 44):
        cut = recorded(tmp_path, planted_run(max_entries=kept), max_entries=kept)
        assert cut.played.allocated_bytes.tolist() == planted.played.allocated_bytes[-kept:].tolist()
        assert cut.played.reserved_bytes.tolist() == planted.played.reserved_bytes[-kept:].tolist()
        assert "all that `--memory.max_entries` allows" in cut.cuts[0]
        assert cut.guards[1].status == "warn"


def test_a_missing_free_is_counted(tmp_path: Path) -> None:
    step = planted_run()
    frees = [entry for entry in step.memory.entries if entry["action"].startswith("free_") and entry["size"] == 5 * MIB]
    step.memory.entries = [entry for entry in step.memory.entries if entry not in frees[:2]]
    found = recorded(tmp_path, step)
    assert (found.played.holes, found.is_complete) == (1, False)


def test_a_block_is_held_until_it_is_given_back_and_then_waits(tmp_path: Path) -> None:
    memory = Allocator()
    first = memory.alloc(10 * MIB)
    memory.free(first, FORWARD, waits=True)
    memory.alloc(20 * MIB)
    found = examine(write(tmp_path / "s.pickle", memory))
    assert (found.peak_bytes, found.played.pending_bytes[found.peak]) == (20 * MIB, 10 * MIB)


def test_reserved_memory_free_pieces_and_rounding_are_told(tmp_path: Path) -> None:
    memory = Allocator()
    kept = [memory.alloc(4 * MIB) for _ in range(10)]
    for address in kept[::2]:
        memory.free(address, FORWARD)
    found = examine(write(tmp_path / "s.pickle", memory))
    assert found.peak_reserved_bytes == 40 * MIB
    assert (found.played.free_bytes, found.played.largest_free_bytes) == (20 * MIB, 4 * MIB)
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
    assert (found.peak_bytes, found.is_complete) == (peak, True)
    assert mib(found.by_category) == {
        "parameters": 40, "activations": 30, "temporaries": 24, "gradients": 40, "unknown": 2,
    }  # fmt: skip


def test_a_strangers_history_that_began_late_leaves_unknown_and_says_so(tmp_path: Path) -> None:
    found = examine(write(tmp_path / "theirs.pickle", planted_run().memory))
    assert (found.unknown_fraction > 0.05, found.guards[0].status) == (True, "warn")
    assert "older than its first entry" in found.cuts[0]


def test_without_any_stacks_nothing_is_guessed(tmp_path: Path) -> None:
    step = planted_run()
    for entry in step.memory.entries:
        del entry["frames"]
    for block in step.memory.live.values():
        block["stack"] = None
    assert set(examine(write(tmp_path / "theirs.pickle", step.memory)).by_category) == {"unknown"}


def test_a_device_with_a_history_is_named(tmp_path: Path) -> None:
    first, second, silent = Allocator(device=0), Allocator(device=1), Allocator(is_on=False)
    first.alloc(MIB)
    second.alloc(2 * MIB)
    silent.alloc(MIB)
    path = write(tmp_path / "s.pickle", first, second)
    assert examine(path, device=1).peak_bytes == 2 * MIB
    for device, said in ((None, "name one: --device 0, 1"), (3, "--device 3 has no history")):
        with pytest.raises(UsageError, match=said):
            examine(path, device)
    with pytest.raises(UsageError, match="_record_memory_history"):
        examine(write(tmp_path / "s.pickle", silent))


def test_damaged_notes_are_said(tmp_path: Path) -> None:
    step = planted_run()
    step.moments[0]["blocks"][0][0] = 1 << 70
    with pytest.raises(UsageError, match=r"memory_notes\.json"):
        recorded(tmp_path, step)
    (tmp_path / "memory_notes.json").write_text('{"moments": 3}')
    with pytest.raises(UsageError, match=r"memory_notes\.json"):
        examine(tmp_path / "memory_snapshot.pickle")


@pytest.mark.parametrize(("requested_mib", "status"), [(252, "pass"), (253, "warn")])
def test_a_replay_that_is_not_the_allocators_own_warns(tmp_path: Path, requested_mib: int, status: str) -> None:
    peaks = {
        "allocated_bytes": 252 * MIB, "requested_bytes": requested_mib * MIB, "reserved_bytes": 264 * MIB,
    }  # fmt: skip
    guards = recorded(tmp_path, peaks=peaks).guards
    assert {guard.name: guard.status for guard in guards}["memory_replay"] == status
