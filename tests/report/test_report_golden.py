"""The report's tables against golden files, which were read and found right once."""

from __future__ import annotations

import pytest
from report_golden import CASES, GOLDEN, render


@pytest.mark.parametrize("name", CASES)
def test_tables_equal_their_golden_files(name, tmp_path):
    assert render(CASES[name](tmp_path), tmp_path) == (GOLDEN / f"report_{name}.md").read_text(encoding="utf-8")
