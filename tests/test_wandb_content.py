"""What of a result W&B gets."""

from __future__ import annotations

from wandb_results import step, write_result

from lmbench.records.load import load_run
from lmbench.records.run import Cost, RunRecord, SweepPlace
from lmbench.records.schema import leaves, value_at
from lmbench.wandb.content import CONFIG_PARTS, config_of, summary_of, tables_of


def test_every_leaf_of_a_record_is_in_config_or_summary_under_its_own_name(tmp_path):
    record = load_run(write_result(tmp_path)).record
    config, summary = config_of(record), summary_of(record, "ok")
    assert not set(config) & set(summary)
    assert {name: {**config, **summary}.get(name) for name in leaves(record)} == {
        **leaves(record), "pid": None, "guards": None
    }  # fmt: skip
    assert config["config.model.size"] == "tiny"
    assert config["environment.versions.torch"] == "2.13.0"
    assert summary["phases.step.median_s"] == value_at(record, "phases.step.median_s")
    assert set(RunRecord.__struct_fields__) >= CONFIG_PARTS - {"rank"}


def test_guards_are_in_the_summary_one_by_one(tmp_path):
    record = load_run(write_result(tmp_path)).record
    assert record.guards
    summary = summary_of(record, "ok")
    assert [summary[f"guards.{guard.name}.status"] for guard in record.guards] == [g.status for g in record.guards]


def test_a_runs_cell_is_config_and_its_cost_is_summary():
    place = SweepPlace(cell="tiny-1", axes={"model.size": "tiny"}, repeat=0, cost=Cost(total_s=2.0))
    record = RunRecord(1, "ok", sweep=place)
    config = config_of(record)
    assert (config["sweep.axes.model.size"], config["sweep.cell"]) == ("tiny", "tiny-1")
    assert summary_of(record, "ok") == {"sweep.cost.total_s": 2.0, "outcome": "ok"}


def test_tables_have_a_row_a_phase_and_a_row_a_guard(tmp_path):
    record = load_run(write_result(tmp_path)).record
    phases, guards = tables_of(record)
    rows = {row[0]: dict(zip(phases.columns, row, strict=True)) for row in phases.rows}
    assert list(rows) == ["forward", "backward", "other", "step"]
    assert rows["forward"]["mean_s"] == value_at(record, "phases.forward.mean_s")
    assert rows["forward"]["verdict"] == "queued"
    assert [len(row) for row in guards.rows] == [len(guards.columns)] * len(record.guards)


def test_a_run_that_measured_nothing_has_no_tables(tmp_path):
    path = write_result(tmp_path, outcome="error", error={"kind": "ValueError"}, window={})
    record = load_run(path).record
    assert tables_of(record) == []
    assert summary_of(record, "error")["error.kind"] == "ValueError"


def test_a_row_has_every_measured_value_of_its_step_and_no_other(tmp_path):
    row = leaves(load_run(write_result(tmp_path)).steps[3])
    assert row == leaves(step(3))
