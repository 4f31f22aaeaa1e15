"""Two traces side by side: every sum adds up, and each change has its word."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from paths import GOLDEN, TRACES
from test_clocks import launched
from trace_events import HandWritten

from lmbench.cli import main
from lmbench.kernels.difference import Difference, answer_of
from lmbench.kernels.findings import examine
from lmbench.report.render import render

EAGER, COMPILED = TRACES / "small_fp32_inference", TRACES / "small_bf16_compiled"
KEYS = ("kind", "part", "part_group", "short_name")


@pytest.fixture(scope="module")
def difference() -> Difference:
    return Difference(examine(EAGER), examine(COMPILED))


def written(path: Path, kernels: dict[str, float], steps: int = 1) -> Path:
    """A trace whose forward has these kernels (us each), in each of its steps."""
    trace = HandWritten()
    for step in range(steps):
        begin = 50_000.0 * step
        trace.step(step, begin, 50_000)
        trace.phase("forward", begin, 50_000)
        for place, (name, duration) in enumerate(kernels.items()):
            launched(trace, begin + 12 + 20 * place, name, begin + 100 + 900 * place, duration)
    return trace.write(path)


def test_every_axis_adds_up_to_its_phase_on_both_sides(difference: Difference) -> None:
    sides = {"a": difference.a.work, "b": difference.b.work}
    for phase in ("step", *difference.phases):
        for key in KEYS:
            rows = difference.by(key, phase)
            for side, work in sides.items():
                total = work.total(phase)
                assert sum(row[f"{side}_s"] or 0 for row in rows) == pytest.approx(total["kernel_s"], abs=1e-12)
                assert sum(row[f"{side}_count"] or 0 for row in rows) == pytest.approx(total["kernel_count"])
            shares = [row["share_fraction"] for row in rows]
            assert None in shares or sum(shares) == pytest.approx(1.0)
            sizes = [abs(row["difference_s"]) for row in rows]
            assert sizes == sorted(sizes, reverse=True)


def test_what_vanished_into_a_fused_kernel_stands_beside_it(difference: Difference) -> None:
    parts = {row["name"]: row for row in difference.by("part")}
    names = ("mask", "softmax", "values", "mask+softmax+values")
    assert [parts[name]["change"] for name in names] == ["gone", "gone", "shrank", "new"]
    (group,) = (row for row in difference.by("part_group") if row["name"] == "mask, softmax, values")
    assert group["difference_s"] == pytest.approx(sum(parts[name]["difference_s"] for name in names))


def test_the_same_work_differs_in_nothing_over_any_number_of_steps(tmp_path: Path) -> None:
    chance = random.Random(0)
    work = {f"k{number}": round(chance.uniform(1, 90), 3) for number in range(30)}
    sides = (examine(written(tmp_path / f"{steps}.json", work, steps)) for steps in (1, 3))
    rows = Difference(*sides).by("short_name")
    assert {(row["change"], row["difference_s"], row["share_fraction"]) for row in rows} == {("", 0.0, None)}


def test_each_change_has_its_word_and_steps_are_divided_out(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", {"gone_kernel": 100, "kept": 50, "slower": 30, "faster": 60})
    b = written(tmp_path / "b.json", {"kept": 50, "slower": 45, "faster": 20, "new_kernel": 10}, steps=3)
    rows = {row["name"]: row for row in Difference(examine(a), examine(b)).by("short_name")}
    assert {name: row["change"] for name, row in rows.items()} == {
        "gone_kernel": "gone", "faster": "shrank", "slower": "grew", "new_kernel": "new", "kept": "",
    }  # fmt: skip
    assert rows["slower"]["difference_s"] == pytest.approx(15e-6)
    assert rows["new_kernel"]["b_count"] == pytest.approx(1.0)
    assert rows["faster"]["share_fraction"] == pytest.approx(40 / 115)


def test_shares_are_left_out_where_what_grew_and_what_shrank_cancel(tmp_path: Path) -> None:
    sides = [{"one": 500.0, "two": 100.0}, {"one": 100.0, "two": 501.0}]
    cancelled = Difference(*(examine(written(tmp_path / f"{n}.json", side)) for n, side in enumerate(sides)))
    assert {row["share_fraction"] for row in cancelled.by("short_name")} == {None}
    assert {row["share_fraction"] for row in cancelled.by("kind")} == {1.0}


def test_the_answer_is_as_it_was_read(difference: Difference) -> None:
    text = render(answer_of(difference, 8), "markdown").replace(str(TRACES), "TRACES")
    assert text == (GOLDEN / "kernels_difference.md").read_text(encoding="utf-8")


def test_on_a_screen_no_line_is_wider_than_80(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", "--kernels", str(EAGER), str(COMPILED), "--all", "--top", "3"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines() if str(TRACES) not in line) <= 80


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["A", "B", "--phase", "sideways"], "--phase is 'sideways'"),
        (["A", "B", "--top", "0"], "--top is 0"),
        (["A", "/nowhere"], "is missing"),
        (["A", "cpu"], "has no kernels"),
    ],
    ids=["phase", "top", "path", "cpu"],
)
def test_mistakes_are_one_line(words: list[str], reason: str, capsys: Any, tmp_path: Path) -> None:
    on_cpu = HandWritten()
    on_cpu.op("aten::mm", 0, 10)
    paths = {"A": EAGER, "B": COMPILED, "cpu": on_cpu.write(tmp_path / "cpu.json")}
    assert main(["compare", "--kernels", *(str(paths.get(word, word)) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
