"""Rounds of a sweep as tasks of an engine: results come from the folder, whatever the engine says."""

import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from simulated_cells import SimulatedServers
from tables import cases, flat
from test_task_progress import Terminal

from lmbench.cli import main
from lmbench.records.load import find_runs
from lmbench.sweep import tasks
from lmbench.sweep.tasks import TaskState, become_task

STUDY = """
base: {config: smoke}
matrix: {data.batch_size: [1, 2]}
repeats: 3
"""
ALL_OK = {repeat: {"ok": 2} for repeat in range(3)}


class Engine:
    """Runs tasks in this process, one after the other.

    `fault` says how the second task fails; `late` is what it does when its state is asked for the third time.
    """

    fault, late, silent, states_asked = "", None, 0, 0
    submitted, cancelled, codes = [], [], {}

    def describe(self, commands, needs, folder):
        return f"{len(commands)} processes on {needs.nodes} nodes"

    def submit(self, commands, needs, folder):
        names = []
        (folder / "log").write_text("no such node\n")
        for command in commands:
            *_, where, rounds, probe = command
            names.append(f"task{rounds}")
            self.submitted.append(rounds)
            self.codes[names[-1]] = self.become(where, rounds, probe)
        return names

    def become(self, where, rounds, probe):
        fault = self.fault if rounds == "1" else ""
        if fault in ("dies", "waits"):
            return 1 if fault == "dies" else None
        try:
            code = become_task(where, rounds, "another" if fault == "not shared" else probe)
        except SystemExit as ended:
            code = ended.code
        return None if fault == "put back" else code

    def states(self, names, folder):
        type(self).states_asked += 1
        if self.late and self.states_asked == 3:
            self.codes["task1"] = self.late(str(folder))
        if self.states_asked > 20:
            os.kill(os.getpid(), signal.SIGINT)
        if self.states_asked <= self.silent:
            return {}
        over, running = TaskState("GONE", True, folder / "log"), TaskState("RUNNING", False, folder / "log")
        return {name: running if self.codes[name] is None else over for name in names if name in self.codes}

    def cancel(self, names, folder):
        self.cancelled.extend(names)


@pytest.fixture
def study(here, monkeypatch):
    """A study file with simulated processes. Returns the engine's class, and the servers that record the processes."""
    Path("study.yaml").write_text(STUDY)
    servers = SimulatedServers()
    monkeypatch.setattr("lmbench.campaign.sweep.LocalExecutor", lambda mark: servers)
    monkeypatch.setattr(tasks, "_POLL_S", 0.0)
    # A task replaces its process by `lmbench sweep`. Here that runs in this process.
    monkeypatch.setattr(os, "execv", lambda program, words: main(words[4:]))
    module = ModuleType("my_engine")
    module.Mine = type("Mine", (Engine,), {"submitted": [], "cancelled": [], "codes": {}})
    monkeypatch.setitem(sys.modules, "my_engine", module)
    return module.Mine, servers


def sweep(*words):
    return main(["sweep", "study.yaml", "--on", "my_engine.Mine", *words])


def records(folder="results/study"):
    return [json.loads(path.read_text()) for path in Path(folder).glob("runs/*/run.json")]


def outcomes(folder="results/study"):
    counts = {repeat: Counter() for repeat in range(3)}
    for row in records(folder):
        counts[row["sweep"]["repeat"]][row["outcome"]] += 1
    return counts


def test_each_round_is_a_task_and_each_run_is_measured_once(study, capsys):
    engine, servers = study
    assert sweep("--dry_run") == 0
    assert "tasks: 3, each a round of 2 cells on 1 x 0 GPUs" in (output := capsys.readouterr().out)
    assert (engine.submitted, output.splitlines()[-1]) == ([], "3 processes on 1 nodes")
    for _ in range(2):
        assert sweep() == 0
        assert (engine.submitted, len(servers.started), outcomes()) == (["0", "1", "2"], 6, ALL_OK)
        assert Path("results/study/cells.csv").read_text().count("\n") == 3
    assert "6 of 6 runs: 6 ok" in capsys.readouterr().out


@cases("""
    fault | cause
    dies | task task1 ended: GONE; its last words: no such node
    not shared | does not see .*/results/study as the machine that submitted does; give a --results_dir that
    other torch | has torch 2.*, the machine that submitted 9.9; use one installation
    """)
def test_every_run_of_a_task_that_measured_nothing_has_a_row_and_the_next_start_measures_it(
    fault, cause, study, monkeypatch, capsys
):
    engine, servers = study
    # The engine does not answer five times, and is asked again.
    engine.fault, engine.silent = fault, 5
    if fault == "other torch":
        monkeypatch.setattr(tasks, "versions", iter([{"torch": "9.9"}, *[{"torch": "2.1"}] * 3]).__next__)
    assert sweep() == 1
    lost = {0: {"ok": 2}, 1: {"interrupted": 2}, 2: {"ok": 2}}
    assert outcomes() == ({repeat: {"interrupted": 2} for repeat in range(3)} if fault == "other torch" else lost)
    assert {row["error"]["kind"] for row in records() if row["outcome"] != "ok"} == {"TaskEnded"}
    assert re.search(cause, flat(capsys.readouterr().err))
    begun = len(servers.started)
    # The next start measures on this machine.
    assert main(["sweep", "results/study"]) == 0
    assert (len(servers.started), outcomes()) == (6, ALL_OK)
    assert begun == sum(name[-1] != "1" for name in servers.started if fault != "other torch")


def test_a_full_disk_is_told_in_one_line_and_the_next_start_goes_on(study, monkeypatch, capsys):
    engine, _ = study
    engine.fault = "dies"
    with monkeypatch.context() as patch:
        # The disk is full once the tasks are watched.
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0 if engine.states_asked else 2**30))
        assert sweep() == 1
    assert re.search(r"No space left on device: a run needs 1 MiB: .*; mend that, and go on", capsys.readouterr().err)
    assert main(["sweep", "results/study"]) == 0
    assert outcomes() == ALL_OK


def test_tasks_are_left_or_cancelled_and_watched_again_by_the_next_start(study, capsys, monkeypatch):
    engine, servers = study
    engine.fault = "waits"
    assert sweep() == 130
    assert (engine.submitted, engine.cancelled, len(servers.started)) == (["0", "1", "2"], [], 4)
    assert "tasks go on: task1" in capsys.readouterr().err
    engine.states_asked = 0
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert sweep() == 130
    # Nothing was submitted twice.
    assert (engine.submitted, engine.cancelled, len(servers.started)) == (["0", "1", "2"], ["task1"], 4)
    for choice, count in (("leave", 1), ("cancel", 2)):
        engine.states_asked = 0
        assert sweep("--on_interrupt", choice) == 130
        assert engine.cancelled == ["task1"] * count


def test_a_task_that_the_engine_puts_back_into_its_queue_is_waited_for(study, capsys):
    engine, servers = study
    servers.script = lambda name: "stopped" if name.endswith("r1") and servers.started.count(name) == 1 else "ok"
    engine.fault = "put back"
    engine.late = lambda _, folder: become_task(
        folder, "1", json.loads(Path(folder, "tasks.json").read_text())["probe"]
    )
    assert sweep() == 0
    assert (outcomes(), engine.submitted) == (ALL_OK, ["0", "1", "2"])
    assert "6 of 6 runs: 6 ok" in capsys.readouterr().out


def test_a_task_that_has_not_begun_still_measures_after_another_round_was_submitted_again(study):
    engine, servers = study
    become, probes = engine.become, {}

    def become_later(self, where, rounds, probe):
        if rounds == "0" or self.submitted.count(rounds) > 1:
            return become(self, where, rounds, probe)
        # At first round 1 waits in the queue, and round 2 dies.
        probes[rounds] = probe
        return None if rounds == "1" else 1

    engine.become = become_later
    assert sweep() == 130
    assert (outcomes()[1], outcomes()[2]) == ({}, {"interrupted": 2})
    engine.late, engine.states_asked = lambda _, folder: become_task(folder, "1", probes["1"]), 0
    assert sweep() == 0
    assert (outcomes(), engine.submitted, len(servers.started)) == (ALL_OK, ["0", "1", "2", "2"], 6)


def measure_in(**places):
    """Measure rounds of the study in each of these places, as other machines do."""
    for place, rounds in places.items():
        assert main(["sweep", "study.yaml", "--rounds", rounds, "--results_dir", place]) == 0


def test_rounds_measured_on_several_machines_merge_and_none_hides_another(study, refused):
    _, servers = study
    measure_in(a="0,2", b="1", c="2")
    assert (outcomes("a/study")[1], outcomes("b/study")[1], len(servers.started)) == ({}, {"ok": 2}, 8)
    assert main(["sweep", "a/study", "--merge", "b/study", "--dry_run"]) == 0
    assert outcomes("a/study")[1] == {}
    assert main(["sweep", "a/study", "--merge", "b/study", "--rounds", "0,2"]) == 0
    assert (len(servers.started), outcomes("a/study")) == (8, ALL_OK)
    for path in Path("c/study/runs").glob("*/run.json"):
        path.write_text(f"{path.read_text()} ")
    assert "is here already; one would hide the other" in refused("sweep", "a/study", "--merge", "c/study")
    Path("study.yaml").write_text(STUDY.replace("[1, 2]", "[1, 4]"))
    assert "is no run of this sweep" in refused("sweep", "study.yaml", "--merge", "b/study")


def test_a_merge_is_whole_or_nothing(study, refused):
    measure_in(a="0", b="1,2")
    run, *_ = sorted(Path("b/study/runs").iterdir())
    with (run / "large.bin").open("wb") as file:
        file.truncate(2**40)
    os.mkfifo(run / "pipe")
    words = ["sweep", "a/study", "--merge", "b/study"]
    assert f"{run.name}/pipe is no file, link or folder" in refused(*words)
    assert len(records("a/study")) == 2
    (run / "pipe").unlink()
    # A kill leaves runs in part, here one with its record.
    part = Path("a/study/runs/.merge", run.name)
    part.mkdir(parents=True)
    (part / "run.json").write_bytes((run / "run.json").read_bytes())
    assert len(find_runs(["a/study"])) == 2
    # The same again adds nothing, and a sparse file keeps its holes.
    for _ in range(2):
        assert main(words) == 0
        assert sorted(path.name for path in Path("a/study/runs").glob(".*")) == []
        assert len(find_runs(["a/study"])) == 6
    assert Path("a/study/runs", run.name, "large.bin").stat().st_blocks < 100
