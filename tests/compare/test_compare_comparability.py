"""Differences that two sides may have, differences that make a comparison invalid, and its notes."""

from __future__ import annotations

import pytest
from comparison_runs import TIMES, make_run, make_sides, store_floor
from tables import cases, stored

from lmbench.compare.comparability import WITH_HOST
from lmbench.compare.comparison import compare
from lmbench.compare.sides import METRICS
from lmbench.records.schema import fields
from lmbench.records.settings import CHOSEN, CONSEQUENCES, FACTS

CASES = stored("comparability")
HOST_BOUND = {"probe__verdicts": {"forward": {"verdict": "host-bound"}, "backward": {"verdict": "queued"}}}


def compared(folder, about=(), common=None, **changes):
    (cell,) = compare(*make_sides(folder, common=common, **changes), 0.01, about).cells
    return cell


def test_everything_that_is_looked_up_by_name_is_in_the_schema():
    schema = fields("run")
    fields_of_metrics = [metric.expression for metric in METRICS if isinstance(metric.expression, str)]
    names = [*WITH_HOST, *fields_of_metrics, *CONSEQUENCES]
    assert [name for name in names if name not in schema] == []
    # A name in these lists may stand for a part of the record with all its fields.
    assert [part for part in (*CHOSEN, *FACTS) if not any(f"{name}.".startswith(f"{part}.") for name in schema)] == []


@cases("changes | reason", *CASES["invalid"])
def test_a_difference_that_nobody_asked_for_is_invalid(tmp_path, changes, reason):
    cell = compared(tmp_path, **changes)
    # An invalid comparison still has figures.
    assert (cell.verdict, cell.metrics[0].ratio.point) == ("invalid", pytest.approx(1.04, rel=1e-3))
    assert any(line.startswith(reason) for line in cell.reasons), cell.reasons


@cases("changes", *CASES["compared"])
def test_what_the_user_changed_is_compared(tmp_path, changes):
    cell = compared(tmp_path, **changes)
    assert (cell.verdict, cell.metrics[0].finding) == ("slower", "slower")


def test_other_work_is_told_beside_the_setting_of_the_model_that_brings_it(tmp_path):
    facts = {"model__attention": "naive", "flops__per_token_flops": 500, "flops__recomputed_per_token_flops": 100}
    common = {"flops__per_token_flops": 1000, "flops__recomputed_per_token_flops": 0, "model__attention": "sdpa"}
    cell = compared(tmp_path, common=common, config__model__attention="naive", **facts)
    assert [str(difference) for difference in cell.differences] == [
        "model.attention: sdpa -> naive",
        "flops.per_token_flops: 1000 -> 500",
        "flops.recomputed_per_token_flops: 0 -> 100",
    ]


def test_no_arguments_of_a_class_are_no_difference(tmp_path):
    assert compared(tmp_path, config__model__init_args={}).differences == []


def test_about_allows_what_it_names_and_nothing_else(tmp_path):
    changes = {"environment__code__project__commit": "bbbb", "config__model__attention": "naive"}
    assert compared(tmp_path / "1", about=["code", "model.attention"], **changes).verdict == "slower"
    cell = compared(tmp_path / "2", about=["code"], **changes)
    assert (cell.verdict, cell.reasons) == (
        "invalid", ["model.attention: sdpa -> naive; the comparison is about code"]
    )  # fmt: skip


@cases("common | changes | verdict", *CASES["host"])
def test_the_host_counts_where_it_is_part_of_what_was_measured(tmp_path, common, changes, verdict):
    assert compared(tmp_path, common=common, **changes).verdict == verdict


def test_runs_of_a_side_that_are_not_repeats_are_invalid(tmp_path):
    make_run(tmp_path / "a", environment__code__project__commit="cccc")
    assert compared(tmp_path).reasons == [
        "runs of A are not repeats of one thing: environment.code.project.commit is aaaa or cccc"
    ]


def test_runs_without_a_configuration_are_compared_by_their_facts(tmp_path):
    cell = compared(tmp_path, common={"config": None}, precision="32-true")
    assert cell.verdict == "slower"
    assert [str(d) for d in cell.differences] == ["precision: bf16-mixed -> 32-true"]


def test_an_option_that_is_not_set_stands_for_what_the_record_says(tmp_path):
    unset = {"config__model__num_layers": None, "model__num_layers": 2}
    for layers, differences in ((1, ["model.num_layers: 2 -> 1"]), (2, [])):
        changes = {"config__model__num_layers": layers, "model__num_layers": layers}
        assert [str(d) for d in compared(tmp_path / str(layers), common=unset, **changes).differences] == differences


def test_what_a_reader_should_know_is_noted(tmp_path):
    guards = [{"name": "power_cap", "status": "warn", "message": "..."}]
    cell = compared(tmp_path, config__data__batch_size=8, data__batch_size=8, window__tokens=409_600, guards=guards)
    assert cell.notes == [
        "a step has 2,048 tokens in A, 4,096 in B: the time per token of B is 0.52 times A's",
        "guards that warned: power_cap",
        "no A/A noise floor is known; `lmbench noise` measures it",
    ]


@cases("""
- [tokens_b, is_noted]
- [206000, false]
- [207000, true]
""")
def test_tokens_of_a_step_are_noted_where_the_means_over_the_runs_differ_by_one_percent(tmp_path, tokens_b, is_noted):
    """Windows of the same sequences of many lengths end in different places."""
    cell = compared(tmp_path, window__tokens=tokens_b)
    assert any(note.startswith("a step has 2,048 tokens in A") for note in cell.notes) == is_noted


def test_a_difference_that_the_load_of_a_host_that_counts_may_have_made_is_undecided(tmp_path):
    busy = [{"name": "busy_machine", "status": "warn", "message": "this machine is busy: load 3.1 a core"}]
    cell = compared(tmp_path / "bound", common=HOST_BOUND, guards=busy)
    assert cell.verdict == "undecided"
    (reason,) = cell.reasons
    assert reason.startswith("+4.00 %, and busy machine in 3 of 3 runs of B (load 3.1 a core): measure again")
    assert compared(tmp_path / "queued", guards=busy).verdict == "slower"


@cases("""
- [factor, floor_days, is_turned, verdict]
- [1.02, 0, false, undecided]
- [0.97, 0, false, undecided]
- [1.02, 0, true, slower]
- [1.02, 2, false, slower]
- [1.02, 1, false, undecided]
# Without load, a machine does not drift this far.
- [2.0, 0, false, slower]
- [1.0, 0, false, same]
""")
def test_a_change_that_may_be_a_drift_between_sides_measured_apart_is_undecided(
    tmp_path, factor, floor_days, is_turned, verdict
):
    for repeat, step_s in enumerate(TIMES):
        make_run(tmp_path / "a", step_s, started_at=f"2026-11-21T00:00:{2 * repeat:02}")
        start = f"2026-11-21T00:00:{2 * repeat + 1 if is_turned else 30 + repeat:02}"
        make_run(tmp_path / "b", step_s * factor, started_at=start)
    if floor_days:
        store_floor(tmp_path, next((tmp_path / "a").iterdir()), [*TIMES, *TIMES], floor_days)
    (cell,) = compare(str(tmp_path / "a"), str(tmp_path / "b"), 0.01).cells
    assert cell.verdict == verdict
    assert ("takes turns" in cell.reasons[0]) == (verdict == "undecided")
