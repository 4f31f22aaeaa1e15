"""What a device attains at best: measured on the CPU here, and stored where `lmbench kernels` finds it."""

from __future__ import annotations

import json
import time

import pytest
import torch

from lmbench.cli import main
from lmbench.measure import ceiling
from lmbench.report.ceiling import ceiling_table, datasheet_rate

CPU = torch.device("cpu")


def test_a_rate_is_work_over_time():
    """Against a product that is timed by itself, best of many."""
    record = ceiling._matmul("fp32", CPU, 0.3)
    size = ceiling.MATMUL_SIZE["cpu"]
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(_timed(lambda: a @ b, time.perf_counter) for _ in range(30))
    # Other work on the machine slows either; what must be right is the count of operations and the clock.
    assert record["burst_per_s"] == pytest.approx(2 * size**3 / best, rel=0.7)
    assert record["seconds"] >= 0.3


def _timed(work, now):
    start = now()
    work()
    return now() - start


def test_the_precision_of_matmuls_is_restored():
    before = torch.get_float32_matmul_precision()
    ceiling._matmul("tf32", CPU, 0.01)
    assert torch.get_float32_matmul_precision() == before


def test_the_command_prints_a_table_and_stores_the_record(tmp_path, capsys):
    assert main(["ceiling", "--sustained-s", "0.05", "--results-dir", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("ceiling_")
    assert json.loads(path.read_text()) == printed
    assert [rate["name"] for rate in printed["rates"]] == ["bf16", "fp32", "copy"]
    assert ceiling_table(printed).row_count == 3


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(["ceiling", "--sustained-s", "0.01", "--results-dir", str(blocker / "x")]) == 2
    record, line = capsys.readouterr().err.rstrip().split("\n")
    assert len(json.loads(record)["rates"]) == 3
    assert "cannot be written" in line


@pytest.mark.parametrize("words", [["--sustained-s", "0"], ["--sustained-s", "x"], ["more"]])
def test_mistakes_are_one_line(words, capsys):
    assert main(["ceiling", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_datasheet_is_of_the_same_kind_of_work():
    assert datasheet_rate("NVIDIA H200", "bf16") == 989.4e12
    assert datasheet_rate("NVIDIA H200", "copy") == 4.8e12
    assert datasheet_rate("unheard of", "bf16") is None
