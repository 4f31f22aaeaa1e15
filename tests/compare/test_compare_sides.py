"""The samples and cells of two sides: which runs count, which cells both sides have, and which runs are only listed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from comparison_runs import SLOWER, TIMES, make_run, make_runs, make_sides, make_sweep
from refusals import usage_error
from tables import cases

from lmbench.compare.comparison import compare
from lmbench.compare.sides import mean_step_s, typical_step_s
from lmbench.records.measured import PhaseSummary, Window
from lmbench.records.run import RunRecord


def compared(a, b, **options):
    return compare(str(a), str(b), 0.01, **options)


def verdicts(comparison):
    return {cell.name: cell.verdict for cell in comparison.cells}


def test_the_sample_is_a_typical_step_and_the_mean_is_the_windows_wall_time_divided_by_its_steps():
    record = RunRecord(1, "ok", window=Window(wall_s=5.0, steps=100, skipped_count=0, short_count=0))
    record.phases.step = PhaseSummary(mean_s=0.049, p25_s=0.04, median_s=0.045, p75_s=0.05)
    assert (typical_step_s(record), mean_step_s(record)) == (pytest.approx(0.045), 0.05)
    # Skipped steps are shorter, and no statistic includes them.
    record.window.skipped_count = 3
    record.phases.step.p25_s = None
    assert (typical_step_s(record), mean_step_s(record)) == (0.049, 0.049)
    assert typical_step_s(RunRecord(1, "ok", window=Window(wall_s=5.0, steps=0))) is None


@cases("""
- [quartile_s, mean_factor, verdict, reason]
# In each run of B the host delayed some steps, in some runs more than in others.
- [0.05, [1.0, 1.3, 1.0, 1.1, 1.0, 1.4], same, lies within ±1 %]
# Only the longest steps are longer; then the typical step too.
- [0.05, [1.1, 1.1, 1.1, 1.1, 1.1, 1.1], slower, "only the mean step: +10.0"]
- [0.052, [1.04, 1.3, 1.04, 1.1, 1.04, 1.4], slower, "+4.0"]
""")
def test_a_few_long_steps_do_not_hide_a_change_and_a_longer_tail_is_told(
    tmp_path, quartile_s, mean_factor, verdict, reason
):
    for side, typical_s, factors in (("a", 0.05, (1.0,) * 6), ("b", quartile_s, mean_factor)):
        for wobble, factor in zip((0.999, 1.0, 1.001) * 2, factors, strict=True):
            quartiles = {f"phases__step__{name}_s": typical_s * wobble for name in ("p25", "median", "p75")}
            make_run(tmp_path / side, 0.05 * factor * wobble, **quartiles)
    (cell,) = compared(tmp_path / "a", tmp_path / "b").cells
    assert (cell.verdict, cell.metrics[0].finding) == (verdict, verdict)
    assert reason in cell.reasons[0]


def test_phases_and_memory_come_after_the_step_and_are_corrected_apart_from_it(tmp_path):
    (cell,) = compared(*make_sides(tmp_path, memory__run_peak_allocated_bytes=6 * 2**30)).cells
    times = ("step_s", "mean_step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "other_s")
    assert {figure.name: figure.finding for figure in cell.metrics} == {
        **dict.fromkeys(times, "slower"), "steady_peak_allocated_bytes": "same", "run_peak_allocated_bytes": "larger",
    }  # fmt: skip
    step, *others = cell.metrics
    assert step.adjusted_p == step.ratio.p < min(figure.adjusted_p for figure in others if figure.unit == "s")


@cases("""
- [changes, reason]
- [{outcome: oom, error: {phase: forward}}, outcome oom in forward]
- [{outcome: timeout}, outcome timeout]
- [{outcome: running, pid: 4194305}, outcome killed]
- [{window.steps: 0, window.wall_s: 0.0}, "empty window: no step was measured"]
- [{window: {}}, "empty window: no step was measured"]
- [{is_profiled: true}, "under a profiler: its step times are in no comparison"]
- [{clock: sync}, "with clock sync (synchronized at every phase): its step times are in no comparison"]
""")
def test_a_run_that_is_no_sample_is_listed_with_its_reason(tmp_path, changes, reason):
    sides = make_sides(tmp_path, TIMES)
    left_out_path = make_run(tmp_path / "b", 0.09, **changes)
    comparison = compared(*sides)
    (left_out,) = (*comparison.b.left_out, *comparison.cells[0].left_out_b)
    assert (comparison.verdict, left_out.path, left_out.reason) == ("same", str(left_out_path), reason)


def on_repeats(a, b):
    """What the cells of a comparison note on their repeats."""
    return {note for cell in compared(a, b).cells for note in cell.notes if "repeats" in note}


def test_a_side_of_few_repeats_is_told_the_command_for_more_if_its_run_records_one(tmp_path):
    make_run(tmp_path / "a", replay_command="lmbench validate --config a.yaml")
    make_run(tmp_path / "b", config=None)
    notes = {"repeats of A: lmbench validate --config a.yaml --repeats 3"}
    assert on_repeats(tmp_path / "a", tmp_path / "b") == notes


def test_sweeps_of_few_repeats_that_count_are_told_one_command_for_those_of_all_cells(tmp_path):
    few = make_sweep(tmp_path / "few a", {"small": TIMES[:1], "medium": TIMES[:1]})
    failed = make_sweep(tmp_path / "b", {"small": TIMES, "medium": TIMES})
    for path in failed.glob("runs/*-r2/run.json"):
        path.write_text(path.read_text().replace('"outcome": "ok"', '"outcome": "error"'))
    assert on_repeats(few, failed) == {
        f"repeats of A: lmbench sweep '{few}' --repeats 3", f"repeats of B: lmbench sweep {failed} --repeats 3",
    }  # fmt: skip


def test_a_single_run_of_a_sweep_with_repeats_is_told_to_compare_its_cell(tmp_path):
    a, b = (min((make_sweep(tmp_path / name, {"small": TIMES}) / "runs").iterdir()) for name in "ab")
    assert on_repeats(a, b) == {
        f"{side} is one of 3 repeats: give its cell, SWEEP@AXIS=VALUE, instead" for side in "AB"
    }


def test_the_name_of_a_side_may_be_longer_than_that_of_a_file(tmp_path):
    a, b = make_sides(tmp_path)
    selector = f"@{','.join(['trainer.precision=bf16-mixed'] * 12)}"
    assert compared(a + selector, b).verdict == "slower"


def test_runs_that_cannot_be_read_are_listed_or_refused(tmp_path):
    sides = make_sides(tmp_path, TIMES)
    broken = make_run(tmp_path / "b", run_id="broken") / "run.json"
    broken.write_text(broken.read_text()[:100])
    old = make_run(tmp_path / "b", run_id="old", schema_version=99)
    comparison = compared(*sides)
    assert (comparison.verdict, [run.outcome for run in comparison.b.left_out]) == ("same", ["damaged", "damaged"])
    # A cell that a cluster never began, on both sides, is no common result.
    for side in sides:
        make_run(Path(side), run_id="lost", outcome="interrupted", pid=None, started_at=None)
    assert compared(*sides).verdict == "same"
    for path, message in ((old, "schema version 99"), (broken.parent, "has nothing to compare: run.json is damaged")):
        with usage_error(message):
            compared(tmp_path / "a", path)


def test_runs_of_one_process_are_one_sample_and_on_both_sides_are_refused(tmp_path):
    a, b = make_sides(tmp_path, TIMES, pid=77)
    (cell,) = compared(a, b).cells
    assert (cell.verdict, cell.metrics[0].ratio.n_b) == ("undecided", 1)
    assert all("one process is one sample" in run.reason for run in cell.left_out_b)
    copy = shutil.copytree(b, tmp_path / "copy")
    make_run(copy)
    for other in (copy, make_run(tmp_path / "further", pid=77)):
        with usage_error(r"hold runs of the same processes, 3 such as"):
            compared(b, other)


def test_cells_of_two_sweeps_meet_by_their_axes_and_those_that_fit_on_neither_side_are_not_judged(tmp_path):
    cells = {"small": TIMES, "medium": TIMES, "large": TIMES}
    a = make_sweep(tmp_path / "a", {**cells, "tiny": TIMES})
    changes = {"environment__code__project__commit": "bbbb"}
    b = make_sweep(tmp_path / "b", {"small": TIMES, "medium": SLOWER, "2.7B": TIMES}, **changes)
    make_sweep(b, {"large": TIMES}, outcome="oom", **changes)
    for side in (a, b):
        make_sweep(side, {"xl": TIMES}, outcome="oom")
    comparison = compared(a, b)
    assert verdicts(comparison) == {"size small": "same", "size medium": "slower", "size large": "invalid"}
    assert (comparison.only_a, comparison.only_b) == (["size tiny"], ["size 2.7B"])
    assert (comparison.verdict, comparison.family) == ("slower", 2)
    assert comparison.cells[2].reasons == ["no run of B counts: outcome oom"]
    reason = "no run of A counts: outcome oom; no run of B counts: outcome oom"
    assert comparison.neither == [{"name": "size xl", "reason": reason}]


def test_unrelated_runs_meet_by_their_configuration_and_sides_without_a_cell_in_common_are_refused(tmp_path):
    for side, times in (("a", TIMES), ("b", SLOWER)):
        for size in ("small", "medium"):
            make_runs(tmp_path / side, times, config__model__size=size, config__measure__results_dir=side)
    assert verdicts(compared(tmp_path / "a", tmp_path / "b")) == {"size small": "slower", "size medium": "slower"}
    other = make_sweep(tmp_path / "c", {"large": TIMES, "xl": TIMES})
    with usage_error(r"no cell in common: A has 2 .such as 'size small'"):
        compared(tmp_path / "a", other)
