"""Answers over a report's charts: what is compared, how it is told, and what is not told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_golden import BF16
from report_results import write_sweep

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.report.feature import Catalogue


def shown(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert main(["report", str(folder), "--format", "markdown", *words]) == 0
    return capsys.readouterr().out


def test_what_is_not_told_apart_is_not_called_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(run: dict[str, Any], axes: dict[str, Any], repeat: int) -> None:
        factor = 1 + 0.1 * repeat if axes["trainer.compile"] else 1.05 + 0.01 * repeat
        run["phases"]["step"]["mean_s"] = 0.1 * factor

    axes = {"model.size": ["small", "large"], "trainer.compile": [False, True]}
    home = write_sweep(tmp_path, "compile", axes, view="compile", fixed=BF16, repeats=3, edit=edit)
    told = "**compiled is not told from eager by time at large (110.0 ± 10.0 against 106.0 ± 1.0 ms), never pays, "
    assert told in shown(capsys, home)


def test_an_answer_is_the_first_thing_below_the_question_on_a_page(tmp_path: Path) -> None:
    axes = {"model.size": ["small"], "data.batch_size": [8, 32]}
    home = write_sweep(tmp_path, "batch", axes, view="batch", fixed=BF16, repeats=3)
    assert main(["report", str(home), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    question, answer, chart = (page.index(f'class="{name}"') for name in ("question", "answer", "charts"))
    assert question < answer < chart
    assert "Most tokens/s at batch " in page[answer:chart]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"kind": "agains"}, "invalid enum value"),
        ({"kind": "against", "y": "step_z"}, "column 'step_z' is unknown"),
        ({"kind": "along", "x": "contex"}, "fact 'contex' is unknown"),
        ({"kind": "parts", "of": ["no_*_such"]}, "no column is like"),
    ],
)
def test_a_mistake_in_an_answer_is_a_line(answer: dict[str, Any], message: str) -> None:
    view = {"title": "t", "tables": [{"title": "t", "columns": ["step_s"]}], "answers": [answer]}
    with pytest.raises(UsageError, match=message):
        Catalogue().view(view)
