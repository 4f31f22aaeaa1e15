"""What W&B gets of a result, and what a module sends to its logger meanwhile."""

from __future__ import annotations

import json
import math

import torch
from wandb_results import step, write_result

from lmbench.records.fields import FIELD
from lmbench.records.load import load_run
from lmbench.records.paths import leaves, lookup
from lmbench.wandb.content import config_of, history_rows, summary_of, tables_of
from lmbench.wandb.held_run import LOGGED_FILE, HeldRun


def test_a_row_has_every_measured_value_of_its_step_and_no_other(tmp_path):
    (row,) = history_rows([step(3)])
    assert row == {name: value for name, value in step(3).items() if value is not None}
    assert "clip_s" not in row
    assert all(name in FIELD for name in row)


def test_every_leaf_of_a_record_is_in_config_or_summary_under_its_own_name(tmp_path):
    run = load_run(write_result(tmp_path)).run
    config, summary = config_of(run), summary_of(run, "ok")
    left_out = {"pid", "guards"}
    for name, value in leaves(run):
        if value is not None and name.split(".")[0] not in left_out:
            assert {**config, **summary}[name] == value, name
    assert not set(config) & set(summary)
    assert config["config.model.size"] == "tiny"
    assert config["environment.versions.torch"] == "2.13.0"
    assert summary["phases.step.median_s"] == lookup(run, "phases.step.median_s")


def test_guards_are_in_the_summary_one_by_one(tmp_path):
    run = load_run(write_result(tmp_path)).run
    summary = summary_of(run, "ok")
    for guard in run["guards"]:
        assert summary[f"guards.{guard['name']}.status"] == guard["status"]


def test_a_killed_run_is_told_as_killed(tmp_path):
    path = write_result(tmp_path, outcome="running", boot_id="another boot")
    loaded = load_run(path)
    assert summary_of(loaded.run, loaded.outcome)["outcome"] == "killed"


def test_tables_have_a_row_a_phase_and_a_row_a_guard(tmp_path):
    run = load_run(write_result(tmp_path)).run
    phases, guards = tables_of(run)
    rows = {row[0]: dict(zip(phases.columns, row, strict=True)) for row in phases.rows}
    assert list(rows) == ["forward", "backward", "other", "step"]
    assert rows["forward"]["mean_s"] == run["phases"]["forward"]["mean_s"]
    assert rows["forward"]["verdict"] == "queued"
    assert len(guards.rows) == len(run["guards"])


def test_a_run_that_measured_nothing_has_no_tables(tmp_path):
    run = load_run(write_result(tmp_path, outcome="error", error={"kind": "ValueError"}, window={})).run
    assert tables_of(run) == []
    assert summary_of(run, "error")["error.kind"] == "ValueError"


def test_a_module_may_treat_the_stand_in_like_a_run_of_wandb(tmp_path):
    held = HeldRun("me")
    loss = torch.tensor(2.5, requires_grad=True)
    held.log({"loss": loss * 2, "epoch": 0, "note": "x", "image": object()}, step=7)
    held.log({"loss": float("nan")})
    held.config.update({"lr": 0.1}, allow_val_change=True)
    held.config.width = 8
    held.summary["best"] = 1.5
    held.watch(torch.nn.Linear(2, 2), log="all")
    held.write(tmp_path)
    assert held.unkept == {"image", "watch"}
    config, first, second = [json.loads(line) for line in (tmp_path / LOGGED_FILE).read_text().splitlines()]
    assert config == {"config": {"lr": 0.1, "width": 8, "summary.best": 1.5}}
    assert first == {"_step": 7, "loss": 5.0, "epoch": 0, "note": "x"}
    assert math.isnan(float(second["nonfinite"]["loss"]))


def test_a_value_that_changes_in_place_is_kept_as_it_was(tmp_path):
    held, loss = HeldRun("me"), torch.zeros(())
    for _ in range(3):
        held.log({"loss": loss.add_(1)})
    assert [row["loss"].item() for row in held.rows] == [1.0, 2.0, 3.0]


def test_nothing_logged_leaves_no_file(tmp_path):
    HeldRun("me").write(tmp_path)
    assert list(tmp_path.iterdir()) == []
