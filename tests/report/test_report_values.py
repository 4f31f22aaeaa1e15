"""The figures in the tables, against the records they come from."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from report_results import make_record, set_outcome, write_run, write_sweep

from lmbench.cli import main
from lmbench.commands.report import make_catalogue
from lmbench.report.cells import Cell, make_cells
from lmbench.report.charts import interval
from lmbench.report.delimited import cell_rows
from lmbench.report.gather import gather
from lmbench.report.sections import Options, build_report

Row = dict[str, Any]


def rows_of(folder: Path, **options: Any) -> list[Row]:
    return cell_rows(build_report(gather([folder]), make_catalogue(), Options(**options)))


def set_step(run: dict[str, Any], mean_s: float, std_s: float = 0.001) -> None:
    run["phases"]["step"] |= {"mean_s": mean_s, "std_s": std_s, "median_s": mean_s}


def test_the_spread_of_several_processes_is_that_of_their_means(tmp_path: Path) -> None:
    means = [0.100, 0.102, 0.107]
    write_sweep(tmp_path, "s", {"data.batch_size": [4]}, repeats=3, edit=lambda run, _, k: set_step(run, means[k]))
    (row,) = rows_of(tmp_path)
    assert row["step_s"] == pytest.approx(0.103)
    assert row["step_std_s"] == pytest.approx(statistics.stdev(means))
    assert row["spread"] == "mean ± std between 3 processes"


def test_the_spread_of_one_process_is_that_of_its_steps(tmp_path: Path) -> None:
    write_sweep(tmp_path, "s", {"data.batch_size": [4]}, edit=lambda run, *_: set_step(run, 0.1, 0.007))
    (row,) = rows_of(tmp_path)
    assert (row["step_s"], row["step_std_s"]) == (0.1, 0.007)
    assert row["spread"] == "mean ± std of the steps within one run"


def test_runs_of_one_configuration_without_a_sweep_are_repeats(tmp_path: Path) -> None:
    for index in range(3):
        write_run(tmp_path / f"r{index}", make_record({}, edit=lambda run, i=index: set_step(run, 0.1 + 0.01 * i)))
    write_run(tmp_path / "other", make_record({"data.batch_size": 8}))
    write_run(tmp_path / "option", make_record({"model.weight_decay": 0.5}))
    runs = {(row["batch"], row["model.weight_decay"]): row["runs"] for row in rows_of(tmp_path)}
    assert runs == {(4, 0.1): 3, (8, 0.1): 1, (4, 0.5): 1}


def test_runs_on_other_hosts_or_code_are_no_repeats_of_each_other(tmp_path: Path) -> None:
    for index, host in enumerate("ab"):
        record = make_record({})
        record["environment"]["host"]["hostname"] = host
        write_run(tmp_path / f"host{index}", record)
    assert [(row["host"], row["runs"]) for row in rows_of(tmp_path)] == [("a", 1), ("b", 1)]


def test_a_sweep_that_moved_to_another_host_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(run: dict[str, Any], _: Mapping[str, Any], repeat: int) -> None:
        run["environment"]["host"]["hostname"] = f"host{repeat}"

    write_sweep(tmp_path, "s", {"data.batch_size": [4]}, repeats=2, edit=edit)
    assert main(["report", str(tmp_path)]) == 0
    assert "[1] runs on 2 hosts" in capsys.readouterr().out


def test_speed_up_and_memory_saving_are_against_the_named_baseline(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], repeat: int) -> None:
        is_base = axes["trainer.precision"] == "32-true"
        set_step(run, (0.2 if is_base else 0.1) * (1 + 0.01 * repeat))
        run["memory"]["run_peak_allocated_bytes"] = 8000 if is_base else 6000

    write_sweep(
        tmp_path, "precision", {"trainer.precision": ["32-true", "bf16-mixed"]}, view="precision", repeats=3, edit=edit
    )
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
        if axes["trainer.precision"] == "16-mixed":
            run["window"]["steps"] += 1

    precisions = ["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
    write_sweep(tmp_path, "precision", {"trainer.precision": precisions}, view="precision", edit=edit)
    found = {row["precision"]: row for row in rows_of(tmp_path)}
    assert found["bf16-mixed"]["first_loss_difference"] == pytest.approx(0.01)
    assert found["bf16-mixed"]["gradient_norm_difference_fraction"] == pytest.approx(0.05)
    # A window of another length changes nothing about a step before it; another seed began with other weights.
    assert found["16-mixed"]["gradient_norm_difference_fraction"] == pytest.approx(0.05)
    assert found["bf16-true"]["first_loss_difference"] is None
    assert found["bf16-true"]["gradient_norm_difference_fraction"] is None


def test_another_pass_of_a_cell_makes_no_row_of_its_own(tmp_path: Path) -> None:
    write_sweep(tmp_path, "passes", {"model.size": ["small"], "pass": ["timing", "sync"]})
    (row,) = rows_of(tmp_path)
    assert (row["runs"], row["passes"]) == (1, 1)


def test_a_run_that_ended_before_it_saw_its_processor_is_in_the_table_of_the_others(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        run["device_type"], run["environment"] = "cpu", {"host": {"cpu_model": "A  CPU"}}
        if axes["data.batch_size"] == 64:
            set_outcome(run, "oom", "setup")
            del run["environment"]

    write_sweep(tmp_path, "batch", {"data.batch_size": [1, 64]}, edit=edit)
    assert {row["gpu"] for row in rows_of(tmp_path)} == {"CPU (A CPU)"}


def test_compiling_has_paid_when_its_excess_is_made_up_for(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        set_step(run, 0.06 if axes["trainer.compile"] else 0.1)

    home = write_sweep(tmp_path, "compile", {"trainer.compile": [False, True]}, view="compile", edit=edit)
    for cell, times in {"False": [0.5, 0.1, 0.1, 0.1, 0.1], "True": [10.42, 0.1, 0.06, 0.06, 0.06]}.items():
        steps = [{"step": index, "step_s": time} for index, time in enumerate(times)]
        text = "".join(f"{json.dumps(step)}\n" for step in steps)
        (home / "runs" / f"{cell}-r0" / "steps.jsonl").write_text(text)
    # 10.36 + 0.04 s beyond the compiled step, 0.4 s beyond the eager one; every step gains 0.04 s.
    assert rows_of(tmp_path)[1]["pays_after_steps"] == math.ceil((10.4 - 0.4) / 0.04 - 1e-9)


def test_compiling_that_is_slower_never_pays(tmp_path: Path) -> None:
    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        set_step(run, 0.11 if axes["trainer.compile"] else 0.1)

    write_sweep(tmp_path, "compile", {"trainer.compile": [False, True]}, view="compile", edit=edit)
    section = build_report(gather([tmp_path]), make_catalogue()).sections[0]
    column = section.catalogue.column("pays_after_steps")
    measure = column.read(section.cells[1], section.pairing.of(section.cells[1]))
    assert measure is not None
    assert column.show(measure) == "never"


def test_cold_time_is_that_of_private_caches_only(tmp_path: Path) -> None:
    write_sweep(tmp_path, "compile", {"trainer.compile": [False, True]}, view="compile", repeats=3)
    row = rows_of(tmp_path)[1]
    assert row["warm_first_step_s"] == pytest.approx(0.2 * row["cold_first_step_s"])


def test_host_bound_share_counts_the_phases_that_waited(tmp_path: Path) -> None:
    record = make_record({})
    for phase, share in {"forward": 0.3, "backward": 0.6}.items():
        record["phases"][phase]["share_fraction"] = share
    record["probe"]["verdicts"] = {"forward": {"verdict": "host-bound"}, "backward": {"verdict": "queued"}}
    write_run(tmp_path / "a", record)
    assert rows_of(tmp_path)[0]["host_bound_fraction"] == pytest.approx(0.3)


def cell_of(folder: Path) -> Cell:
    (cell,) = make_cells(gather([folder]).groups[0])
    return cell


def test_whiskers_are_a_standard_deviation_between_processes(tmp_path: Path) -> None:
    means = [0.1, 0.101, 0.104, 0.103]
    write_sweep(tmp_path, "s", {"data.batch_size": [4]}, repeats=4, edit=lambda run, _, k: set_step(run, means[k]))
    cell = cell_of(tmp_path)
    mean, std = statistics.fmean(means), statistics.stdev(means)
    assert interval(cell, make_catalogue().column("step_s")) == pytest.approx((mean - std, mean + std))


def test_csv_holds_every_cell_with_si_units_in_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = write_sweep(tmp_path, "batch", {"data.batch_size": [1, 2, 4]}, view="batch", repeats=2)
    assert main(["report", str(home), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["batch"] for row in rows] == ["1", "2", "4"]
    assert {"step_s", "step_std_s", "tokens_per_s", "peak_bytes", "mfu_fraction", "outcome"} <= rows[0].keys()
    assert [float(row["step_s"]) for row in rows] == [row["step_s"] for row in rows_of(home)]


def test_csv_with_published_figures_gives_them_in_seconds(tmp_path: Path) -> None:
    fixed = {"mode": "forward_backward", "data.context_length": 256, "trainer.precision": "bf16-mixed"}
    write_sweep(tmp_path, "s", {"data.batch_size": [64]}, fixed=fixed)
    assert rows_of(tmp_path, has_reference=True)[0]["reference 002, A100-80GB: step_s"] == pytest.approx(0.29553)


def test_a_difference_that_repeats_cannot_tell_from_none_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"32-true": [0.100, 0.104, 0.102], "bf16-mixed": [0.101, 0.105, 0.099], "bf16-true": [0.050, 0.051, 0.052]}

    def edit(run: dict[str, Any], axes: Mapping[str, Any], repeat: int) -> None:
        set_step(run, steps[axes["trainer.precision"]][repeat])

    write_sweep(tmp_path, "s", {"trainer.precision": list(steps)}, view="precision", repeats=3, edit=edit)
    assert main(["report", str(tmp_path)]) == 0
    table = capsys.readouterr().out.partition("**Accuracy")[0]
    marked = [line.split("|")[1].strip() for line in table.splitlines() if line.endswith("[1]   |")]
    assert marked == ["bf16-mixed"]
    assert "[1] the difference to the baseline is not told from none" in table


def test_a_real_run_is_reported_with_its_device_and_precision_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--measure.steps", "2", "--measure.min_window_s", "0", "--measure.probe_steps", "0"]
    assert main(["fit", "--config", "smoke", "--measure.results_dir", str(tmp_path), *options]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 cell, 1 run (1 ok)" in out
    assert "**Step times**: CPU" in out
    assert "32-true, float32 matmul highest (fp32), eager" in out
