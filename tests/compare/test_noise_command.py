"""`lmbench noise`: floors from repeats, stored where `compare` finds them."""

from __future__ import annotations

import json
import random
import re

import pytest
import yaml
from comparison_runs import make_run, make_runs, make_sweep

from lmbench.cli import main
from lmbench.compare.noise import Floors
from lmbench.records.load import find_runs, load_run
from lmbench.report.answer import Answer

GENERATOR = random.Random(4)
TIMES = [0.05 * GENERATOR.lognormvariate(0, 0.003) for _ in range(8)]


def stored(folder):
    return json.loads((folder / "noise.json").read_text())["entries"]


def test_floors_are_stored_beside_the_results_and_found(tmp_path, capsys):
    make_runs(tmp_path / "results", TIMES)
    assert main(["noise", str(tmp_path / "results")]) == 0
    captured = capsys.readouterr()
    assert f"stored in {tmp_path / 'results' / 'noise.json'}" in captured.err
    assert re.search(r"so +changes under 0.[0-9]+ % cannot be told here with 3 repeats$", captured.out.strip())
    (entry,) = stored(tmp_path / "results")
    assert entry["metrics"]["step_s"]["n"] == 8
    assert entry["metrics"]["run_peak_allocated_bytes"]["floor_fraction"] == 0
    runs = [load_run(path) for path in find_runs([tmp_path / "results"])]
    assert Floors(runs).floor(runs, "step_s") == entry["metrics"]["step_s"]["floor_fraction"] > 0


@pytest.mark.parametrize(
    ("changes", "is_known"),
    yaml.safe_load("""
- [{environment.code.project.commit: bbbb}, true]
- [{environment.host.hostname: beta}, false]
- [{environment.gpu.name: NVIDIA A100}, false]
- [{config.data.batch_size: 8}, false]
"""),
)
def test_a_floor_belongs_to_host_device_and_settings_not_to_the_code(tmp_path, changes, is_known):
    make_runs(tmp_path / "results", TIMES)
    assert main(["noise", str(tmp_path / "results")]) == 0
    other = load_run(make_run(tmp_path / "results" / "other", **changes))
    runs = [load_run(path) for path in find_runs([tmp_path / "results"])]
    assert (Floors(runs).floor([other], "step_s") is not None) == is_known


def test_every_cell_of_a_sweep_has_its_own_floor_of_the_repeats_that_count(tmp_path, capsys):
    folder = tmp_path / "s"
    make_sweep(folder, {"small": TIMES, "medium": TIMES[:4], "large": TIMES})
    make_sweep(folder, {"mixed": TIMES[:4]})
    for repeat, step_s in enumerate(TIMES[4:], 4):
        sweep = {"name": "s", "axes": {"model.size": "mixed"}, "repeat": repeat}
        commit = {"environment__code__project__commit": "bbbb", "config__model__size": "mixed"}
        make_run(folder / "runs", step_s, sweep=sweep, **commit)
    in_small = {"sweep": {"name": "s", "axes": {"model.size": "small"}, "repeat": 9}, "config__model__size": "small"}
    odd = {
        make_run(folder / "runs", 0.07, outcome="oom", **in_small): "outcome oom",
        make_run(folder / "runs", 0.07, guards=[{"name": "g", "status": "fail"}], **in_small): "guard g failed",
        make_run(folder / "runs", 0.07, is_profiled=True, **in_small): "under a profiler: its step times are in no",
    }
    # Measured again, a floor takes the place of the one before.
    assert main(["noise", str(folder)]) == main(["noise", str(folder)]) == 0
    out = capsys.readouterr().out
    assert [entry["metrics"]["step_s"]["n"] for entry in stored(folder)] == [8, 8]
    assert "no floor     size medium: 4 repeats that count; a noise floor takes 6" in out
    reason = "size mixed: not repeats of one thing: environment.code.project.commit is aaaa or bbbb"
    assert f"no floor {reason}" in " ".join(out.split())
    for path, reason in odd.items():
        assert f"left out     {path}: {reason}" in out


def test_a_damaged_noise_file_is_said_and_kept(tmp_path, capsys):
    make_runs(tmp_path, TIMES)
    for content, message in (
        ("{", "cannot be read (it is no JSON: Input data was truncated); remove it"),
        ('{"schema_version": 9, "entries": []}', "Invalid enum value 9 - at schema_version"),
    ):
        (tmp_path / "noise.json").write_text(content)
        assert main(["noise", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
        assert (tmp_path / "noise.json").read_text() == content


def test_noise_measures_its_repeats_in_a_folder_of_their_own(tmp_path, capsys, monkeypatch):
    def repeated(configuration, repeats, settings):
        assert (configuration, repeats, settings[0]) == ("smoke", 6, "--measure.steps=5")
        make_runs(tmp_path / settings[-1].partition("=")[2], TIMES[:repeats])
        return Answer()

    monkeypatch.setattr("lmbench.commands.fit.repeated", repeated)
    assert main(["noise", "--run", "smoke", "--measure.steps=5", "--repeats=6", f"--results_dir={tmp_path}"]) == 0
    assert stored(tmp_path)[0]["metrics"]["step_s"]["n"] == 6
