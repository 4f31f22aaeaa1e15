"""`lmbench compare --run`: rounds in turn, when it stops, what it says, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import math
import random
import subprocess
from pathlib import Path

import pytest
from warm_servers import warm_servers

from lmbench.cli import main
from lmbench.records.codec import decode_run
from lmbench.sweep.executor import End

from comparison_runs import make_run  # isort: skip

CONFIG = "trainer: {accelerator: cpu}\nmodel: {size: tiny}\n"


class Measured:
    """Servers whose processes leave a record at once: a step time of `step_s(side, round)`, or an outcome."""

    def __init__(self, step_s):
        self.step_s = step_s
        self.started, self.words, self.variables, self.window_s = [], {}, {}, {}
        self.rounds = 0

    def begin_round(self, rounds_to_come):
        self.rounds += 1

    def await_ready(self, environments):
        """They are."""

    def close(self):
        """They are."""

    def run(self, launch, timeout_s, tick):
        if "--print_config" in launch.words:
            return End(0, "itself", 100.0, 101.0)
        options = dict(word.removeprefix("--").partition("=")[::2] for word in launch.words[1:])
        run_id = options["measure.run_id"]
        side, at = run_id[0], int(run_id.rpartition("-r")[2])
        name = f"{side}{at}"
        self.started.append(name)
        self.words[name] = launch.words
        self.variables[name] = launch.variables
        self.window_s[name] = options.get("measure.min_window_s")
        found = self.step_s(side, at)
        more = {"outcome": found, "exit_code": 1} if isinstance(found, str) else {}
        make_run(Path(options["measure.results_dir"]), 1.0 if more else found, run_id=run_id, **more)
        return End(more.get("exit_code", 0), "itself", 100.0, 101.0)


@pytest.fixture
def compare_run(tmp_path, monkeypatch):
    """Runs the command with processes that are made up; returns its exit code and its servers."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG)
    Path("b.yaml").write_text(CONFIG.replace("tiny", "small"))

    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 5.0)

    def run(step_s, *words):
        servers = Measured(step_s)
        monkeypatch.setattr("lmbench.commands.sweep.LocalExecutor", lambda say, mark: servers)
        return main(["compare", "--run", *map(str, words)]), servers

    return run


def noisy(spread=0.003, effect=0.0, seed=0):
    generator = random.Random(seed)
    return lambda side, at: 0.05 * generator.lognormvariate(0, spread) * (1 + effect * (side == "B"))


def test_both_sides_are_measured_in_rounds_with_the_order_turned_until_the_verdict_stands(compare_run, capsys):
    code, servers = compare_run(noisy(), "a.yaml", "b.yaml", "--name", "c", "--all")
    out = " ".join(capsys.readouterr().out.split())
    assert code == main(["compare", "results/c@side=A", "results/c@side=B", "--all"]) == 0
    assert " ".join(capsys.readouterr().out.split()) == out
    assert "verdict SAME: the 90 % interval" in out
    assert "test paired by round, since both sides were measured in turn" in out
    rounds = len(servers.started) // 2
    assert 8 <= rounds <= 24
    # Imports take longer than a round: four rounds have a server.
    assert servers.rounds == math.ceil(rounds / 4)
    assert servers.started[:6] == ["A0", "B0", "B1", "A1", "A2", "B2"]


def test_windows_are_short_until_the_noise_takes_longer_ones_and_only_the_first_round_probes(compare_run):
    _, servers = compare_run(noisy(0.03, 0.3), "a.yaml", "--name", "c")
    windows_s = [servers.window_s[f"A{at}"] for at in range(len(servers.started) // 2)]
    assert windows_s[:2] == ["0.5", "0.5"]
    assert windows_s == sorted(windows_s, key=float)
    assert float(windows_s[-1]) >= 2
    assert ["--measure.probe_steps=0" in servers.words[name] for name in ("A0", "B0", "A1", "B1")] == [0, 0, 1, 1]
    _, quiet = compare_run(noisy(), "a.yaml", "--name", "d")
    assert {quiet.window_s[name] for name in quiet.started} == {"0.5"}
    _, chosen = compare_run(noisy(), "a.yaml", "--measure.steps", "7", "--name", "e", "--budget", "0.001s")
    assert "--measure.steps=7" in chosen.words["A0"]
    assert chosen.window_s["A0"] is None


def test_on_a_busy_machine_threads_that_wait_give_their_cores_away(compare_run, monkeypatch, capsys):
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 100.0)
    _, servers = compare_run(noisy(), "a.yaml", "--name", "c", "--budget", "0.001s")
    assert [servers.variables[name]["OMP_WAIT_POLICY"] for name in ("A0", "B0")] == ["passive"] * 2
    assert "other processes take 100 % of the cores" in capsys.readouterr().err
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    _, servers = compare_run(noisy(), "a.yaml", "--name", "d", "--budget", "0.001s")
    assert "OMP_WAIT_POLICY" not in servers.variables["A0"]


def test_each_side_gets_its_configuration_and_options_and_both_the_common_ones(compare_run, tmp_path):
    words = ["a.yaml@model.attention=naive,trainer.devices=[1,2]", "b.yaml", "--name", "c", "--data.batch_size", "2"]
    _, servers = compare_run(noisy(), *words)
    config = {side: words[1].removeprefix("--config=") for side, words in servers.words.items() if side[1] == "0"}
    assert {side[0]: Path(path).read_text() for side, path in config.items()} == {
        "A": CONFIG, "B": CONFIG.replace("tiny", "small"),
    }  # fmt: skip
    assert servers.words["A0"][2:5] == ["--data.batch_size=2", "--model.attention=naive", "--trainer.devices=[1,2]"]
    assert "--model.attention=naive" not in servers.words["B0"]
    assert "--data.batch_size=2" in servers.words["B0"]


@pytest.mark.parametrize(("effect", "code", "word"), [(0.02, 10, "SLOWER: +"), (-0.02, 0, "FASTER: -")])
def test_a_change_ends_it_and_is_the_exit_code(compare_run, capsys, effect, code, word):
    ended, servers = compare_run(noisy(effect=effect), "a.yaml")
    captured = capsys.readouterr()
    assert (ended, word in captured.out, len(servers.started) <= 40) == (code, True, True)
    assert "lmbench: compare: round 4, " in captured.err


def test_the_budget_ends_it_undecided_with_what_it_would_take_and_it_goes_on_from_there(compare_run, capsys):
    step_s = noisy(0.005, seed=5)
    code, servers = compare_run(step_s, "a.yaml", "--name", "c", "--budget", "0.001s")
    assert (code, servers.started) == (11, ["A0", "B0"])
    assert "go on: lmbench compare --run results/c --gate 1% --budget 0.001s" in capsys.readouterr().err
    code, more = compare_run(step_s, "results/c", "--gate", "3%")
    assert code == 0
    assert more.started[:3] == ["B1", "A1", "A2"]
    record = decode_run(next(Path("results/c/runs").glob("B-*-r2/run.json")).read_bytes())
    assert (record.sweep.axes, record.sweep.repeat) == ({"side": "B"}, 2)
    assert record.sweep.load_per_core is not None
    code, nothing = compare_run(step_s, "results/c", "--gate", "3%")
    assert (code, nothing.started) == (0, [])


def test_a_slow_process_is_named_and_measured_again_before_the_verdict(compare_run, capsys):
    quiet = noisy(0.001)
    code, servers = compare_run(lambda side, at: quiet(side, at) * (1.2 if (side, at) == ("A", 3) else 1), "a.yaml")
    captured = capsys.readouterr()
    assert code == 0
    assert "slow: round 4: A took 19" in captured.err
    assert "slow         round 4: A took 19" in captured.out
    assert "A4" in servers.started


def test_a_side_that_does_not_run_ends_it_after_one_round(compare_run, capsys):
    code, servers = compare_run(lambda side, at: "oom" if side == "B" else 0.05, "a.yaml")
    assert (code, servers.started) == (11, ["A0", "B0"])
    assert "no run of B counts: outcome oom" in " ".join(capsys.readouterr().out.split())


def test_revisions_are_checked_out_and_kept_as_commits(compare_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"], ["branch", "old"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "two"], check=True)
    compare_run(noisy(), "a.yaml", "--revision", "old", "main", "--name", "c")
    stored = json.loads(Path("results/c/sweep.json").read_text())
    commits = {name: spec["revision"] for name, spec in stored["file"]["environments"].items()}
    assert set(commits) == {"old", "main"}
    assert all(len(commit) == 40 for commit in commits.values())
    assert stored["cells"][0]["axes"] == {"side": "A", "environment": "old"}
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "three"], check=True)
    code, again = compare_run(noisy(), "results/c")
    assert (code, again.started) == (0, [])


def test_variables_make_environments_whose_servers_are_ready_before_either_side_is_measured(compare_run, monkeypatch):
    asked = []
    monkeypatch.setattr(Measured, "await_ready", lambda self, environments: asked.append(len(list(environments))))
    words = ("--variable", "OMP_NUM_THREADS", "1", "2", "--revision", ".", ".", "--budget", "0.001s")
    _, servers = compare_run(noisy(), "a.yaml", *words)
    assert [servers.variables[name]["OMP_NUM_THREADS"] for name in ("A0", "B0")] == ["1", "2"]
    # To check the options, and for the round.
    assert asked == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "takes one or two configurations, A and B; 0 given"),
        (["nowhere.yaml"], "config 'nowhere.yaml' is no file and no shipped configuration"),
        (["a.yaml@size"], "give a configuration, and its options as CONFIG@NAME=VALUE"),
        (["a.yaml", "--budget", "10"], "--budget is '10'; give a duration above 0"),
        (["a.yaml", "--budget", "0s"], "--budget is '0s'"),
        (["a.yaml", "--revision", "x", "y"], "is in no git repository"),
        (["a.yaml@data.x=1", "--data.x", "2"], "--data.x is for both sides, and one has its own"),
        (["a.yaml", "--name", "a/b"], "only letters, digits"),
        (["--kernels", "a.yaml"], "--kernels compares traces that are there"),
        (["a.yaml", "--data.x"], "--data.x has no value"),
        (["a.yaml", "--python", "python3", "/no/python"], "is no program"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(compare_run, capsys, words, message):
    code, _ = compare_run(noisy(), *words)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("lmbench: ")
    assert message in last


def test_a_folder_that_is_no_comparison_or_is_one_already_is_refused(compare_run, capsys):
    compare_run(noisy(), "a.yaml", "--name", "c")
    assert compare_run(noisy(), "a.yaml", "--name", "c")[0] == 2
    assert "is there already; `lmbench compare --run results/c` goes on" in capsys.readouterr().err
    assert compare_run(noisy(), "results/c", "--data.x", "1")[0] == 2
    assert "it has its options already" in capsys.readouterr().err
    assert main(["sweep", "results/c"]) == 2
    assert "has sides to compare; `lmbench compare --run FOLDER` goes on with it" in capsys.readouterr().err


def test_real_processes_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--model.vocab_size", "64", "--data.context_length", "16", "--measure.steps", "20"]
    words += ["--measure.min_window_s", "0", "--measure.probe_steps", "0", "--budget", "0.1s"]
    with warm_servers() as servers:
        monkeypatch.setattr("lmbench.commands.sweep.LocalExecutor", lambda say, mark: servers)
        code = main(["compare", "--run", "smoke@data.batch_size=1", "smoke", *words, "--results_dir", str(tmp_path)])
    out = " ".join(capsys.readouterr().out.split())
    assert code == 11
    assert "data.batch_size: 1 -> 4" in out
    assert "rounds: 1; a verdict takes 4" in out
