"""The wheel works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from paths import ROOT


def run(*words, **settings):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, timeout=240, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lmbench_measures_and_shows_its_guide_from_its_wheel_in_an_empty_folder(tmp_path):
    # A build leaves files beside the sources.
    copy, here, installed = tmp_path / "copy", tmp_path / "here", tmp_path / "installed"
    for name in ("lmbench", "callbacks", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    # The dependencies are this environment's. Its own lmbench comes after the wheel's.
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    run(*pip, "--target", installed, copy)
    here.mkdir()
    alone = {"cwd": here, "env": {**os.environ, "PYTHONPATH": str(installed)}}
    lmbench = installed / "bin" / "lmbench"
    assert "mean step" in run(lmbench, "fit", "smoke", "--measure.steps=3", "--measure.min_window_s=0", **alone)
    assert len(list((here / "results").glob("*/run.json"))) == 1
    assert run(lmbench, "guide", **alone).startswith("# The guide")
    places = run(sys.executable, "-P", "-c", "import lmbench; print(*lmbench.__path__)", **alone).split()
    assert places == [f"{installed}/lmbench"]
