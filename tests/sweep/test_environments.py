"""Code as an axis: a revision of a working tree, another Python, further variables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.records.load import find_runs, load_run
from lmbench.sweep.environments import resolve
from lmbench.sweep.file import EnvironmentSpec, sweep_from
from lmbench.sweep.plan import make_plan

MODULE = """
from lmbench.model.language_model import LanguageModel

class Net(LanguageModel):
    def describe(self):
        return {**super().describe(), "attention": "revision %d"}
"""


def git(folder, *words):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with two commits of a project, and one that is not committed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "tree"
    (folder / "src").mkdir(parents=True)
    git(folder, "init", "-q")
    for revision in (1, 2):
        (folder / "src" / "mine.py").write_text(MODULE % revision)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"revision {revision}")
    (folder / "src" / "mine.py").write_text(MODULE % 3)
    return folder


def spec(tree, revision):
    return {"x": EnvironmentSpec(revision=revision, tree=str(tree))}


def text_of(environment):
    code = "import importlib.util as u; print(open(u.find_spec('mine').origin).read())"
    words = [environment.python, "-P", "-c", code]
    variables = environment.process_variables()
    return subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout


def test_a_revision_is_checked_out_beside_and_found_first(tree):
    before = git(tree, "status", "--porcelain"), sorted(path.name for path in (tree / ".git").iterdir())
    for revision, number in (("HEAD~1", 1), ("HEAD", 2), (git(tree, "rev-parse", "HEAD")[:10], 2)):
        environment = resolve(spec(tree, revision))["x"]
        assert f"revision {number}" in text_of(environment)
        assert environment.facts.commit == git(tree, "rev-parse", revision)
        assert git(environment.folder, "rev-parse", "HEAD") == environment.facts.commit
    assert before == (git(tree, "status", "--porcelain"), sorted(path.name for path in (tree / ".git").iterdir()))


def test_a_checkout_that_somebody_changed_is_made_anew(tree):
    folder = resolve(spec(tree, "HEAD"))["x"].folder
    (folder / "src" / "mine.py").write_text("broken")
    assert resolve(spec(tree, "HEAD"))["x"].folder == folder
    assert "revision 2" in (folder / "src" / "mine.py").read_text()


def test_a_folder_within_a_repository_may_be_the_tree(tree):
    environment = resolve(spec(tree / "src", "HEAD~1"))["x"]
    assert environment.folder.name == "src"
    assert "revision 1" in text_of(environment)


def test_a_package_that_lies_elsewhere_comes_from_the_checkout_too(tree):
    (tree / "pkg").mkdir()
    (tree / "pkg" / "__init__.py").write_text("")
    (tree / "parts").mkdir()
    (tree / "parts" / "__init__.py").write_text("HERE = True\n")
    (tree / "pyproject.toml").write_text('[tool.setuptools.package-dir]\n"pkg.parts" = "parts"\n')
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "package-dir")
    environment = resolve(spec(tree, "HEAD"))["x"]
    words = [environment.python, "-P", "-c", "import pkg.parts; print(pkg.parts.__file__)"]
    done = subprocess.run(words, env=environment.process_variables(), capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(environment.folder)


def test_lmbench_itself_can_be_the_tree(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree = ROOT
    if not (tree / ".git").exists():
        pytest.skip("this is no git checkout")
    environment = resolve(spec(tree, "HEAD"))["x"]
    code = "import importlib.util as u; print(*(u.find_spec(f'lmbench.{m}').origin for m in ('cli', 'callbacks')))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment.process_variables(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    cli, callbacks = map(Path, done.stdout.split())
    environment.check_origin(cli.parent)
    assert callbacks.is_relative_to(environment.folder)


MISTAKES = {
    "no such revision": (EnvironmentSpec(revision="nowhere", tree="."), "'nowhere' is no revision of"),
    "an option as revision": (EnvironmentSpec(revision="--help", tree="."), "is no revision of"),
    "no repository": (EnvironmentSpec(revision="HEAD", tree="/"), "is in no git repository"),
    "no folder": (EnvironmentSpec(revision="HEAD", tree="/nowhere"), "is no folder"),
    "no such Python": (EnvironmentSpec(python="/nowhere/python"), "is no program"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line(mistake, tree, monkeypatch):
    monkeypatch.chdir(tree)
    given, told = MISTAKES[mistake]
    with pytest.raises(UsageError) as raised:
        resolve({"x": given})
    assert told in str(raised.value)
    assert str(raised.value).startswith("environment x: ")
    assert "\n" not in str(raised.value)


def test_a_python_without_lmbench_is_told(tmp_path, capsys):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'lmbench'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    file = tmp_path / "study.yaml"
    file.write_text(f"environments: {{x: {{python: {bare}}}}}\n")
    assert main(["sweep", str(file), "--results_dir", str(tmp_path / "r")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"lmbench: environment x: {bare} finds no lmbench that works: ModuleNotFoundError: No module named 'lmbench'"
    )
    assert not (tmp_path / "r").exists()


def test_another_commit_makes_another_cell_and_another_folder_does_not(tree, tmp_path):
    def ids(where):
        content = {"environments": {"x": {"revision": "HEAD", "tree": str(where)}}}
        return [cell.id for cell in make_plan("s", sweep_from(content)).cells]

    first = ids(tree)
    moved = tmp_path / "moved"
    tree.rename(moved)
    assert ids(moved) == first
    git(moved, "commit", "-q", "-a", "-m", "revision 3")
    assert ids(moved) != first


def test_two_revisions_are_interleaved_in_one_sweep(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "study.yaml"
    file.write_text(
        f"""
base:
  trainer.accelerator: cpu
  model: mine.Net
  model.init_args.size: tiny
  data.context_length: 16
  measure.warmup_steps: 1
  measure.steps: 3
  measure.min_window_s: 0
  measure.probe_steps: 0
modes: [forward]
repeats: 1
environments:
  before: {{revision: HEAD~1, tree: {tree}}}
  after: {{revision: HEAD, tree: {tree}, variables: {{OMP_NUM_THREADS: 1}}}}
"""
    )
    assert main(["sweep", str(file)]) == 0
    found = {run.record.sweep.environment: run.record for run in map(load_run, find_runs(["results/study"]))}
    assert {name: (run.outcome, run.model.attention) for name, run in found.items()} == {
        "before": ("ok", "revision 1"),
        "after": ("ok", "revision 2"),
    }
    for name, revision in (("before", "HEAD~1"), ("after", "HEAD")):
        assert found[name].environment.code.project.commit == git(tree, "rev-parse", revision)
        assert found[name].sweep.axes == {"mode": "forward", "environment": name}
