"""Charts of a report and their page, which is self-contained and readable in a real browser."""

from __future__ import annotations

import itertools
import json
import re

import yaml
from browser import look, needs_browser, operate
from report_golden import CASES
from runs import section_of, table_of

from lmbench.cli import main
from lmbench.records.vocabulary import PHASES
from lmbench.report.answer import Chart
from lmbench.report.charts import steps_charts
from lmbench.report.page import chart_html, svg


def make_page(tmp_path, *cases):
    """A page of the golden cases' results."""
    words = []
    for case in cases:
        results = tmp_path / case
        results.mkdir(parents=True)
        words.append(CASES[case](results)[0])
    page = tmp_path / "page.html"
    assert main(["report", *words, f"--output={page}"]) == 0
    return page


def test_the_same_results_give_the_same_page_with_nothing_that_points_outside(tmp_path):
    first, second = (make_page(tmp_path / name, "step_times", "any_sweep").read_text() for name in "ab")
    assert first == second
    assert re.search(r"<link|@import|\ssrc=|javascript:", re.sub(r"(?s)<script>.*?</script>", "", first)) is None
    assert "default-src 'none'" in first


def test_a_page_names_its_subject_and_links_to_its_sections_if_it_has_several(tmp_path, swept):
    for cases in (["step_times"], ["step_times", "any_sweep"]):
        page = make_page(tmp_path / str(len(cases)), *cases).read_text()
        assert ("<nav" in page) == (len(cases) > 1)
    run, shown = swept({"model.size": ["small"]}) / "runs", tmp_path / "show.html"
    assert main(["show", str(next(run.iterdir())), f"--output={shown}"]) == 0
    assert re.search("<title>small, .*parameters", shown.read_text()) is not None


def test_the_picture_of_steps_has_the_phases_of_a_usual_step_and_not_of_the_first_alone(swept):
    folder = swept({"model.size": ["small"]}) / "runs"
    steps = next(folder.glob("*/steps.jsonl"))
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    for number, line in enumerate(lines):
        line |= {"step_s": 1.0 if number == 0 else 0.01, "forward_s": 0.009, "other_s": 0.9 if number == 0 else 1e-6}
    steps.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (chart,) = steps_charts(steps.parent)
    assert {point["series"] for point in chart.spec["data"]["values"]} == {"step", "forward"}


def test_an_svg_file_has_the_palette_and_no_script_and_a_chart_escapes_its_texts():
    rows = [{"x": 1, "text": "<b> </script> \u202e"}]
    encoding = {"x": {"field": "x", "type": "quantitative"}, "color": {"field": "text", "type": "nominal"}}
    spec = {"data": {"values": rows}, "mark": "point", "encoding": encoding}
    picture = svg(Chart("Step time", spec, "Whiskers: 95 %"))
    assert (picture[:4], "--series-1: #2f6fde" in picture, "<script" in picture) == ("<svg", True, False)
    assert {">Step time</text>", ">Whiskers: 95 %</text>"} <= {*re.findall(">[^<]+</text>", picture)}
    assert "\u202e" not in chart_html(spec)
    assert chart_html(spec).count("</script") == 1


@needs_browser
def test_in_a_browser_a_page_fits_asks_for_nothing_and_sorts_its_tables(tmp_path):
    page = make_page(tmp_path, "step_times", "precision", "unrelated", "attention")
    seen = look(page, 390)
    assert seen["requests"] == []
    assert seen["scroll_width"] <= seen["client_width"] <= 390
    assert seen["charts"] > 10
    assert seen["cut_texts"] == []
    before, up, down, after = operate(
        page,
        1280,
        """
        const tables = [...page.querySelectorAll(".scroll > table")];
        const table = tables.find(each => each.caption.textContent.includes("batch 64"));
        const head = table.tHead.rows[0].cells[4];
        const column = () => [...table.tBodies[0].rows].map(row => row.cells[4].textContent);
        const columns = [column()];
        for (let n = 0; n < 3; n++) { head.querySelector("button").click(); columns.push(column()); }
        return columns;
        """,
    )
    figures = [float(text.split(" ")[0].replace(",", "")) for text in up if text[0].isdigit()]
    assert len(figures) > 1
    assert figures == sorted(figures)
    assert [text for text in down if text[0].isdigit()] == [text for text in up if text[0].isdigit()][::-1]
    assert before == after != down


#: Cells of which two have long labels, since all of these settings differ.
LABELS = """
- {trainer.precision: 32-true, model.attention: naive, data.batch_size: 4, model.size: small, trainer.recompute: null}
- &long {trainer.precision: bf16-mixed, model.attention: sdpa_efficient, data.batch_size: 16, model.size: medium,
    trainer.recompute: {keep: attention}}
- {<<: *long, model.size: large}
"""


@needs_browser
def test_a_bar_whose_label_is_longer_than_the_page_has_the_whole_label(tmp_path, swept):
    cells = yaml.safe_load(LABELS)
    page = tmp_path / "page.html"
    assert main(["report", str(swept(cells)), f"--output={page}"]) == 0
    seen = look(page, 360)
    assert seen["charts"] == 3
    assert seen["cut_texts"] == []


def test_a_series_has_one_colour_in_all_charts_of_a_page_whatever_others_a_chart_has(swept):
    backends = {"32-true": ["naive", "sdpa"], "bf16-mixed": ["naive", "flex", "sdpa"]}
    cells = [
        {"trainer.precision": precision, "data.context_length": context, "model.attention": attention}
        for precision, context in itertools.product(backends, (256, 512))
        for attention in backends[precision]
    ]
    chart = {"title": "Step", "kind": "lines", "y": "step_s", "x": "context", "series": ["attention"]}
    charts = section_of(swept(cells, view=table_of("step_s", charts=[chart]))).charts()
    scales = [chart.spec["layer"][-1]["encoding"]["color"]["scale"] for chart in charts]
    two, three = (dict(zip(scale["domain"], scale["range"], strict=True)) for scale in scales)
    assert two.items() < three.items()
    assert len({*three.values()}) == 3


def test_a_stack_leaves_out_the_phases_that_no_bar_would_show(swept):
    def change(run, repeat):
        return {"phases.other.mean_s": 1e-6, "phases.transfer.mean_s": 0.01, "phases.data.mean_s": 1e-6}

    home = swept({"mode": ["forward", "inference"]}, fixed={"model.size": "small"}, change=change)
    (stack,) = (chart for chart in section_of(home, view="step_times").charts() if chart.title == "Where the step goes")
    series = {point["series"] for point in stack.spec["data"]["values"]}
    assert {"forward", "transfer"} <= series
    assert not {"other", "data"} & series


def test_each_phase_has_a_colour_of_its_own_name():
    chart = Chart("", {"mark": "point", "data": {"values": [{}]}})
    colours = dict(re.findall(r"--of-(\w+): var\((--series-\d+)\)", svg(chart)))
    assert {*PHASES} <= {*colours}
    assert len({colours[phase] for phase in PHASES}) == len(PHASES)
