"""`lmbench fields`: what the numbers mean, off the schema."""

from __future__ import annotations

import json
import re

import pytest

from lmbench.cli import main
from lmbench.records.schema import fields

ALL = [*fields("step").values(), *fields("run").values()]


def rows(capsys, *words):
    assert main(["fields", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["tables"]["fields"]


def test_the_tables_have_every_field_once_in_rows_of_four_cells(capsys):
    assert main(["fields", "--format", "markdown"]) == 0
    table = capsys.readouterr().out
    lines = [line for line in table.splitlines() if line.startswith("| ") and not re.match(r"\| (field |---)", line)]
    names = [re.match(r"\| (\S+)", line)[1].replace("&lt;", "<") for line in lines]
    assert set(names) == {field.pattern for field in ALL}
    # `rank` and `nonfinite` are fields of both records.
    assert sorted(name for name in names if names.count(name) > 1) == ["nonfinite", "nonfinite", "rank", "rank"]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in lines)
    titles = [line for line in table.splitlines() if line.startswith("**")]
    assert len(titles) == len(set(titles)) > 10


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("forward_s", "forward_s"),
        ("phases.forward.mean_s", "phases.<phase>.mean_s"),
        ("phases.<phase>.mean_s", "phases.<phase>.mean_s"),
        ("run_peak_allocated_bytes", "memory.run_peak_allocated_bytes"),
        ("run_peak_alloc", "memory.run_peak_allocated_bytes"),
    ],
)
def test_a_field_is_found_by_its_whole_name_its_pattern_its_last_word_and_a_part_of_it(name, pattern, capsys):
    (row,) = rows(capsys, name)
    about = next(field for field in ALL if field.pattern == pattern).about
    assert (row["name"], row["unit"], row["better"]) == (pattern, about.unit, about.better)
    assert row["meaning"] == about.meaning


def test_a_part_of_the_record_is_all_of_its_fields(capsys):
    names = [row["name"] for row in rows(capsys, "throughput")]
    assert "throughput.mfu_fraction" in names
    assert all(name.startswith("throughput.") for name in names)


def test_a_misspelt_field_is_one_line_with_the_nearest(capsys):
    assert main(["fields", "forwrd_s"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean forward_s?" in line
