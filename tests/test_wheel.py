"""The wheel holds all that lmbench needs, and works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from paths import SOURCE


def run(*words, **settings):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, timeout=240, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources: a build leaves files beside them."""
    copy, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("lmbench", "callbacks", "configs"):
        shutil.copytree(SOURCE / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, copy)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", dist, copy)
    (path,) = dist.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_sources(wheel):
    sources = {
        file.relative_to(SOURCE).as_posix()
        for folder in ("lmbench", "callbacks", "configs")
        for file in (SOURCE / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    shipped = {
        name.replace("lmbench/callbacks/", "callbacks/").replace("lmbench/configs/", "configs/")
        for name in ZipFile(wheel).namelist()
        if ".dist-info/" not in name
    }
    assert shipped == sources
    assert {"lmbench/guide/index.md", "callbacks/session.py", "configs/smoke.yaml"} <= shipped


def test_lmbench_measures_from_its_wheel_in_an_empty_folder(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # The dependencies are this environment's. Its own lmbench comes after the wheel's.
    Path(packages, "dependencies.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (here := tmp_path / "here").mkdir()
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lmbench = python.with_name("lmbench")
    said = run(lmbench, "fit", "smoke", "--measure.steps=3", "--measure.min_window_s=0", cwd=here, env=alone)
    assert "mean step" in said
    assert len(list((here / "results").glob("*/run.json"))) == 1
    where = run(python, "-c", "import lmbench; print(lmbench.__file__)", cwd=here, env=alone)
    assert where.startswith(str(tmp_path / "venv"))
    assert run(lmbench, "guide", cwd=here, env=alone).startswith("# The guide")
