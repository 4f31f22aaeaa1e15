"""The wheel works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from paths import ROOT


def run(*words, **settings):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, timeout=240, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lmbench_measures_and_shows_its_guide_from_its_wheel_in_an_empty_folder(tmp_path):
    # A build leaves files beside the sources.
    copy, here, python = tmp_path / "copy", tmp_path / "here", tmp_path / "venv" / "bin" / "python"
    for name in ("lmbench", "callbacks", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, copy)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # The dependencies are this environment's. Its own lmbench comes after the wheel's.
    Path(packages, "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    (wheel,) = tmp_path.glob("*.whl")
    # The same version is among the dependencies.
    install = ["install", "-q", "--no-deps", "--no-index", "--ignore-installed", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install)
    here.mkdir()
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lmbench = python.with_name("lmbench")
    quick = ["--measure.steps=3", "--measure.min_window_s=0"]
    assert "mean step" in run(lmbench, "fit", "smoke", *quick, cwd=here, env=alone)
    assert len(list((here / "results").glob("*/run.json"))) == 1
    assert run(lmbench, "guide", cwd=here, env=alone).startswith("# The guide")
    places = run(python, "-c", "import lmbench; print(*lmbench.__path__)", cwd=here, env=alone).split()
    assert places == [f"{packages}/lmbench"]
