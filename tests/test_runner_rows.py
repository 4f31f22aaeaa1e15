"""Every repeat of every cell ends as one row, whatever became of its process, and a restart goes on from there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from simulated_cells import OUTCOMES, SimulatedEngine, records, sweep

from lmbench.errors import ExitCode, UsageError
from lmbench.records.fields import unregistered
from lmbench.records.load import load_run
from lmbench.records.vocabulary import OUTCOMES as RUN_OUTCOMES
from lmbench.sweep.execute import SweepHalted
from lmbench.sweep.folder import SweepFolder, read_sweep_folder
from lmbench.sweep.plan import make_plan
from lmbench.sweep.sweep_file import sweep_from

GRID = {"matrix": {"model.num_layers": [1, 2, 3]}, "repeats": 2}
ONE = {"matrix": {"model.num_layers": [1]}, "repeats": 1}

ROWS = {
    "ok": ("ok", 0, None),
    "oom": ("oom", 3, "OutOfMemoryError came"),
    "error": ("error", 1, "RuntimeError came"),
    "usage": ("error", 2, "num_heads 5 does not divide d_model 64"),
    "early oom": ("oom", 3, "out of memory before anything was built: no room"),
    "segfault": ("error", None, "ended by SIGSEGV; its last words: about to"),
    "kill": ("error", None, "ended by SIGKILL; it said nothing"),
    "silent": ("error", None, "ended by SIGABRT; it said nothing"),
    "stopped": ("interrupted", 143, "SIGTERM came"),
    "nothing": ("error", 0, "it ended well and left no result; it said nothing"),
    "odd": ("error", 77, "ended with exit code 77; its last words: some | words"),
    "guard": ("ok", 4, None),
}


@pytest.mark.parametrize("ending", OUTCOMES)
def test_an_ending_becomes_an_outcome_with_its_reason(ending, tmp_path):
    sweep(tmp_path, SimulatedEngine(lambda name: ending), ONE)
    (run,) = records(tmp_path).values()
    error = run["error"]
    assert (run["outcome"], run["exit_code"], error and error["message"]) == ROWS[ending]
    if error is not None:
        assert error["phase"] in ("setup", "warmup", "forward")
    assert unregistered(run, "run") == []
    assert load_run(tmp_path / "sim" / "runs" / run["run_id"]).outcome in RUN_OUTCOMES


def test_repeats_are_interleaved_and_each_run_knows_its_place(tmp_path):
    engine = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, engine, GRID)
    assert [name[:12] + name[-3:] for name in engine.started] == [
        f"num_layers-{layers}-r{repeat}" for repeat in (0, 1) for layers in (1, 2, 3)
    ]
    run = records(tmp_path)[engine.started[4]]
    place = run["sweep"]
    assert (place["name"], place["repeat"], place["attempt"]) == ("sim", 1, 1)
    assert place["axes"] == {"model.num_layers": 2}
    assert place["cost"]["total_s"] >= 0


def test_later_repeats_of_a_cell_that_cannot_end_well_are_skipped_with_the_reason(tmp_path):
    endings = {"1": "oom", "2": "usage", "3": "error"}
    engine = SimulatedEngine(lambda name: endings[name.split("-")[1]])
    sweep(tmp_path, engine, GRID)
    assert len(engine.started) == 4
    found = {(r["sweep"]["axes"]["model.num_layers"], r["sweep"]["repeat"]): r for r in records(tmp_path).values()}
    assert {place: run["outcome"] for place, run in found.items()} == {
        (1, 0): "oom", (1, 1): "skipped", (2, 0): "error", (2, 1): "skipped", (3, 0): "error", (3, 1): "error",
    }  # fmt: skip
    assert found[1, 1]["error"]["message"] == "repeat 0 ended with oom: OutOfMemoryError came"


def test_what_is_done_is_not_done_again_and_what_was_stopped_is(tmp_path):
    first = SimulatedEngine(lambda name: {"1": "ok", "2": "stopped", "3": "error"}[name.split("-")[1]])
    sweep(tmp_path, first, {**GRID, "repeats": 1})
    second = SimulatedEngine(lambda name: "ok")
    execution = sweep(tmp_path, second, GRID)
    names = [name.rpartition("-")[0].split("-")[1] + name[-3:] for name in second.started]
    assert names == ["2-r0", "1-r1", "2-r1", "3-r1"]
    assert execution.exit_code == ExitCode.OK
    attempts = {name: run["sweep"]["attempt"] for name, run in records(tmp_path).items()}
    assert sorted(attempts.values()) == [1, 1, 1, 1, 1, 2]
    assert len(attempts) == 6


def test_a_run_that_ended_well_while_the_sweep_was_killed_counts(tmp_path):
    engine = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, engine, ONE)
    path = tmp_path / "sim" / "runs" / engine.started[0] / "run.json"
    run = json.loads(path.read_text())
    place = run.pop("sweep")
    path.write_text(json.dumps(run))
    again = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, again, ONE)
    assert again.started == []
    assert json.loads(path.read_text())["sweep"] == {k: v for k, v in place.items() if k != "cost"}


@pytest.mark.parametrize("left", ["{", "", '{"schema_version": 1, "outcome": "running", "pid": 1}', None])
def test_what_a_kill_left_half_done_is_done_again(left, tmp_path, capsys):
    engine = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, engine, ONE)
    folder = tmp_path / "sim" / "runs" / engine.started[0]
    if left is None:
        (folder / "run.json").unlink()
    else:
        (folder / "run.json").write_text(left)
    (folder / "steps.jsonl").write_text('{"step": 0}\n')
    again = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, again, ONE)
    assert again.started == engine.started
    assert records(tmp_path)[engine.started[0]]["outcome"] == "ok"
    assert not (folder / "steps.jsonl").exists()
    is_damaged = left is None or not left.endswith("}")
    assert ("was damaged" in capsys.readouterr().err) == is_damaged


@pytest.mark.slow
def test_ten_thousand_cells_leave_ten_thousand_rows(tmp_path, monkeypatch):
    kinds = list(OUTCOMES)
    engine = SimulatedEngine(lambda name: kinds[len(engine.started) % len(kinds)])
    # In memory where there is such a place: a disk would be what takes the time.
    where = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    grid = {"matrix": {"a.a": list(range(100)), "a.b": list(range(100))}, "repeats": 1, "timeout_s": 5}
    name = f"sim-{os.getpid()}"
    try:
        execution = sweep(where, engine, grid, name)
        rows = records(where, name)
        assert len(rows) == 10_000
        assert len(list((where / name / "runs").iterdir())) == 10_000
        expected = Counter(ROWS[kinds[(i + 1) % len(kinds)]][0] for i in range(10_000))
        assert Counter(run["outcome"] for run in rows.values()) == expected
        assert execution.exit_code == ExitCode.GUARD_FAILED
    finally:
        subprocess.run(["rm", "-rf", str(where / name)], check=True)


def test_later_repeats_reuse_what_a_cold_first_one_compiled(tmp_path):
    engine = SimulatedEngine(lambda name: "ok")
    content = {"matrix": {"trainer.compile": [False, True]}, "repeats": 3}
    sweep(tmp_path, engine, content)
    shares = {name: "--trainer.compile.cache=shared" in words for name, words in engine.words.items()}
    assert [shares[name] for name in engine.started] == [False, False, False, True, False, True]
    again = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, again, {**content, "repeats": 4})
    assert ["--trainer.compile.cache=shared" in again.words[name] for name in again.started] == [False, True]


def test_runs_of_other_settings_are_not_mixed_in(tmp_path):
    sweep(tmp_path, SimulatedEngine(lambda name: "ok"), GRID)
    with pytest.raises(UsageError, match="no cell of this sweep as it is now") as raised:
        sweep(tmp_path, SimulatedEngine(lambda name: "ok"), {**GRID, "base": {"data.batch_size": 2}})
    assert "\n" not in str(raised.value)
    assert len(records(tmp_path)) == 6


def test_one_sweep_has_one_engine(tmp_path):
    engine = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, engine, {**ONE, "engine": "exec"})
    with pytest.raises(UsageError, match=r"was begun with --engine exec, .*; give --engine exec, or another --name"):
        sweep(tmp_path, engine, ONE)
    sweep(tmp_path, engine, {**ONE, "engine": "exec"})
    assert len(engine.started) == 1


def test_two_sweeps_cannot_write_into_one_folder(tmp_path):
    plan = make_plan("sim", sweep_from(GRID))
    first = SweepFolder(tmp_path / "sim")
    first.open(plan)
    code = (
        "import sys\nfrom pathlib import Path\nfrom lmbench.errors import UsageError\n"
        "from lmbench.sweep.folder import SweepFolder\nfrom lmbench.sweep.plan import make_plan\n"
        "from lmbench.sweep.sweep_file import sweep_from\n"
        f"try: SweepFolder(Path(sys.argv[1])).open(make_plan('sim', sweep_from({GRID!r})))\n"
        "except UsageError as error: print(error)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "sim")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"is being written by another sweep (process {os.getpid()})" in done.stdout
    assert done.stdout.count("\n") == 1
    first.close()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_a_full_disk_halts_the_sweep_and_nothing_measured_is_lost(tmp_path, monkeypatch):
    engine = SimulatedEngine(lambda name: "ok")
    from lmbench.sweep import execute

    written = []
    real = execute.RunFolder.write_run

    def write_run(folder, run):
        written.append(folder.run_id)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, run)

    monkeypatch.setattr(execute.RunFolder, "write_run", write_run)
    with pytest.raises(SweepHalted, match="is full; make room and start the sweep again"):
        sweep(tmp_path, engine, GRID)
    assert [run["outcome"] for run in records(tmp_path).values()] == ["ok"] * 3
    monkeypatch.setattr(execute.RunFolder, "write_run", real)
    again = SimulatedEngine(lambda name: "ok")
    sweep(tmp_path, again, GRID)
    assert len(again.started) == 3
    assert len(records(tmp_path)) == 6


def test_a_sweeps_folder_knows_everything_to_go_on_with_it_elsewhere(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("model: {size: tiny}\n")
    content = {**GRID, "base": {"config": str(config), "data.batch_size": 2}, "modes": ["forward"]}
    engine = SimulatedEngine(lambda name: "stopped" if name.endswith("r1") else "ok")
    sweep(tmp_path, engine, content)
    config.unlink()
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    (tmp_path / "sim").rename(moved)
    name, file = read_sweep_folder(moved)
    again = SimulatedEngine(lambda name: "ok")
    sweep(moved.parent, again, file.as_mapping(), name)
    assert sorted(again.started) == sorted(name for name in engine.started if name.endswith("r1"))
    assert str(tmp_path / "sim") not in (moved / "sweep.json").read_text()
    assert f"--config={moved / 'base.yaml'}" in again.words[again.started[0]]


def test_a_record_of_another_schema_is_kept_beside_the_row(tmp_path, monkeypatch):
    record = {"outcome": "ok", "error": None, "schema_version": 99}
    monkeypatch.setitem(OUTCOMES, "foreign", (0, record, ""))
    sweep(tmp_path, SimulatedEngine(lambda name: "foreign"), ONE)
    (run,) = records(tmp_path).values()
    assert run["outcome"] == "error"
    foreign = tmp_path / "sim" / "runs" / run["run_id"] / "run.foreign.json"
    assert json.loads(foreign.read_text())["schema_version"] == 99


def test_the_kernels_memory_kill_is_out_of_memory_where_a_counter_says_so(tmp_path, monkeypatch):
    from lmbench.sweep import supervise
    from lmbench.sweep.oom_evidence import KillCount

    counts = iter(range(100))
    monkeypatch.setattr(supervise, "kill_counts", lambda: [KillCount("memory.events", next(counts))])
    sweep(tmp_path, SimulatedEngine(lambda name: "kill"), ONE)
    (run,) = records(tmp_path).values()
    assert (run["outcome"], run["error"]["where"]) == ("oom", "host")
    assert "oom_kill in memory.events went from 0 to 1" in run["error"]["message"]
