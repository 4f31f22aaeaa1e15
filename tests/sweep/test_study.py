"""A whole study with real processes: cells that fail in every way, killed, stopped, moved, and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from warm_servers import warm_servers

from lmbench.cli import main
from lmbench.records.codec import as_dict, decode_run
from lmbench.records.load import find_runs, load_run

BASE = """
base:
  config: smoke
  model.vocab_size: 64
  data.batch_size: 2
  data.context_length: 16
  measure.steps: 4
  measure.min_window_s: 0
  measure.probe_steps: 1
"""
# One of each: ends well, refused when it is built, has no end, wants 2^58 bytes.
FAULTS = """
matrix:
  case:
    - {model.num_layers: 1}
    - {model.num_heads: 5}
    - {measure.min_window_s: 1000}
    - {model.d_ff: 1125899906842624}
repeats: 2
timeout_s: 15
"""
GRID = """
matrix: {model.num_layers: [1, 2]}
repeats: 2
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    # With more, OpenMP's spinning on a busy two-core machine makes small steps a hundred times slower.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def warm():
    with pytest.MonkeyPatch.context() as patch, warm_servers() as servers:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield servers


@pytest.fixture
def sweep(warm, monkeypatch):
    """`lmbench sweep` in this process, with a server that other tests have used."""
    monkeypatch.setattr("lmbench.commands.sweep.LocalExecutor", lambda say, mark: warm)
    return lambda *words: main(["sweep", *map(str, words)])


def write(tmp_path, text, name="study"):
    path = tmp_path / f"{name}.yaml"
    path.write_text(BASE + text)
    return str(path)


def runs(folder):
    return {path.name: load_run(path) for path in find_runs([folder])}


@pytest.fixture
def start():
    """Starts sweeps in processes of their own, of which none outlives its test."""
    started = []

    def begin(*words):
        words = [sys.executable, "-m", "lmbench", "sweep", *map(str, words)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(count, folder, process):
    """Until so many runs have ended and another one is going on."""
    for _ in range(12000):
        found = [json.loads(path.read_text()) for path in Path(folder).glob("runs/*/run.json")]
        going_on = [run for run in found if run.get("sweep") is None and run["outcome"] == "running"]
        if len(found) - len(going_on) >= count and going_on:
            return going_on[0]["run_id"]
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the sweep did not come so far")


def test_a_study_with_every_fault_ends_with_a_row_for_each_and_renders(sweep, tmp_path, capsys):
    assert sweep(write(tmp_path, FAULTS), "--results_dir", tmp_path) == 1
    captured = capsys.readouterr()
    assert "8 of 8 runs: 1 error, 2 ok, 1 oom, 3 skipped, 1 timeout" in captured.out
    assert len([line for line in captured.err.splitlines() if line.startswith("[")]) == 8
    found = {run.outcome: run for run in runs(tmp_path / "study").values() if run.record.sweep.repeat == 0}
    assert set(found) == {"ok", "error", "timeout", "oom"}
    errors = {outcome: run.record.error for outcome, run in found.items()}
    assert "num_heads 5 does not divide d_model 64" in errors["error"].message
    assert errors["error"].phase == "setup"
    assert errors["oom"].requested_bytes > 2**50
    assert errors["oom"].where == "host"
    assert errors["timeout"].message == "no end within 15 s; it was stopped"
    assert errors["timeout"].phase not in (None, "setup")
    assert found["timeout"].record.window.steps > 10
    for run in found.values():
        written = (run.path / "run.json").read_bytes()
        assert json.loads(written) == as_dict(decode_run(written))
        assert (run.path / "child.log").is_file()
        assert run.record.replay_command.startswith("lmbench fit")
    cost = as_dict(found["ok"].record.sweep.cost)
    total_s, beside = cost.pop("total_s"), (cost.pop("overhead_s"), cost.pop("compile_s"))
    assert beside[1] is None
    assert sum(cost.values()) == pytest.approx(total_s, abs=0.05)
    # What the server has imported, no fork imports again.
    assert cost["import_s"] < 0.01 * total_s
    assert main(["report", str(tmp_path / "study")]) == 0
    report = capsys.readouterr().out
    for word in ("OOM", "timeout", "error"):
        assert word in report


def test_the_tiny_study_of_attention_is_measured_and_shown_by_both_views(sweep, tmp_path, capsys):
    assert sweep("tiny_attention", "--results_dir", tmp_path, "--repeats", 1) == 0
    assert "4 of 4 runs: 4 ok" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "tiny_attention"), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().count("Dashed: context^2") == 2
    for run in runs(tmp_path / "tiny_attention").values():
        model, memory = run.record.model, run.record.memory
        assert (model.num_heads, model.head_dim, model.is_causal) == (1, 16, True)
        length = run.record.data.context_length
        # The weights, and nothing else of their size.
        assert model.attention != "naive" or memory.saved_bytes == 2 * length**2 * 4
    assert main(["report", str(tmp_path / "tiny_attention")]) == 0
    assert "| context | attention |" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "tiny_attention"), "--view", "attention_backends"]) == 0
    fastest = capsys.readouterr().out
    assert fastest.count("**Fastest by forward + backward: ") == 1
    assert fastest.count("| second takes ") == 3


def test_a_killed_sweep_takes_its_cell_along_and_goes_on_where_it_was_also_elsewhere(start, sweep, tmp_path):
    # A window long enough for the kill to meet it, also on a busy machine.
    words = [write(tmp_path, GRID), "--results_dir", tmp_path / "here", "--measure.min_window_s=1"]
    here, there = tmp_path / "here" / "study", tmp_path / "there" / "study"
    killed = start(*words)
    # In the second round, so that both have had their servers.
    going_on = wait_for(2, here, killed)
    killed.kill()
    killed.communicate()
    for _ in range(1000):
        left = runs(here)
        if left[going_on].outcome != "running":
            break
        time.sleep(0.01)
    finished = {name: run.record.started_at for name, run in left.items() if run.record.sweep is not None}
    assert left[going_on].outcome == "killed"
    assert len(finished) >= 2
    with tarfile.open(tmp_path / "study.tar", "w") as archive:
        archive.add(here, "study")
    (tmp_path / "here").rename(tmp_path / "gone")
    (tmp_path / "study.yaml").unlink()
    with tarfile.open(tmp_path / "study.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert sweep(there) == 0
    found = runs(there)
    assert [run.outcome for run in found.values()] == ["ok"] * 4
    assert {name: found[name].record.started_at for name in finished} == finished
    assert found[going_on].record.sweep.attempt == 2
    assert not list(there.rglob("*.log.*"))
    assert not (tmp_path / "here").exists()


def test_a_stopped_sweep_closes_the_running_cell_and_does_it_again_later(start, sweep, tmp_path):
    folder = tmp_path / "study"
    path = write(tmp_path, GRID.replace("repeats: 2", "repeats: 1"))
    words = [path, "--results_dir", tmp_path, "--measure.min_window_s=1"]
    for attempt, signum, code in ((1, signal.SIGINT, 130), (2, signal.SIGTERM, 143)):
        process = start(*words)
        going_on = wait_for(0, folder, process)
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code
        assert "Traceback" not in err
        assert "of 2 runs" in out
        left = runs(folder)[going_on]
        assert left.outcome == "interrupted"
        assert left.record.sweep.attempt == attempt
        # With the folder's name alone it goes on, with the options that were given then.
        words = [folder]
    assert sweep(folder) == 0
    found = runs(folder)
    assert [run.outcome for run in found.values()] == ["ok"] * 2
    assert all(run.record.config["measure"]["min_window_s"] == 1 for run in found.values())


def test_a_sweep_needs_no_torch_and_runs_its_own_lmbench_whatever_lies_in_the_working_directory(tmp_path, monkeypatch):
    """A checkout's root, say: another `lmbench` there is not what was asked to measure."""
    (tmp_path / "lmbench").mkdir()
    (tmp_path / "lmbench" / "__init__.py").write_text("raise ImportError('the wrong lmbench')\n")
    path = write(tmp_path, "modes: [inference, forward]\nrepeats: 1\n")
    program = (
        "import sys; from lmbench.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'lightning'} & set(sys.modules), 'torch was imported'; sys.exit(code)"
    )
    words = [sys.executable, "-P", "-c", program, "sweep", path, "--results_dir", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {run.record.mode: run for run in runs(tmp_path / "out").values()}
    assert {mode: (run.outcome, run.record.command) for mode, run in found.items()} == {
        "inference": ("ok", "validate"),
        "forward": ("ok", "fit"),
    }
    record = found["inference"].record
    assert (record.config["measure"]["results_dir"], record.config["measure"]["run_id"]) == ("results", None)
    assert record.loss.first == pytest.approx(4.2, abs=0.3)
    # A replay of a cell is a run outside of the sweep.
    monkeypatch.chdir(tmp_path / "out")
    assert main(found["forward"].record.replay_command.split()[1:]) == 0
    (replayed,) = runs("results").values()
    assert replayed.record.config == found["forward"].record.config


MISSPELT = {
    "an option": ("matrix: {model.sizee: [tiny]}\n", "did you mean --model.size?"),
    "a value": ("matrix: {measure.steps: [3, many]}\n", "measure.steps is 'many'"),
}


@pytest.mark.parametrize("what", MISSPELT)
def test_what_the_command_line_rejects_is_told_before_anything_runs(what, sweep, tmp_path, capsys):
    text, told = MISSPELT[what]
    assert sweep(write(tmp_path, text), "--results_dir", tmp_path / "r") == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("lmbench: sweep: ")]
    assert told in error
    assert error.startswith("lmbench: cell ")
    assert not (tmp_path / "r").exists()
