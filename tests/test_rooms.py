"""A package that is installed beside lmbench adds a metric and a pass; the package is the guide's example."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from pages import block

STUDY = """
base: {config: smoke, measure.steps: 3, measure.min_window_s: 0, measure.probe_steps: 0}
matrix: {data.batch_size: [2]}
passes: [timing, spread]
repeats: 1
view: {title: Losses, tables: [{title: Losses, columns: [step_s, rooms.spread.largest_nat]}]}
"""


def lmbench(folder, path, *words):
    """A process in a folder, which sees the packages of another one."""
    command = [sys.executable, "-P", "-m", "lmbench", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_installed_room_adds_a_pass_a_metric_and_columns_to_a_sweep(tmp_path):
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    (source / "pyproject.toml").write_text(block("extending", "toml", "entry-points"))
    (source / "loss_spread.py").write_text(block("extending", "python", "ROOM ="))
    (source / "loss_spread_observer.py").write_text(block("extending", "python", "class LossSpread"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True)
    (tmp_path / "losses.yaml").write_text(STUDY)
    done = lmbench(tmp_path, target, "sweep", "losses.yaml")
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/losses/runs/*/run.json")]
    (record,) = [record for record in records if record["rooms"]]
    assert record["rooms"]["spread"]["largest_nat"] > 0
    assert (len(records), record["scalar_units"]) == (2, {"squared_loss": "nat²"})
    assert record["scalars"]["squared_loss"] > record["loss"]["mean"]
    shown = lmbench(tmp_path, target, "report", "results/losses")
    assert "spread.largest_nat" in shown.stdout, shown.stdout + shown.stderr
    # A result is read also where the package is not.
    listed = lmbench(tmp_path, tmp_path, "list", "results/losses")
    assert listed.returncode == 0, listed.stderr


@pytest.mark.parametrize(("module", "message"), [
    ("raise ImportError('half of it\\nis gone')", "cannot be loaded (ImportError: half of it is gone)"),
    ("ROOM = 3", "is int; it must be a lmbench.rooms.Room"),
    ("from lmbench.rooms import Room\nROOM = Room('memory')", "is called 'memory' as another one"),
])  # fmt: skip
def test_a_room_that_cannot_be_used_is_one_line(module, message, tmp_path):
    (tmp_path / "loss_spread.py").write_text(module)
    info = tmp_path / "loss_spread-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loss-spread\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lmbench.rooms]\nspread = loss_spread:ROOM\n")
    done = lmbench(tmp_path, tmp_path, "list", "--limit", "1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"the room loss_spread:ROOM of loss-spread {message}" in done.stderr
