"""Tables of attention by itself and of published figures: who sets the time, growth, bytes, and the fastest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from attention_results import make_attention, write_attention
from report_results import answer_of, edit_runs, rows_of, set_outcome, table_rows

from lmbench.commands.report import make_catalogue
from lmbench.precision import FP32_MATMUL, TF32_MATMUL
from lmbench.records.codec import decode_run
from lmbench.reference.published import load_figures
from lmbench.report.answer import Cell, Table
from lmbench.report.facts import EAGER
from lmbench.report.frame import Frame
from lmbench.report.tables import published

# attention by itself


def tables_of(home: Path, view: str | None = None) -> list[Table]:
    return list(answer_of(home, view=view).sections[0].tables)


def test_a_made_up_run_is_one_that_a_real_one_could_be() -> None:
    run = decode_run(json.dumps(make_attention({
        "data.context_length": 256, "model.head_dim": 16, "model.attention": "naive", "trainer.compile": False,
    })).encode())  # fmt: skip
    assert run.memory.saved_bytes == 8 * 256 * 256 * 4


def test_a_row_says_who_sets_its_time_and_has_the_devices_own_beside_it(tmp_path: Path) -> None:
    rows = table_rows(tables_of(write_attention(tmp_path, [256, 16384], [64], repeats=1, profiled_contexts=[256]))[0])
    assert (
        [row["forward is"] for row in rows]
        == [row["backward is"] for row in rows]
        == ["host-bound"] * 4 + ["queued"] * 4
    )
    assert [row["forward, device busy"] for row in rows[4:]] == ["-"] * 4
    for row in rows[:4]:
        assert 10 * float(row["forward, device busy"]) < float(row["forward"].partition(" ")[0])


def test_time_grows_as_the_square_of_a_long_context_and_hardly_with_a_short_one(tmp_path: Path) -> None:
    rows = table_rows(tables_of(write_attention(tmp_path, [256, 1024, 16384, 32768], [16], repeats=1))[1])
    naive = [row for row in rows if (row["attention"], row["compile"]) == ("naive", EAGER)]
    powers = [row["forward ~ context^"] for row in naive]
    assert (powers[0], powers[3]) == ("-", "2.00")
    assert float(powers[1]) < 0.2


def test_the_rate_of_a_causal_pass_is_that_of_the_half_which_is_needed(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [16384], [64], repeats=1)
    row = next(row for row in rows_of(home) if row["attention"] == "sdpa")
    needed = 2 * 8 * 16384**2 * 64
    assert row["forward_flops_per_s"] == pytest.approx(needed / row["forward_s"])
    assert row["backward_flops_per_s"] == pytest.approx(2 * needed / row["backward_s"])
    assert row["forward_mfu_fraction"] == pytest.approx(
        row["forward_flops_per_s"] / row["backward_flops_per_s"] * row["backward_mfu_fraction"]
    )


@pytest.mark.parametrize("more_bytes", [0, 4 * 2**20])
def test_out_of_memory_is_a_row_that_explains_the_bytes(more_bytes: int, tmp_path: Path) -> None:
    home = write_attention(tmp_path, [16384, 65536], [64], repeats=1)

    def ask_for_more(run: dict[str, Any]) -> None:
        if run["outcome"] == "oom":
            run["memory"]["refused"]["requested_bytes"] += more_bytes

    edit_runs(home, ask_for_more)
    table = tables_of(home)[2]
    row = next(row for row in table_rows(table) if (row["context"], row["attention"]) == ("65536", "naive"))
    assert any(text.startswith("OOM (forward) [") for text in row.values())
    assert row["saved by shape"] == "128.00"
    note = next(note for note in table.notes if "more were asked for" in note)
    is_of_scores = "one batch x heads x context x context tensor of 4 B an element" in note
    assert is_of_scores == (more_bytes == 0)
    assert note.endswith("0.50 GiB were held of 139.80 GiB")


def test_a_row_says_what_really_ran(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256], [64])

    def fuse(run: dict[str, Any]) -> None:
        # The first process compiled; the others found its graphs, which do not say.
        if run["compile"]["is_enabled"] and run["sweep"]["repeat"] == 0:
            run["compile"]["is_attention_fused"] = True

    edit_runs(home, fuse)
    table = tables_of(home)[1]
    marked = {(row["attention"], row["compile"]) for row in table_rows(table) if "[" in row["forward"]}
    assert marked == {("naive", "default"), ("sdpa", EAGER)}
    assert set(table.notes) == {
        "Inductor put PyTorch's fused attention in the place of naive", "PyTorch took sdpa_efficient for sdpa",
    }  # fmt: skip


# the fastest


def test_the_fastest_is_named_with_its_margin_and_what_gave_no_figure(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 65536], [64])
    forward, backward, both = tables_of(home, "attention_backends")[:3]
    row = table_rows(backward)[1]
    assert (row["fastest"], row["second"]) == ("sdpa", "flex")
    interval = backward.rows[1][-2]
    assert isinstance(interval, Cell)
    assert interval.low == pytest.approx(0.44, abs=0.01)
    assert interval.low < float(row["second takes"].removesuffix(" %")) / 100 < interval.high
    assert table_rows(both)[1]["no figure"] == "OOM: naive, naive compiled"
    assert table_rows(forward)[0]["fastest"] == "sdpa [1]"
    assert "the host's time that is compared" in forward.notes[0]


@pytest.mark.parametrize(
    ("repeats", "spread", "fastest"),
    [
        (3, 0.0, ["same: flex, sdpa [1]", "naive compiled"]),
        (3, 0.5, ["same: flex, sdpa [1]", "undecided: naive compiled, sdpa [1]"]),
        (
            2,
            0.0,
            ["undecided: flex, sdpa, naive compiled, naive [1]", "undecided: naive compiled, sdpa, naive, flex [1]"],
        ),
    ],
)
def test_a_difference_within_one_percent_is_the_same_and_a_wide_interval_or_few_processes_undecided(
    repeats: int, spread: float, fastest: list[str], tmp_path: Path
) -> None:
    home = write_attention(tmp_path, [16384], [64], repeats=repeats)

    def widen(run: dict[str, Any]) -> None:
        if run["model"]["attention"] == "sdpa":
            run["phases"]["backward"]["mean_s"] *= 1 + spread * run["sweep"]["repeat"]

    edit_runs(home, widen)
    assert [table_rows(table)[0]["fastest"] for table in tables_of(home, "attention_backends")[:2]] == fastest
    if repeats == 2:
        told = "Fastest by forward + backward: undecided ("
        assert any(
            line.text.startswith(told) for line in answer_of(home, view="attention_backends").sections[0].headline
        )


def test_where_nothing_ran_the_row_says_how_each_ended(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [256, 65536], [64])

    def end(run: dict[str, Any]) -> None:
        if run["data"]["context_length"] == 65536:
            set_outcome(run, "timeout" if run["model"]["attention"] == "flex" else "oom", "forward")

    edit_runs(home, end)
    assert tables_of(home, "attention_backends")[0].texts()[1] == [
        "65536", "-", "-", "-", "-", "-", "OOM: naive, naive compiled, sdpa; timeout: flex",
    ]  # fmt: skip


# published figures

SMALL = {
    "size": "small", "mode": "forward_backward", "batch": 64, "context": 256, "precision": "32-true",
    "matmul": FP32_MATMUL, "compile": EAGER, "warmup": 5,
}  # fmt: skip
LARGE = {"size": "2.7B", "mode": "train_step", "context": 512, "precision": "32-true", "matmul": FP32_MATMUL}
ATTENTION = {
    "size": "AttentionLayer", "mode": "forward_backward", "batch": 8, "context": 4096, "head_dim": 64, "heads": 1,
    "causal": "causal", "precision": "32-true", "matmul": FP32_MATMUL, "compile": EAGER, "attention": "naive",
}  # fmt: skip
BEFORE_BACKWARD = "memory.phase_begin_allocated_bytes.backward"


def beside(column: str, *cells: dict[str, Any]) -> dict[str, Cell]:
    """Published figures beside the first of these cells, by source."""
    facts = pd.DataFrame(list(cells), dtype=object)
    frame = Frame(pd.DataFrame(), facts.where(facts.notna(), None).assign(gpu="NVIDIA H200"))
    found = published(frame, [make_catalogue().column(column)])
    return {
        heading.title.removeprefix("ref. ").partition(",")[0]: figures[0] for heading, figures in found if 0 in figures
    }


@pytest.mark.parametrize(
    ("column", "facts", "source", "value"),
    [
        # What was called fp32 and was TF32.
        ("step_s", {**SMALL, "matmul": TF32_MATMUL}, "002", 0.34856),
        ("step_s", SMALL, "002", None),
        *(
            ("step_s", {**SMALL, "matmul": TF32_MATMUL, **other}, "002", None)
            for other in ({"size": "large"}, {"mode": "train_step"}, {"context": 512}, {"precision": "16-mixed"},
                          {"batch": 8})
        ),
        ("step_s", {**SMALL, "mode": "forward", "size": "medium"}, "001", 0.08688),
        ("step_s", {**SMALL, "mode": "forward", "size": "medium", "compile": "default"}, "001", 0.07085),
        # Implausible: faster than a smaller model.
        ("step_s", {**SMALL, "size": "2.7B", "precision": "bf16-mixed"}, "001", None),
        ("step_s", {**SMALL, "size": "4 x 512", "mode": "train_step"}, "004", 0.128),
        ("memory.phase_peak_allocated_bytes.forward", LARGE, "001", 70e9),
        ("memory.phase_peak_allocated_bytes.forward", {**LARGE, "precision": "bf16-mixed"}, "001", 60e9),
        *(
            ("peak_bytes", {**LARGE, **other}, "001", None)
            for other in ({"checkpoint": "block"}, {"attention": "sdpa"}, {"compile": "default"}, {"size": "xl"})
        ),
        ("forward_s", ATTENTION, "001 first table", 0.00265901),
        ("backward_s", {**ATTENTION, "compile": "default"}, "001 first table", None),
        (BEFORE_BACKWARD, {**ATTENTION, "context": 16384, "head_dim": 16}, "001 first table", 16.1172 * 2**30),
        # A cold first time.
        ("forward_s", {**ATTENTION, "context": 256, "head_dim": 16}, "001 first table", None),
        *(
            ("forward_s", {**ATTENTION, **other}, "001 first table", None)
            for other in ({"attention": "sdpa"}, {"precision": "bf16-true"}, {"heads": 8}, {"head_dim": 48},
                          {"mode": "forward"}, {"head_dim": None})
        ),
    ],
)  # fmt: skip
def test_a_published_figure_stands_beside_what_it_can_be_compared_with_alone(
    column: str, facts: dict[str, Any], source: str, value: float | None
) -> None:
    figure = beside(column, facts).get(source)
    assert figure is None if value is None else figure is not None and figure.value == pytest.approx(value)


def test_what_a_write_up_does_not_state_is_a_caveat_and_no_context_stands_beside_one_context_alone() -> None:
    assert beside("step_s", SMALL)["001"].notes == ("ref. 001, GPU unstated: batch, context, warm-up unstated",)
    assert "TF32" in beside("step_s", {**SMALL, "matmul": TF32_MATMUL})["002"].notes[0]
    assert (
        beside("step_s", {**SMALL, "size": "large", "mode": "forward", "batch": 32, "matmul": TF32_MATMUL})["002"].text
        == "OOM"
    )
    sources = set(beside("step_s", SMALL, {**SMALL, "context": 512}))
    assert "003" in sources
    assert "001" not in sources


def test_every_published_figure_is_loaded() -> None:
    figures = load_figures()
    assert len(figures) > 300
    # Two tables of 20 shapes, the second eager and compiled; memory in the first alone; one is cold.
    assert sum(figure.head_dim is not None for figure in figures) == 2 * (20 + 40) + 20 - 1
    ratios = {figure.label[:3] for figure in figures if figure.column == "forward_softmax_matmul_time_ratio"}
    # That of 001 is to the products of the scores alone.
    assert ratios == {"002", "003"}


def test_csv_has_published_figures_in_si_under_the_columns_names(tmp_path: Path) -> None:
    home = write_attention(tmp_path, [1024, 4096], [64], repeats=1)
    rows = rows_of(home, has_reference=True)
    (row,) = [row for row in rows if (row["context"], row["attention"], row["compile"]) == (4096, "naive", EAGER)]
    label = "reference 001 first table, GPU unstated"
    assert row[f"{label}: forward_s"] == 0.00265901
    assert row[f"{label}: {BEFORE_BACKWARD}"] == pytest.approx(1.11719 * 2**30)
    assert "batch, precision, mask unstated" in row["reference 001 compile table, GPU unstated: forward_s: caveat"]
