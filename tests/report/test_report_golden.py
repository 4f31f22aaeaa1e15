"""The report's tables, as they were read and found right once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from report_golden import CASES, GOLDEN, build, render


@pytest.mark.parametrize("name", CASES)
def test_tables_are_as_they_were_found_right(name: str, tmp_path: Path) -> None:
    assert build(name, tmp_path / "results") == (GOLDEN / f"report_{name}.md").read_text(encoding="utf-8")


def test_the_order_of_the_arguments_and_the_place_of_the_folder_change_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    CASES["batch"](first)
    CASES["compile"](first)
    shutil.copytree(first, second)
    text = render([str(first / "batch"), str(first / "compile")], first)
    assert render([str(second / "compile"), str(second / "batch"), str(second)], second) == text


def test_columns_of_a_markdown_table_are_aligned(tmp_path: Path) -> None:
    lines = build("step_times", tmp_path / "results").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    bars = [[place for place, character in enumerate(line) if character == "|"] for line in table]
    assert bars.count(bars[0]) == len(bars)
