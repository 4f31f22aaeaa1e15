"""Published figures stand only beside what they can be compared with, each with its GPU and its caveat."""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Any

import pytest

from lmbench.reference.published import load_figures, load_step_times
from lmbench.report.cells import Cell
from lmbench.report.facts import EAGER, FP32_MATMUL, TF32_MATMUL
from lmbench.report.feature import Catalogue
from lmbench.report.references import Published, References

FORWARD_BACKWARD = {
    "size": "small", "mode": "forward_backward", "batch": 64, "context": 256, "precision": "32-true",
    "matmul": FP32_MATMUL, "compile": EAGER, "warmup": 5,
}  # fmt: skip


def found(**facts: Any) -> dict[str, Published]:
    cell = Cell("NVIDIA H200", {**FORWARD_BACKWARD, **facts})
    matches = References().match([cell])
    return {label.partition(",")[0].removeprefix("ref. "): figures[0] for label, figures in matches.items()}


def test_what_was_called_fp32_and_was_tf32_is_joined_with_tf32() -> None:
    assert "002" not in found()
    published = found(matmul=TF32_MATMUL)["002"]
    assert published.text == "348.56 ± 0.98"
    assert "TF32" in published.caveats[0]


@pytest.mark.parametrize(
    "other",
    [
        {"size": "large"},
        {"mode": "train_step"},
        {"context": 512},
        {"precision": "16-mixed"},
        {"warmup": 1},
        {"batch": 8},
    ],
)
def test_a_figure_of_another_kind_is_not_joined(other: dict[str, Any]) -> None:
    published = found(**{"matmul": TF32_MATMUL, **other}).get("002")
    assert published is None or published.text != "348.56 ± 0.98"


def test_compiled_figures_stand_beside_compiled_cells_only() -> None:
    same = {"mode": "forward", "size": "medium"}
    assert found(**same)["001"].value == 0.08688
    assert found(**same, compile="default")["001"].value == 0.07085


def test_what_a_write_up_does_not_state_is_a_caveat_with_the_gpu() -> None:
    assert found()["001"].caveats == ("ref. 001, GPU unstated: batch, context, warm-up unstated",)


def test_a_figure_of_unknown_context_is_shown_only_where_there_is_one_context() -> None:
    cells = [Cell("GPU", {**FORWARD_BACKWARD, "context": context}) for context in (256, 512)]
    labels = References().match(cells)
    assert not any("001" in label for label in labels)
    assert any("003" in label for label in labels)


def test_implausible_figures_are_hidden() -> None:
    assert "001" not in found(size="2.7B", precision="bf16-mixed")
    assert "001" in found(size="xl", precision="bf16-mixed")


def test_a_published_out_of_memory_is_shown() -> None:
    assert found(size="large", mode="forward", batch=32, matmul=TF32_MATMUL)["002"].text == "OOM"


def test_custom_shapes_are_joined_by_layers_and_width() -> None:
    assert found(size="4 x 512", mode="train_step")["004"].value == 0.128


def test_a_ratio_to_the_score_products_alone_stands_beside_no_ratio_to_both() -> None:
    rows = csv.DictReader((files("lmbench.reference") / "softmax_vs_matmul.csv").read_text().splitlines())
    alone = [row for row in rows if "scores matmul" in row["note"]]
    assert [row["source"] for row in alone] == ["001"]
    column = "forward_softmax_matmul_time_ratio"
    assert {share.source for share in load_figures() if share.column == column} == {"002", "003"}


def test_every_whole_step_of_the_csv_is_loaded_but_those_of_profilers() -> None:
    text = (files("lmbench.reference") / "step_times.csv").read_text()
    rows = [row for row in csv.DictReader(text.splitlines()) if row["size"] and row["timer"] != "nsys"]
    whole = [row for row in rows if row["phase"] == "step" or row["mode"] == row["phase"] == "forward"]
    assert len(load_step_times()) == len(whole) > 100
    assert all(time.is_oom or time.mean_s for time in load_step_times())


def beside(column: str, **facts: Any) -> dict[str, Published]:
    """Published figures beside one cell of 2.7B at context 512, by source."""
    own = {"size": "2.7B", "mode": "train_step", "context": 512, "precision": "32-true", "matmul": FP32_MATMUL}
    found = References().beside([Catalogue().column(column)], [Cell("NVIDIA H200", {**own, **facts})])
    return {heading.partition(",")[0].removeprefix("ref. "): figures[0] for heading, figures in found.items()}


def test_published_peaks_stand_beside_the_phase_and_precision_that_they_are_of():
    forward = "memory.phase_peak_allocated_bytes.forward"
    assert beside(forward)["001"].value == 70e9
    assert beside(forward, precision="bf16-mixed")["001"].value == 60e9
    assert beside("memory.phase_peak_allocated_bytes.backward")["001"].value == 55e9
    assert "GB or GiB unstated" in beside("peak_bytes")["001"].caveats[0]
    small = {"size": "small", "batch": 64, "context": 256, "mode": "forward_backward", "precision": "bf16-mixed"}
    assert beside("memory.run_peak_reserved_bytes", **small)["002"].value == 19.46e9


def test_no_published_peak_stands_beside_a_checkpointed_fused_or_compiled_cell():
    for other in ({"checkpoint": "block"}, {"attention": "sdpa"}, {"compile": "default"}, {"size": "xl"}):
        assert beside("peak_bytes", **other) == {}
