"""The report's tables, as they were read and found right once."""

from __future__ import annotations

import shutil

import pytest
from report_golden import CASES, GOLDEN, render


@pytest.mark.parametrize("name", CASES)
def test_tables_are_as_they_were_found_right(name, tmp_path):
    assert render(CASES[name](tmp_path), tmp_path) == (GOLDEN / f"report_{name}.md").read_text(encoding="utf-8")


def test_the_order_of_the_arguments_and_the_place_of_the_folder_change_nothing(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for case in ("memory", "compile"):
        CASES[case](first)
    shutil.copytree(first, second)
    text = render([str(first / "memory"), str(first / "compile")], first)
    assert render([str(second / "compile"), str(second / "memory"), str(second)], second) == text
