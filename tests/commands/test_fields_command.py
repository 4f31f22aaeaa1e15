"""`lmbench fields`: the meanings of all numbers, from the schema."""

from __future__ import annotations

import json

import pytest
from tables import cases

from lmbench.records.schema import fields

ALL = [*fields("step").values(), *fields("run").values()]


@pytest.fixture
def rows(printed):
    return lambda *words: json.loads(printed("fields", "--json", *words))["tables"]["fields"]


def test_the_tables_have_every_field_once_and_the_groups_come_first(rows, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    names = [row["name"] for row in rows()]
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
def test_a_field_is_found_by_its_whole_name_its_pattern_its_last_word_and_a_part_of_it(name, pattern, rows):
    (row,) = rows(name)
    about = next(field for field in ALL if field.pattern == pattern).about
    assert (row["name"], row["unit"], row["better"]) == (pattern, about.unit, about.better)
    assert row["meaning"] == about.meaning


def test_a_column_of_reports_is_told_beside_the_field_of_its_name(printed):
    tables = json.loads(printed("fields", "--json", "step_s", "speedup"))["tables"]
    assert [row["name"] for row in tables["fields"]] == ["step_s"]
    assert [row["column"] for row in tables["columns"]] == ["step_s", "speedup"]
    assert tables["columns"][0]["meaning"] == "step (ms, mean over the processes, of `phases.step.mean_s`)"
    assert [*json.loads(printed("fields", "--json", "speedup"))["tables"]] == ["columns"]


def test_a_column_is_found_by_its_heading_and_told_by_the_function_that_works_it_out(printed):
    (row,) = json.loads(printed("fields", "--json", "unhidden communication (%)"))["tables"]["columns"]
    assert row["column"] == "unhidden_communication_fraction"
    assert row["meaning"].endswith("The share of a step that it would be shorter without synchronizing gradients.")


def test_a_guard_and_a_key_of_a_mapping_are_told(printed):
    tables = json.loads(printed("fields", "--json", "busy_machine", "scalars.mine"))["tables"]
    assert tables["guards"][0]["advice"].startswith("Measure when the machine is quiet")
    assert {row["name"] for row in tables["fields"]} == {"scalars"}


def test_sizes_are_listed_with_the_year_in_which_the_course_calls_them_so(printed):
    sizes = json.loads(printed("fields", "--json", "size"))["tables"]["sizes"]
    assert [(size["parameters"], size["CS336"]) for size in sizes if "xl" in size["size"]] == [
        (1_998_235_200, "2025"), (3_406_809_600, "2026, as xl"),
    ]  # fmt: skip
