"""`lmbench bisect`: ends, search, suspects that do not run, going on, and mistakes, with simulated processes."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest
from repository import git
from simulated_cells import MeasuredServers
from tables import cases

from lmbench.cli import main
from lmbench.errors import UsageError

CONFIG = "trainer: {accelerator: cpu}\nmodel: {size: tiny}\n"


class Row(MeasuredServers):
    """Servers of a row of suspects: those from `first_bad` on take longer, and `broken` ones end in errors."""

    def __init__(self, last, first_bad, broken=(), change=1.1, noise=0.005):
        super().__init__(lambda name: name)
        self.last, self.first_bad, self.broken = last, first_bad, broken
        self.change, self.noise, self.chance, self.measured = change, noise, random.Random(3), set()

    def end(self, name, launch, folder, options):
        comparison = folder.parent.parent.name
        number = self.last if comparison.startswith("ends") else int(re.search(r"\d+", comparison)[0])
        side_a = number - 1 if comparison.startswith("found") else 0
        index = number if name.startswith("B") else side_a
        self.measured.add(index)
        step_s = (self.change if index >= self.first_bad else 1.0) * (1 + self.chance.gauss(0, self.noise))
        return super().end("error" if index in self.broken else step_s, launch, folder, options)


@pytest.fixture
def bisect(here, monkeypatch, capsys):
    """Runs the command on a row of 8 options, or on what `words` say; returns its servers with code and output."""
    coins = itertools.count(6)
    monkeypatch.setattr("secrets.randbits", lambda bits: next(coins))
    Path("good.yaml").write_text(CONFIG)
    options = "".join(f"  option_{number}: {number}\n" for number in range(1, 9))
    Path("bad.yaml").write_text(f"{CONFIG.replace('model: {size: tiny}', 'model:')}  size: tiny\n{options}")
    monkeypatch.setattr("lmbench.campaign.sweep.check_options", lambda *_: None)

    def run(*words, **row):
        servers = Row(**{"last": 8, "first_bad": 6, **row})
        monkeypatch.setattr("lmbench.campaign.sweep.LocalExecutor", lambda mark: servers)
        servers.code = main(["bisect", *(words or ["good.yaml", "bad.yaml"]), "--json"])
        servers.out, servers.err = capsys.readouterr()
        servers.figures = json.loads(servers.out) if servers.code in (0, 11, 12) else {}
        return servers

    return run


def test_the_option_that_made_it_slower_is_found_and_compared_with_the_one_before(bisect):
    servers = bisect()
    assert (servers.code, servers.figures["first"]) == (0, "model.option_6=6")
    assert servers.figures["before"] == "model.option_5=5"
    assert servers.figures["comparison"]["verdict"] == "slower"
    assert servers.figures["probability_fraction"] >= 0.99


def test_rounds_of_other_suspects_do_not_count(bisect):
    ends = ["good.yaml", "bad.yaml", "--budget=0.001s"]
    bisect(*ends)
    bad = Path("bad.yaml")
    bad.write_text(bad.read_text().replace("option_1: 1", "option_1: 100"))
    assert bisect(*ends).measured == {0, 8}


@cases("""
- [row, code, why]
- [{change: 1.0, noise: 0.002}, 0, nothing to find]
- [{broken: [8]}, 12, nothing to search]
""")
def test_ends_that_are_the_same_and_an_end_that_does_not_run_cost_no_suspect(bisect, row, code, why):
    servers = bisect(**row)
    assert (servers.code, servers.figures["first"], servers.measured) == (code, None, {0, 8})
    assert why in servers.figures["why"]


def test_suspects_that_do_not_run_are_left_out_and_named_beside_the_answer(bisect):
    servers = bisect(broken={4, 5})
    assert servers.figures["first"] == "model.option_6=6"
    assert servers.figures["or"] == ["model.option_4=4", "model.option_5=5"]


def test_a_version_that_cannot_be_installed_is_left_out_and_new_constraints_make_new_environments(bisect, monkeypatch):
    def pip(python, *words):
        if "thing==1.2" in words:
            raise UsageError("pip install thing==1.2: No matching distribution found")
        return "Available versions: 1.4, 1.3, 1.2, 1.1, 1.0\n"

    def link_python(folder, with_pip):
        for part in ("bin", "lib/python3/site-packages"):
            (folder / part).mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").resolve()))
    monkeypatch.setattr("lmbench.campaign.suspects._pip", pip)
    monkeypatch.setattr("venv.create", link_python)
    Path("own.yaml").write_text(CONFIG)
    monkeypatch.setenv("PIP_CONSTRAINT", "limits.txt")
    for limit in ("numpy<2", "numpy<3"):
        Path("limits.txt").write_text(limit)
        words = "thing==1.0", "thing==1.4", "--config", "own.yaml", "--results_dir", limit
        servers = bisect(*words, last=4, first_bad=3)
        assert (servers.code, servers.figures["first"], servers.figures["or"]) == (0, "thing==1.3", ["thing==1.2"])
        assert "thing==1.2 is left out: pip install thing==1.2: No matching" in servers.err
    assert len([*Path("cache").rglob("thing==1.3-*")]) == 2


def test_the_same_command_goes_on_where_it_ended(bisect):
    begun = bisect("good.yaml", "bad.yaml", "--budget", "0.001s")
    assert begun.code == 11
    again = bisect()
    assert again.figures["first"] == "model.option_6=6"
    assert bisect().started == []
    # As if a kill had come in the first round of a suspect.
    killed = next(Path("results").glob("bisect-*/suspect-5-*/runs"))
    for run in killed.glob("*/run.json"):
        run.write_text('{"schema_version": 1, "outcome": "running"}')
    resumed = bisect()
    assert resumed.figures["first"] == "model.option_6=6"
    assert 5 in resumed.measured


def test_a_secret_is_not_written_into_the_configurations_between_two(refused, here):
    for number in range(2):
        Path(f"{number}.yaml").write_text(f"model: {{size: tiny, hf_token: hidden, number: {number}}}\n")
    err = refused("bisect", "0.yaml", "1.yaml")
    assert err.startswith("lmbench: model.hf_token is a secret, and the configurations between these two")
    assert "hidden" not in err + "".join(path.read_text() for path in here.glob("results/*/*/*"))


def test_commits_are_searched_along_first_parents(bisect):
    git("init", "-q", ".")
    Path("own.yaml").write_text(CONFIG)
    for number in range(9):
        Path("code.py").write_text(f"number = {number}\n")
        git("add", ".")
        git("commit", "-q", "-m", f"step {number}")
    servers = bisect("HEAD~8", "HEAD", "--config", "own.yaml")
    assert servers.code == 0, servers.err
    assert git("log", "-1", "--format=%s", servers.figures["first"]).strip() == "step 6"
    assert servers.figures["subject"].startswith("step 6 (")
