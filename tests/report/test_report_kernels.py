"""Profiled runs in a report: which view shows them, what their headings may say, and what a damaged record leaves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, operate
from paths import TRACES
from report_results import add_kernels, make_record, write_run, write_sweep

from lmbench.cli import main
from lmbench.kernels.findings import examine_run
from lmbench.kernels.kinds import KINDS
from lmbench.kernels.parts import PARTS
from lmbench.records.codec import as_dict
from lmbench.report import palette
from lmbench.report.palette import part_colour
from lmbench.report.units import percent

NAIVE = {"model.size": "small", "model.attention": "naive", "trainer.precision": "32-true"}
Edit = Callable[[dict[str, Any]], None]


def profiled(folder: Path, axes: dict[str, Any], edit: Edit | None = None) -> None:
    def profile(run: dict[str, Any]) -> None:
        add_kernels(run, axes)
        if edit is not None:
            edit(run)

    write_run(folder, make_record(axes, edit=profile))


def shown(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


def without_attention(run: dict[str, Any]) -> None:
    """A model of somebody else's: nothing is known of its attention and its optimizer."""
    run["model"] = {"name": "theirs.Llama", "parameter_count": 1}
    run["config"]["model"] = {}


def first_table(text: str) -> tuple[str, list[dict[str, str]]]:
    """Caption and rows of the first table."""
    lines = text.partition("**Kernel time**: ")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if line.startswith("|")]
    count = next((place for place, line in enumerate(lines[2:]) if not line.startswith("|")), len(cells))
    return lines[0], [dict(zip(cells[0], row, strict=True)) for row in cells[2:count]]


def test_a_fact_that_a_row_does_not_have_is_a_column_and_not_in_the_heading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tmp_path / "own", NAIVE)
    profiled(tmp_path / "theirs", NAIVE, without_attention)
    caption, rows = first_table(shown(capsys, tmp_path, "--view", "kernels"))
    assert "naive" not in caption
    assert "AdamW" not in caption
    told = {row["size"]: (row["attention"], row["optimizer"]) for row in rows}
    assert told == {"small": ("naive", "AdamW fused"), "Llama": ("-", "-")}
    assert "32-true" in caption


def test_within_a_sweep_too_what_lived_without_a_fact_does_not_share_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(run: dict[str, Any], axes: dict[str, Any], _repeat: int) -> None:
        add_kernels(run, axes)
        if axes["data.context_length"] == 512:
            run["model"]["optimizer"] = None

    home = write_sweep(tmp_path, "kernels", {"data.context_length": [256, 512]}, view="kernels", fixed=NAIVE, edit=edit)
    caption, rows = first_table(shown(capsys, home))
    assert "AdamW" not in caption
    assert [row["optimizer"] for row in rows] == ["AdamW fused", "-"]


def test_profiled_runs_alone_are_shown_by_their_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiled(tmp_path / "a", NAIVE)
    write_run(tmp_path / "sync", make_record(NAIVE, 1, lambda run: run.update(clock="sync")))
    text = shown(capsys, tmp_path)
    assert text.startswith("## Kernels\n")
    assert "multi_tensor_apply" in text or "elementwise" in text
    assert "--view kernels" not in text


def test_profiled_runs_beside_others_say_how_to_see_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiled(tmp_path / "a", NAIVE)
    write_run(tmp_path / "b", make_record(NAIVE, 1))
    text = shown(capsys, tmp_path)
    assert text.startswith("## Runs\n")
    assert re.search(r"1 run under a profiler: in no timing table.*; `--view kernels` shows their kernels", text)


def test_a_profiled_run_without_a_summary_points_at_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tmp_path / "a", NAIVE, lambda run: run.pop("kernels"))
    assert "1 run without kernel figures in run.json: `lmbench kernels RUN`" in shown(capsys, tmp_path)


def put(path: str, value: Any) -> Edit:
    """Sets what is at a dotted path of the summary; the path `kernels` is all of it."""

    def edit(run: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        holder = run
        for parent in parents:
            holder = holder[parent]
        holder[last] = value

    return edit


DAMAGES = {
    "all a text": put("kernels", "x"),
    "phases a list": put("kernels.phases", []),
    "a part's time a text": put("kernels.phases.forward.parts", {"ffn_s": "x", "norm_s": 0.001}),
    "kinds null": put("kernels.phases.step.kinds", None),
    "a top kernel without its share": put("kernels.phases.step.top_other", {"name": "x"}),
    "a window a text": put("kernels.phases.forward.window_s", "x"),
    "attention's forward a list": put("kernels.attention.forward", [2]),
    "a reason that is a list": put("kernels.reason", [1]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_summary_that_does_not_fit_is_a_damaged_run_beside_the_others(
    damage: Edit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tmp_path / "runs" / "a", NAIVE, damage)
    profiled(tmp_path / "runs" / "b", {**NAIVE, "data.context_length": 256})
    page = tmp_path / "page.html"
    for view in ("kernels", "attention_parts"):
        text = shown(capsys, tmp_path / "runs", "--view", view, "--html", page, "--format", "markdown")
        assert "2 runs (1 ok, 1 damaged)" in text
        assert "run.json is damaged: " in text
        assert "<svg" in page.read_text()
    assert main(["show", str(tmp_path / "runs" / "a")]) == 0


def test_names_that_cannot_be_shown_reach_no_table_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = "\x1b[31mred\x00\nline \u202e"

    def edit(run: dict[str, Any]) -> None:
        run["kernels"]["phases"]["step"]["top_other"]["name"] = raw
        run["kernels"]["phases"]["forward"]["parts"][f"{raw}_s"] = 0.004
        run["model"]["size"] = raw
        run["error"] = None

    profiled(tmp_path / "runs" / "a", NAIVE, edit)
    profiled(tmp_path / "runs" / "b", {**NAIVE, "data.context_length": 256})
    page = tmp_path / "page.html"
    texts = [shown(capsys, tmp_path / "runs"), shown(capsys, tmp_path / "runs", "--format", "csv", "--html", page)]
    for text in (*texts, page.read_text(encoding="utf-8")):
        assert r"\x1b[31mred\x00\nline \u202e" in text.replace("\\\\", "\\")
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]", text)
    assert main(["show", str(tmp_path / "runs" / "a")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_parts_kinds_and_phases_have_colours_that_tell_them_apart() -> None:
    for colours in (palette.PARTS, palette.KINDS, palette.PHASES):
        assert len(set(colours.values())) == len(colours)
    assert set(palette.PARTS) >= set(PARTS)
    assert set(palette.KINDS) == set(KINDS)
    both = set(PARTS) & set(KINDS)
    assert {name: palette.PARTS[name] for name in both} == {name: palette.KINDS[name] for name in both}


REMARKS = ("short", "a remark that is so long that it needs another line", "a remark " + "that goes on and on " * 5)


def make_page(tmp_path: Path) -> Path:
    """A page of three runs with labels of one to several lines, two of them with a timeline."""
    traces = ("small_bf16_compiled", "small_fp32_inference", None)
    for index, (trace, remark) in enumerate(zip(traces, REMARKS, strict=True)):
        run = tmp_path / "runs" / str(index)
        profiled(run, {**NAIVE, "model.remark": remark})
        if trace is not None:
            record = json.loads((run / "run.json").read_text())
            shutil.copy(TRACES / trace / "trace.json.gz", run)
            record["kernels"] = as_dict(examine_run(run)[0])
            (run / "run.json").write_text(json.dumps(record))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--html", str(page)]) == 0
    return page


def test_a_part_has_one_colour_on_the_whole_page(tmp_path: Path) -> None:
    text = make_page(tmp_path).read_text()
    marks = re.findall(r"<title>[^<]*: ([\w+]+) [\d.,]+ ms, [^<]*</title>.*?fill: var\(--([\w-]+)\)", text, re.DOTALL)
    charted: dict[str, set[str]] = {}
    for name, colour in marks:
        charted.setdefault(name, set()).add(colour)
    assert {"ffn", "gemm", "softmax", "several"} <= charted.keys()
    assert all(len(colours) == 1 for colours in charted.values()), charted
    explained = {(name, colour) for colour, name in re.findall(r'background:var\(--([\w-]+)\)"></i>(\w+)<', text)}
    for name in ("ffn", "softmax", "optimizer"):
        assert {colour for known, colour in explained if known == name} == charted[name]
    assert part_colour("mask+softmax") == palette.PARTS["several"]


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_several_lines_lie_on_no_bar(width: int, tmp_path: Path) -> None:
    found = operate(
        make_page(tmp_path), width,
        """
        const found = {lines: [], over: []};
        for (const svg of page.querySelectorAll(".chart svg")) {
          const bars = [...svg.querySelectorAll(".mark path")].map(bar => bar.getBoundingClientRect());
          const texts = [...svg.querySelectorAll("text")].filter(text => text.textContent.length > 12);
          found.lines.push(texts.length);
          for (const text of texts) {
            const t = text.getBoundingClientRect();
            for (const b of bars) {
              const wide = Math.min(t.right, b.right) - Math.max(t.left, b.left);
              const high = Math.min(t.bottom, b.bottom) - Math.max(t.top, b.top);
              if (wide > 1 && high > 1.5 && b.width > 1) found.over.push([text.textContent, high]);
            }
          }
        }
        return found;
        """,
    )  # fmt: skip
    assert len(found["lines"]) == 4
    assert max(found["lines"]) >= 6
    assert found["over"] == []


def test_shares_are_written_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert (percent(0.1234), percent(-0.00001), percent(None)) == ("12.3 %", "0.0 %", "-")
    folders = [str(TRACES / name) for name in ("small_fp32_inference", "small_bf16_compiled")]
    for words in (
        ["kernels", folders[0], "--all"],
        ["compare", "--kernels", *folders],
        ["kernels", folders[1], "--format", "markdown"],
    ):
        assert main(words) == 0
        assert re.search(r"\d%", capsys.readouterr().out) is None


def test_runs_without_kernels_show_their_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operators = [
        {"phase": phase, "name": name, "self_s": 1e-3, "call_count": 4.0, "share_fraction": share}
        for phase, name, share in (
            ("forward", "aten::addmm", 0.45),
            ("forward", "aten::mul", 0.2),
            ("backward", "aten::mm", 0.5),
        )
    ]
    on_a_cpu = {"reason": "a trace of a CPU has operators and no kernels", "steps": 3, "operators": operators}
    for context in (128, 256):
        facts = {**NAIVE, "data.context_length": context}
        profiled(tmp_path / str(context), facts, lambda run: run.update(kernels=on_a_cpu))
    text = " ".join(shown(capsys, tmp_path).split())
    assert "aten::addmm 45.0 %, aten::mul 20.0 % | aten::mm 50.0 % |" in text
    assert "] a trace of a CPU has operators and no kernels" in text
    assert "**Kernel time**" not in text
    assert "none" not in text.partition("**Operators")[2]
