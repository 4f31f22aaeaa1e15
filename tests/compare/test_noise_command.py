"""`lmbench noise`: floors from repeats, stored where `compare` finds them."""

from __future__ import annotations

import json
import random
import re

from comparison_runs import make_run, make_runs, make_sweep
from tables import flat

from lmbench.cli import main
from lmbench.compare.noise import noise_facts, read_floors
from lmbench.records.load import load_run

GENERATOR = random.Random(4)
TIMES = [0.05 * GENERATOR.lognormvariate(0, 0.003) for _ in range(8)]


def stored(folder):
    return json.loads((folder / "noise.json").read_text())["entries"]


def test_floors_are_stored_beside_the_results_and_belong_to_host_device_and_settings_not_to_the_code(tmp_path, capsys):
    make_runs(tmp_path / "results", TIMES)
    assert main(["noise", str(tmp_path / "results")]) == 0
    captured = capsys.readouterr()
    assert f"stored in {tmp_path / 'results' / 'noise.json'}" in captured.err
    assert re.search(r"so +changes under 0.[0-9]+ % cannot be detected here with 3 repeats$", captured.out.strip())
    (entry,) = stored(tmp_path / "results")
    assert entry["metrics"]["step_s"]["n"] == 8
    assert entry["metrics"]["run_peak_allocated_bytes"]["floor_fraction"] == 0
    floors, floor = read_floors(tmp_path / "results"), entry["metrics"]["step_s"]["floor_fraction"]
    for name, value, is_known in (
        ("environment.code.project.commit", "bbbb", True),
        ("environment.host.hostname", "beta", False),
        ("environment.gpu.name", "NVIDIA A100", False),
        ("config.data.batch_size", 8, False),
    ):
        facts = noise_facts(load_run(make_run(tmp_path / "other", **{name: value})).record)
        matching = [entry.metrics["step_s"].floor_fraction for entry in floors if entry.facts == facts]
        assert matching == ([floor] if is_known else []), name
    assert re.search("holds for +NVIDIA H200, small, .*; not for other settings", flat(captured.out))


def test_compare_finds_the_floor_of_a_sides_own_repeats(tmp_path, printed):
    a, b = (make_runs(tmp_path / side, TIMES) for side in "ab")
    assert "no A/A noise floor is known" in flat(printed("compare", a, b))
    printed("noise", a)
    assert "no A/A noise floor" not in flat(printed("compare", a, b))


def test_every_cell_of_a_sweep_has_its_own_floor_of_the_repeats_that_count(tmp_path, printed):
    folder = make_sweep(
        tmp_path / "s", {"small": TIMES, "medium": TIMES[:4], "large": TIMES, "few": TIMES[:5], "mixed": TIMES[:7]}
    )
    make_sweep(folder, {"small": [0.07]}, run_id="odd", guards=[{"name": "g", "status": "fail"}])
    failed = [{"name": "g", "status": "fail", "message": "odd"}]
    make_sweep(folder, {"few": [0.07]}, run_id="worse", guards=failed)
    make_sweep(folder, {"mixed": [0.05]}, run_id="other", environment__code__project__commit="bbbb")
    # A second measurement replaces the first floor.
    printed("noise", folder)
    out = flat(printed("noise", folder))
    assert [entry["metrics"]["step_s"]["n"] for entry in stored(folder)] == [8, 8]
    for line in (
        "no floor size medium: repeats that count: 4; a noise floor takes 6",
        "no floor size few: repeats that count: 5; a noise floor takes 6; one does not: guard g failed: odd",
        "no floor size mixed: not repeats of one thing: environment.code.project.commit is aaaa or bbbb",
    ):
        assert line in out


def test_a_damaged_noise_file_is_said_and_kept(tmp_path, refused):
    make_runs(tmp_path, TIMES)
    for content, message in (
        ("{", "cannot be read (it is no JSON: Input data was truncated); remove it"),
        ('{"schema_version": 9, "entries": []}', "Invalid enum value 9 - at schema_version"),
    ):
        (tmp_path / "noise.json").write_text(content)
        assert message in refused("noise", tmp_path)
        assert (tmp_path / "noise.json").read_text() == content
