"""The figures of a report against the records that they come from, and what is no result, damaged or foreign."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from report_golden import BF16
from report_results import (
    add_kernels,
    answer_of,
    edit_runs,
    make_record,
    rows_of,
    set_outcome,
    table_rows,
    write_run,
    write_sweep,
)

from lmbench.cli import main


def set_step(run: dict[str, Any], mean_s: float, std_s: float = 0.001) -> None:
    run["phases"]["step"] |= {"mean_s": mean_s, "std_s": std_s, "median_s": mean_s}


@pytest.mark.parametrize(
    ("means", "mean", "std", "spread"),
    [
        ([0.100, 0.102, 0.107], 0.103, statistics.stdev([0.100, 0.102, 0.107]), "mean ± std between 3 processes"),
        ([0.1], 0.1, 0.001, "mean ± std of the steps within one run"),
    ],
)
def test_the_spread_is_that_between_processes_or_within_the_only_one(
    means: list[float], mean: float, std: float, spread: str, tmp_path: Path
) -> None:
    write_sweep(
        tmp_path, "s", {"data.batch_size": [4]}, repeats=len(means), edit=lambda run, _, k: set_step(run, means[k])
    )
    (row,) = rows_of(tmp_path)
    assert (row["step_s"], row["step_std_s"]) == pytest.approx((mean, std))
    assert row["spread"] == spread


def test_runs_of_one_configuration_without_a_sweep_are_repeats_but_not_on_other_hosts(tmp_path: Path) -> None:
    for index in range(3):
        write_run(tmp_path / f"r{index}", make_record({}))
    write_run(tmp_path / "other", make_record({"data.batch_size": 8}))
    write_run(tmp_path / "option", make_record({"model.weight_decay": 0.5}))
    write_run(tmp_path / "host", make_record({}, edit=lambda run: run["environment"]["host"].update(hostname="b")))
    runs = {(row["batch"], row["model.weight_decay"], row["host"] == "b"): row["runs"] for row in rows_of(tmp_path)}
    assert runs == {(4, 0.1, False): 3, (8, 0.1, False): 1, (4, 0.5, False): 1, (4, 0.1, True): 1}


def test_a_sweep_that_moved_to_another_host_says_so(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], _: Mapping[str, Any], repeat: int) -> None:
        run["environment"]["host"]["hostname"] = f"host{repeat}"

    write_sweep(tmp_path, "s", {"data.batch_size": [4]}, repeats=2, edit=edit)
    (table,) = answer_of(tmp_path).sections[0].tables
    assert table.notes == ["runs on 2 hosts; the spread has their difference in it"]


def test_speed_up_and_memory_saving_are_against_the_named_baseline(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], repeat: int) -> None:
        is_base = axes["trainer.precision"] == "32-true"
        set_step(run, (0.2 if is_base else 0.1) * (1 + 0.01 * repeat))
        run["memory"]["run_peak_allocated_bytes"] = 8000 if is_base else 6000

    axes = {"trainer.precision": ["32-true", "bf16-mixed"]}
    write_sweep(tmp_path, "precision", axes, view="precision", repeats=3, edit=edit)
    base, faster = rows_of(tmp_path)
    assert (base["speedup"], base["memory_saved_fraction"]) == (pytest.approx(1.0), 0)
    assert faster["baseline"] == "fp32 eager"
    assert faster["speedup"] == pytest.approx(2.0)
    assert faster["speedup_low"] < 2 < faster["speedup_high"]
    assert faster["memory_saved_fraction"] == pytest.approx(0.25)


def test_steps_of_another_size_are_compared_by_tokens_per_second(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        set_step(run, 0.1 if axes["data.batch_size"] == 1 else 0.15)
        run["throughput"]["tokens_per_s"] = 1000 if axes["data.batch_size"] == 1 else 4000

    write_sweep(tmp_path, "batch", {"data.batch_size": [1, 8]}, edit=edit)
    assert rows_of(tmp_path, baseline="batch=1")[1]["speedup"] == pytest.approx(4.0)


def test_a_cell_without_an_ok_run_has_an_outcome_and_no_figures(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        if axes["data.batch_size"] == 64:
            set_outcome(run, "oom", "backward")

    write_sweep(tmp_path, "batch", {"data.batch_size": [1, 64]}, view="batch", repeats=2, edit=edit)
    _, row = rows_of(tmp_path)
    assert (row["outcome"], row["phase"], row["reason"]) == ("oom", "backward", "CUDA out of memory.")
    assert (row["runs"], row["ok_runs"], row["step_s"], row["peak_bytes"]) == (2, 0, None, None)


def test_loss_and_gradients_are_compared_on_the_same_seed_and_data_only(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        is_base = axes["trainer.precision"] == "32-true"
        run["loss"]["first"] = 9.0 if is_base else 9.01
        run["warmup"] = {"gradient_norm": 2.0 if is_base else 2.1}
        if axes["trainer.precision"] == "bf16-true":
            run["config"]["seed_everything"] = 7

    write_sweep(
        tmp_path, "precision", {"trainer.precision": ["32-true", "bf16-mixed", "bf16-true"]}, view="precision",
        edit=edit,
    )  # fmt: skip
    names = ("first_loss_difference", "gradient_norm_difference_fraction")
    rows = {row["precision"]: tuple(row[name] for name in names) for row in rows_of(tmp_path)}
    assert rows["bf16-mixed"] == pytest.approx((0.01, 0.05))
    # Another seed began with other weights.
    assert rows["bf16-true"] == (None, None)


def test_another_pass_of_a_cell_makes_no_row_of_its_own(tmp_path: Path) -> None:
    write_sweep(tmp_path, "passes", {"model.size": ["small"], "pass": ["timing", "sync"]})
    (row,) = rows_of(tmp_path)
    assert (row["runs"], row["passes"]) == (1, 1)


def test_compiling_that_is_slower_never_pays_and_its_cold_time_is_that_of_private_caches(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        set_step(run, 0.11 if axes["trainer.compile"] else 0.1)

    write_sweep(tmp_path, "compile", {"trainer.compile": [False, True]}, view="compile", repeats=3, edit=edit)
    row = rows_of(tmp_path)[1]
    assert row["warm_first_step_s"] == pytest.approx(0.2 * row["cold_first_step_s"])
    assert table_rows(answer_of(tmp_path).sections[0].tables[0])[1]["pays after, vs eager"] == "never"


def test_host_bound_share_counts_the_phases_that_waited(tmp_path: Path) -> None:
    record = make_record({})
    for phase, share in {"forward": 0.3, "backward": 0.6}.items():
        record["phases"][phase]["share_fraction"] = share
    record["probe"]["verdicts"] = {"forward": {"verdict": "host-bound"}, "backward": {"verdict": "queued"}}
    write_run(tmp_path / "a", record)
    assert rows_of(tmp_path)[0]["host_bound_fraction"] == pytest.approx(0.3)


def test_csv_holds_every_cell_with_si_units_in_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = write_sweep(tmp_path, "batch", {"data.batch_size": [1, 2, 4]}, view="batch", repeats=2)
    assert main(["report", str(home), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["batch"] for row in rows] == ["1", "2", "4"]
    assert [float(row["step_s"]) for row in rows] == [row["step_s"] for row in rows_of(home)]
    assert {"step_std_s", "tokens_per_s", "peak_bytes", "mfu_fraction", "outcome"} <= rows[0].keys()


def test_a_difference_that_repeats_cannot_tell_from_none_is_marked_and_not_called_faster(tmp_path: Path) -> None:
    steps = {False: [0.105, 0.106, 0.107], True: [0.100, 0.110, 0.120]}

    def edit(run: dict[str, Any], axes: Mapping[str, Any], repeat: int) -> None:
        set_step(run, steps[axes["trainer.compile"]][repeat])

    axes = {"model.size": ["small", "large"], "trainer.compile": [False, True]}
    write_sweep(tmp_path, "compile", axes, view="compile", fixed=BF16, repeats=3, edit=edit)
    section = answer_of(tmp_path).sections[0]
    marked = [row["compile"] for row in table_rows(section.tables[0]) if row["step"].endswith("[1]")]
    assert marked == ["default", "default"]
    assert section.tables[0].notes[0].startswith("the difference to the baseline is not told from none")
    told = "compiled is not told from eager by time at large (110.0 ± 10.0 against 106.0 ± 1.0 ms), never pays, "
    assert any(line.text.startswith(told) for line in section.headline)


def test_a_real_run_is_reported_with_its_device_and_precision_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--measure.steps", "2", "--measure.min_window_s", "0", "--measure.probe_steps", "0"]
    assert main(["fit", "--config", "smoke", "--measure.results_dir", str(tmp_path), *options]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert "1 cell, 1 run (1 ok)" in out
    assert "**Step times**: CPU" in out
    assert "32-true, float32 matmul highest (fp32), eager" in out


# what is no result, damaged or foreign


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "'nowhere' does not exist"),
        (["empty"], "holds no lmbench result"),
        (["good", "--view", "step_time"], "did you mean step_times?"),
        (["good", "--baseline", "colour=red"], "'colour' is unknown here; choose among attention"),
        (["good", "--baseline", "precision=64-true"], "no run has it; choose among 32-true"),
        (["good", "--baseline", "precision"], "give fact=value"),
        (["good", "--output", "missing/page.html"], "cannot be written"),
        (["good", "--format", "pdf"], "choose among"),
        ([], "no result was named"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "good", make_record({"model.size": "small"}))
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_only_results_of_another_schema_version_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", make_record({}, edit=lambda run: run.update(schema_version=2)))
    assert main(["report", str(tmp_path)]) == 2
    assert "schema version 2, this lmbench reads 1" in capsys.readouterr().err


def test_a_record_that_does_not_fit_is_listed_as_damaged_with_the_field(tmp_path: Path) -> None:
    write_run(tmp_path / "good", make_record({"model.size": "small"}))
    for name, changes in {"a": {"model": 5}, "b": {"phases": [1]}, "c": {"guards": "none"}, "d": {"sweep": 3}}.items():
        write_run(tmp_path / name, make_record({}))
        (tmp_path / name / "run.json").write_text(json.dumps({**make_record({}), **changes}))
    section = answer_of(tmp_path).sections[0]
    assert any("4 damaged" in line.text for line in section.headline)
    reasons = [line.text for line in section.notes if line.label == "not ok"]
    for field in ("model", "phases", "guards", "sweep"):
        assert any("damaged: run.json is damaged: " in reason and field in reason for reason in reasons)


def test_a_damaged_sweep_file_leaves_its_runs_and_a_missing_cell_is_counted(tmp_path: Path) -> None:
    home = write_sweep(tmp_path, "batch", {"data.batch_size": [1, 2]}, view="batch", repeats=2)
    sweep = json.loads((home / "sweep.json").read_text())
    sweep["cells"] += [{"id": "4", "axes": {"data.batch_size": 4}}]
    (home / "sweep.json").write_text(json.dumps(sweep))
    notes = [line.text for line in answer_of(home / "sweep.json").sections[0].notes]
    assert "1 of 3 cells have no run yet" in notes
    (home / "sweep.json").write_text('{"name": "batch", "vie')
    assert any("2 cells, 4 runs (4 ok)" in line.text for line in answer_of(home).sections[0].headline)


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ("from_the_future", "view 'from_the_future' is unknown here"),
        ({"title": "Later", "tables": [{"title": "T", "columns": ["later"]}]}, "column 'later' is unknown"),
    ],
)
def test_an_unknown_view_in_a_sweep_is_said_and_the_sweep_shown(view: Any, said: str, tmp_path: Path) -> None:
    section = answer_of(write_sweep(tmp_path, "new", {"data.batch_size": [1, 2]}, view=view)).sections[0]
    assert (section.title, section.tables[0].title) == ("new", "Step times")
    assert any(said in line.text and "shown as any sweep" in line.text for line in section.notes)


def test_a_run_that_died_before_it_could_tell_stands_in_its_own_row(tmp_path: Path) -> None:
    axes = {"model.size": ["small", "medium"], "mode": ["inference", "train_step"]}
    home = write_sweep(tmp_path, "step_times", axes, view="step_times", fixed={"data.batch_size": 8})
    path = home / "runs" / "medium-train_step-r0" / "run.json"
    place = json.loads(path.read_text())["sweep"]
    died = {"schema_version": 1, "outcome": "error", "error": {"message": "killed by signal 9", "phase": None}}
    path.write_text(json.dumps({**died, "sweep": place}))
    (table,) = answer_of(home).sections[0].tables
    (row,) = [row for row in table_rows(table) if (row["size"], row["mode"]) == ("medium", "train_step")]
    assert row["step"] == "error"
    assert "batch 8" in table.caption


def test_text_from_a_result_cannot_break_a_table_or_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script>*x*\n| y |\x1b[31m\u202e"
    for name, size in (("a", evil), ("b", "small")):
        record = make_record({}, edit=lambda run, size=size: run["model"].update(size=size))
        record["environment"]["gpu"]["name"] = evil
        write_run(tmp_path / "runs" / name, record)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--output", str(page)]) == 0
    text = page.read_text()
    assert "<script>alert" not in text
    assert main(["report", str(tmp_path / "runs"), "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    assert len([line for line in markdown.splitlines() if line.startswith("|")]) == 4
    for shown in (text, markdown):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e\ud800-\udfff]", shown)


def test_show_goes_on_past_a_run_that_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", make_record({}, edit=lambda run: run.update(schema_version=99)))
    write_run(tmp_path / "b", make_record({"model.size": "medium"}))
    assert main(["show", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "medium" in out
    assert "schema version 99" in err
    assert err.count("\n") == 1
    assert main(["show", str(tmp_path / "a")]) == 2


def test_a_shorter_window_of_the_longest_context_is_no_fact(tmp_path: Path) -> None:
    home = write_sweep(tmp_path, "own", {"data.context_length": [256, 512], "measure.steps": [100]})

    def shorten(run: dict[str, Any]) -> None:
        if run["data"]["context_length"] == 512:
            run["sweep"]["axes"]["measure.steps"] = 34

    edit_runs(home, shorten)
    assert [column.title for column in answer_of(home).sections[0].tables[0].columns][:2] == ["context", "step"]
    only = write_sweep(tmp_path, "steps", {"measure.steps": [10, 100]})
    assert answer_of(only).sections[0].tables[0].columns[0].title == "steps"


# profiled runs

NAIVE = {"model.size": "small", "model.attention": "naive", "trainer.precision": "32-true"}


def profiled(folder: Path, edit: Any = None) -> None:
    def profile(run: dict[str, Any]) -> None:
        add_kernels(run, NAIVE)
        if edit is not None:
            edit(run)

    write_run(folder, make_record(NAIVE, edit=profile))


def without_attention(run: dict[str, Any]) -> None:
    """A model of somebody else's: nothing is known of its attention and its optimizer."""
    run["model"] = {"name": "theirs.Llama", "parameter_count": 1}
    run["config"]["model"] = {}


def test_a_fact_that_a_row_does_not_have_is_a_column_and_not_in_the_caption(tmp_path: Path) -> None:
    profiled(tmp_path / "own")
    profiled(tmp_path / "theirs", without_attention)
    table = answer_of(tmp_path, view="kernels").sections[0].tables[0]
    assert "naive" not in table.caption
    assert "32-true" in table.caption
    told = {row["size"]: (row["attention"], row["optimizer"]) for row in table_rows(table)}
    assert told == {"small": ("naive", "AdamW fused"), "Llama": ("-", "-")}


def test_profiled_runs_alone_are_shown_by_their_kernels_and_beside_others_a_line_says_how(tmp_path: Path) -> None:
    profiled(tmp_path / "a")
    write_run(tmp_path / "sync", make_record(NAIVE, 1, lambda run: run.update(clock="sync")))
    assert answer_of(tmp_path).sections[0].title == "Kernels"
    write_run(tmp_path / "b", make_record(NAIVE, 1))
    section = answer_of(tmp_path).sections[0]
    assert section.title == "Runs"
    (line,) = [line.text for line in section.notes if "profiler" in line.text]
    assert re.fullmatch(r"1 run under a profiler: in no timing table.*; `--view kernels` shows their kernels", line)


def test_a_profiled_run_without_a_summary_points_at_its_trace(tmp_path: Path) -> None:
    profiled(tmp_path / "a", lambda run: run.pop("kernels"))
    notes = [line.text for line in answer_of(tmp_path).sections[0].notes]
    assert any(note.startswith("1 run without kernel figures in run.json: `lmbench kernels RUN`") for note in notes)


def test_runs_without_kernels_show_their_operators(tmp_path: Path) -> None:
    shares = {("forward", "aten::addmm"): 0.45, ("forward", "aten::mul"): 0.2, ("backward", "aten::mm"): 0.5}
    operators = [
        {"phase": phase, "name": name, "self_s": 1e-3, "call_count": 4.0, "share_fraction": share}
        for (phase, name), share in shares.items()
    ]
    profiled(tmp_path / "a", lambda run: run.update(kernels={"reason": "no kernels", "operators": operators}))
    (table,) = answer_of(tmp_path).sections[0].tables
    (row,) = table_rows(table)
    assert (row["forward"], row["backward"]) == ("aten::addmm 45.0 %, aten::mul 20.0 % [1]", "aten::mm 50.0 %")
    assert table.notes == ["no kernels"]
