"""The traces of several ranks, against planted ones: which rank the others wait for, and what communication costs."""

from __future__ import annotations

import pytest
import yaml
from plain_sums import plain_sums
from tables import cases
from trace_events import HandWritten, write_ranks

from conftest import check_golden

NOTES = yaml.safe_load("""
group: {Group size: 2, Process Group Name: "0", Process Group Ranks: "[0, 1]"}
all-reduce: {Collective name: allreduce, In msg nelems: 1000, Out msg nelems: 1000, dtype: Float}
all-gather: {Collective name: _allgather_base, In msg nelems: 300, Out msg nelems: 600, dtype: Half}
point-to-point: {Collective name: send, In msg nelems: 8, dtype: Long}
""")


def write_rank(folder, rank, names=("all-reduce", "all-gather"), first_step=7, lasts=3, **group):
    """Write two steps of a rank: a product, then collectives that take 40 us once both ranks are there.

    The product takes rank 1 900 us longer. While rank 0 waits, it runs a computing kernel of 30 us and a copy.
    """
    trace = HandWritten()
    trace.distributed = {"rank": rank, "world_size": 2}
    for step in range(2):
        at = 1_600 * step
        trace.range(f"ProfilerStep#{first_step + step}", at, 1_590)
        product_us, ready = 500 + 900 * rank, at + 1_420
        trace.launched(at + 1, "sgemm", at + 20, product_us)
        for number, name in enumerate(names):
            begin, end = ready + 41 * number, ready + 41 * number + 40
            begin = begin if number else at + 20 + product_us
            note = {**NOTES[name], **NOTES["group"], **group}
            # Some profilers note only the operator, which has ended when messages are launched together.
            trace.op("record_param_comms", at + 5 + 3 * number, lasts, **note)
            trace.launched(at + 6 + 3 * number, "ncclKernel_SendRecv", begin, end - begin, 9, **({} if step else note))
        if not rank:
            trace.launched(at + 14, "add", at + 530, 30)
            trace.launched(at + 16, "Memcpy DtoD", at + 570, 10)
    return trace.write(folder / f"{rank}.json")


def test_waiting_for_a_slow_rank_is_told_from_communication(tmp_path, answered):
    paths = [write_rank(tmp_path, rank) for rank in (0, 1)]
    record = answered("kernels", tmp_path)
    assert record == answered("kernels", *reversed(paths))
    for row, path in zip(record["tables"]["ranks"], paths, strict=True):
        plain = plain_sums(path)
        assert row["comm_s"] == pytest.approx(plain["comm"] / 2)
        assert row["comm_exposed_s"] == pytest.approx((plain["comm"] - plain["overlapped"]) / 2)
        assert row["computing_s"] + row["comm_exposed_s"] + row["idle_s"] == pytest.approx(row["window_s"])
    first, second = record["tables"]["ranks"]
    # A kernel computes beside 30 of the 900 us; the copy does not compute.
    assert (first["rank_wait_s"], second["rank_wait_s"]) == (pytest.approx(870e-6), 0)
    assert (first["delay_s"], second["delay_s"]) == (0, pytest.approx(900e-6))
    assert (first["verdict"], second["verdict"]) == ("waits for other ranks", "mixed")
    _, gathers, reduces = sorted(record["tables"]["communication"], key=lambda row: row["collective"])
    # Both take 40 us. A ring of two carries all 4000 bytes of float32, and half of the 1200 bytes of float16.
    assert (reduces["message_bytes"], reduces["bus_bytes_per_s"]) == (4000, pytest.approx(4000 / 40e-6))
    assert (gathers["message_bytes"], gathers["bus_bytes_per_s"]) == (1200, pytest.approx(600 / 40e-6))


@cases(
    """
- [first, second, matched]
# Recording began a step later.
- [{}, {first_step: 8}, 2]
# Collectives with numbers match whatever the steps are called.
- [{Seq: 1}, {Seq: 1, first_step: 70}, 4]
- [{}, {names: [all-gather, all-reduce]}, 0]
- [{}, {Process Group Ranks: "[1, 2]"}, 0]
# Messages match by their pair of ranks, not by number; without a pair they do not match.
- [{names: &sent [point-to-point, point-to-point], Dst Rank: 1, Seq: 3, lasts: 0.5}, {names: *sent, Src Rank: 0}, 4]
- [{names: *sent, Dst Rank: 1}, {names: *sent, Dst Rank: 0}, 0]
""",
    ids=str,
)
def test_only_kernels_that_are_surely_one_collective_are_matched(first, second, matched, tmp_path, answered):
    paths = [write_rank(tmp_path, rank, **options) for rank, options in enumerate((first, second))]
    record = answered("kernels", *paths)
    assert len(record["tables"].get("collectives", ())) == matched
    assert ("rank_wait_fraction" in record) == bool(matched)
    # A wait that is not known makes the sum of waits a least one, and the answer says so.
    (lost,) = [text for label, text in record["headline"] if label == "lost"]
    assert ("at least" in lost and "4 of its kernels match none" in lost) == (matched == 2)
    sizes = {row["collective"]: row.get("message_bytes") for row in record["tables"]["communication"]}
    assert sizes.get("point-to-point", 128) == 128
    # Rank 1 has the longer product, whether or not collectives match.
    (straggler,) = [text for label, text in record["headline"] if label == "straggler"]
    assert straggler.startswith("rank 1 ")


#: The last rank comes 60 us after the first, whose kernel ends 10 us after the last rank's.
GOES_ON = """
rank 0:
- [range, ProfilerStep#3, 0, 500]
- [launched, 1, sgemm, 10, 90]
- [launched, 2, ncclDevKernel_AllReduce_Sum_f32_RING_LL, 100, 100, 9]
rank 1:
- [range, ProfilerStep#3, 0, 500]
- [launched, 1, sgemm, 10, 150]
- [launched, 2, ncclDevKernel_AllReduce_Sum_f32_RING_LL, 160, 30, 9]
"""


# On clocks that differ, only the kernels' durations tell the wait.
@cases("""
- [offset_us, wait_us]
- [0, 60]
- [7000, 70]
""")
def test_a_kernel_that_goes_on_after_the_others_does_not_wait_then(offset_us, wait_us, tmp_path, answered):
    write_ranks(tmp_path, GOES_ON, offset_us)
    first, second = answered("kernels", tmp_path)["tables"]["ranks"]
    assert (first["rank_wait_s"], second["rank_wait_s"]) == (pytest.approx(wait_us * 1e-6), 0)
    assert (second["delay_s"], second["last_count"]) == (pytest.approx(wait_us * 1e-6), 1)


def test_the_first_screen_of_ranks_is_the_golden_file(here, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for rank in (0, 1):
        write_rank(here, rank)
    check_golden("kernels_ranks.txt", printed("kernels", "."))


def test_ranks_without_devices_say_so_and_show_the_first(tmp_path, printed):
    write_ranks(tmp_path, "{rank 0: [[op, aten::mm, 0, 5]], rank 1: [[op, aten::mm, 0, 5]]}")
    assert "gloo's collectives run on the host" in printed("kernels", tmp_path)


def test_a_trace_that_is_not_of_another_rank_is_refused(tmp_path, refused):
    write_rank(tmp_path, 1)
    other = HandWritten()
    other.op("aten::mm", 0, 5)
    for rank, reason in ((1, "has that of another trace"), (None, "name files rank0.json.gz"), (0, "has no kernels")):
        other.distributed = {"rank": rank}
        other.write(tmp_path / "other.json")
        assert reason in refused("kernels", tmp_path)
