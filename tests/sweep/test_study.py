"""A whole study with real processes: cells that fail in every way, sweeps that are killed, moved, resumed and filed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from tables import cases
from waiting import wait_for
from wandb_loopback import PLANTED_KEY, Server

import lmbench
from lmbench.cli import main

BASE = """
base:
  config: smoke
  model.vocab_size: 64
  data.batch_size: 2
  data.context_length: 16
  measure.steps: 4
  measure.min_window_s: 0
  measure.probe_steps: 1
  wandb.mode: disabled
"""
# Four cells: one ends well, one is refused when it is built, one does not end in time, one needs 2^58 bytes.
FAULTS = """
matrix:
  case:
    - {model.num_layers: 1}
    - {model.attention: flex}
    - {measure.min_window_s: 1000}
    - {model.d_ff: 1125899906842624}
repeats: 2
timeout_s: 7
"""
MODES = """
modes: [inference, forward]
repeats: 2
"""
#: `lmbench sweep`, and a check that its process did without PyTorch.
PROGRAM = """
import sys
from lmbench.cli import main
code = main(["sweep", *sys.argv[1:]])
assert not {"torch", "lightning"} & set(sys.modules), "torch was imported"
sys.exit(code)
"""


@pytest.fixture
def sweep(warm_sweeps):
    """`lmbench sweep` in this process."""
    return lambda *words: main(["sweep", *map(str, words)])


def write(tmp_path, text):
    path = tmp_path / "study.yaml"
    path.write_text(BASE + text)
    return str(path)


def runs(folder):
    return {run.path.name: run for run in lmbench.load(folder)}


@pytest.fixture
def start(tmp_path):
    """Starts sweeps in processes of their own, and kills them at the test's end.

    Their working directory has another `lmbench`, which is not the installed one, as the root of a checkout has.
    """
    (tmp_path / "lmbench").mkdir()
    (tmp_path / "lmbench" / "__init__.py").write_text("raise ImportError('the wrong lmbench')\n")
    started = []

    def begin(*words):
        words, pipe = [sys.executable, "-P", "-c", PROGRAM, *map(str, words)], subprocess.PIPE
        started.append(subprocess.Popen(words, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def going_on_after(count, folder, process):
    """The name of a run that goes on after `count` runs have ended."""

    def going_on():
        assert process.poll() is None, process.communicate()
        records = [json.loads(path.read_text()) for path in Path(folder).glob("runs/*/run.json")]
        names = [run["run_id"] for run in records if run.get("sweep") is None and run["outcome"] == "running"]
        return names if len(records) - len(names) >= count else []

    return wait_for(going_on, 120)[0]


@cases("""
- [asked, probe_steps]
- [{}, [5, null]]
- [{measure.probe_steps: 1}, [1, 1]]
""")
def test_later_repeats_take_no_probe_steps_unless_the_file_asks_for_them(asked, probe_steps, sweep, tmp_path):
    base = {**yaml.safe_load(BASE)["base"], "measure.probe_steps": None, **asked}
    base = {name: value for name, value in base.items() if value is not None}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({"base": base, "modes": ["forward"], "repeats": 2}))
    assert sweep(tmp_path / "study.yaml", "--results_dir", tmp_path) == 0
    assert [run.record.probe.requested_steps for run in lmbench.load(tmp_path / "study")] == probe_steps


def test_a_study_with_every_fault_ends_with_a_row_for_each_and_renders(sweep, tmp_path, capsys, printed):
    assert sweep(write(tmp_path, FAULTS), "--results_dir", tmp_path) == 1
    captured = capsys.readouterr()
    assert "8 of 8 runs: 1 error, 2 ok, 1 oom, 3 skipped, 1 timeout" in captured.out
    # A line for each run that ended.
    assert captured.err.count(" of 8: ") == 8
    first = {run.outcome: run for run in runs(tmp_path / "study").values() if run.record.sweep.repeat == 0}
    errors = {outcome: run.record.error for outcome, run in first.items()}
    assert set(first) == {"ok", "error", "timeout", "oom"}
    assert "has no backward pass on a CPU" in errors["error"].message
    assert (errors["error"].phase, errors["oom"].where, errors["oom"].requested_bytes > 2**50) == ("setup", "host", 1)
    assert errors["timeout"].message == "no end within 7 s; it was stopped"
    assert errors["timeout"].phase not in (None, "setup")
    for run in first.values():
        assert (run.path / "child.log").is_file()
        assert run.record.replay_command.startswith("lmbench fit")
    reached = first["ok"].record.milestones
    # A fork does not import again what its server has imported.
    assert 0 < reached.started_s <= reached.imported_s
    assert reached.imported_s - reached.started_s < 0.1 * first["ok"].record.sweep.cost.total_s
    assert {"OOM", "timeout", "error"} <= set(re.findall(r"\w+", printed("report", tmp_path / "study")))


def test_a_sweep_that_is_ended_takes_its_cell_along_and_goes_on_where_it_was_also_elsewhere(
    start, sweep, tmp_path, monkeypatch
):
    # The window is long enough for the signal to come in it, also on a busy machine.
    words = [write(tmp_path, MODES), "--results_dir", tmp_path / "here", "--measure.min_window_s=0.5"]
    here, there = tmp_path / "here" / "study", tmp_path / "there" / "study"
    endings = ((signal.SIGINT, 130, "interrupted"), (signal.SIGKILL, -9, "killed"))
    for count, (signum, code, outcome) in enumerate(endings, start=1):
        process = start(*words)
        going_on = going_on_after(count, here, process)
        forks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        # These are the server and its forks.
        assert (len(forks) >= 2, psutil.wait_procs(forks, 10)[1]) == (True, [])
        assert (process.returncode, "Traceback" in err, "of 4 runs" in out) == (code, False, code > 0)
        left = runs(here)
        assert left[going_on].outcome == outcome
    finished = {name: run.record.started_at for name, run in left.items() if run.outcome == "ok"}
    assert len(finished) == 2
    shutil.copytree(here, there)
    (tmp_path / "here").rename(tmp_path / "gone")
    (tmp_path / "study.yaml").unlink()
    # The folder's name is enough to go on, with the first start's options; a copy has to be trusted anew.
    assert sweep(there, "--trust") == 0
    after = runs(there)
    settings = [(run.outcome, run.record.config["measure"]["min_window_s"]) for run in after.values()]
    assert settings == [("ok", 0.5)] * 4
    assert {name: after[name].record.started_at for name in finished} == finished
    assert not (tmp_path / "here").exists()
    by_mode = {run.record.mode: run.record for run in after.values()}
    assert {mode: record.command for mode, record in by_mode.items()} == {"inference": "validate", "forward": "fit"}
    # A replay of a cell is a run outside the sweep.
    monkeypatch.chdir(there)
    assert main(by_mode["forward"].replay_command.split()[1:]) == 0
    (replayed,) = runs("results").values()
    assert replayed.record.config == by_mode["forward"].config


def test_a_value_that_the_command_line_rejects_is_reported_before_anything_runs(sweep, tmp_path, capsys):
    # Its folder has no blank in its name.
    path = Path(write(tmp_path, "matrix: {measure.steps: [3, many]}\n")).rename(tmp_path / "my study.yaml")
    assert [sweep(path, "--results_dir", tmp_path / "r", *dry) for dry in ([], ["--dry_run"])] == [2, 2]
    error, same = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("lmbench: sweep: ")]
    assert error == same
    assert "measure.steps is 'many'" in error
    assert not (tmp_path / "r").exists()


@pytest.mark.usefixtures("no_account")
def test_a_sweeps_runs_are_one_group_at_wandb_with_their_cells_and_are_uploaded_once(
    sweep, tmp_path, monkeypatch, printed, capsys
):
    # A cell that ends well, and one that needs 2^58 bytes.
    path = write(tmp_path, "matrix: {model.d_ff: [64, 1125899906842624]}\nrepeats: 1\n")
    words, folder = [path, "--results_dir", tmp_path, "--wandb.mode=offline"], tmp_path / "study"
    (tmp_path / "wandb.py").write_text("raise ImportError('this wandb is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert sweep(*words) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "W&B did not get" in line]
    assert "this wandb is broken" in line
    assert line.endswith(f"later: lmbench upload {folder}")
    monkeypatch.delenv("PYTHONPATH")
    assert sweep(*words, "--repeats=2") == 0
    assert f"W&B: offline, beside the results; upload: lmbench upload {folder}\n" in capsys.readouterr().out
    assert len(list(folder.glob("runs/*/wandb/offline-run-*/*.wandb"))) == 3
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for state in ("uploaded", "already uploaded"):
            assert [line.split("  ")[0] for line in printed("upload", folder).splitlines()] == [state] * 4
    by_run = {config["run"]: run_id for run_id, config in server.config.items()}
    results = runs(folder)
    assert set(by_run) == set(results)
    for name, run in results.items():
        run_id, place = by_run[name], run.record.sweep
        assert server.filed[run_id]["groupName"] == "study"
        assert server.config[run_id]["cell"] == place.cell
        assert server.summary[run_id]["outcome"] == run.outcome
