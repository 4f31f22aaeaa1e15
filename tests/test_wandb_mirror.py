"""The offline W&B run beside a result, read back by an independent reader."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import sys
import time
from pathlib import Path

import pytest
from wandb_loopback import PLANTED_KEY, Offline
from wandb_results import step, write_result

from lmbench.records.load import load_run
from lmbench.records.store import RunFolder
from lmbench.wandb import mirror
from lmbench.wandb.content import config_of, summary_of
from lmbench.wandb.place import Place
from lmbench.wandb.problem import BoardProblem, IncompleteFile
from lmbench.wandb.transaction_log import history_count

pytestmark = pytest.mark.slow


def read(result: Path) -> Offline:
    return Offline(mirror.ensure_mirror(result))


def close(a, b):
    return a == b or (isinstance(a, float) and (math.isclose(a, b, rel_tol=1e-12) or (math.isnan(a) and math.isnan(b))))


def test_every_step_and_every_summary_value_is_in_the_offline_file(tmp_path):
    result = write_result(tmp_path, steps=120)
    offline, loaded = read(result), load_run(result)
    assert len(offline.history) == len(loaded.steps) == 120
    for row, record in zip(offline.history, loaded.steps, strict=True):
        assert {name: row[name] for name in record if record[name] is not None} == {
            name: value for name, value in record.items() if value is not None
        }
    for name, value in summary_of(loaded.run, "ok").items():
        assert close(offline.summary[name], value), name
    for name, value in config_of(loaded.run).items():
        assert offline.config[name] == value, name
    assert offline.step_metric["*"] == "step"
    assert offline.run.run_id == offline.run.display_name == result.name
    assert offline.run.project == "lmbench"


def test_tables_lie_beside_it(tmp_path):
    result = write_result(tmp_path)
    file = mirror.ensure_mirror(result)
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in file.parent.rglob("*.table.json")}
    assert set(tables) == {"phases", "guards"}
    assert [row[0] for row in tables["phases"]["data"]] == ["forward", "backward", "other", "step"]
    assert Offline(file).summary["tables/phases"]["nrows"] == 4


def test_non_finite_losses_arrive_as_such(tmp_path):
    result = write_result(tmp_path)
    folder = RunFolder(result)
    folder.append_steps([step(9, loss=float("nan")), step(10, loss=float("inf"))])
    folder.close()
    losses = [row["loss"] for row in read(result).history[-2:]]
    assert math.isnan(losses[0])
    assert losses[1] == math.inf


@pytest.mark.parametrize("outcome", ["oom", "error", "interrupted"])
def test_a_run_that_failed_is_there_with_what_it_measured(tmp_path, outcome):
    error = {"kind": "RuntimeError", "message": "what happened", "phase": "forward"}
    offline = read(write_result(tmp_path, outcome=outcome, error=error, exit_code=3))
    assert len(offline.history) == 9
    assert offline.summary["outcome"] == outcome
    assert offline.summary["error.message"] == "what happened"


def test_where_it_is_filed_comes_from_the_record(tmp_path):
    filed = {"project": "speed", "entity": "team", "name": "A", "tags": ["x"], "group": "g", "id": "own-id"}
    run = read(write_result(tmp_path, wandb=filed)).run
    assert (run.project, run.entity, run.display_name, run.run_id) == ("speed", "team", "A", "own-id")
    assert (list(run.tags), run.run_group) == (["x"], "g")


def test_the_result_folder_goes_along_as_an_artifact_where_asked(tmp_path):
    plain, asked = write_result(tmp_path), write_result(tmp_path, wandb={"artifact": True})
    assert not any(name.startswith("result-") for name in read(plain).artifacts)
    assert read(asked).artifacts[f"result-{asked.name}"] == ["run.json", "steps.jsonl"]


def test_what_the_module_logged_itself_has_a_place_of_its_own(tmp_path):
    result = write_result(tmp_path)
    lines = [{"config": {"width": 8}}, {"loss": 1.5, "trainer/global_step": 4}, {"loss": None}]
    (result / "logged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    offline = read(result)
    assert offline.config["logged.width"] == 8
    assert offline.history[9]["logged/loss"] == 1.5
    assert offline.history[0]["loss"] == 9.0
    assert offline.step_metric["logged/*"] == "logged/trainer/global_step"


def test_it_is_written_once_and_again_only_where_the_result_was_moved(tmp_path):
    result = write_result(tmp_path)
    first = mirror.ensure_mirror(result)
    assert mirror.ensure_mirror(result) == first
    moved = tmp_path / "elsewhere" / result.name
    shutil.move(result, moved)
    second = mirror.ensure_mirror(moved)
    assert [path.name for path in moved.glob("wandb/offline-run-*")] == [second.parent.name]
    assert Offline(second).run.run_id == result.name


def test_an_offline_run_that_broke_off_is_not_taken_for_a_complete_one(tmp_path):
    result = write_result(tmp_path)
    file = mirror.ensure_mirror(result)
    (result / "wandb" / "mirror.json").unlink()
    file.write_bytes(file.read_bytes()[:2000])
    assert history_count(file) == 0
    assert len(read(result).history) == 9


def test_a_file_that_lacks_steps_is_written_once_more(tmp_path, monkeypatch):
    result = write_result(tmp_path)
    tries = []

    def write(result):
        tries.append(result)
        if len(tries) == 1:
            raise IncompleteFile("wandb wrote 0 of 9 steps; 12.0 MB are free on the disk")

    monkeypatch.setattr(mirror, "write_mirror", write)
    assert mirror.main([str(result)]) == 0
    assert len(tries) == 2


def test_what_wandb_adds_after_the_end_of_a_run_does_not_make_it_incomplete(tmp_path):
    file = mirror.ensure_mirror(write_result(tmp_path))
    data = file.read_bytes()
    size = 7 + struct.unpack_from("<IHB", data, 7)[1]
    assert len(data) % 32768 + size < 32768, "the block has no room for one more record"
    # The first record again, after the last one.
    file.write_bytes(data + data[7 : 7 + size])
    assert history_count(file) == 9


def test_no_key_reaches_any_file_and_nothing_is_left_in_this_process_or_at_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    monkeypatch.setenv("WANDB_MODE", "online")
    before = dict(os.environ)
    result = write_result(tmp_path)
    mirror.ensure_mirror(result)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if PLANTED_KEY.encode() in path.read_bytes()]
    assert list(home.rglob("*")) == []
    assert dict(os.environ) == before
    assert sys.modules.get("wandb") is None or sys.modules["wandb"].run is None
    leftovers = [p.name for p in (result / "wandb").rglob("*") if p.is_symlink() or p.suffix == ".log"]
    assert leftovers == []


def test_a_run_without_wandb_installed_says_so(tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "wandb.py").write_text("raise ModuleNotFoundError('wandb', name='wandb')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))
    with pytest.raises(BoardProblem, match=r"^wandb is not installed$") as raised:
        mirror.ensure_mirror(write_result(tmp_path))
    assert raised.value.is_general


@pytest.mark.parametrize(
    ("source", "said"),
    [("raise RuntimeError('bro\\nken')", "RuntimeError: bro ken"), ("import os; os._exit(9)", "no reason given")],
)
def test_a_broken_wandb_is_told_in_one_line(tmp_path, monkeypatch, source, said):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    result = write_result(tmp_path)
    with pytest.raises(BoardProblem, match=said):
        mirror.ensure_mirror(result)
    assert Place(result).mirror is None


def test_a_wandb_that_hangs_is_ended_in_time(tmp_path, monkeypatch):
    (tmp_path / "hung").mkdir()
    (tmp_path / "hung" / "wandb.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hung"))
    monkeypatch.setattr(mirror, "_BASE_TIMEOUT_S", 1.0)
    started = time.monotonic()
    with pytest.raises(BoardProblem, match="within 1 s"):
        mirror.ensure_mirror(write_result(tmp_path))
    assert time.monotonic() - started < 10


@pytest.fixture
def disk(small_disk):
    return small_disk(1024)


def test_a_full_disk_is_noticed_and_its_remains_are_removed(disk):
    result = write_result(disk, steps=1500)
    assert shutil.disk_usage(disk).free > 300_000
    with pytest.raises(BoardProblem, match=r"of 1500 steps; 0\.\d MB are free|disk is full"):
        mirror.ensure_mirror(result)
    assert [path.name for path in (result / "wandb").iterdir()] == [".lock"] or not list((result / "wandb").iterdir())
    assert len(load_run(result).steps) == 1500
    assert shutil.disk_usage(disk).free > 300_000


def test_a_disk_that_is_full_from_the_start_is_told_in_one_line(disk):
    result = write_result(disk)
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(b"\0" * free)
    with pytest.raises(BoardProblem) as raised:
        mirror.ensure_mirror(result)
    assert "\n" not in str(raised.value)
    assert load_run(result).outcome == "ok"
