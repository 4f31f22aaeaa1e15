"""The report's tables against golden files, which were read and found right once."""

from __future__ import annotations

from report_golden import CASES
from tables import cases

from conftest import check_golden


@cases("name", *CASES)
def test_tables_equal_their_golden_files(name, tmp_path, printed):
    text = printed("report", *CASES[name](tmp_path), "--format=markdown")
    check_golden(f"report_{name}.md", text.replace(str(tmp_path), "FOLDER"))
