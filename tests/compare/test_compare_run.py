"""`lmbench compare --run`: measures in rounds, stops, continues, and refuses wrong folders."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import pytest
from comparison_runs import make_run
from simulated_cells import MeasuredServers
from tables import cases, flat

from lmbench.cli import main
from lmbench.interruption import Terminated

CONFIG = "trainer: {accelerator: cpu}\nmodel: {size: tiny}\n"


class Measured(MeasuredServers):
    """Servers whose processes write a record with the step time or the outcome that `step_s(side, round)` returns.

    After a command, `launches` are by side and round; `code`, `out` and `err` are the command's, with single spaces.
    """

    def __init__(self, step_s):
        super().__init__(lambda name: step_s(name[0], int(name.rpartition("-r")[2])))
        self.environment_counts = []

    def await_ready(self, environments):
        self.environment_counts.append(len(list(environments)))

    def window_s(self, name):
        mark = "--measure.min_window_s="
        return next((word.removeprefix(mark) for word in self.launches[name].words if word.startswith(mark)), None)


@pytest.fixture
def compare_run(here, monkeypatch, capsys):
    """Runs the command with simulated processes; returns its servers."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 6)
    Path("a.yaml").write_text(CONFIG)
    Path("b.yaml").write_text(CONFIG.replace("tiny", "small"))

    def run(step_s, *words):
        servers = Measured(step_s)
        monkeypatch.setattr("lmbench.campaign.sweep.LocalExecutor", lambda mark: servers)
        servers.code = main(["compare", "--run", *words])
        servers.launches = {name[0] + name.rpartition("-r")[2]: launch for name, launch in servers.launches.items()}
        servers.started = list(servers.launches)
        servers.out, servers.err = map(flat, capsys.readouterr())
        return servers

    return run


def noisy(spread=0.003, effect=0.0, seed=0):
    generator = random.Random(seed)
    return lambda side, repeat: 0.05 * generator.lognormvariate(0, spread) * (1 + effect * (side == "B"))


def test_both_sides_are_measured_in_rounds_with_the_order_of_coins_until_the_verdict_stands(compare_run, capsys):
    servers = compare_run(noisy(), "a.yaml", "b.yaml", "--name=c", "--all")
    assert servers.code == main(["compare", "results/c@side=A", "results/c@side=B", "--all"]) == 0
    assert flat(capsys.readouterr().out) == servers.out
    assert "verdict SAME: the 90 % interval" in servers.out
    assert "test paired by round, the order drawn by coin" in servers.out
    rounds = len(servers.started) // 2
    # Every round has a server of its own.
    assert (5 <= rounds <= 24, len(servers.rounds)) == (True, rounds)
    assert {*servers.started[::2]} > {"A0", "B1"}


def test_windows_are_short_until_the_noise_takes_longer_ones_and_only_the_first_round_probes(compare_run):
    servers = compare_run(noisy(0.2, 0.6), "a.yaml", "--name=c")
    windows_s = [servers.window_s(f"A{repeat}") for repeat in range(len(servers.started) // 2)]
    assert windows_s[:2] == ["1", "1"]
    assert windows_s == sorted(windows_s, key=float)
    assert float(windows_s[-1]) >= 2
    names = ("A0", "B0", "A1", "B1")
    assert ["--measure.probe_steps=0" in servers.launches[name].words for name in names] == [0, 0, 1, 1]
    quiet = compare_run(noisy(0.001), "a.yaml", "--name=d")
    assert {*map(quiet.window_s, quiet.started)} == {"1"}
    chosen = compare_run(noisy(), "a.yaml", "--measure.steps=7", "--name=e", "--budget=0.001s")
    assert "--measure.steps=7" in chosen.launches["A0"].words
    assert chosen.window_s("A0") is None


def test_on_a_busy_machine_the_first_windows_are_longer(compare_run, monkeypatch):
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 90.0)
    servers = compare_run(noisy(), "a.yaml", "--name=c", "--budget=0.001s")
    assert servers.window_s("A0") == "4"


def test_each_side_gets_its_configuration_options_and_variables_and_both_the_common_ones(compare_run):
    words = ["a.yaml@model.attention=naive,trainer.devices=[1,2]", "b.yaml", "--data.batch_size=2", "--budget=0.001s"]
    a, b = (launch.words for launch in compare_run(noisy(), *words).launches.values())
    configs = [Path(words[1].removeprefix("--config=")).read_text() for words in (a, b)]
    assert configs == [CONFIG, CONFIG.replace("tiny", "small")]
    assert a[3:6] == ["--data.batch_size=2", "--model.attention=naive", "--trainer.devices=[1,2]"]
    assert b[3:5] == ["--data.batch_size=2", "--measure.min_window_s=1"]
    # Variables make environments. The servers of all environments are ready before either side is measured.
    words = ("--variable", "OMP_NUM_THREADS", "1", "2", "--revision", ".", ".", "--budget=0.001s", "--name=d")
    servers = compare_run(noisy(), "a.yaml", *words)
    assert [launch.variables["OMP_NUM_THREADS"] for launch in servers.launches.values()] == ["1", "2"]
    # The answer calls a side by its environment, since a folder tells a reader of a pull request nothing.
    assert "A here OMP_NUM_THREADS=1: results/d@side=A B here OMP_NUM_THREADS=2: results/d@side=B" in servers.out
    # Once to check the options, once for the round.
    assert servers.environment_counts == [2, 2]


@cases("""
- [effect, code, word]
- [0.02, 10, "SLOWER: +"]
- [-0.02, 0, "FASTER: -"]
- [oom, 12, outcome oom]
""")
def test_a_change_ends_it_and_is_the_exit_code_and_a_side_that_does_not_run_ends_it_after_one_round(
    compare_run, effect, code, word
):
    fails = effect == "oom"
    step_s = (lambda side, repeat: "oom" if side == "B" else 0.05) if fails else noisy(effect=effect)
    servers = compare_run(step_s, "a.yaml")
    assert (servers.code, word in servers.out, len(servers.started) <= (2 if fails else 40)) == (code, True, True)
    assert ("lmbench: compare: round 4, " in servers.err) != fails


def test_the_budget_ends_it_undecided_with_what_it_would_take_and_it_goes_on_from_there(compare_run):
    step_s = noisy(0.005, seed=5)
    servers = compare_run(step_s, "a.yaml", "--name=c", "--budget=0.001s")
    assert (servers.code, servers.started) == (11, ["A0", "B0"])
    assert "two sides in turn, at most 200 rounds; the runs are in results/c " in servers.err
    # The command that goes on has the time of the line above it.
    assert re.search(
        r"\+2 % takes at least 6 rounds: [\d.]+ s more lmbench: compare: go on: lmbench compare --run results/c "
        r"--gate 1% --budget [1-9]\d*s$",
        servers.err.strip(),
    )
    continued = compare_run(step_s, "results/c", "--gate=3%")
    assert (continued.code, continued.started[:3]) == (0, ["B1", "A1", "A2"])
    nothing = compare_run(step_s, "results/c", "--gate=3%")
    assert (nothing.code, nothing.started) == (0, [])


def test_a_change_that_is_not_shown_takes_more_rounds_than_there_are(compare_run):
    quiet = noisy(0.001)
    # Every third round contradicts the others.
    step_s = lambda side, repeat: quiet(side, repeat) * (1.1 if (side == "B") == (repeat % 3 > 0) else 1)  # noqa: E731
    servers = compare_run(step_s, "a.yaml", "--gate=5%", "--budget=5s")
    assert servers.code == 11
    assert int(re.findall(r"\+10 % takes about (\d+) rounds", servers.err)[-1]) > len(servers.started) // 2


def test_an_interrupted_comparison_says_how_it_goes_on(compare_run):
    def step_s(side, repeat):
        raise Terminated

    servers = compare_run(step_s, "a.yaml", "--name=c", "--gate=3%", "--about=model.size")
    assert "compare: go on: lmbench compare --run results/c --gate 3% --about model.size" in servers.err


def test_a_round_whose_guard_failed_is_measured_again_within_the_budget_alone(compare_run, monkeypatch):
    guards = [{"name": "clocks", "status": "fail", "message": "patched"}]
    monkeypatch.setattr("simulated_cells.make_run", functools.partial(make_run, guards=guards))
    once = compare_run(noisy(), "a.yaml", "--budget=0.001s")
    assert (once.code, len(once.started)) == (11, 2)
    # Both sides fail here, as where the project itself patches a clock.
    thrice = compare_run(noisy(), "a.yaml", "--name=d")
    assert (thrice.code, len(thrice.started)) == (12, 6)


def test_an_automatic_budget_lasts_as_long_as_the_gate_needs(compare_run):
    servers = compare_run(noisy(0.01, 0.004), "a.yaml", "--budget=auto", "--gate=2%")
    # A change of the gate's size takes 14 rounds for each squared ratio of spread and gate, here about a half.
    assert 5 <= len(servers.started) // 2 <= 60


def test_a_folder_that_is_no_comparison_or_is_one_already_is_refused(compare_run, refused):
    compare_run(noisy(), "a.yaml", "--name=c")
    for words, message in (
        (["a.yaml", "--name=c"], "is there already; `lmbench compare --run results/c` goes on"),
        (["results/c", "--data.x=1"], "it has its options already"),
    ):
        servers = compare_run(noisy(), *words)
        assert (servers.code, message in servers.err) == (2, True)
    assert "has sides to compare; `lmbench compare --run FOLDER` goes on with it" in refused("sweep", "results/c")
