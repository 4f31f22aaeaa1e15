"""A sweep as a job array of a real SLURM without accounting."""

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import psutil
import pytest
from tables import cases
from waiting import wait_for

from lmbench.cli import main
from lmbench.sweep.slurm import Slurm

BASE = "base: {config: smoke, measure.steps: 2, measure.min_window_s: 0.01, measure.probe_steps: 0, model.num_layers: 1"
STUDY = (
    BASE
    + """}
matrix: {data.batch_size: [1, 2, 3]}
repeats: 2
"""
)
ON_NODES = (
    BASE
    + """, trainer.strategy: ddp, trainer.devices: 1}
matrix: {trainer.num_nodes: [2]}
repeats: 1
"""
)


@pytest.fixture
def study(here):
    Path("study.yaml").write_text(STUDY)
    return Path("results/study")


@pytest.fixture
def start(slurm, study, warm_sweeps, monkeypatch):
    """Starts `lmbench sweep STUDY --on slurm` in a thread; returns a function that waits for its exit code."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setattr("lmbench.sweep.execute.Execution.check", lambda *_: None)
    monkeypatch.setattr("lmbench.sweep.tasks._POLL_S", 0.3)

    def begin():
        codes = SimpleQueue()
        words = ["sweep", "study.yaml", "--on", "slurm", "--slurm.time", "10"]
        Thread(target=lambda: codes.put(main(words)), daemon=True).start()
        return partial(codes.get, timeout=200)

    return begin


def rows():
    return [json.loads(path.read_text()) for path in Path().glob("results/study/runs/*/run.json")]


def workers():
    """The processes of the sweep's tasks, each with its children, by their rounds."""
    by_round = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--rounds" in words and str(Path.cwd()) in " ".join(words):
            by_round[words[words.index("--rounds") + 1]] = [process, *process.children(recursive=True)]
    return by_round


def test_tasks_that_are_killed_or_cancelled_lose_no_row_and_no_run_is_measured_twice(slurm, study, start, capsys):
    exit_code = start()
    wait_for(lambda: slurm.run("squeue", "--noheader", "--states=running", "--array").count("\n") == 2, 200)
    slurm.restart_controller()
    halted = {}

    def all_are_halted():
        """Halt each task after its first run, so that none ends before the others have begun."""
        begun = {str(row["sweep"]["repeat"]) for row in rows() if row.get("sweep")} - halted.keys()
        processes = workers() if begun else {}
        for repeat in begun & processes.keys():
            halted[repeat] = processes[repeat]
            processes[repeat][0].suspend()
        return len(halted) == 2

    wait_for(all_are_halted, 200)
    job = slurm.run("squeue", "--noheader", "--format=%A %F").split()[1]
    halted["0"][0].kill()
    slurm.run("scancel", f"{job}_1")
    assert (exit_code(), "6 of 6 runs: " in capsys.readouterr().out) == (1, True)
    for repeat, word in enumerate(("FAILED", "CANCELLED")):
        cause = f"task {job}_{repeat} ended: {word}"
        lost = [row["error"] for row in rows() if row["sweep"]["repeat"] == repeat and row["outcome"] != "ok"]
        assert {(error["kind"], cause in error["message"]) for error in lost} == {("TaskEnded", True)}
    wait_for(lambda: not any(process.is_running() for task in halted.values() for process in task), 200)
    done = {row["run_id"]: row["started_at"] for row in rows() if row["outcome"] == "ok"}
    assert main(["sweep", str(study)]) == 0
    assert Counter(row["outcome"] for row in rows()) == {"ok": 6}
    assert done.items() <= {row["run_id"]: row["started_at"] for row in rows()}.items()


@cases("""
- [state, is_over]
- [TIMEOUT, true]
- [OUT_OF_MEMORY, true]
- [COMPLETING, false]
""")
def test_a_task_is_over_by_the_word_that_slurm_has_for_it(state, is_over, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.run", lambda words, **_: subprocess.CompletedProcess(words, 0, f"7_0 {state}\n"))
    assert Slurm({}).states(["7_0"], Path("study"))["7_0"].is_over == is_over


def test_a_cell_of_several_nodes_has_its_ranks_on_them(start):
    Path("study.yaml").write_text(ON_NODES)
    assert start()() == 0
    assert sorted((row["world_size"], row["outcome"]) for row in rows()) == [(2, "ok")]


@pytest.mark.usefixtures("start")
def test_a_dry_run_shows_the_tasks_and_the_script_and_what_slurm_refuses(study, printed, refused):
    options = ["--slurm.gpus_per_node", "2", "--slurm.setup", "ulimit", "--slurm.additional", "comment=mine,exclusive"]
    lines = printed("sweep", "study.yaml", "--on", "slurm", "--dry_run", *options).splitlines()
    script = ["#SBATCH --array=0-1%2", "#SBATCH --gpus-per-node=2", "#SBATCH --comment=mine", "#SBATCH --exclusive"]
    assert {*script, "ulimit"} <= {*lines}
    assert any(line.startswith("tasks: 2, each a round of 3 cells") for line in lines)
    assert not study.exists()
    assert "SLURM refuses this: sbatch: error: invalid partition specified: nope" in refused(
        "sweep", "study.yaml", "--on", "slurm", "--dry_run", "--slurm.partition", "nope"
    )


@cases("""
- [missing, line]
- [sbatch, there is no SLURM here]
- [submitit, needs submitit]
""")
def test_a_missing_program_is_reported_in_one_line(missing, line, study, monkeypatch, refused):
    monkeypatch.setattr("shutil.which", lambda name: None if name == missing else f"/usr/bin/{name}")
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert line in refused("sweep", "study.yaml", "--on", "slurm", "--dry_run")
