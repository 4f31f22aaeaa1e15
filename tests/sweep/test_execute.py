"""Every repeat of every cell ends as one row, whatever happens to its process, and a restart continues the sweep."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
import yaml
from simulated_cells import SimulatedServers, records, sweep
from tables import cases

from lmbench.errors import ExitCode
from lmbench.records.store import RunFolder
from lmbench.sweep.file import sweep_from
from lmbench.sweep.folder import FolderTaken, SweepFolder
from lmbench.sweep.plan import make_plan
from lmbench.sweep.progress import SweepProgress

GRID = {"matrix": {"model.num_layers": [1, 2, 3]}, "repeats": 2}
ONE = {"matrix": {"model.num_layers": [1]}, "repeats": 1}

#: Outcome, exit code and message of a row, by the way its process ends.
ROWS = yaml.safe_load("""
ok: [ok, 0, null]
retries: [ok, 0, null]
oom: [oom, 3, OutOfMemoryError came]
error: [error, 1, RuntimeError came]
usage: [error, 2, num_heads 5 does not divide d_model 64]
early oom: [oom, 3, "out of memory before anything was built: no room"]
segfault: [error, null, "ended by SIGSEGV; its last words: about to"]
kill: [error, null, ended by SIGKILL; it said nothing]
memory kill: [oom, null,
  "the kernel ended it for lack of memory (the kernel's count of such ends rose by 1); it said nothing"]
silent: [error, null, ended by SIGABRT; it said nothing]
stopped: [interrupted, 143, SIGTERM came]
nothing: [error, 0, left no result and ended with exit code 0; it said nothing]
odd: [error, 77, "left no result and ended with exit code 77; its last words: some | words"]
lost: [error, null, "/x/python ended while it served: SIGKILL"]
no server: [error, null, "/x/python does not run: No such file or directory"]
guard: [ok, 4, null]
""")


def by_layers(*endings):
    """Cells of 1, 2 and 3 layers whose processes end in these ways, by default `ok`."""
    layers = re.compile(r"num_layers-(\d)")
    return SimulatedServers(lambda name: (endings or ["ok"] * 3)[int((layers.findall(name) or [1])[0]) - 1])


@cases("ending", *ROWS)
def test_an_ending_becomes_an_outcome_with_its_reason(ending, tmp_path):
    sweep(tmp_path, by_layers(ending), ONE)
    (run,) = records(tmp_path).values()
    assert [run.outcome, run.exit_code, run.error and run.error.message] == ROWS[ending]
    assert run.error is None or run.error.phase in ("setup", "warmup", "forward")


def test_the_output_of_a_process_is_kept_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM_API_KEY", "about to")
    sweep(tmp_path, by_layers("segfault"), ONE)
    (log,) = tmp_path.glob("sim/runs/*/child.log")
    assert log.read_text() == "***\n"
    assert "its last words: ***" in str(next(iter(records(tmp_path).values())).error)
    assert not list(tmp_path.glob("sim/runs/.*.log"))


@cases("""
- [code, endings]
- [OK, [ok, oom, ok]]
- [OUT_OF_MEMORY, [oom, oom, oom]]
- [INTERNAL, [ok, error, error]]
- [USAGE, [ok, usage, usage]]
- [INTERNAL, [usage, error, ok]]
- [INTERNAL, [ok, stopped, no server]]
- [USAGE, [guard, usage, ok]]
- [GUARD_FAILED, [guard, oom, ok]]
""")
def test_a_sweep_ends_with_the_code_of_its_failed_runs_and_running_out_of_memory_is_a_result(endings, code, tmp_path):
    assert sweep(tmp_path, by_layers(*endings), {**GRID, "repeats": 1}).exit_code == ExitCode[code]
    outcomes = [run.outcome for _, run in sorted(records(tmp_path).items())]
    assert outcomes == [ROWS[ending][0] for ending in endings]


def test_rounds_interleave_the_repeats_and_know_which_rounds_come(tmp_path):
    first, again = by_layers(), by_layers()
    sweep(tmp_path, first, GRID)
    assert [name[:12] + name[-3:] for name in first.started] == [
        f"num_layers-{layers}-r{repeat}" for repeat in (0, 1) for layers in (1, 2, 3)
    ]
    assert (first.to_come, [len(names) for names in first.rounds]) == ([1, 0], [3, 3])
    run = records(tmp_path)[first.started[4]]
    assert (run.sweep.name, run.sweep.repeat) == ("sim", 1)
    assert (run.sweep.axes, run.sweep.cost.total_s) == ({"model.num_layers": 2}, 1)
    sweep(tmp_path, again, {**GRID, "repeats": 4})
    assert [[name[-2:] for name in names] for names in again.rounds] == [[], [], ["r2"] * 3, ["r3"] * 3]


def test_a_run_that_ended_well_while_the_sweep_was_killed_counts(tmp_path):
    servers, again = by_layers(), by_layers()
    sweep(tmp_path, servers, ONE)
    path = tmp_path / "sim" / "runs" / servers.started[0] / "run.json"
    run = json.loads(path.read_text())
    place = run.pop("sweep")
    path.write_text(json.dumps(run))
    # The log is not written through a planted link.
    path.with_name("child.log").unlink()
    path.with_name("child.log").symlink_to(tmp_path / "private")
    (path.parents[1] / f".{servers.started[0]}.log").touch()
    sweep(tmp_path, again, ONE)
    assert (again.started, (tmp_path / "private").exists()) == ([], False)
    assert json.loads(path.read_text())["sweep"] == {**place, "cost": None}


@cases("left", "{", '{"schema_version": 1, "outcome": "running", "pid": 1}', None)
def test_a_run_that_a_kill_left_half_done_is_repeated(left, tmp_path, capsys):
    servers, again = by_layers(), by_layers()
    sweep(tmp_path, servers, ONE)
    folder = tmp_path / "sim" / "runs" / servers.started[0]
    (folder / "run.json").unlink()
    if left is not None:
        (folder / "run.json").write_text(left)
    (folder / "steps.jsonl").write_text('{"step": 0}\n')
    sweep(tmp_path, again, ONE)
    assert again.started == servers.started
    assert records(tmp_path)[servers.started[0]].outcome == "ok"
    assert not (folder / "steps.jsonl").exists()
    assert ("was damaged" in capsys.readouterr().err) == (left is None or not left.endswith("}"))


def test_later_repeats_and_other_passes_reuse_the_compiled_code_of_their_cells_first_run(tmp_path):
    first, again = by_layers(), by_layers()
    matrix = {"model.num_layers": [1, 2], "trainer.compile": [True]}
    content = {"matrix": matrix, "passes": ["timing", "kernels"], "repeats": 2}
    for servers, repeats, expected in ((first, 2, [0, 1, 0, 1, 1, 1]), (again, 3, [1, 1])):
        sweep(tmp_path, servers, {**content, "repeats": repeats})
        assert [
            "--trainer.compile.cache=shared" in servers.launches[name].words for name in servers.started
        ] == expected
    timing, kernels, other, others_kernels, *_ = (
        launch.variables["TORCHINDUCTOR_CACHE_DIR"] for launch in first.launches.values()
    )
    assert timing == kernels != other == others_kernels


def test_two_sweeps_cannot_write_into_one_folder_and_a_refused_one_leaves_no_file_open(tmp_path):
    plan = make_plan("sim", sweep_from(GRID))
    first, second = (SweepFolder(plan, tmp_path, SweepProgress(plan)) for _ in range(2))
    first.open([0, 1])
    open_files = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(FolderTaken, match="is being written by another sweep; wait for it"):
        second.open([1])
    assert len([*Path("/proc/self/fd").iterdir()]) == open_files
    second.open([2])
    second.close()
    first.close()
    second.open([1])
    second.close()


def test_a_full_disk_halts_the_sweep_and_nothing_measured_is_lost(tmp_path, monkeypatch):
    written = []
    write_run = RunFolder.write_run

    def write(folder, run):
        written.append(run)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_run(folder, run)

    monkeypatch.setattr(RunFolder, "write_run", write)
    with pytest.raises(OSError, match="No space left on device"):
        sweep(tmp_path, by_layers(), GRID)
    assert [run.outcome for run in records(tmp_path).values()] == ["ok"] * 3
    again = by_layers()
    sweep(tmp_path, again, GRID)
    assert (len(again.started), len(records(tmp_path))) == (3, 6)


SIDES = {"sides": {"A": {}, "B": {"model.num_layers": 2}}, "repeats": 2}


def test_two_sides_are_alive_together_and_one_by_one_where_they_do_not_fit(tmp_path, capsys):
    together = SimulatedServers()
    sweep(tmp_path / "fits", together, SIDES)
    pairs = [[together.launches[name] for name in names] for names in together.rounds if names]
    # Both ends of a pipe go to the two processes of a round.
    assert [bool(launch.pipe) for launch in pairs[0]] == [True, True]
    assert {launch.variables["LMBENCH_TURNS"][-1] for launch in pairs[0]} == {"0", "1"}
    alone = SimulatedServers(lambda name: "oom" if alone.launches[name].pipe and name.startswith("B") else "ok")
    sweep(tmp_path, alone, SIDES)
    assert {run.outcome for run in records(tmp_path).values()} == {"ok"}
    assert [launch.pipe for launch in alone.launches.values()] == [None] * 4
    line = "both sides do not run together (OutOfMemoryError came): they are measured one by one"
    assert line in capsys.readouterr().err
