"""Attention by itself in a report: who sets the time, growth, bytes, published figures, and the fastest back end."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attention_results import make_attention, write_attention
from report_results import set_outcome, write_sweep

from lmbench.cli import main
from lmbench.commands.report import make_catalogue
from lmbench.precision import FP32_MATMUL
from lmbench.reference.published import load_figures
from lmbench.report.cells import Cell
from lmbench.report.facts import EAGER
from lmbench.report.gather import gather
from lmbench.report.references import Published, References
from lmbench.report.sections import Options, Section, build_report
from lmbench.report.table import Table

BEFORE_BACKWARD = "memory.phase_begin_allocated_bytes.backward"
NAIVE = {
    "size": "AttentionLayer", "mode": "forward_backward", "batch": 8, "context": 4096, "head_dim": 64, "heads": 1,
    "causal": "causal", "precision": "32-true", "matmul": FP32_MATMUL, "compile": EAGER, "attention": "naive",
}  # fmt: skip
Edit = Callable[[dict[str, Any]], None]


def section(home: Path, view: str | None = None, edit: Edit = lambda run: None) -> Section:
    """The report of a sweep, each run's record changed before."""
    for path in home.glob("runs/*/run.json"):
        run = json.loads(path.read_text())
        edit(run)
        path.write_text(json.dumps(run))
    return build_report(gather([home]), make_catalogue(), Options(view)).sections[0]


def column(table: Table, heading: str) -> list[str]:
    place = [each.text for each in table.headings].index(heading)
    return [row[place].text for row in table.rows]


def told(table: Table) -> list[tuple[str, list[str]]]:
    """Each row's fastest with the notes on it."""
    place = [each.text for each in table.headings].index("fastest")
    return [(row[place].text, [table.notes[number - 1] for number in row[place].notes]) for row in table.rows]


# times, growth, bytes


def test_a_row_says_who_sets_its_time_and_has_the_devices_own_beside_it(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 16384], [64], repeats=1, profiled_contexts=[256])
    table = section(home).tables[0]
    short, long = [row for row, context in enumerate(column(table, "context")) if context == "256"], 4
    for heading, word in (("forward is", "host-bound"), ("backward is", "host-bound")):
        assert [column(table, heading)[row] for row in short] == [word] * 4
        assert column(table, heading)[long:] == ["queued"] * 4
    spans, busy = (
        [float(text.partition(" ")[0]) for text in column(table, name)[:4]]
        for name in ("forward (ms)", "forward, device busy (ms)")
    )
    assert all(10 * own < span for own, span in zip(busy, spans, strict=True))
    assert column(table, "forward, device busy (ms)")[long:] == ["-"] * 4


def test_time_grows_as_the_square_of_a_long_context_and_hardly_with_a_short_one(tmp_path: Path) -> None:
    table = section(write_attention(tmp_path, [256, 1024, 16384, 32768], [16], repeats=1)).tables[1]
    naive = [row for row, name in enumerate(column(table, "attention")) if name == "naive"][::2]
    powers = [column(table, "forward ~ context^")[row] for row in naive]
    assert powers[0] == "-"
    assert float(powers[1]) < 0.2
    assert powers[3] == "2.00"


def test_the_rate_of_a_causal_pass_is_that_of_the_half_which_is_needed(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [16384], [64], repeats=1)
    rows = csv_rows(home)
    flash = next(row for row in rows if row["attention"] == "sdpa")
    needed = 2 * 8 * 16384**2 * 64
    assert float(flash["forward_flops_per_s"]) == pytest.approx(needed / float(flash["forward_s"]))
    assert float(flash["backward_flops_per_s"]) == pytest.approx(2 * needed / float(flash["backward_s"]))
    peak = json.loads(next(home.glob("runs/*/run.json")).read_text())["flops"]["peak_flops_per_s"]
    share = float(flash["forward_mfu_fraction"])
    assert share == pytest.approx(float(flash["forward_flops_per_s"]) / peak)


def csv_rows(home: Path) -> list[dict[str, str]]:
    from lmbench.report.delimited import to_csv

    return list(csv.DictReader(io.StringIO(to_csv(build_report(gather([home]), make_catalogue())))))


def test_out_of_memory_is_a_row_that_explains_the_bytes(tmp_path: Path) -> None:
    table = section(write_attention(tmp_path, [16384, 65536], [64], repeats=1)).tables[2]
    row = next(row for row in table.rows if row[0].text == "65536" and row[1].text == "naive")
    assert [entry.text for entry in row if entry.kind == "outcome"] == ["OOM (forward)"]
    for heading in ("refused (GiB)", "saved by shape (GiB)"):
        assert column(table, heading)[table.rows.index(row)] == "128.00"
    (note,) = [table.notes[int(number) - 1] for number in re.findall(r"\d+", row[-1].text)]
    assert note == (
        "128.00 GiB more were asked for: one batch x heads x context x context tensor of 4 B an element; 0.50 GiB were "
        "held of 139.80 GiB"
    )


def test_a_row_says_what_pytorch_took_for_plain_sdpa(tmp_path: Path) -> None:
    table = section(write_attention(tmp_path, [256], [64], repeats=1)).tables[1]
    told = {row[0].text: row[-1].text for row in table.rows}
    assert (told["sdpa"], told["flex"]) == ("[1]", "")
    assert table.notes == ["PyTorch took sdpa_efficient for sdpa"]


def test_a_refused_tensor_of_another_size_is_not_called_one_of_the_scores(tmp_path: Path) -> None:
    def other_size(run: dict[str, Any]) -> None:
        if run["outcome"] == "oom":
            run["memory"]["refused"]["requested_bytes"] += 4 * 2**20

    home = write_attention(tmp_path, [16384, 65536], [64], repeats=1)
    assert not any("one batch x" in note for note in section(home, edit=other_size).tables[2].notes)


def test_a_shorter_window_of_the_longest_context_is_no_fact(tmp_path: Path) -> None:
    axes = {"data.context_length": [256, 512], "measure.steps": [100]}
    home = write_sweep(tmp_path, "own", axes, edit=lambda run, place, _: None)
    for path in home.glob("runs/512*/run.json"):
        run = json.loads(path.read_text())
        run["sweep"]["axes"]["measure.steps"] = 34
        path.write_text(json.dumps(run))
    assert [each.text for each in section(home).tables[0].headings][:2] == ["context", "step (ms)"]
    only = write_sweep(tmp_path, "steps", {"measure.steps": [10, 100]})
    assert section(only).tables[0].headings[0].text == "steps"


# published figures


def beside(name: str, **facts: Any) -> dict[str, Published]:
    """Published figures beside one cell, by the source's table."""
    cells = [Cell("NVIDIA H200", {**NAIVE, **facts}), Cell("NVIDIA H200", {**NAIVE, "context": 512})]
    found = References().beside([make_catalogue().column(name)], cells)
    return {label.partition(",")[0].removeprefix("ref. 001 "): figures[0] for label, figures in found.items()}


def test_published_times_of_attention_stand_beside_the_same_shape_table_by_table() -> None:
    eager = beside("forward_s")
    assert {table: figure.text for table, figure in eager.items()} == {"first table": "2.659", "compile table": "2.756"}
    assert "batch, precision, mask unstated" in eager["compile table"].caveats[0]
    assert {name: figure.text for name, figure in beside("backward_s", compile="default").items()} == {
        "compile table": "3.667"
    }
    assert beside(BEFORE_BACKWARD, context=16384, head_dim=16)["first table"].value == 16.1172 * 2**30


@pytest.mark.parametrize(
    "other",
    [
        {"attention": "sdpa"},
        {"precision": "bf16-true"},
        {"batch": 4, "compile": EAGER, "context": 2048},
        {"heads": 8},
        {"head_dim": 48},
        {"mode": "forward"},
        {"head_dim": None},
    ],
)
def test_no_published_time_stands_beside_another_shape_or_back_end(other: dict[str, Any]) -> None:
    assert beside("forward_s", **other) == {}


def test_a_cold_first_time_is_hidden_and_a_contradicted_one_told_of() -> None:
    assert set(beside("forward_s", context=256, head_dim=16)) == {"compile table"}
    assert "differ 1.5 to 2.9 times" in beside("backward_s", context=256)["first table"].caveats[0]
    assert not any("differ" in caveat for caveat in beside("backward_s")["first table"].caveats)


def test_every_time_and_memory_of_a_whole_pass_is_loaded() -> None:
    found = [figure for figure in load_figures() if figure.head_dim is not None]
    # Two tables of 20 shapes, the second eager and compiled; memory in the first alone; one is cold.
    assert len(found) == 2 * (20 + 40) + 20 - 1


def test_csv_has_published_figures_in_si_under_the_columns_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = write_attention(tmp_path, [1024, 4096], [64], repeats=1)
    assert main(["report", str(home), "--reference", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    (row,) = [row for row in rows if (row["context"], row["attention"], row["compile"]) == ("4096", "naive", EAGER)]
    label = "reference 001 first table, GPU unstated"
    assert float(row[f"{label}: forward_s"]) == 0.00265901
    assert float(row[f"{label}: {BEFORE_BACKWARD}"]) == 1.11719 * 2**30


# the fastest


def test_the_fastest_is_named_with_its_margin_and_what_gave_no_figure(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 65536], [64])
    forward, backward, both = section(home, "attention_backends").tables[:3]
    assert told(backward)[1] == ("sdpa", [])
    assert column(backward, "second")[1] == "flex"
    low, high = map(float, column(backward, "95 % interval")[1].removesuffix(" %").split(" .. "))
    assert low < float(column(backward, "second takes")[1].removesuffix(" %")) < high
    assert low == pytest.approx(44, abs=1)
    assert column(both, "no figure")[1] == "OOM: naive, naive compiled"
    name, notes = told(forward)[0]
    assert (name, len(notes)) == ("sdpa", 1)
    assert "the host's time that is compared" in notes[0]


def test_a_difference_within_one_percent_is_the_same_and_a_wide_interval_undecided(tmp_path: Path) -> None:
    def spread(run: dict[str, Any]) -> None:
        if run["model"]["attention"] == "sdpa":
            run["phases"]["backward"]["mean_s"] *= 1 + 0.5 * run["sweep"]["repeat"]

    home = write_attention(tmp_path, [16384], [64])
    forward, backward = section(home, "attention_backends", spread).tables[:2]
    assert told(forward)[0][0] == "same: flex, sdpa"
    assert "within 1 %" in told(forward)[0][1][0]
    assert told(backward)[0][0] == "undecided: naive compiled, sdpa"


def test_two_processes_decide_nothing(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [16384], [64], repeats=2)
    assert told(section(home, "attention_backends").tables[1])[0][0].startswith("undecided: ")


def test_a_row_says_that_inductor_measured_something_else(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256], [64])

    def fuse(run: dict[str, Any]) -> None:
        # The first process compiled; the others found its graphs, which do not say.
        if run["compile"]["is_enabled"] and run["sweep"]["repeat"] == 0:
            run["compile"]["is_attention_fused"] = True

    table = section(home, "attention", fuse).tables[0]
    assert table.notes == ["Inductor put PyTorch's fused attention in the place of naive"]
    assert [[entry.text for entry in row[:2]] for row in table.rows if row[-1].text == "[1]"] == [["naive", "default"]]


def test_where_nothing_ran_the_row_says_how_each_ended(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 65536], [64])

    def end(run: dict[str, Any]) -> None:
        if run["data"]["context_length"] == 65536:
            set_outcome(run, "timeout" if run["model"]["attention"] == "flex" else "oom", "forward")

    table = section(home, "attention_backends", end).tables[0]
    assert [entry.text for entry in table.rows[1]] == [
        "65536", "-", "-", "-", "-", "-", "OOM: naive, naive compiled, sdpa; timeout: flex",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "answer", "said"),
    [
        ("among: [attention], columns: [forward_s, backward_s]", "", "with `among` it takes one"),
        ("among: [attention], columns: [kept]", "", "column 'kept' is unknown"),
        ("among: [attention], columns: [peak_bytes]", "", "'peak_bytes' is no number of one process"),
        ("among: [attention], across: context, columns: [forward_s]", "", "leave one of them out"),
        ("among: [atention], columns: [forward_s]", "", "did you mean attention?"),
        ("columns: [forward_s]", "kind: fastest, y: forward_s", "an answer of kind 'fastest' has no 'among'; give it"),
        (
            "columns: [forward_s]", "kind: fastest, y: peak_bytes, among: [attention]",
            "'peak_bytes' is no number of one process",
        ),
        ("columns: [forward_s]", "kind: best, y: tokens_per_s", "an answer of kind 'best' has no 'x'; give it"),
    ],
)  # fmt: skip
def test_a_mistake_in_what_is_the_fastest_is_one_line(
    table: str, answer: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = write_attention(tmp_path, [256], [64], repeats=1)
    answers = f"answers: [{{{answer}}}], " if answer else ""
    view = f"{{title: T, {answers}tables: [{{title: A, {table}}}]}}"
    (tmp_path / "own.yaml").write_text(f"matrix: {{}}\nview: {view}\n")
    assert main(["report", str(home), "--view", str(tmp_path / "own.yaml")]) == 2
    assert said in capsys.readouterr().err


def test_the_answer_names_no_winner_where_the_table_has_none(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 16384], [64], repeats=2)
    (line,) = section(home, "attention_backends").answers
    assert line.startswith("Fastest by forward + backward: undecided in 2 of 2, up to context 16384 (sdpa, ")


def test_a_precision_is_no_size_that_an_answer_goes_up_to(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 16384], [64], repeats=2)
    for path in home.glob("runs/*/run.json"):
        run = json.loads(path.read_text())
        if run["data"]["context_length"] == 16384:
            run["precision"], run["data"]["context_length"] = "bf16-true", 256
            path.write_text(json.dumps(run))
    (line,) = section(home, "attention_backends").answers
    assert "in 2 of 2, at bf16-true (" in line


# charts


def test_charts_have_a_line_of_the_square_readable_lengths_and_one_meaning_of_whiskers(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 1024, 16384, 65536], [16])
    page = tmp_path / "page.html"
    assert main(["report", str(home), "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("Dashed: context^2, through the last point of naive.") == 3
    assert text.count(">context^2</text>") == 3
    for length in ("256", "1k", "16k", "64k"):
        assert f">{length}</text>" in text
    assert text.count(">naive compiled</text>") == 3
    assert text.count("Whiskers") == 1
    assert "Whiskers: mean ± standard deviation between processes; none where there is one process." in text


def test_the_square_goes_through_the_last_point_and_is_cut_at_the_lowest(tmp_path: Path) -> None:
    from lmbench.report.charts import build_charts

    made = section(write_attention(tmp_path, [256, 1024, 16384], [16]))
    spec = made.view.charts[0]
    (chart,), _ = build_charts(
        spec, made.catalogue.chart_kinds["lines"], made.cells, made.pairing, made.catalogue.column
    )
    assert chart.guide is not None
    (x0, y0), (x1, y1) = chart.guide.ends
    assert (x1, y1) == (16384, chart.series[0].points[-1].y)
    assert y0 == pytest.approx(max(chart.lowest, y1 * (256 / 16384) ** 2))
    assert y1 / y0 == pytest.approx((x1 / x0) ** 2)


def test_a_made_up_run_is_one_that_a_real_one_could_be() -> None:
    from lmbench.records.codec import decode_run

    run = decode_run(json.dumps(make_attention({
        "data.context_length": 256, "model.head_dim": 16, "model.attention": "naive", "trainer.compile": False,
    })).encode())  # fmt: skip
    assert run.memory.saved_bytes == 8 * 256 * 256 * 4


def test_a_page_says_incorrect_at_the_cross_of_attention_that_is_wrong_and_rounds_what_contexts_grow_by(
    tmp_path: Path,
) -> None:
    home = write_attention(tmp_path, [64, 777], [16], repeats=1)
    for path in home.glob("runs/*flex*/run.json"):
        run = json.loads(path.read_text())
        error = {"kind": "UsageError", "message": "incorrect: my:flex is off by 2", "phase": "setup"}
        path.write_text(json.dumps(run | {"outcome": "error", "error": error}))
    page = tmp_path / "page.html"
    assert main(["report", str(home), "--html", str(page)]) == 0
    text = page.read_text()
    charts = " ".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert re.search(r"<text[^>]*>incorrect</text>", charts)
    assert ">error:<" not in charts
    assert "for 12.14x the context" in text
