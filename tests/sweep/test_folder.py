"""A sweep's folder from somebody else: only the sweep's own processes are signalled, and none of its code runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from refusals import usage_error
from simulated_cells import SimulatedServers, sweep
from tables import cases

from lmbench.errors import UsageError
from lmbench.python_process import SWEEP
from lmbench.records.process import boot_id, process_start_s
from lmbench.sweep.folder import read_sweep_folder

ONE = {"matrix": {"data.batch_size": [1]}, "repeats": 1}


def go_on(tmp_path):
    """Begin a sweep of one run here, or go on with it. Returns the names of the runs measured now."""
    servers = SimulatedServers()
    sweep(tmp_path, servers, ONE)
    return servers.started


@pytest.fixture
def run(tmp_path):
    """The folder of the only run of a sweep that began here."""
    return tmp_path / "sim" / "runs" / go_on(tmp_path)[0]


def write_running(run, pid, start_s):
    record = {"schema_version": 1, "outcome": "running", "pid": pid, "process_start_s": start_s, "boot_id": boot_id()}
    (run / "run.json").write_text(json.dumps(record))


@cases("""
- [mark, knows_start, told]
- [null, false, null]
- [null, true, "was not started by this folder's sweep, and goes on"]
- [other, true, "was not started by this folder's sweep, and goes on"]
- [sim, true, was ended]
""")
def test_a_process_that_a_record_names_is_ended_only_if_a_sweep_of_this_folder_started_it(
    mark, knows_start, told, run, tmp_path, capsys
):
    variables = {} if mark is None else {SWEEP: str((tmp_path / mark).resolve())}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **variables}) as sleeper:
        write_running(run, sleeper.pid, process_start_s(sleeper.pid) if knows_start else None)
        assert go_on(tmp_path) == [run.name]
        assert (sleeper.poll() is None) == (mark != "sim")
        sleeper.kill()
    assert sleeper.returncode == -signal.SIGKILL
    err = capsys.readouterr().err
    assert (f"was still running: process {sleeper.pid} {told}" in err) == (told is not None)


@cases("plant", os.link, os.symlink, lambda _, path: os.mkfifo(path), ids=["hard", "soft", "pipe"])
def test_a_lock_that_lies_elsewhere_is_neither_emptied_nor_written_to(plant, run, tmp_path):
    (tmp_path / "private").write_text("mine")
    lock = run.parents[1] / ".lock"
    lock.unlink()
    plant(tmp_path / "private", lock)
    with usage_error("cannot be written"):
        go_on(tmp_path)
    assert (tmp_path / "private").read_text() == "mine"


def test_a_folder_behind_a_link_is_neither_written_nor_run(run, tmp_path):
    elsewhere, link = tmp_path / "elsewhere", run.parents[1] / "runs"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    with usage_error("is a link; remove it"):
        go_on(tmp_path)
    assert sorted(elsewhere.rglob("*")) == before


#: Dangerous settings of a foreign sweep: in sweep.json's file, in the configuration beside it, and the line about it.
FOREIGN = yaml.safe_load("""
program: [{environments: {x: {python: ./evil.sh}}}, {}, "x.python: ./evil.sh"]
variable: [{environments: {x: {variables: {LD_PRELOAD: evil.so}}}}, {}, "LD_PRELOAD: evil.so"]
revision: [{environments: {x: {revision: HEAD}}}, {}, "x.revision: HEAD"]
class: [{matrix: {case: [{model: {class_path: evil.Model}}]}}, {}, "class_path: evil.Model"]
callback: [{}, {trainer: {callbacks: [{class_path: evil.Call}]}}, evil.Call (base.yaml)]
function: [{}, {model: {attention: "evil:attend"}}, "model.attention: evil:attend"]
settings: [{}, {trainer: {callbacks: dl, compile: true}}, "trainer.callbacks: dl"]
"a key's form": [{}, {model: sl.a1b2c3d4e5f6a1b2c3d4e5f6.Model}, "model: ***"]
"a class in a key's form": [{}, {model: sl.models_v2_large.LargeModel}, "model: sl.models_v2_large.LargeModel"]
"behind a secret's name": [{}, {model: {hf_token: evil.Model}}, "model.hf_token: ***"]
logger: [{base: {trainer.logger: WandbLogger}}, {}, "trainer.logger: WandbLogger"]
destination: [{}, {wandb: {mode: online, entity: thief}}, "wandb.entity: thief"]
nothing to run: [{base: {}}, {}, null]
""")


@cases("words", ["sweep"], ["sweep", "--dry_run"], ["compare", "--run"])
@cases("what", *FOREIGN)
def test_a_folder_that_the_user_did_not_begin_is_shown_and_nothing_of_it_is_run(what, words, here, refused):
    file, config, shown = FOREIGN[what]
    Path("evil.py").write_text("open('ran', 'w')")
    Path("evil.sh").write_text("#!/bin/sh\ntouch ran")
    Path("evil.sh").chmod(0o755)
    (here / "dl").mkdir()
    content = {"base": {"config": "base.yaml"}, "matrix": {"data.batch_size": [1]}} | file
    (here / "dl" / "sweep.json").write_text(json.dumps({"file": content}))
    (here / "dl" / "base.yaml").write_text(json.dumps(config))
    before = sorted(here.rglob("*"))
    lines = refused(words[0], "dl", *words[1:]).splitlines()
    assert lines[-1] == "lmbench: nothing of 'dl' was run; `lmbench sweep dl --trust` takes it over"
    if shown:
        assert any(shown in line for line in lines[1:-1])
    else:
        # Where nothing would be used, no list of it is announced.
        assert lines[:-1] == ["lmbench: dl was not begun here by you, or was changed since"]
    assert sorted(here.rglob("*")) == before


def test_a_folder_is_the_users_own_until_somebody_changes_it_and_after_trust(run, tmp_path, monkeypatch):
    folder = (tmp_path / "sim").rename(tmp_path / "moved")

    def refusal():
        try:
            read_sweep_folder(folder)
        except UsageError as error:
            return str(error)
        return None

    assert refusal() is None
    (folder / "side-A.yaml").write_text("model: evil.Model")
    assert "--trust" in str(refusal())
    (folder / "side-A.yaml").unlink()
    assert refusal() is None
    path = folder / "sweep.json"
    path.write_text(path.read_text().replace('"repeats": 1', '"repeats": 2'))
    assert "--trust" in str(refusal())
    assert read_sweep_folder(folder, trusts=True).repeats == 2
    assert refusal() is None
    copy = shutil.copytree(folder, tmp_path / "copy")
    with usage_error("--trust"):
        read_sweep_folder(copy)
    # For another user, or one without a home.
    monkeypatch.setenv("XDG_STATE_HOME", "moved")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert "--trust" in str(refusal())
