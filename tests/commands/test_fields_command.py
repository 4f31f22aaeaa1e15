"""`lmbench fields`: the meanings of all numbers, from the schema."""

from __future__ import annotations

import pytest
from tables import cases

from lmbench.records.schema import fields

ALL = [*fields("step").values(), *fields("run").values()]


@pytest.fixture
def tables_of(answered):
    return lambda *words: answered("fields", *words)["tables"]


def test_the_tables_have_every_field_once_and_the_groups_come_first(tables_of, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    names = [row["name"] for row in tables_of()["fields"]]
    assert set(names) == {field.pattern for field in ALL}
    # These are fields of both records.
    assert {name for name in names if names.count(name) > 1} == {"nonfinite", "rank", "scalars"}
    output = printed("fields")
    assert len(output.splitlines()) < 60
    for text in ("device_state", "peaks of the allocator and of the process", "tables"):
        assert text in output


@cases("""
name | pattern
forward_s | forward_s
phases.forward.mean_s | phases.<phase>.mean_s
phases.<phase>.mean_s | phases.<phase>.mean_s
run_peak_allocated_bytes | memory.run_peak_allocated_bytes
run_peak_alloc | memory.run_peak_allocated_bytes
""")
def test_a_field_is_found_by_its_whole_name_its_pattern_its_last_word_and_a_part_of_it(name, pattern, tables_of):
    (row,) = tables_of(name)["fields"]
    about = next(field for field in ALL if field.pattern == pattern).about
    assert (row["name"], row["unit"], row["better"]) == (pattern, about.unit, about.better)
    assert row["meaning"] == about.meaning


def test_a_column_of_reports_is_told_beside_the_field_of_its_name(tables_of):
    tables = tables_of("step_s", "speedup")
    assert [row["name"] for row in tables["fields"]] == ["step_s"]
    assert [row["column"] for row in tables["columns"]] == ["step_s", "speedup"]
    assert tables["columns"][0]["meaning"] == "step (ms, mean over the processes, of `phases.step.mean_s`)"
    assert [*tables_of("speedup")] == ["columns"]


def test_a_column_is_found_by_its_heading_and_told_by_the_function_that_works_it_out(tables_of):
    (row,) = tables_of("unhidden communication (%)")["columns"]
    assert row["column"] == "unhidden_communication_fraction"
    assert row["meaning"].endswith("The share of a step that it would be shorter without synchronizing gradients.")


def test_a_guard_and_a_key_of_a_mapping_are_told(tables_of):
    tables = tables_of("busy_machine", "scalars.mine")
    assert tables["guards"][0]["advice"].startswith("Measure when the machine is quiet")
    assert {row["name"] for row in tables["fields"]} == {"scalars"}


def test_sizes_are_listed_with_the_year_in_which_the_course_calls_them_so(tables_of):
    sizes = tables_of("size")["sizes"]
    assert [(size["parameters"], size["CS336"]) for size in sizes if "xl" in size["size"]] == [
        (1_998_235_200, "2025"), (3_406_809_600, "2026, as xl"),
    ]  # fmt: skip
