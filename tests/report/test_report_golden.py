"""The report's tables, as they were read and found right once."""

from __future__ import annotations

import pytest
from report_golden import CASES, GOLDEN, render


@pytest.mark.parametrize("name", CASES)
def test_tables_are_as_they_were_found_right(name, tmp_path):
    assert render(CASES[name](tmp_path), tmp_path) == (GOLDEN / f"report_{name}.md").read_text(encoding="utf-8")
