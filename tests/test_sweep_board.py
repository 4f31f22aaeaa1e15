"""What W&B gets of a sweep: its runs in one group, each with its cell as config, and the cells as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from wandb_loopback import PLANTED_KEY, Offline, Server, closed_port_url

from lmbench.cli import main
from lmbench.records.load import find_runs, load_run
from lmbench.wandb.content import config_of, summary_of
from lmbench.wandb.sweep_mirror import read_cells

# One cell that ends well, one that wants 2^58 bytes.
FILE = """
base: {config: smoke, model.vocab_size: 64, data.context_length: 16, measure.steps: 3, measure.probe_steps: 0}
matrix: {model.d_ff: [64, 1125899906842624]}
repeats: 1
timeout_s: 120
"""


@pytest.fixture(autouse=True)
def _wandb(tmp_path, monkeypatch):
    """W&B is on, without an account; its servers are out of reach."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WANDB_BASE_URL", closed_port_url())
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def sweep(tmp_path, *words, code=0):
    file = tmp_path / "study.yaml"
    file.write_text(FILE)
    assert main(["sweep", str(file), "--results_dir", str(tmp_path), "--measure.min_window_s=0", *words]) == code
    return tmp_path / "study"


def offline_of(folder):
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return Offline(file)


def table_of(folder):
    (file,) = folder.glob("wandb/offline-run-*/files/media/table/cells*.table.json")
    return json.loads(file.read_text())


def test_a_runs_cell_is_config_and_its_cost_is_summary():
    axes = {"model.size": "tiny"}
    run = {"run_id": "x", "sweep": {"cell": "tiny-1", "axes": axes, "repeat": 0, "cost": {"total_s": 2.0}}}
    assert config_of(run)["sweep.axes.model.size"] == "tiny"
    assert config_of(run)["sweep.cell"] == "tiny-1"
    assert summary_of(run, "ok") == {"sweep.cost.total_s": 2.0, "outcome": "ok"}


def test_columns_of_numbers_are_numbers_and_empty_fields_are_nothing(tmp_path):
    path = tmp_path / "cells.csv"
    path.write_text('size,step_s,reason\nsmall,0.5,\n2.7B,,"a, b"\n')
    assert read_cells(path) == (["size", "step_s", "reason"], [["small", 0.5, None], ["2.7B", None, "a, b"]])


@pytest.mark.slow
def test_a_sweep_is_on_the_board_with_its_runs_and_its_table(tmp_path, capsys):
    folder = sweep(tmp_path)
    assert f"W&B: offline, beside the results; upload: lmbench upload {folder}" in capsys.readouterr().out
    runs = [load_run(path) for path in find_runs([folder])]
    assert sorted(run.outcome for run in runs) == ["ok", "oom"]
    ids = set()
    for run in runs:
        offline = offline_of(run.path)
        ids.add(offline.run.run_id)
        assert offline.run.run_group == "study"
        assert offline.run.display_name == run.run_id
        assert offline.config["sweep.axes.model.d_ff"] == run.run["sweep"]["axes"]["model.d_ff"]
        assert offline.summary["outcome"] == run.outcome
        assert offline.summary["sweep.cost.total_s"] == pytest.approx(run.run["sweep"]["cost"]["total_s"])
    summary = offline_of(folder)
    assert (summary.run.run_group, summary.run.job_type, summary.run.display_name) == ("study", "sweep", "study")
    assert summary.run.run_id not in ids
    assert len(ids) == 2
    assert (summary.summary["outcomes.ok"], summary.summary["outcomes.oom"]) == (1, 1)
    table = table_of(folder)
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert sorted(row["outcome"] for row in rows) == ["ok", "oom"]
    assert all((row["step_s"] is not None) == (row["outcome"] == "ok") for row in rows)
    header, cells = read_cells(folder / "cells.csv")
    assert (table["columns"], table["data"]) == (header, cells)


@pytest.mark.slow
def test_a_sweep_that_goes_on_later_gets_its_summary_anew_and_is_uploaded_once(tmp_path, monkeypatch, capsys):
    folder = sweep(tmp_path)
    before = offline_of(folder).run.run_id
    written = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/wandb/mirror.json")}
    assert len(written) == 2
    sweep(tmp_path, "--repeats", "2")
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert (offline_of(folder).run.run_id, offline_of(folder).summary["runs"]) == (before, 4)
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        capsys.readouterr()
        assert main(["upload", str(folder)]) == 0
        told = capsys.readouterr().out.splitlines()
        assert main(["upload", str(folder)]) == 0
        again = capsys.readouterr().out.splitlines()
    assert len(told) == len(again) == 5
    assert all(line.startswith("uploaded ") for line in told)
    assert all(line.startswith("already uploaded ") for line in again)
    assert before in server.config


@pytest.mark.slow
def test_a_wandb_that_cannot_be_imported_costs_the_sweep_nothing(tmp_path, monkeypatch, capsys):
    site = tmp_path / "site"
    site.mkdir()
    (site / "wandb.py").write_text("raise ImportError('this wandb is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    folder = sweep(tmp_path)
    captured = capsys.readouterr()
    assert "2 of 2 runs: 1 ok, 1 oom" in captured.out
    (line,) = [line for line in captured.err.splitlines() if "W&B did not get" in line]
    assert "this wandb is broken" in line
    assert line.endswith(f"later: lmbench upload {folder}")
    # Where it is whole again, the same command makes up for it.
    monkeypatch.delenv("PYTHONPATH")
    sweep(tmp_path)
    assert offline_of(folder).summary["runs"] == 2


@pytest.mark.slow
def test_without_a_wandb_logger_there_is_a_table_and_nothing_of_wandb(tmp_path, capsys):
    folder = sweep(tmp_path, "--trainer.logger=false")
    assert "W&B" not in capsys.readouterr().out
    assert not list(folder.rglob("wandb"))
    assert len(read_cells(folder / "cells.csv")[1]) == 2


@pytest.mark.slow
def test_what_a_module_logs_itself_arrives_from_a_sweep_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    file = tmp_path / "own.yaml"
    file.write_text(
        "base: {model: wandb_modules.Logging, trainer.accelerator: cpu, trainer.log_every_n_steps: 1,"
        " data.batch_size: 4, data.context_length: 16, measure.warmup_steps: 1, measure.steps: 4,"
        " measure.min_window_s: 0, measure.probe_steps: 0}\nmodes: [train_step]\nrepeats: 1\n"
    )
    assert main(["sweep", str(file), "--results_dir", str(tmp_path)]) == 0
    (path,) = find_runs([tmp_path / "own"])
    assert [row["logged/square"] for row in offline_of(path).history if "logged/square" in row][:3] == [0.0, 1.0, 4.0]
    assert "wandb" not in sys.modules or sys.modules["wandb"].run is None
