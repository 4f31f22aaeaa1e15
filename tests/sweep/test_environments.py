"""Environments as an axis: another git revision, another Python, additional variables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from refusals import usage_error
from repository import git
from tables import flat

import lmbench
from lmbench.cli import main
from lmbench.sweep.environments import resolve
from lmbench.sweep.file import EnvironmentSpec

MODULE = """
from lmbench.model.language_model import LanguageModel

class Net(LanguageModel):
    def describe(self):
        return {**super().describe(), "attention": "revision %d"}
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with two commits of a project, and an uncommitted change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "tree"
    (folder / "src").mkdir(parents=True)
    git("init", "-q", folder=folder)
    for revision in (1, 2):
        (folder / "src" / "mine.py").write_text(MODULE % revision)
        git("add", ".", folder=folder)
        git("commit", "-q", "-m", f"revision {revision}", folder=folder)
    (folder / "src" / "mine.py").write_text(MODULE % 3)
    monkeypatch.chdir(folder)
    return folder


def at(revision):
    return resolve({"x": EnvironmentSpec(revision=revision)})["x"]


def origin_of(environment, module):
    """The file that a process of the environment imports a module from."""
    words = [environment.python, "-P", "-c", f"import importlib.util as u; print(u.find_spec({module!r}).origin)"]
    process = subprocess.run(words, env=environment.process_variables(), capture_output=True, text=True, check=True)
    return Path(process.stdout.strip())


def test_a_revision_is_checked_out_beside_found_first_and_made_anew_where_somebody_changed_it(tree, monkeypatch):
    def state():
        return git("status", "--porcelain", folder=tree), sorted(path.name for path in (tree / ".git").iterdir())

    before = state()
    for revision, number in (("HEAD~1", 1), ("HEAD", 2), (git("rev-parse", "HEAD", folder=tree)[:10], 2)):
        environment = at(revision)
        assert f"revision {number}" in origin_of(environment, "mine").read_text()
        assert environment.spec.revision == git("rev-parse", revision, folder=tree)
        assert git("rev-parse", "HEAD", folder=environment.folder) == environment.spec.revision
    with usage_error(r"environment x: 'nowhere' is no revision of [^()]*; `git log --all`"):
        at("nowhere")
    assert before == state()
    (environment.folder / "src" / "mine.py").write_text("broken")
    assert at("HEAD").folder == environment.folder
    assert "revision 2" in (environment.folder / "src" / "mine.py").read_text()
    monkeypatch.chdir("src")
    within = at("HEAD~1")
    assert within.folder.name == "src"
    assert "revision 1" in origin_of(within, "mine").read_text()
    Path("new").mkdir()
    monkeypatch.chdir("new")
    with usage_error(r"environment x: its revision has no folder 'src/new'; start from"):
        at("HEAD")


def test_two_revisions_are_interleaved_in_one_sweep(tree):
    Path("study.yaml").write_text(
        """
base: {trainer.accelerator: cpu, model: mine.Net, model.init_args.size: tiny, data.context_length: 16,
  measure.warmup_steps: 1, measure.steps: 3, measure.min_window_s: 0, measure.probe_steps: 0}
modes: [forward]
repeats: 1
environments:
  before: {revision: HEAD~1}
  after: {revision: HEAD, variables: {OMP_NUM_THREADS: "1"}}
"""
    )
    assert main(["sweep", "study.yaml"]) == 0
    by_name = {run.record.sweep.environment: run.record for run in lmbench.load("results/study")}
    for name, revision, number in (("before", "HEAD~1", 1), ("after", "HEAD", 2)):
        record = by_name[name]
        assert (record.outcome, record.model.attention) == ("ok", f"revision {number}")
        assert record.environment.code.project.commit == git("rev-parse", revision, folder=tree)
        assert record.sweep.axes == {"mode": "forward", "environment": name}


def test_a_file_that_git_does_not_track_is_missing_in_both_revisions_which_is_no_comparison(tree, capsys):
    reading = "    def setup(self, stage):\n        open('tokens.npz')\n"
    Path("src/mine.py").write_text(f"{MODULE % 3}\n{reading}")
    git("commit", "-q", "-a", "-m", "reads a file", folder=tree)
    Path("tokens.npz").touch()
    Path("mine.yaml").write_text("{model: mine.Net, trainer: {accelerator: cpu}, data.context_length: 16}")
    assert main(["compare", "--run", "mine.yaml", "--revision", "HEAD", "HEAD", "--budget", "1s"]) == 12
    out = flat(capsys.readouterr().out)
    assert out.startswith("verdict INVALID: no run of A counts: outcome error in setup: [Errno 2] No such file")
    assert "'tokens.npz'; a revision's checkout has only files that git tracks: give an absolute path" in out
