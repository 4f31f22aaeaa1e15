"""The critical path and what-ifs, against planted graphs whose path is known, and on real traces."""

from __future__ import annotations

import gzip
import json

import pytest
from runs import make_run, make_sweep, rows_of
from tables import flat
from trace_events import HandWritten, answer, examined, shown

from lmbench.cli import main
from lmbench.kernels.findings import summarize
from lmbench.records.examined import KernelSummary
from lmbench.report.run import what_sets

MAIN, SIDE = 7, 20
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)"
GROUP = {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Collective name": "allreduce"}


def path_us(record):
    assert sum(record["path"].values()) == pytest.approx(record["step_s"])
    return {cause: round(time_s * 1e6, 3) for cause, time_s in record["path"].items()}


def step(host_us, rank=None):
    """A trace with one step, in which the host works until `host_us`."""
    trace = HandWritten()
    trace.range("ProfilerStep#7", 0, host_us)
    if rank is not None:
        trace.distributed = {"rank": rank, "world_size": 2}
    return trace


def two_streams():
    """The all-reduce waits for the product, and the softmax for the all-reduce."""
    trace = step(40)
    trace.launched(0, "sgemm", 6, 100, MAIN)
    trace.call("cudaStreamWaitEvent", 10, 1)
    trace.launched(12, NCCL, 107, 300, SIDE)
    trace.launched(20, "add", 108, 50, MAIN)
    trace.call("cudaStreamWaitEvent", 30, 1)
    trace.launched(32, "softmax", 408, 92, MAIN)
    return trace


def unnoted_wait():
    """The softmax waits for a kernel of another stream, though no call says so."""
    trace = step(40)
    trace.launched(0, "sgemm", 6, 100, MAIN)
    trace.launched(12, "add", 20, 380, SIDE)
    trace.launched(32, "softmax", 403, 97, MAIN)
    return trace


def late_host():
    """The host waits for the product, then works for 200 us before it launches the softmax."""
    trace = step(320)
    trace.launched(0, "sgemm", 6, 100, MAIN)
    trace.call("cudaStreamSynchronize", 10, 100)
    trace.launched(310, "softmax", 317, 183, MAIN)
    return trace


def replayed():
    """One launch of a graph of three kernels, which returns after the first of them began."""
    trace = step(40)
    trace.launch(1, 0, 30, name="cudaGraphLaunch")
    for start, stream in ((20, MAIN), (121, MAIN), (222, SIDE)):
        trace.kernel(1, "sgemm", start, 100, stream=stream)
    return trace


def full_queue():
    """A device that is always behind: the last launches wait for room in the queue of 1,000 kernels."""
    trace = step(10_010)
    for number in range(1_600):
        at = 4.0 * number if number < 1_000 else 10.0 * (number - 600) + 7
        trace.launched(at, "sgemm", 6 + 10 * number, 9, lasts=3.0 if number < 1_000 else 9.9)
    return trace


def attention(*kernels):
    """One kernel after the other, each launched in the forward of a module of an attention."""
    trace, begin = step(40), 20
    for number, (module, name, us) in enumerate(kernels):
        trace.module(f"network.blocks.0.attention.{module}", 10 * number, 8)
        trace.launched(10 * number + 1, name, begin, us, MAIN)
        begin += us + 1
    return trace


def written_out():
    kernels = ("core.scores", "sgemm", 100), ("core.scores", "add", 30), ("core.softmax", "softmax", 60)
    return attention(*kernels, ("core.values", "sgemm", 50))


def already_fused():
    return attention(("qkv", "sgemm", 100), ("core", "void pytorch_flash::flash_fwd_kernel<Traits>", 80))


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (two_streams, {"launching": 6, "gemm": 100, "exposed all-reduce": 300, "short gaps": 2, "softmax": 92}),
        (unnoted_wait, {"launching": 20, "elementwise": 380, "short gaps": 3, "softmax": 97}),
        # The synchronize returns 4 us after the product.
        (late_host, {"launching": 6 + 200 + 7, "gemm": 100, "synchronizing": 4, "softmax": 183}),
        (replayed, {"launching": 20, "gemm": 300, "short gaps": 2}),
    ],
)
def test_the_path_is_the_planted_one(trace, expected, tmp_path, capsys):
    assert path_us(answer(capsys, trace().write(tmp_path / "t.json"), "--path")) == expected


def write_ranks(folder, late_us=900, offset_us=0):
    """Two ranks: a product, which takes rank 1 longer, then an all-reduce of 40 us; the softmax waits for it."""
    for rank in (0, 1):
        trace = step(50, rank)
        product_us, ready = 500 + late_us * rank, 520 + late_us
        trace.launched(1, "sgemm", 20, product_us, MAIN)
        trace.call("cudaStreamWaitEvent", 6, 1)
        trace.launched(8, NCCL, 21 + product_us, ready + 41 - 21 - product_us, SIDE, **GROUP)
        trace.call("cudaStreamWaitEvent", 14, 1)
        trace.launched(16, "softmax", ready + 42, 100, MAIN)
        for event in trace.events:
            event["ts"] += offset_us * rank
        trace.write(folder / f"{rank}.json")


@pytest.mark.parametrize("offset_us", [0, 70_000])
def test_the_path_over_ranks_follows_the_late_one_and_names_what_the_others_waited(offset_us, tmp_path, capsys):
    write_ranks(tmp_path, offset_us=offset_us)
    record = answer(capsys, tmp_path, "--path")
    # The other rank waits for 899 us of the product, and for the gap behind it.
    expected = {"waiting for rank 1": 900, "gemm": 501, "softmax": 100, "exposed all-reduce": 40, "launching": 20}
    assert path_us(record) == {**expected, "short gaps": 1}
    changes = {row["change"]: row for row in record["tables"]["what_if"]}
    assert changes["rank=median"]["change_s"] == pytest.approx(-900e-6)
    assert changes["collectives=0"]["change_s"] == pytest.approx(-40e-6, abs=1.5e-6)


def test_a_late_rank_is_told_where_the_others_have_come_to_two_collectives(tmp_path, capsys):
    """Rank 1 runs them one after the other, and rank 0 waits in both at once."""
    for rank in (0, 1):
        trace, late_us, begins = step(50, rank), 500 * rank, [(31, 32), (531, 572)][rank]
        trace.launched(1, "sgemm", 20, 10 + late_us, MAIN)
        for number, (begin, end, stream) in enumerate(zip(begins, (571, 612), (SIDE, SIDE + 1), strict=True)):
            if rank or not number:
                trace.call("cudaStreamWaitEvent", 6 + 8 * number, 1)
            trace.launched(8 + 8 * number, NCCL, begin, end - begin, stream, **GROUP)
        trace.write(tmp_path / f"{rank}.json")
    assert path_us(answer(capsys, tmp_path, "--path"))["waiting for rank 1"] == 572 - 31


@pytest.mark.parametrize(
    ("trace", "change", "change_us"),
    [
        # The other stream's kernel then sets the step: 50 us and a gap.
        (two_streams, "collectives=0", -(300 - 50)),
        (two_streams, "collectives=0.5", -150),
        (two_streams, "kind:softmax=0", -92),
        (two_streams, "launches=0", 0),
        # Products stay: what is between them, with its gaps, is gone.
        (written_out, "attention=fused", -(30 + 60 + 2)),
        # The host is ahead, and kernels beside longer ones save nothing.
        (two_streams, "kind:elementwise=0", 0),
        # Two at once save less than the sum of both, once what is beside the all-reduce sets the step.
        (two_streams, "collectives=0,kind:elementwise=0", -300),
        (late_host, "device=2x", -(100 + 183) / 2),
        (late_host, "launches=0", -(200 + 7)),
        # Without the host's wait for room in the queue, twice the speed of the device is twice that of the step.
        (full_queue, "device=2x", -1_600 * 4.5),
    ],
)
def test_a_what_if_changes_the_step_as_the_graph_says(trace, change, change_us, tmp_path, capsys):
    record = answer(capsys, trace().write(tmp_path / "t.json"), "--what_if", change)
    assert record["tables"]["what_if"][-1]["change_s"] * 1e6 == pytest.approx(change_us, rel=0.03, abs=4)


@pytest.mark.parametrize("name", ["small_bf16_eager", "small_bf16_replayed", "two_gpus"])
def test_on_real_traces_the_path_sums_to_the_clocked_step_and_no_change_saves_more_than_it(name):
    kernels = summarize(examined(name))
    assert sum(kernels.path.values()) == pytest.approx(kernels.path_s)
    assert kernels.path_s == pytest.approx(examined(name).clocks.total.window_s, rel=0.01)
    assert all(-kernels.path_s <= change_s <= 1e-3 * kernels.path_s for change_s in kernels.what_if.values())


@pytest.mark.parametrize(
    ("trace", "change", "problem"),
    [
        (two_streams, "collectives=2GB", "is no change; give collectives=F or =NGB/s"),
        (two_streams, "kind:gem=0", "did you mean gemm?"),
        (two_streams, "device=-1", "is no change"),
        (two_streams, "host=1e400", "is no change"),
        (two_streams, "layers=0.5", "what is in the blocks is unknown: 100.0 % of the work has no known part"),
        (two_streams, "rank=median", "needs the traces of several ranks"),
        (two_streams, "optimizer=fused", "changes nothing"),
        (already_fused, "attention=fused", "changes nothing"),
        (two_streams, "kind:gemm=1", "changes nothing: the trace has none of it, or it is so already"),
    ],
)
def test_a_change_that_is_none_is_one_line(trace, change, problem, tmp_path, capsys):
    assert main(["kernels", str(trace().write(tmp_path / "t.json")), "--what_if", change]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def clocks_apart():
    """The last kernel ends before its own launch, and the one before it just after the call that waited for it."""
    trace = step(90)
    trace.launched(10, "sgemm", 17, 30.4, MAIN)
    trace.call("cudaDeviceSynchronize", 16, 31)
    trace.launched(86, "softmax", 80, 2, MAIN)
    return trace


@pytest.mark.parametrize("words", [[], ["--path"]])
def test_clocks_that_disagree_are_read(words, tmp_path, capsys):
    whole, steps = clocks_apart(), clocks_apart()
    whole.events = [event for event in whole.events if "lmbench.step" not in event["name"]]
    for trace in (whole, steps):
        assert answer(capsys, trace.write(tmp_path / "t.json"), *words)


def test_the_path_of_a_trace_without_steps_is_of_the_whole_trace_and_has_no_changes_that_are_unknown(tmp_path, capsys):
    trace = HandWritten()
    trace.op("aten::mm", 0, 2000)
    text = shown(capsys, trace.write(tmp_path / "t.json"), "--path")
    assert "2.000 ms in the whole trace: gemm" in text
    assert "What if" not in text


def test_a_report_has_the_step_predicted_from_the_unchanged_runs_trace_beside_the_measured_one(tmp_path):
    def change(run, _):
        place = run["sweep"]["axes"]
        times = {"phases.step.mean_s": {"nothing": 0.1, "layers=0.5": 0.08}[place["measure.what_if"]]}
        # The profiler doubles the step, so that a quarter of it is what counts.
        traced = {"kernels": {"path_s": 0.2, "what_if": {"layers=0.5": -0.05}}, "is_profiled": True}
        return times | (traced if "pass" in place else {})

    cells = [{"measure.what_if": "nothing"}, {"measure.what_if": "layers=0.5"}]
    cells.append({"measure.what_if": "nothing", "pass": "kernels"})
    rows = rows_of(make_sweep(tmp_path / "checked", cells, view="what_if", change=change))
    (row,) = [row for row in rows if row["measure.what_if"] == "layers=0.5"]
    assert row["predicted_step_s"] == pytest.approx(0.075)
    assert row["step_prediction_error_fraction"] == pytest.approx(0.075 / 0.08 - 1)


def test_the_sentence_of_a_run_names_a_change_that_it_can_make():
    changes_s = {"layers=0.5": -0.08, "attention=0": -0.06, "launches=0": -0.05, "data=0": 0.0}
    text = what_sets(KernelSummary(path_s=0.2, path={"launching_s": 0.1}, what_if=changes_s))
    assert text == "launching takes 100.00 of 200.00 ms of the chain that sets the step; launches=0 would save 50.00 ms"


def test_launching_takes_as_much_less_as_the_host_is_faster_without_the_profiler(tmp_path, capsys):
    # The host works for 10 us before the synchronize and for 210 us after it.
    folder = tmp_path / "run"
    make_run(folder, {}, {"profile.host_step_s": 110e-6})
    late_host().write(folder / "trace.json").rename(folder / "trace.json.gz")
    record = answer(capsys, folder, "--path")
    assert (record["step_s"], record["unprofiled_step_s"]) == pytest.approx((500e-6, 400e-6))
    text = flat(shown(capsys, folder, "--path"))
    assert "0.400 ms per step with 0.110 ms of the host instead of 0.220" in text


def test_a_fused_trace_has_all_ranks_on_one_clock_and_the_path(tmp_path, capsys):
    write_ranks(tmp_path, offset_us=70_000)
    fused = tmp_path / "fused.json.gz"
    shown(capsys, tmp_path, "--path", "--output", fused)
    events = json.loads(gzip.decompress(fused.read_bytes()))["traceEvents"]
    ends = {event["ts"] + event["dur"] for event in events if "AllReduce" in event["name"]}
    assert max(ends) - min(ends) == pytest.approx(0, abs=1e-3)
    path = [event for event in events if event.get("cat") == "path"]
    assert sum(event["dur"] for event in path) == pytest.approx(1_562)
    assert {event["args"]["rank"] for event in path} == {0, 1}
