"""The critical path and what-ifs, against planted graphs whose path is known, and on real traces."""

from __future__ import annotations

import gzip
import json

import pytest
from runs import make_run, rows_of
from tables import cases, flat
from trace_events import HandWritten, examined, planted, write_ranks

from lmbench.kernels.findings import summarize
from lmbench.records.examined import KernelSummary
from lmbench.report.run import what_sets

#: Each has one step, in which the host works until the end of its range.
PLANTED = planted("""
# The all-reduce waits for the product, and the softmax for the all-reduce.
two_streams:
- [range, ProfilerStep#7, 0, 40]
- [launched, 0, sgemm, 6, 100]
- [call, cudaStreamWaitEvent, 10, 1]
- [launched, 12, ncclDevKernel_AllReduce_Sum_f32_RING_LL(int), 107, 300, 20]
- [launched, 20, add, 108, 50]
- [call, cudaStreamWaitEvent, 30, 1]
- [launched, 32, softmax, 408, 92]
# The softmax waits for a kernel of another stream, though no call says so.
unnoted_wait:
- [range, ProfilerStep#7, 0, 40]
- [launched, 0, sgemm, 6, 100]
- [launched, 12, add, 20, 380, 20]
- [launched, 32, softmax, 403, 97]
# The host waits for the product, then works for 200 us before it launches the softmax.
late_host:
- [range, ProfilerStep#7, 0, 320]
- [launched, 0, sgemm, 6, 100]
- [call, cudaStreamSynchronize, 10, 100]
- [launched, 310, softmax, 317, 183]
# One launch of a graph of three kernels, which returns after the first of them began.
replayed:
- [range, ProfilerStep#7, 0, 40]
- [launch, 1, 0, 30, {name: cudaGraphLaunch}]
- [kernel, 1, sgemm, 20, 100]
- [kernel, 1, sgemm, 121, 100]
- [kernel, 1, sgemm, 222, 100, {stream: 20}]
# An update with a matrix product, as Muon's.
muon:
- [step, 7, 0, 40]
- [phase, optimizer, 0, 40]
- [launched, 0, sgemm, 6, 100]
- [launched, 12, add, 107, 100]
# Attention by operators, and by one kernel.
written_out:
- [range, ProfilerStep#7, 0, 40]
- [module, network.blocks.0.attention.core.scores, 0, 18]
- [launched, 1, sgemm, 20, 100]
- [launched, 11, add, 121, 30]
- [module, network.blocks.0.attention.core.softmax, 20, 8]
- [launched, 21, softmax, 152, 60]
- [module, network.blocks.0.attention.core.values, 30, 8]
- [launched, 31, sgemm, 213, 50]
already_fused:
- [range, ProfilerStep#7, 0, 40]
- [module, network.blocks.0.attention.qkv, 0, 8]
- [launched, 1, sgemm, 20, 100]
- [module, network.blocks.0.attention.core, 10, 8]
- [launched, 11, void pytorch_flash::flash_fwd_kernel<Traits>, 121, 80]
# A softmax that is none of attention's.
other_softmax:
- [range, ProfilerStep#7, 0, 40]
- [op, aten::_softmax, 0, 8]
- [launched, 1, softmax, 20, 100]
# The first kernel of its stream has lost its launch, and sets the step.
lost_launch:
- [range, ProfilerStep#7, 0, 40]
- [launched, 12, sgemm, 20, 100]
- [kernel, null, add, 300, 100, {stream: 20}]
# Nothing computes, and one collective takes no time.
collectives_alone:
- [range, ProfilerStep#7, 0, 40]
- [launched, 1, &nccl ncclDevKernel_AllReduce_Sum_f32_RING_LL(int), 20, 100]
- [launched, 11, *nccl, 121, 0]
# The last kernel of a trace without steps ends while its launch still runs.
slow_last_launch:
- [launched, 0, sgemm, 6, 30]
- [launched, 40, softmax, 45, 0, {lasts: 90}]
# The last kernel ends before its own launch, and the one before it just after the call that waited for it.
clocks_apart:
- [range, ProfilerStep#7, 0, 90]
- &early [launched, 10, sgemm, 17, 30.4]
- &wait [call, cudaDeviceSynchronize, 16, 31]
- &late [launched, 86, softmax, 80, 2]
clocks_apart_without_steps: [*early, *wait, *late]
# Operators of a CPU in a block and after it.
cpu:
- [range, ProfilerStep#7, 0, 100]
- [module, network.blocks.0.ffn, 0, 60]
- [op, aten::mm, 0, 60]
- [module, network.head, 60, 40]
- [op, aten::mm, 60, 40]
# A device that is always behind: the last launches wait for room in the queue of 1,000 kernels.
full_queue:
- [range, ProfilerStep#7, 0, 10010]
""")
for number in range(1_600):
    at, lasts = (4.0 * number, 3.0) if number < 1_000 else (10.0 * (number - 600) + 7, 9.9)
    PLANTED["full_queue"].launched(at, "sgemm", 6 + 10 * number, 9, lasts=lasts)


def path_us(record):
    assert sum(record["path"].values()) == pytest.approx(record["step_s"])
    return {cause: round(time_s * 1e6, 3) for cause, time_s in record["path"].items()}


@cases("""
- [trace, expected]
- [two_streams, {launching: 6, gemm: 100, exposed all-reduce: 300, short gaps: 2, softmax: 92}]
- [unnoted_wait, {launching: 20, elementwise: 380, short gaps: 3, softmax: 97}]
- [late_host, {launching: 213, gemm: 100, synchronizing: 4, softmax: 183}]
- [collectives_alone, {launching: 20, exposed all-reduce: 100, short gaps: 1}]
- [lost_launch, {unexplained: 300, elementwise: 100}]
- [slow_last_launch, {launching: 39}]
- [replayed, {launching: 20, gemm: 300, short gaps: 2}]
""")
def test_the_path_is_the_planted_one(trace, expected, tmp_path, answered):
    assert path_us(answered("kernels", PLANTED[trace].write(tmp_path / "t.json"), "--path")) == expected


#: A product, which takes rank 1 900 us longer, then an all-reduce of 40 us; the softmax waits for it.
LATE_RANK = """
rank 0:
- [range, ProfilerStep#7, 0, 50]
- [launched, 1, sgemm, 20, 500]
- [call, cudaStreamWaitEvent, 6, 1]
- [launched, 8, &nccl ncclDevKernel_AllReduce_Sum_f32_RING_LL(int), 521, 940, 20, &group {
    Group size: 2, Process Group Name: "0", Process Group Ranks: "[0, 1]", Collective name: allreduce}]
- [call, cudaStreamWaitEvent, 14, 1]
- [launched, 16, softmax, 1462, 100]
rank 1:
- [range, ProfilerStep#7, 0, 50]
- [launched, 1, sgemm, 20, 1400]
- [call, cudaStreamWaitEvent, 6, 1]
- [launched, 8, *nccl, 1421, 40, 20, *group]
- [call, cudaStreamWaitEvent, 14, 1]
- [launched, 16, softmax, 1462, 100]
"""
#: Rank 1 comes 500 us later. It runs two collectives one after the other, and rank 0 waits in both at once.
TWO_COLLECTIVES = """
rank 0:
- [range, ProfilerStep#7, 0, 50]
- [launched, 1, sgemm, 20, 10]
- [call, cudaStreamWaitEvent, 6, 1]
- [launched, 8, &nccl ncclDevKernel_AllReduce_Sum_f32_RING_LL(int), 31, 540, 20, &group {
    Group size: 2, Process Group Name: "0", Process Group Ranks: "[0, 1]", Collective name: allreduce}]
- [launched, 16, *nccl, 32, 580, 21, *group]
rank 1:
- [range, ProfilerStep#7, 0, 50]
- [launched, 1, sgemm, 20, 510]
- [call, cudaStreamWaitEvent, 6, 1]
- [launched, 8, *nccl, 531, 40, 20, *group]
- [call, cudaStreamWaitEvent, 14, 1]
- [launched, 16, *nccl, 572, 40, 21, *group]
"""


@cases("offset_us", 0, 70_000)
def test_the_path_over_ranks_follows_the_late_one_and_names_what_the_others_waited(offset_us, tmp_path, answered):
    write_ranks(tmp_path, LATE_RANK, offset_us)
    record = answered("kernels", tmp_path, "--path")
    # The other rank waits for 899 us of the product, and for the gap behind it.
    expected = {"waiting for rank 1": 900, "gemm": 501, "softmax": 100, "exposed all-reduce": 40, "launching": 20}
    assert path_us(record) == {**expected, "short gaps": 1}
    changes = {row["change"]: row for row in record["tables"]["what_if"]}
    assert changes["rank=median"]["change_s"] == pytest.approx(-900e-6)
    assert changes["collectives=0"]["change_s"] == pytest.approx(-40e-6, abs=1.5e-6)


def test_a_late_rank_is_told_where_the_others_have_come_to_two_collectives(tmp_path, answered):
    write_ranks(tmp_path, TWO_COLLECTIVES)
    assert path_us(answered("kernels", tmp_path, "--path"))["waiting for rank 1"] == 572 - 31


@cases("""
- [trace, change, change_us]
# The other stream's kernel then sets the step: 50 us and a gap.
- [two_streams, collectives=0, -250]
- [two_streams, collectives=0.5, -150]
- [two_streams, kind:softmax=0, -92]
- [two_streams, launches=0, 0]
# Products stay: what is between them, 30 and 60 us with two gaps, is gone.
- [written_out, attention=fused, -92]
# Only what is no product reads and writes less.
- [muon, optimizer=fused, -65]
# The host is ahead, and kernels beside longer ones save nothing.
- [two_streams, kind:elementwise=0, 0]
# Two at once save less than the sum of both, once what is beside the all-reduce sets the step.
- [two_streams, "collectives=0,kind:elementwise=0", -300]
- [two_streams, "collectives=0 --what_if kind:elementwise=0", -300]
- [late_host, device=2x, -141.5]
- [late_host, launches=0, -207]
# Without the host's wait for room in the queue, twice the speed of the device is twice that of the step.
- [full_queue, device=2x, -7200]
""")
def test_a_what_if_changes_the_step_as_the_graph_says(trace, change, change_us, tmp_path, answered):
    record = answered("kernels", PLANTED[trace].write(tmp_path / "t.json"), "--what_if", *change.split())
    assert record["tables"]["what_if"][-1]["change_s"] * 1e6 == pytest.approx(change_us, rel=0.03, abs=4)


@cases("name", "small_bf16_eager", "small_bf16_replayed", "two_gpus")
def test_on_real_traces_the_path_sums_to_the_clocked_step_and_no_change_saves_more_than_it(name):
    kernels = summarize(examined(name))
    assert sum(kernels.path.values()) == pytest.approx(kernels.path_s)
    assert kernels.path_s == pytest.approx(examined(name).clocks.total.window_s, rel=0.01)
    assert all(-kernels.path_s <= change_s <= 1e-3 * kernels.path_s for change_s in kernels.what_if.values())


@cases("""
trace | change | problem
two_streams | collectives=2GB | is no change; give collectives=F or =NGB/s
two_streams | kind:gem=0 | did you mean gemm?
two_streams | device=-1 | is no change
two_streams | host=1e400 | is no change
two_streams | layers=0.5 | what is in the blocks is unknown: 100.0 % of the work has no known part
two_streams | rank=median | needs the traces of several ranks
two_streams | optimizer=fused | changes nothing
cpu | collectives=100GB/s | changes nothing
already_fused | attention=fused | changes nothing
other_softmax | attention=fused | changes nothing
other_softmax | attention=0 | changes nothing
two_streams | kind:gemm=1 | changes nothing: the trace has none of it, or it is so already
""")
def test_a_change_that_is_none_is_one_line(trace, change, problem, tmp_path, refused):
    (line,) = refused("kernels", PLANTED[trace].write(tmp_path / "t.json"), "--what_if", change).splitlines()
    assert problem in line


@cases("trace", "clocks_apart", "clocks_apart_without_steps")
@cases("words", [], ["--path"])
def test_clocks_that_disagree_are_read(words, trace, tmp_path, answered):
    assert answered("kernels", PLANTED[trace].write(tmp_path / "t.json"), *words)


def test_the_path_of_a_trace_without_steps_is_of_the_whole_trace_and_has_no_changes_that_are_unknown(tmp_path, printed):
    trace = HandWritten()
    trace.op("aten::mm", 0, 2000)
    text = printed("kernels", trace.write(tmp_path / "t.json"), "--path")
    assert "2.000 ms in the whole trace: gemm" in text
    assert "What if" not in text


def test_a_report_has_the_step_predicted_from_the_unchanged_runs_trace_beside_the_measured_one(swept):
    def change(run, _):
        place = run["sweep"]["axes"]
        times = {"phases.step.mean_s": {"nothing": 0.1, "layers=0.5": 0.08}[place["measure.what_if"]]}
        # The profiler doubles the step, so that a quarter of it is what counts.
        traced = {"kernels": {"path_s": 0.2, "what_if": {"layers=0.5": -0.05}}, "is_profiled": True}
        return times | (traced if "pass" in place else {})

    cells = [{"measure.what_if": "nothing"}, {"measure.what_if": "layers=0.5"}]
    cells.append({"measure.what_if": "nothing", "pass": "kernels"})
    rows = rows_of(swept(cells, view="what_if", change=change))
    (row,) = [row for row in rows if row["measure.what_if"] == "layers=0.5"]
    assert row["predicted_step_s"] == pytest.approx(0.075)
    assert row["step_prediction_error_fraction"] == pytest.approx(0.075 / 0.08 - 1)


def test_the_sentence_of_a_run_names_a_change_that_it_can_make():
    changes_s = {"layers=0.5": -0.08, "attention=0": -0.06, "launches=0": -0.05, "data=0": 0.0}
    text = what_sets(KernelSummary(path_s=0.2, path={"launching_s": 0.1}, what_if=changes_s))
    assert text == "launching takes 100.00 of 200.00 ms of the chain that sets the step; launches=0 would save 50.00 ms"


def test_a_table_of_kernels_says_what_sets_each_cells_step_and_what_would_save_most(swept):
    path = {"path_s": 0.2, "path": {"launching_s": 0.15}, "what_if": {"layers=0.5": -0.1, "launches=0": -0.05}}
    traced = {"is_profiled": True, "kernels": {**path, "phases": {"step": {"kernel_s": 0.1, "kernel_count": 5}}}}
    tables = swept([{"model.size": "small"}], view="kernels", change=lambda _run, _place: traced)
    (row,) = rows_of(tables)
    assert (row["path_cause_fraction"], row["path_saving_fraction"]) == pytest.approx((0.75, 0.25))


def test_launching_takes_as_much_less_as_the_host_is_faster_without_the_profiler(tmp_path, printed, answered):
    # The host works for 10 us before the synchronize and for 210 us after it.
    folder = tmp_path / "run"
    make_run(folder, {}, {"profile.host_step_s": 110e-6})
    PLANTED["late_host"].write(folder / "trace.json.gz")
    record = answered("kernels", folder, "--path")
    assert (record["step_s"], record["unprofiled_step_s"]) == pytest.approx((500e-6, 400e-6))
    text = flat(printed("kernels", folder, "--path"))
    assert "0.400 ms per step with 0.110 ms of the host instead of 0.220" in text


def test_half_the_layers_halve_the_operators_of_a_cpu_in_blocks(tmp_path, answered):
    make_run(tmp_path / "run", {})
    PLANTED["cpu"].write(tmp_path / "run" / "trace.json.gz")
    record = answered("kernels", tmp_path / "run", "--what_if", "layers=0.5")
    assert record["tables"]["what_if"][-1]["change_s"] == pytest.approx(-30e-6)


def test_a_fused_trace_has_all_ranks_on_one_clock_and_the_path(tmp_path, printed):
    write_ranks(tmp_path, LATE_RANK, 70_000)
    fused = tmp_path / "fused.json.gz"
    printed("kernels", tmp_path, "--path", "--output", fused)
    events = json.loads(gzip.decompress(fused.read_bytes()))["traceEvents"]
    ends = {event["ts"] + event["dur"] for event in events if "AllReduce" in event["name"]}
    assert max(ends) - min(ends) == pytest.approx(0, abs=1e-3)
    path = [event for event in events if event.get("cat") == "path"]
    assert sum(event["dur"] for event in path) == pytest.approx(1_562)
    assert {event["args"]["rank"] for event in path} == {0, 1}
