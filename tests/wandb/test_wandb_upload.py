"""`lmbench upload` against servers on the loopback: everything arrives once, and every fault is one line."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from datetime import UTC, datetime

import pytest
from runs import write_result
from tables import cases
from wandb_loopback import PLANTED_KEY, Server, SilentServer

from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.records.process import process_identity
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder
from lmbench.wandb.child import config_of, stable_id, summary_of
from lmbench.wandb.publish import WandbFiling, WandbProblem, is_uploaded, publish_run, sync, write, write_new

pytestmark = pytest.mark.usefixtures("planted_key")


@pytest.fixture
def server():
    with Server() as server:
        yield server


def id_of(result):
    return stable_id(load_run(result).record)


def test_results_arrive_whole_and_once(tmp_path, server, capsys, monkeypatch):
    results = tmp_path / "results"
    filing = {"project": "speed", "entity": "team", "tags": ["x"], "group": "g", "artifact": True, "mode": "disabled"}
    plain = write_result(results, ended_at="2026-01-02T03:04:05+00:00", milestones={"closed_s": 2468.4})
    filed = write_result(results, wandb=filing)
    folder = RunFolder(plain)
    folder.append_steps([StepRecord(step=9, step_s=0.1, loss=math.nan)])
    folder.close()
    killed = write_result(results, outcome="running", boot_id="gone")
    pid, boot_id, start_s = process_identity()
    write_result(results, outcome="running", pid=pid, boot_id=boot_id, process_start_s=start_s)
    (results / "damaged").mkdir()
    (results / "damaged" / "run.json").write_text("{")
    monkeypatch.setenv("WANDB_PROJECT", "speed")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert main(["upload", str(results)]) == 2
    output = capsys.readouterr()
    states = Counter(line.split("  ")[0] for line in output.out.splitlines())
    assert states == {"uploaded": 3, "still running": 1}
    assert f"{plain} -> {server.url}/team/lmbench/runs/{id_of(plain)}" in output.out
    damage, sending = output.err.splitlines()
    assert "damaged: run.json" in damage
    assert sending == f"lmbench: results to send to {server.url}: 3"

    assert set(server.history) == {id_of(plain), id_of(filed), id_of(killed)}
    loaded, history = load_run(plain), server.history[id_of(plain)]
    # Times of the warm-up have series of their own.
    for row, record in zip(history, loaded.steps, strict=True):
        name = "warmup/time/step_ms" if record.is_warmup else "time/step_ms"
        assert (row["step"], row[name]) == (record.step, record.step_s * 1e3)
    assert math.isnan(float(history[9]["train/loss"]))
    # The times are those of the run, not of the writing.
    summary, ended_s = server.summary[id_of(plain)], datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    assert (summary["_wandb"]["runtime"], summary["_timestamp"]) == (2468, ended_s)
    assert summary_of(loaded.record, "ok").items() <= summary.items()
    assert config_of(loaded.record).items() <= server.config[id_of(plain)].items()
    assert server.summary[id_of(killed)]["outcome"] == "killed"
    expected = {"project": "speed", "entity": "team", "groupName": "g", "tags": ["x"]}
    assert expected.items() <= server.filed[id_of(filed)].items()
    assert f"result-{id_of(filed)}" in server.artifacts

    # The server was given the key, and no file or output has it.
    assert server.authorizations - {""}
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and PLANTED_KEY.encode() in p.read_bytes()]
    assert PLANTED_KEY not in output.out + output.err


def test_an_upload_that_broke_off_is_done_anew_where_the_result_was_moved_to(tmp_path, printed, refused):
    result = write_result(tmp_path / "results")
    with Server(upload_status=403):
        error = refused("upload", result, code=6).partition("\n")[2]
    assert "Fatal error while uploading data" in error
    assert error.count("\n") == 1
    assert not is_uploaded(result)
    moved = tmp_path / "moved"
    shutil.move(result, moved)
    with Server() as server:
        printed("upload", moved, "--project=other")
        assert len(server.history[id_of(moved)]) == 9
        assert server.filed[id_of(moved)]["project"] == "other"
        assert len(server.artifacts) == 2


def test_a_fault_is_told_in_one_line_and_once(tmp_path, refused):
    first, second = sorted(write_result(tmp_path / "results") for _ in range(2))
    with Server(status=401):
        error = refused("upload", tmp_path / "results", code=6).partition("\n")[2]
    assert error == f"lmbench: not uploaded: {first}: the server refused it; is the key right?; 1 more not tried\n"
    assert not is_uploaded(first)
    assert not is_uploaded(second)


def test_a_server_that_does_not_answer_costs_no_more_than_the_time_limit(tmp_path):
    result = write_result(tmp_path / "results")
    write([result], 60)
    with SilentServer(), pytest.raises(WandbProblem, match="not done within 1 s"):
        sync(result, 1)
    with pytest.raises(WandbProblem, match=r"was not done within 0\.01 s"):
        write([result], 0.01)


def test_a_missing_wandb_is_reported_and_the_run_is_written_later(tmp_path, monkeypatch):
    result = write_result(tmp_path / "results", wandb={"mode": "offline"})
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError('no', name='wandb')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WandbProblem, match=r"^wandb is not installed$"):
        write_new([result])
    monkeypatch.delenv("PYTHONPATH")
    write_new([result])
    assert len(list(result.glob("wandb/offline-run-*/*.wandb"))) == 1


@cases(
    "part | raised | is_interrupted | said",
    ("write", KeyboardInterrupt(), False, "W&B got nothing of this run: stopped"),
    ("sync", WandbProblem("the server is\nnot there"), False, "not uploaded to W&B: the server is not there"),
    ("sync", AssertionError("sent"), True, "not uploaded to W&B: the run was interrupted"),
    ids=["a second Ctrl-C", "no server", "interrupted"],
)
def test_every_fault_of_w_and_b_is_one_line_with_the_command_that_uploads_later(
    monkeypatch, tmp_path, part, raised, is_interrupted, said
):
    def fail(*_):
        raise raised

    monkeypatch.setattr("lmbench.wandb.publish.write", lambda *_: "the server")
    monkeypatch.setattr(f"lmbench.wandb.publish.{part}", fail)
    published = publish_run(tmp_path, WandbFiling(mode="online"), 60, is_interrupted)
    assert (published.line, published.is_problem) == (f"{said}; later: lmbench upload {tmp_path}", True)
