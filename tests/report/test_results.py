"""The figures of a report against the records that they come from; damaged sweep files and unknown views."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
from runs import ended, make_run, make_sweep, report_of, rows_of, section_of, table_of
from tables import cases, texts_of

from lmbench.report.results import rows_table

STEP = "phases.step.mean_s"


@cases("means", [0.1, 0.102, 0.107], [0.1])
def test_whiskers_are_the_interval_between_processes_and_a_single_one_has_none(means, swept):
    home = swept(repeats=len(means), change=lambda _, repeat: {STEP: means[repeat]})
    row, _ = rows_of(home)
    point, _ = section_of(home).charts()[0].spec["data"]["values"]
    assert [row.get(f"step_{end}_s", 0.0) for end in ("low", "high")] == pytest.approx(
        [point.get(end, 0.0) / 1e3 for end in ("low", "high")]
    )
    assert ("low" in point) == (len(means) > 1)


def test_sweeps_come_in_the_order_in_which_they_began_and_a_single_cell_has_no_chart_of_bars(tmp_path):
    for hour, name in enumerate(["search", "finals"]):
        changes = {"started_at": f"2026-11-30T0{hour}:00:00+00:00"}
        make_sweep(tmp_path / name, {"data.batch_size": [4]}, change=lambda *_, changes=changes: changes)
    sections = report_of(tmp_path).sections
    assert [section.title for section in sections[:2]] == ["search", "finals"]
    assert sections[0].charts() == []


@cases("""
- [columns, padding, text]
- [[step_s, tokens_per_s], 0.388, "; tokens/s counts padding, 0.5 % to 38.8 % of the tokens"]
- [[step_s, tokens_per_s], 0.006, processes]
- [[step_s], 0.388, processes]
""")
def test_a_table_with_throughput_says_how_much_of_it_is_padding(columns, padding, text, swept):
    def change(run, _):
        return {"data.padding_fraction": {4: 0.005, 8: padding}[run["config"]["data"]["batch_size"]]}

    home = swept(view=table_of(*columns), repeats=3, change=change)
    assert section_of(home).tables[0].caption.removesuffix(" (data.padding_fraction)").endswith(text)


def test_rates_of_attention_agree_with_the_mean_time_of_its_passes(swept):
    def change(_, repeat):
        flops = {"flops.per_token_flops": 1200, "flops.multiplier": 3}
        return flops | {"model.head_dim": 16, "phases.forward.mean_s": [0.001, 0.003][repeat]}

    view, axes = table_of("forward_s", "forward_flops_per_s"), {"data.batch_size": [4]}
    (row,) = rows_of(swept(axes, view=view, repeats=2, change=change))
    assert row["forward_s"] == pytest.approx(0.002)
    tokens = 4 * row["context"]
    assert row["forward_flops_per_s"] == pytest.approx(1200 / 3 * tokens / 0.002)


def test_columns_and_tables_without_figures_are_left_out_and_such_tables_named(swept):
    view = table_of("predicted_peak_bytes", "trace_host_wait_fraction", "step_s")
    view["tables"].append({"title": "Kernels", "columns": ["step_*_kind_fraction"]})
    # A trace that does not say how long the device waited.
    trace = {"kernels": {"phases": {"step": {"window_s": 0.05}}}}
    section = section_of(swept(view=view, change=lambda *_: trace))
    (shown,) = section.tables
    assert [column.title for column in shown.columns] == ["batch", "step"]
    assert "no run has figures of Kernels" in [line.text for line in section.notes]


def test_a_row_says_what_its_figures_are_where_the_caption_does_not(swept):
    def change(run, repeat):
        is_baseline = run["data"]["batch_size"] == 4
        host = {"environment.host.hostname": f"node_{repeat}"} if is_baseline else {}
        return host | ({} if is_baseline or repeat == 0 else {"outcome": "interrupted"})

    view = table_of("step_s", "speedup", baseline={"batch": 4})
    home = swept(view=view, repeats=3, change=change)
    (table,) = section_of(home).tables
    assert [cell.notes for row in table.cells for cell in row if cell.notes] == [
        ("mean over runs that differ in host: node_0, node_1, node_2",),
        ("± std of the steps within one run", "of 3 runs, not counted: 2 interrupted"),
        ("not decided: fewer than 3 processes on a side; --repeats 3",),
    ]


@cases("ends", ["inf", "inf"], ["inf", "-inf"])
def test_infinite_numbers_are_shown_without_a_point_of_a_chart_or_a_verdict(ends, swept):
    def change(run, repeat):
        if run["data"]["batch_size"] == 4 or repeat == 2:
            return {"scalars": {"mine": 1.0 + repeat}}
        return {"scalars": {"mine": None}, "nonfinite": {"scalars.mine": ends[repeat]}}

    chart = {"title": "Mine", "kind": "bars", "y": "scalars.mine", "x": "batch"}
    answer = {"kind": "best", "y": "scalars.mine", "x": "batch"}
    section = section_of(
        swept(view=table_of("scalars.mine", charts=[chart], answers=[answer]), repeats=3, change=change)
    )
    assert [row[-1].text or str(row[-1].value) for row in section.tables[0].cells] == [
        "2.0",
        "inf" if ends[0] == ends[1] else "nan",
    ]
    assert [point["x"] for point in section.charts()[0].spec["data"]["values"]] == ["4"]


def test_runs_of_one_process_are_one_sample(tmp_path):
    for index, step_s in enumerate([0.1, 0.11, 0.12]):
        make_run(tmp_path / str(index), {}, {"run_id": str(index), "pid": 7, STEP: step_s})
    (table,) = section_of(tmp_path).tables[:1]
    figure = table.cells[0][0]
    assert (figure.value, figure.low) == (0.1, None)
    assert figure.notes == ("runs: 3, processes: 1; one process is one sample, its first run",)
    assert table.caption.endswith("mean ± std of the steps within one run")


def test_sizes_of_several_widths_are_in_one_chart_unless_a_size_has_several_shapes(tmp_path):
    shapes = [(64, 2), (128, 4), (128, 8)]
    cells = [{"model.d_model": width, "model.num_layers": 2, "model.num_heads": heads} for width, heads in shapes]
    view = table_of("step_s", charts=[{"kind": "bars", "title": "Step time", "x": "size"}])
    titles = [
        [chart.title for chart in section_of(make_sweep(tmp_path / str(count), cells[:count], view=view)).charts()]
        for count in (2, 3)
    ]
    assert titles == [["Step time"], [f"Step time: num_heads {heads}" for _, heads in shapes]]


def test_runs_of_one_configuration_without_a_sweep_are_repeats_but_not_on_other_hosts(tmp_path):
    for index, settings in enumerate([{}, {}, {}, {"data.batch_size": 8}, {"model.weight_decay": 0.5}]):
        make_run(tmp_path / str(index), settings)
    make_run(tmp_path / "host", {}, {"environment.host.hostname": "b"})
    variables = {"LD_PRELOAD": "a.so", "X_DIR": "b"}
    make_run(tmp_path / "loaded", {}, {"environment.variables": variables})
    rows = {row["run_ids"]: row for row in rows_of(tmp_path)}
    assert {ids: row["runs"] for ids, row in rows.items()} == {"0 1 2": 3, "3": 1, "4": 1, "host": 1, "loaded": 1}
    assert [rows[ids]["variables"] for ids in ("3", "loaded")] == ["none", "LD_PRELOAD=a.so"]
    caption = section_of(tmp_path).tables[0].caption
    assert caption.endswith("mean ± std between 3 processes, or of the steps of a single one")


def test_what_a_run_recorded_goes_before_what_was_planned_for_one_that_died(swept):
    def change(run, repeat):
        run["config"]["trainer"]["devices"] = "auto" if repeat == 0 else 1
        return {"outcome": "timeout", "world_size": None, "phases": None} if repeat == 0 else {"world_size": 1}

    (row,) = rows_of(swept({"data.batch_size": [4]}, repeats=2, change=change))
    assert row["ranks"] == 1


def test_a_baseline_may_name_what_follows_from_other_facts(swept):
    home = swept({"model.optimizer_variant": ["fused", "loop"]})
    names = {row["optimizer"] for row in rows_of(home)}
    rows = rows_of(home, baseline=f"optimizer={min(names)}")
    assert [row["speedup"] for row in rows] == [pytest.approx(1.0)] * 2


def test_a_copy_of_a_run_is_noted_and_does_not_count(tmp_path):
    make_run(tmp_path / "a", {}, {"pid": 7})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert [row["runs"] for row in rows_of(tmp_path)] == [1]
    assert [line.text for line in section_of(tmp_path).notes if "copies" in line.text] == [
        "copies of runs, not counted: b"
    ]


def test_sweeps_of_one_name_go_by_their_folders_and_a_moved_run_is_repeated_from_where_it_lies(tmp_path, printed):
    def change(day, run, _):
        command = f"lmbench fit --config '/a & b/{run['run_id']}/config.yaml'"
        return {"replay_command": command, "started_at": f"2026-11-0{day}T00:00:00+00:00"}

    # Another sweep began between the two.
    for day, (machine, name) in enumerate([("machine a", "s"), ("b", "other"), ("b", "s")], start=1):
        home = make_sweep(tmp_path / machine / name, change=partial(change, day))
        (run, *_) = (home / "runs").iterdir()
        (run / "config.yaml").touch()
    assert {row["sweep"] for row in rows_of(tmp_path)} == {"machine a/s", "other", "b/s"}
    assert f"lmbench fit --config {run}/config.yaml" in printed(
        "report", tmp_path / "b", "--table=runs", "--format=csv"
    )


def test_a_stage_of_a_tuning_is_one_table_over_its_folders_and_lacks_nothing(tmp_path):
    tuning = tmp_path / "tune-mine"
    for batch in (4, 8):
        home = make_sweep(tuning / f"points-{batch}", {"data.batch_size": [batch]}, repeats=2)
        path = home / "sweep.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "name": "points"}))
    shutil.rmtree(home / "runs" / sorted(path.name for path in (home / "runs").iterdir())[-1])
    assert len({row["sweep"] for row in rows_of(tuning)}) == 2
    (tuning / ".begun").touch()
    section = section_of(tuning)
    assert (section.title, len(section.tables[0].cells)) == ("points of tune-mine", 2)
    assert "unfinished" not in [line.label for line in section.headline]


def test_the_efficiency_of_ranks_is_the_speed_up_by_their_ratio_and_may_be_undecided(swept):
    def change(run, repeat):
        ranks = run["sweep"]["axes"]["trainer.devices"]
        if ranks == "auto":
            return {"world_size": None, **ended("timeout", "setup")}
        rate = {1: 100, 2: 199, 4: 300}[ranks] * (1 + 0.01 * repeat)
        return {"world_size": ranks, "throughput.tokens_per_s": rate}

    view = table_of("scaling_efficiency_fraction", baseline={"ranks": 1})
    home = swept({"trainer.devices": [1, 2, 4, "auto"]}, view=view, repeats=3, change=change)
    *figures, died = (row[-1] for row in section_of(home).tables[0].cells)
    assert died.text == "timeout (setup)"
    assert [figure.value for figure in figures] == pytest.approx([1, 0.995, 0.75])
    assert [bool(figure.notes) for figure in figures] == [False, True, False]
    assert figures[2].low < 0.75 < figures[2].high < 0.8


def test_loss_and_gradients_are_compared_on_the_same_seed_and_data_only(swept):
    def change(run, _repeat):
        loss, norm = (9.0, 2.0) if run["precision"] == "32-true" else (9.01, 2.1)
        seed = 7 if run["precision"] == "bf16-true" else 0
        return {"loss.first": loss, "warmup": {"gradient_norm": norm}, "config.seed_everything": seed}

    axes = {"trainer.precision": ["32-true", "bf16-mixed", "bf16-true"]}
    rows = {row["precision"]: row for row in rows_of(swept(axes, view="precision", change=change))}
    names = ("first_loss_difference", "gradient_norm_difference_fraction")
    assert [rows["bf16-mixed"][name] for name in names] == pytest.approx([0.01, 0.05])
    # A run with another seed began with other weights.
    assert [rows["bf16-true"][name] for name in names] == [None, None]


@cases("""
- [row_count, is_told]
- [1, true]
- [9, false]
""")
def test_the_rows_of_a_section_are_tested_together(row_count, is_told, tmp_path):
    # One pair has p = 0.014.
    steps = {False: [0.1000, 0.1010, 0.1020], True: [0.1035, 0.1045, 0.1055]}
    axes = {"model.num_layers": [*range(1, row_count + 1)], "trainer.compile": [False, True]}
    home = make_sweep(
        tmp_path / "compile", axes, view="compile", repeats=3,
        change=lambda run, repeat: {STEP: steps[run["compile"]["is_enabled"]][repeat], "throughput": {}},
    )  # fmt: skip
    section = section_of(home)
    answers = texts_of(section.headline)
    assert [text for text in answers if "0.97x" in text and ("(undecided: may be chance" in text) == is_told] == []
    assert any("0.97x" in text for text in answers), answers
    assert bool(section.tables[0].notes) == (not is_told)


def test_a_stored_answers_times_are_shown_in_ms_and_its_rates_as_they_are():
    table = rows_table("kept", [{"step_s": 0.25, "flops_per_s": 7.9e14, "peak_bytes": 2**30, "way": "a"}])
    assert [column.heading for column in table.columns] == ["step (ms)", "flops_per_s", "peak (GiB)", "way"]


# damaged sweep files and unknown views


def test_a_damaged_sweep_file_leaves_its_runs_and_missing_runs_are_counted(swept):
    home = swept(view="batch", repeats=2)
    sweep = json.loads((home / "sweep.json").read_text())
    sweep["cells"] += [{"id": "1", "axes": {"data.batch_size": 1, "environment": {"no": "name"}}}]
    (home / "sweep.json").write_text(json.dumps(sweep))
    assert {("unfinished", "4 of 6 runs measured"), ("go on", f"lmbench sweep {home}")} <= {
        line[:2] for line in section_of(home).headline
    }
    (home / "sweep.json").write_text('{"name": "batch", "vie')
    assert any("2 cells, 4 runs (4 ok)" in line.text for line in section_of(home).headline)


def test_a_sweep_file_as_large_as_a_sweep_reads_it_has_its_view(swept):
    home = swept(view=table_of("peak_bytes"))
    sweep = json.loads((home / "sweep.json").read_text())
    (home / "sweep.json").write_text(json.dumps({**sweep, "environments": "x" * 40 * 2**20}))
    assert [table.title for table in section_of(home).tables] == ["T"]


def test_an_unknown_view_in_a_sweep_is_noted_and_the_sweep_is_shown(tmp_path):
    section = section_of(make_sweep(tmp_path / "new", view=table_of("later")))
    assert (section.title, section.tables[0].title) == ("new", "Step times")
    assert any("column 'later' is unknown" in line.text for line in section.notes)


def test_a_warning_of_one_run_is_not_its_worst_and_one_commit_of_code_and_lmbench_is_named_once(tmp_path):
    guard = {"name": "trend", "status": "warn", "message": "step time drifts", "value": 0.1}
    revision = {"commit": "c0ffee1234" * 4, "is_dirty": False}
    code = {"environment.code.project": revision, "environment.code.lmbench": revision}
    make_run(tmp_path / "a", {}, {"guards": [guard], **code})
    make_run(tmp_path / "b", {}, {"guards": [], **code}, repeat=1)
    headline = {line.label: line.text for line in section_of(tmp_path).headline}
    assert headline["WARN"] == "1 of 2 runs: step time drifts"
    assert headline["measured"].count("c0ffee123") == 1
