"""Charts of a report, and the page that has them: self-contained, and readable in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from browser import look, needs_browser, operate
from report_golden import CASES, make_attention
from runs import answer_of, make_sweep

from lmbench.cli import main
from lmbench.kernels.kinds import KINDS
from lmbench.kernels.parts import PARTS
from lmbench.report import palette
from lmbench.report.answer import Chart


def make_page(tmp_path: Path, *cases: str) -> Path:
    """A page of the golden cases' results."""
    words = []
    for case in cases:
        results = tmp_path / case
        results.mkdir()
        words.append(CASES[case](results)[0])
    page = tmp_path / "page.html"
    assert main(["report", *words, "--output", str(page)]) == 0
    return page


def points_of(chart: Chart) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = chart.spec["data"]["values"]
    return points


def test_nothing_in_the_page_points_outside_and_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    first, second = (make_page(folder, "step_times", "context") for folder in folders)
    text = first.read_text()
    assert text == second.read_text()
    body = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert re.search(r"<link|@import|\ssrc=|javascript:", body) is None
    assert "default-src 'none'" in text


@pytest.mark.parametrize("case", CASES)
def test_every_view_has_charts(case: str, tmp_path: Path) -> None:
    folder = Path(CASES[case](tmp_path)[0])
    assert sum(len(section.charts) for section in answer_of(folder).sections) >= 1


def test_outcomes_and_units_stand_in_charts(tmp_path: Path) -> None:
    folder = Path(CASES["context"](tmp_path)[0])
    charts = answer_of(folder).sections[0].charts
    missing = [point for chart in charts for point in points_of(chart) if "outcome" in point]
    assert len(missing) == 9
    assert all(point["outcome"] == "OOM" and "OOM (forward)" in point["tip"] for point in missing)
    titles = [re.findall(r"'title': '([^']*)'", str(chart.spec["layer"]))[0] for chart in charts]
    assert titles == ["step (ms), log", "tokens/s, log", "peak memory (GiB), log"]


def test_whiskers_are_a_standard_deviation_between_processes(tmp_path: Path) -> None:
    means = [0.1, 0.101, 0.104, 0.103]
    make_sweep(tmp_path / "s", {}, repeats=4, change=lambda _, repeat: {"phases.step.mean_s": means[repeat]})
    chart = answer_of(tmp_path).sections[0].charts[0]
    (point,) = points_of(chart)
    # std of 100, 101, 104, 103 ms
    assert (point["y"], point["high"] - point["y"], point["y"] - point["low"]) == pytest.approx(
        (102, 1.825742, 1.825742)
    )
    assert chart.caption == "Whiskers: mean ± standard deviation between processes; none where there is one process."


def test_the_square_goes_through_the_last_point_and_is_cut_at_the_lowest(tmp_path: Path) -> None:
    chart = answer_of(make_attention(tmp_path / "a", [256, 1024, 16384], [16])).sections[0].charts[0]
    first, last = chart.spec["layer"][0]["data"]["values"]
    points = [point for point in points_of(chart) if "y" in point]
    naive = [point for point in points if point["series"] == "naive"]
    assert (last["x"], last["y"]) == (16384, naive[-1]["y"])
    assert first["y"] == pytest.approx(max(min(point["y"] for point in points), last["y"] * (256 / 16384) ** 2))
    assert last["y"] / first["y"] == pytest.approx((last["x"] / first["x"]) ** 2)
    assert chart.caption.startswith("Dashed: context^2, through the last point of naive. Whiskers")


def test_attention_that_is_wrong_is_incorrect_in_a_chart(tmp_path: Path) -> None:
    error = {"kind": "UsageError", "message": "incorrect: my:flex is off by 2", "phase": "setup"}
    home = make_attention(
        tmp_path / "a", [64, 777], [16], repeats=1,
        change=lambda run, _: {"outcome": "error", "error": error} if run["model"]["attention"] == "flex" else {},
    )  # fmt: skip
    section = answer_of(home).sections[0]
    assert {point["outcome"] for point in points_of(section.charts[0]) if "outcome" in point} == {"incorrect"}
    assert any("for 12.14x the context" in line.text for line in section.headline)


def test_a_sweep_of_many_cells_leaves_charts_out_and_says_so(tmp_path: Path) -> None:
    axes = {"model.size": ["small", "medium"], "data.context_length": [128, 256], "data.batch_size": list(range(1, 15))}
    section = answer_of(make_sweep(tmp_path / "s", axes, view="step_times", steps=1)).sections[0]
    assert any("left out" in line.text for line in section.notes)


def test_a_name_has_one_colour_in_all_charts(tmp_path: Path) -> None:
    charts = answer_of(Path(CASES["kernels"](tmp_path)[0])).sections[0].charts
    colours: dict[str, set[str]] = {}
    for chart in charts:
        scale = chart.spec["layer"][0]["encoding"]["color"]["scale"]
        for name, colour in zip(scale["domain"], scale["range"], strict=True):
            colours.setdefault(name, set()).add(colour)
    assert {"ffn", "gemm", "softmax"} <= colours.keys()
    assert all(len(found) == 1 for found in colours.values())
    for known in (palette.PARTS, palette.KINDS, palette.PHASES):
        assert len(set(known.values())) == len(known)
    assert set(palette.PARTS) >= set(PARTS)
    assert set(palette.KINDS) == set(KINDS)
    assert palette.part_colour("mask+softmax") == palette.PARTS["several"]


def test_a_series_has_its_colour_in_every_chart_and_compiled_is_the_same_colour_dashed() -> None:
    names = ["precision", "matmul", "compile"]
    facts = [
        {"precision": precision, "matmul": matmul, "compile": compiled}
        for precision, matmul in (("32-true", "highest (fp32)"), ("32-true", "high (TF32)"), ("bf16-mixed", "highest"))
        for compiled in ("eager", "default")
    ]
    forward, backward = palette.SeriesColours(names, facts), palette.SeriesColours(names, facts[2:][::-1])
    looks = [forward.of(each) for each in facts]
    assert [backward.of(each) for each in facts[2:]] == looks[2:]
    assert [is_dashed for _, is_dashed in looks] == [False, True] * 3
    assert len({colour for colour, _ in looks}) == 3


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_the_page_asks_for_nothing_and_does_not_overflow(width: int, tmp_path: Path) -> None:
    seen = look(make_page(tmp_path, "step_times", "precision", "context", "unrelated", "attention"), width)
    assert seen["requests"] == []
    assert seen["scroll_width"] <= seen["client_width"] <= width
    assert seen["charts"] > 10


@needs_browser
def test_in_a_browser_a_heading_sorts_its_table_and_puts_it_back(tmp_path: Path) -> None:
    sort, before, up, down, after = operate(
        make_page(tmp_path, "context"),
        1280,
        """
        const table = page.querySelector(".scroll > table"), head = table.tHead.rows[0].cells[2];
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
