"""The HTML page: self-contained, safe, and readable in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import look, needs_browser, operate
from report_golden import CASES
from report_results import make_record, write_run, write_sweep

from lmbench.cli import main
from lmbench.report.figures import log_ticks
from lmbench.report.palette import SeriesColours


def make_page(tmp_path: Path, *cases: str) -> Path:
    """A page of the golden cases' results."""
    words = []
    for case in cases:
        results = tmp_path / case
        results.mkdir()
        words.append(CASES[case](results)[0])
    page = tmp_path / "page.html"
    assert main(["report", *words, "--html", str(page)]) == 0
    return page


def test_nothing_in_the_page_points_outside(tmp_path: Path) -> None:
    text = make_page(tmp_path, "step_times", "context").read_text()
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "://" not in without_names
    assert re.search(r"<script [^>]|<link|@import|\ssrc=|javascript:", without_names) is None
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", without_names))
    assert "default-src 'none'" in text


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert make_page(tmp_path / "a", "context").read_bytes() == make_page(tmp_path / "b", "context").read_bytes()


def test_outcomes_stand_in_tables_and_charts(tmp_path: Path) -> None:
    text = make_page(tmp_path, "context").read_text()
    assert re.search(r'<td class="outcome right">OOM \(forward\)</td>', text)
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert sum(">OOM</text>" in chart for chart in charts) == 3
    assert any("<title>2.7B" in chart and "OOM (forward)</title>" in chart for chart in charts)


def test_charts_name_their_units(tmp_path: Path) -> None:
    charts = re.findall(r"<svg.*?</svg>", make_page(tmp_path, "context").read_text(), flags=re.DOTALL)
    for chart, unit in zip(charts, ("step (ms), log", "tokens/s, log", "peak memory (GiB), log"), strict=True):
        assert f">{unit}</text>" in chart


def test_text_from_a_result_is_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>$x_1$"
    for index, size in enumerate((evil, "small")):
        record = make_record({}, edit=lambda run, size=size: run["model"].update(size=size))
        record["replay_command"] = evil
        record["environment"]["gpu"]["name"] = evil
        write_run(tmp_path / "runs" / str(index), record)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("<script") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;$x_1$" in text


@pytest.mark.parametrize("case", CASES)
def test_every_view_has_a_page_with_charts(case: str, tmp_path: Path) -> None:
    assert make_page(tmp_path, case).read_text().count("<svg") >= 2


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_the_page_asks_for_nothing_and_does_not_overflow(width: int, tmp_path: Path) -> None:
    seen = look(make_page(tmp_path, "step_times", "precision", "context", "unrelated", "attention"), width)
    assert seen["requests"] == []
    assert seen["scroll_width"] <= seen["client_width"] <= width
    assert seen["charts"] > 10
    assert seen["smallest_text_px"] >= 8.5


@needs_browser
def test_in_a_browser_a_heading_sorts_its_table_and_puts_it_back(tmp_path: Path) -> None:
    sort, before, up, down, after = operate(
        make_page(tmp_path, "context"),
        1280,
        """
        const table = page.querySelector("figure.table table"), head = table.tHead.rows[0].cells[2];
        const column = () => [...table.tBodies[0].rows].map(row => row.cells[2].textContent);
        const found = [column()];
        for (let n = 0; n < 3; n++) { head.querySelector("button").click(); found.push(column()); }
        return [head.getAttribute("aria-sort"), ...found];
        """,
    )
    figures = [float(text.split(" ")[0].replace(",", "")) for text in up if text[0].isdigit()]
    assert len(figures) > 1
    assert figures == sorted(figures)
    assert [text for text in down if text[0].isdigit()] == [text for text in up if text[0].isdigit()][::-1]
    assert before == after != down
    assert sort is None


@needs_browser
def test_the_browser_would_tell_of_a_request_and_of_an_overflow(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<body><img src="elsewhere.png"><div style="width: 900px">x</div>')
    seen = look(page, 390)
    assert [request.rpartition("/")[2] for request in seen["requests"]] == ["elsewhere.png"]
    assert seen["scroll_width"] > 390


def test_a_sweep_of_many_cells_leaves_charts_out_and_says_so(tmp_path: Path) -> None:
    axes = {"model.size": ["small", "medium"], "data.context_length": [128, 256], "data.batch_size": list(range(1, 15))}
    home = write_sweep(tmp_path, "step_times", axes, view="step_times", steps=1)
    page = tmp_path / "page.html"
    assert main(["report", str(home), "--html", str(page)]) == 0
    assert "more charts are left out" in page.read_text()


@pytest.mark.parametrize(("low", "high"), [(0.1, 700.0), (18.3, 31.0), (40, 44), (1e-3, 1e6), (21, 130)])
def test_a_log_axis_has_at_least_three_round_numbers_and_at_most_seven(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 3 <= len(ticks) <= 7
    assert all(low <= tick <= high and float(f"{tick:.3g}") == pytest.approx(tick) for tick in ticks)


def test_a_series_has_its_colour_in_every_chart_and_compiled_is_the_same_one_dashed() -> None:
    names = ["precision", "matmul", "compile"]
    facts = [
        {"precision": precision, "matmul": matmul, "compile": compiled}
        for precision, matmul in (("32-true", "highest (fp32)"), ("32-true", "high (TF32)"), ("bf16-mixed", "highest"))
        for compiled in ("eager", "default")
    ]
    forward, backward = SeriesColours(names, facts), SeriesColours(names, facts[2:][::-1])
    looks = [forward.of(each) for each in facts]
    assert [backward.of(each) for each in facts[2:]] == looks[2:]
    assert [is_dashed for _, is_dashed in looks] == [False, True] * 3
    assert len({colour for colour, _ in looks}) == 3
