"""`lmbench noise`: floors from repeats, stored where `compare` finds them."""

from __future__ import annotations

import json
import random

import pytest
from comparison_runs import make_run, make_runs, make_sweep

from lmbench.cli import main
from lmbench.compare.noise import Floors, noise_key, survey
from lmbench.records.load import find_runs, load_run

GENERATOR = random.Random(4)
TIMES = [0.05 * GENERATOR.lognormvariate(0, 0.003) for _ in range(8)]


def stored(folder):
    return json.loads((folder / "noise.json").read_text())["entries"]


def floor(folder, metric="step_s"):
    runs = [load_run(path) for path in find_runs([folder])]
    return Floors.beside(runs).floor(runs[-1:], metric)


def test_floors_are_stored_beside_the_results_and_found(tmp_path, capsys):
    make_runs(tmp_path / "results", TIMES)
    assert main(["noise", str(tmp_path / "results")]) == 0
    captured = capsys.readouterr()
    assert f"stored in {tmp_path / 'results' / 'noise.json'}" in captured.err
    assert "Step time against itself" in captured.out
    (entry,) = stored(tmp_path / "results")
    assert entry["metrics"]["step_s"]["n"] == 8
    assert entry["metrics"]["run_peak_allocated_bytes"]["floor_fraction"] == 0
    assert floor(tmp_path / "results") == entry["metrics"]["step_s"]["floor_fraction"] > 0


def test_a_floor_belongs_to_host_device_and_settings_not_to_the_code(tmp_path):
    make_runs(tmp_path / "results", TIMES)
    survey_of = survey([str(tmp_path / "results")])
    assert main(["noise", str(tmp_path / "results")]) == 0
    for name, changes, known in (
        ("code", {"environment__code__project__commit": "bbbb"}, True),
        ("host", {"environment__host__hostname": "beta"}, False),
        ("gpu", {"environment__gpu__name": "NVIDIA A100"}, False),
        ("settings", {"config__data__batch_size": 8}, False),
    ):
        run = load_run(make_run(tmp_path / "results" / name, **changes))
        first = load_run(find_runs([tmp_path / "results"])[0])
        floors = Floors.beside([first, run, *(load_run(path) for path in find_runs([tmp_path / "results"]))])
        assert (floors.floor([run], "step_s") is not None) == known, name
    assert survey_of.cells[0].entry.key == noise_key(load_run(find_runs([tmp_path / "results"])[0]).record)


def test_measuring_again_replaces_the_floor_of_the_same_configuration_only(tmp_path):
    make_runs(tmp_path / "one", TIMES)
    make_runs(tmp_path / "two", TIMES, config__data__batch_size=8)
    for folder in ("one", "two", "one"):
        assert main(["noise", str(tmp_path / folder), str(tmp_path / folder)]) == 0
    assert len(stored(tmp_path / "one")) == 1
    assert main(["noise", str(tmp_path)]) == 0
    assert len(stored(tmp_path)) == 2


def test_every_cell_of_a_sweep_has_its_own_floor(tmp_path, capsys):
    make_sweep(tmp_path / "s", {"small": TIMES, "medium": TIMES[:4], "large": TIMES})
    assert main(["noise", str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    assert len(stored(tmp_path / "s")) == 2
    assert "no floor     size medium: 4 repeats that count; a noise floor takes 6" in out


def test_repeats_that_do_not_count_are_listed(tmp_path, capsys):
    folder = tmp_path / "results"
    make_runs(folder, TIMES)
    odd = {
        make_run(folder, 0.07, outcome="oom"): "outcome oom",
        make_run(folder, 0.07, guards=[{"name": "trained", "status": "fail"}]): "guard trained failed",
        make_run(folder, 0.07, is_profiled=True): "under a profiler: its step times are in no comparison",
    }
    assert main(["noise", str(folder)]) == 0
    out = capsys.readouterr().out
    assert stored(folder)[0]["metrics"]["step_s"]["n"] == 8
    for path, reason in odd.items():
        assert f"left out     {path}: {reason}" in out


def test_runs_of_two_commits_are_no_repeats(tmp_path, capsys):
    make_runs(tmp_path, TIMES[:4])
    make_runs(tmp_path, TIMES[4:], environment__code__project__commit="bbbb")
    assert main(["noise", str(tmp_path)]) == 2
    assert "not repeats of one thing: environment.code.project.commit is aaaa or bbbb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "noise takes results with repeats, or --run"),
        (["few"], "3 repeats that count; a noise floor takes 6"),
        (["nowhere"], "does not exist"),
        (["few", "--config", "smoke"], "unknown option --config; options of `lmbench fit` go with --run"),
        (["--run", "--repeats", "3"], "--repeats is 3; a noise floor takes 6"),
        (["--run", "--repeats", "x"], "int"),
        (["--run", "--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path / "few", TIMES[:3])
    assert main(["noise", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lmbench: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_damaged_noise_file_is_said_and_kept(tmp_path, capsys):
    make_runs(tmp_path, TIMES)
    for content, message in (
        ("{", "cannot be read (it is no JSON: Input data was truncated); remove it"),
        ('{"schema_version": 9, "entries": []}', "version 9"),
    ):
        (tmp_path / "noise.json").write_text(content)
        assert main(["noise", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
        assert (tmp_path / "noise.json").read_text() == content


def test_noise_measures_its_repeats_in_fresh_processes(tmp_path, capsys):
    words = ["--config", "smoke", "--model.num_layers", "1", "--measure.steps", "5", "--measure.min_window_s", "0"]
    words += ["--measure.probe_steps", "0", "--results_dir", str(tmp_path), "--trainer.logger", "false"]
    assert main(["noise", "--run", "--repeats", "6", *words]) == 0
    runs = [load_run(folder) for folder in find_runs([tmp_path])]
    assert len({(run.record.pid, run.record.process_start_s) for run in runs}) == 6
    assert stored(tmp_path)[0]["metrics"]["step_s"]["n"] == 6
    assert "6 of 6:" in capsys.readouterr().err
