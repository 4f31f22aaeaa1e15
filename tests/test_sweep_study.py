"""A whole study with real processes: cells that fail in every way, killed, stopped, moved, and resumed."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from lmbench.cli import main
from lmbench.records.fields import unregistered
from lmbench.records.load import find_runs, load_run

BASE = """
base:
  config: smoke
  model.vocab_size: 64
  data.batch_size: 2
  data.context_length: 16
  measure.steps: 4
  measure.min_window_s: 0
  measure.probe_steps: 1
"""
# One of each: ends well, refused when it is built, has no end, wants 2^58 bytes.
FAULTS = """
matrix:
  case:
    - {model.num_layers: 1}
    - {model.num_heads: 5}
    - {measure.min_window_s: 1000}
    - {model.d_ff: 1125899906842624}
repeats: 1
timeout_s: 15
"""
GRID = """
matrix: {model.num_layers: [1, 2, 3]}
repeats: 3
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    # With more, OpenMP's spinning on a busy two-core machine makes small steps a hundred times slower.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write(tmp_path, text, name="study"):
    path = tmp_path / f"{name}.yaml"
    path.write_text(BASE + text)
    return str(path)


def runs(folder):
    return {path.name: load_run(path) for path in find_runs([folder])}


@pytest.fixture
def start():
    """Starts sweeps, of which none outlives its test."""
    started = []

    def begin(*words):
        words = [sys.executable, "-m", "lmbench", "sweep", *words]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for sweep in started:
        sweep.kill()
        sweep.communicate()


def wait_for(count, folder, sweep):
    """Until so many runs have ended and another one is going on."""
    for _ in range(12000):
        found = [json.loads(path.read_text()) for path in Path(folder).glob("runs/*/run.json")]
        going_on = [run for run in found if "sweep" not in run and run["outcome"] == "running"]
        if len(found) - len(going_on) >= count and going_on:
            return going_on[0]
        assert sweep.poll() is None, sweep.communicate()
        time.sleep(0.01)
    raise AssertionError("the sweep did not come so far")


@pytest.mark.slow
def test_a_study_with_every_fault_ends_with_a_row_for_each_and_renders(tmp_path, capsys):
    assert main(["sweep", write(tmp_path, FAULTS), "--results_dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "4 of 4 runs: 1 error, 1 ok, 1 oom, 1 timeout" in captured.out
    assert len([line for line in captured.err.splitlines() if line.startswith("[")]) == 4
    found = {run.outcome: run for run in runs(tmp_path / "study").values()}
    assert set(found) == {"ok", "error", "timeout", "oom"}
    errors = {outcome: run.run["error"] for outcome, run in found.items()}
    assert "num_heads 5 does not divide d_model 64" in errors["error"]["message"]
    assert errors["error"]["phase"] == "setup"
    assert errors["oom"]["requested_bytes"] > 2**50
    assert errors["oom"]["where"] == "host"
    assert errors["timeout"]["message"] == "no end within 15 s; it was stopped"
    assert errors["timeout"]["phase"] not in (None, "setup")
    assert found["timeout"].run["window"]["steps"] > 10
    for run in found.values():
        assert unregistered(run.run, "run") == []
        assert (run.path / "child.log").is_file()
        assert run.run["replay_command"].startswith("lmbench fit")
    cost = found["ok"].run["sweep"]["cost"]
    parts = ("start", "import", "parse", "device", "build", "capture", "first_step", "warmup", "window", "probe")
    total_s = sum(cost[f"{part}_s"] for part in (*parts, "close", "exit"))
    assert total_s == pytest.approx(cost["total_s"], abs=0.05)
    assert main(["report", str(tmp_path / "study")]) == 0
    report = capsys.readouterr().out
    for word in ("OOM", "timeout", "error"):
        assert word in report


@pytest.mark.slow
def test_a_tiny_cell_costs_under_2_s_beyond_its_steps(tmp_path):
    assert main(["sweep", write(tmp_path, GRID), "--results_dir", str(tmp_path)]) == 0
    costs = [run.run["sweep"]["cost"]["overhead_s"] for run in runs(tmp_path / "study").values()]
    assert len(costs) == 9
    assert statistics.median(costs) < 2


@pytest.mark.slow
def test_a_killed_sweep_takes_its_cell_along_and_goes_on_where_it_was(start, tmp_path):
    # A window long enough for the kill to meet it, also on a busy machine.
    words = [write(tmp_path, GRID), "--results_dir", str(tmp_path), "--measure.min_window_s=1"]
    sweep = start(*words)
    going_on = wait_for(3, tmp_path / "study", sweep)
    sweep.kill()
    sweep.communicate()
    for _ in range(1000):
        left = runs(tmp_path / "study")
        if left[going_on["run_id"]].outcome != "running":
            break
        time.sleep(0.01)
    finished = {name: run.run["started_at"] for name, run in left.items() if "sweep" in run.run}
    assert left[going_on["run_id"]].outcome == "killed"
    assert len(finished) >= 3
    assert main(["sweep", *words]) == 0
    found = runs(tmp_path / "study")
    assert len(found) == 9
    assert {run.outcome for run in found.values()} == {"ok"}
    assert {name: found[name].run["started_at"] for name in finished} == finished
    assert found[going_on["run_id"]].run["sweep"]["attempt"] == 2
    assert not list((tmp_path / "study").rglob("*.log.*"))


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_sweep_closes_the_running_cell_and_does_it_again_later(signum, code, start, tmp_path):
    words = [write(tmp_path, GRID.replace("repeats: 3", "repeats: 1")), "--results_dir", str(tmp_path)]
    sweep = start(*words, "--measure.min_window_s=1")
    going_on = wait_for(1, tmp_path / "study", sweep)
    sweep.send_signal(signum)
    out, err = sweep.communicate(timeout=30)
    assert sweep.returncode == code
    assert "Traceback" not in err
    assert "of 3 runs" in out
    left = runs(tmp_path / "study")[going_on["run_id"]]
    assert left.outcome == "interrupted"
    assert left.run["sweep"]["attempt"] == 1
    # With the folder's name alone it goes on, with the options that were given then.
    assert main(["sweep", str(tmp_path / "study")]) == 0
    found = runs(tmp_path / "study")
    assert [run.outcome for run in found.values()] == ["ok"] * 3
    assert all(run.run["config"]["measure"]["min_window_s"] == 1 for run in found.values())


@pytest.mark.slow
def test_a_sweep_travels_in_an_archive_and_goes_on_elsewhere(start, tmp_path):
    words = [write(tmp_path, GRID), "--results_dir", str(tmp_path / "here")]
    sweep = start(*words)
    wait_for(2, tmp_path / "here" / "study", sweep)
    sweep.kill()
    sweep.communicate()
    with tarfile.open(tmp_path / "study.tar", "w") as archive:
        archive.add(tmp_path / "here" / "study", "study")
    (tmp_path / "here").rename(tmp_path / "gone")
    (tmp_path / "study.yaml").unlink()
    with tarfile.open(tmp_path / "study.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert main(["sweep", str(tmp_path / "there" / "study")]) == 0
    found = runs(tmp_path / "there" / "study")
    assert [run.outcome for run in found.values()] == ["ok"] * 9
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["exec", "forkserver"])
def test_both_engines_measure_the_same_configuration(engine, tmp_path):
    path = write(tmp_path, "modes: [inference]\nrepeats: 1\n")
    assert main(["sweep", path, "--results_dir", str(tmp_path), "--engine", engine]) == 0
    (run,) = runs(tmp_path / "study").values()
    assert run.outcome == "ok"
    assert (run.run["sweep"]["engine"], run.run["command"], run.run["mode"]) == (engine, "validate", "inference")
    assert run.run["config"]["measure"]["results_dir"] == "results"
    assert run.run["config"]["measure"]["run_id"] is None
    assert run.run["loss"]["first"] == pytest.approx(4.2, abs=0.3)


@pytest.mark.slow
def test_a_replay_of_a_cell_is_a_run_outside_of_the_sweep(tmp_path, monkeypatch):
    path = write(tmp_path, "modes: [forward]\nrepeats: 1\n")
    assert main(["sweep", path, "--results_dir", str(tmp_path)]) == 0
    (run,) = runs(tmp_path / "study").values()
    monkeypatch.chdir(tmp_path)
    assert main(run.run["replay_command"].split()[1:]) == 0
    assert len(runs(tmp_path / "study")) == 1
    (replayed,) = runs(tmp_path / "results").values()
    assert replayed.run["config"] == run.run["config"]
