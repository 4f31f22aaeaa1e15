"""A package that is installed beside lmbench adds a metric and a pass; the package is the guide's example."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from pages import block
from tables import cases

STUDY = """
base: {config: smoke, measure.steps: 3, measure.min_window_s: 0, measure.probe_steps: 0,
       trainer.logger: CSVLogger, trainer.logger.save_dir: logs}
matrix: {data.batch_size: [2]}
passes: [timing, spread]
repeats: 1
view: {title: Losses, tables: [{title: Losses, columns: [step_s, rooms.spread.largest_nat, scalars.squared_loss]}]}
"""


def lmbench(folder, environment, *words):
    command = [sys.executable, "-P", "-m", "lmbench", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )


def seeing(folder):
    """The environment of a process that imports from this folder too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """A folder, and the environment of a process that sees the package, which pip installed from its sources."""
    folder = tmp_path_factory.mktemp("spread")
    source, target = folder / "source", folder / "installed"
    source.mkdir()
    (source / "pyproject.toml").write_text(block("extending", "toml", "entry-points"))
    (source / "loss_spread.py").write_text(block("extending", "python", "ROOM ="))
    (source / "loss_spread_observer.py").write_text(block("extending", "python", "class LossSpread"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True)
    return folder, seeing(target)


def test_an_installed_room_adds_a_pass_a_metric_and_columns_to_a_sweep(spread):
    folder, environment = spread
    (folder / "losses.yaml").write_text(STUDY)
    done = lmbench(folder, environment, "sweep", "losses.yaml")
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in folder.glob("results/losses/runs/*/run.json")]
    (record,) = [record for record in records if record["rooms"]]
    assert record["rooms"]["spread"]["largest_nat"] > 0
    assert (len(records), record["scalar_units"]) == (2, {"squared_loss": "nat²"})
    assert record["scalars"]["squared_loss"] > record["loss"]["mean"]
    shown = lmbench(folder, environment, "report", "results/losses")
    assert "spread of losses" in shown.stdout, shown.stdout + shown.stderr
    assert next(guard for guard in record["guards"] if guard["name"] == "loss_spread")["status"] == "pass"
    assert "squared loss (nat²)" in shown.stdout
    assert "scalars/squared_loss" in "".join(file.read_text() for file in folder.rglob("metrics.csv"))
    again = lmbench(folder, environment, "show", *map(str, folder.glob("results/losses/runs/*"))).stdout
    numbers = f"{record['scalars']['squared_loss']:.4g} nat²", f"{record['rooms']['spread']['largest_nat']:.4f} nat"
    assert f"scalars      squared_loss {numbers[0]}\nspread       spread of losses {numbers[1]}\n" in again
    (folder / "wrong.yaml").write_text(STUDY.replace("scalars.squared_loss", "scalars.squared_los"))
    shown = lmbench(folder, environment, "report", "results/losses", "--view", "wrong.yaml", "--format", "markdown")
    assert "no run has scalars.squared_los; did you mean scalars.squared_loss?" in shown.stdout
    # A result is read also where the package is not.
    listed = lmbench(folder, dict(os.environ), "list", "results/losses")
    assert listed.returncode == 0, listed.stderr


def test_the_settings_of_an_installed_room_are_completed_and_checked_before_a_sweep_starts(spread):
    folder, environment = spread
    offered = lmbench(folder, environment, "completion", "--words", "fit", "--spread.")
    assert offered.stdout.split() == ["--spread.record"]
    (folder / "misspelt.yaml").write_text(STUDY.replace("measure.steps: 3", "spread.recrd: true"))
    done = lmbench(folder, environment, "sweep", "misspelt.yaml", "--dry_run")
    assert done.returncode == 2
    assert "unknown option --spread.recrd; did you mean --spread.record?" in done.stderr


def test_an_installed_room_tells_what_its_numbers_mean_and_has_a_page_in_the_guide(spread):
    told = json.loads(lmbench(*spread, "fields", "--json", "spread", "scalars.squared_loss").stdout)
    about = {row["name"]: (row["unit"], row["better"]) for row in told["tables"]["fields"]}
    assert about["rooms.spread.largest_nat"] == ("nat", "down")
    assert about["scalars.squared_loss"] == ("1", "down")
    assert lmbench(*spread, "guide", "spread").stdout.startswith("# The spread of losses\n")
    assert "[spread](spread.md)" in lmbench(*spread, "guide").stdout


@cases("""
- [change, words, message]
- ['switch="record"|switch="recordd"', fit --spread.record=true,
   "the room spread: loss_spread:SpreadSettings has no setting 'recordd'; did you mean record?"]
- [SpreadRecord"|ROOM", fields spread, "the room spread: record 'loss_spread:ROOM' cannot be loaded (must be called"]
- [SpreadRecord"|Spread", fields spread, "the room spread: record 'loss_spread:Spread' cannot be loaded"]
- [Number = lower(|Number = str(, fields spread, SpreadScalars.squared_loss has no description]
""")
def test_a_room_that_names_what_is_not_there_is_one_line(change, words, message, spread, tmp_path):
    folder, _ = spread
    shutil.copytree(folder / "installed", tmp_path, dirs_exist_ok=True)
    module = tmp_path / "loss_spread.py"
    module.write_text(module.read_text().replace(*change.split("|")))
    done = lmbench(tmp_path, seeing(tmp_path), *words.split())
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


@cases(r"""
- [module, message]
- ["raise ImportError('half of it\\nis gone')", "cannot be loaded (ImportError: half of it is gone)"]
- [ROOM = 3, is int; it must be a lmbench.rooms.Room]
- ["from lmbench.rooms import Room; ROOM = Room('spread', command='dtypes')", "has the command 'dtypes'; commands are"]
- ["from lmbench.rooms import Room\nROOM = Room('memory')", is called 'memory' as another one]
""")
def test_a_room_that_cannot_be_used_is_one_line(module, message, tmp_path):
    (tmp_path / "loss_spread.py").write_text(module)
    info = tmp_path / "loss_spread-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loss-spread\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lmbench.rooms]\nspread = loss_spread:ROOM\n")
    done = lmbench(tmp_path, seeing(tmp_path), "list", "--limit", "1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"the room loss_spread:ROOM of loss-spread {message}" in done.stderr
