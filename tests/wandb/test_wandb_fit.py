"""W&B with `lmbench fit`: runs are written or uploaded as asked, and no fault of W&B harms the measurement."""

from __future__ import annotations

import json
import os
from datetime import datetime

import pytest
import warm_server
from fit_process import QUICK, bench
from paths import SUPPORT
from tables import cases
from wandb_loopback import PLANTED_KEY, Server

from lmbench.wandb.child import stable_id
from lmbench.wandb.publish import WandbSettings


@pytest.fixture(autouse=True)
def _wandb(no_account, monkeypatch):
    """W&B without account and settings, as a newcomer has it."""
    monkeypatch.delenv("WANDB_MODE", raising=False)


def fit(tmp_path, *words):
    return bench(tmp_path, "--model.num_layers=1 --data.context_length=16", *words)


def test_a_run_is_there_offline_where_asked_without_account_or_network(tmp_path, capsys):
    environment = {name: value for name, value in os.environ.items() if "WANDB" in name}
    result = fit(tmp_path, "--wandb.mode=offline", "--wandb.project=speed", "--wandb.tags=[a,b]")
    output = capsys.readouterr()
    lines = f"W&B          offline, beside the result\nupload       lmbench upload {result.path} --project=speed\n"
    assert (lines in output.out, output.err) == (True, "")
    assert len(list(result.path.glob("wandb/offline-run-*/*.wandb"))) == 1
    filed = result.record.wandb
    assert (filed.mode, filed.project, filed.tags) == ("offline", "speed", ["a", "b"])
    assert {name: value for name, value in os.environ.items() if "WANDB" in name} == environment


def test_it_is_uploaded_when_closed_where_asked(tmp_path, monkeypatch, capsys, printed):
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    with Server() as server:
        more = ["--trainer.gradient_clip_val=1", "--measure.gradient_norm=true"]
        result = fit(tmp_path, "--wandb.mode=online", *more)
        run_id = stable_id(result.record)
        output = capsys.readouterr()
        assert output.err == f"lmbench: sending the result to {server.url}\n"
        assert f"W&B          uploaded: {server.url}/me/lmbench/runs/{run_id}\n" in output.out
        windows = [row["_timestamp"] for row in server.history[run_id] if "time/step_ms" in row]
        # `_runtime` is the time since the process began, and not that of the writing after the run.
        last, opened_s = server.history[run_id][-1], result.record.milestones.window_opened_s
        began_s = datetime.fromisoformat(result.record.ended_at).timestamp() - result.record.milestones.closed_s
        assert last["_timestamp"] - last["_runtime"] == pytest.approx(began_s, abs=0.01)
        assert 0 < last["_runtime"] - opened_s < result.record.milestones.closed_s - opened_s
        # Rows have the steps' own times, and the window takes as long as it did.
        assert windows[-1] - windows[0] == pytest.approx(
            sum(step.step_s + step.excluded_s for step in result.steps[-5:]), rel=0.01
        )
        questions = len(server.questions)
        assert printed("upload", result.path).startswith("already uploaded")
        assert len(server.questions) == questions


def test_in_the_window_nothing_of_wandb_runs_and_a_broken_one_costs_one_line_after_it(tmp_path):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('broken')")
    path = os.pathsep.join((str(SUPPORT), str(tmp_path)))
    env = {**os.environ, "PYTHONPATH": path, "STATE_FILE": str(tmp_path / "state")}
    del env["WANDB_BASE_URL"]
    words = ["fit", *QUICK, "--trainer.accelerator=cpu", "--model=strangers.Watching", "--wandb.mode=online"]
    done = warm_server.run(*words, f"--measure.results_dir={tmp_path}/results", folder=tmp_path, variables=env)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results").iterdir()
    said = "wandb failed with RuntimeError: broken"
    assert done.stderr == f"lmbench: W&B got nothing of this run: {said}; later: lmbench upload {folder}\n"
    for when in ("window", "end"):
        state = json.loads((tmp_path / f"state.{when}").read_text())
        assert state == {"modules": [], "threads": [], "children": [], "variables": []}


@cases("""
    switch | asked | mode
    - | online | online
    online | offline | offline
    offline | online | offline
    disabled | online | disabled
    - | - | disabled
    online | - | offline
    """)
def test_wandbs_own_switch_asks_for_offline_and_only_takes_away(monkeypatch, switch, asked, mode):
    if switch:
        monkeypatch.setenv("WANDB_MODE", switch)
    assert WandbSettings(mode=asked or None).filing().mode == mode


@cases("host", None, "api.wandb.ai", "wandb.example.org:8080", "github.com")
def test_with_a_key_runs_are_written_offline(host, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / ".config" / "wandb").mkdir(parents=True)
    (home / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = http://wandb.example.org:8080\n")
    if host is None:
        monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    else:
        (home / ".netrc").write_text(f"machine {host} login user password {PLANTED_KEY}\n")
        (home / ".netrc").chmod(0o600)
    assert WandbSettings().filing().mode == ("disabled" if host == "github.com" else "offline")
