"""What a device attains at best: measured on the CPU here, and stored where `lmbench kernels` finds it."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmbench.cli import main
from lmbench.kernels.ceiling import CeilingRecord, ceiling_answer, datasheet_rate
from lmbench.kernels.recording import ceiling
from lmbench.records.codec import decode

CPU = torch.device("cpu")


def test_a_rate_is_the_amount_of_work_over_its_time():
    spent_s = []

    def work():
        begun = time.perf_counter()
        time.sleep(0.002)
        spent_s.append(time.perf_counter() - begun)

    rate = ceiling.measure_rate("sleep", work, 3.0, CPU, 0.1)
    for per_s in (rate.burst_per_s, rate.sustained_per_s):
        assert 0.8 * 3.0 / max(spent_s) < per_s < 1.01 * 3.0 / min(spent_s)
    assert rate.seconds >= 0.1


def test_a_product_counts_the_operations_that_pytorch_counts(monkeypatch):
    work, amount = counted(monkeypatch, lambda: ceiling.matmul_rate("fp32", CPU, 0.1))
    with FlopCounterMode(display=False) as counter:
        work()
    assert amount == counter.get_total_flops()


def test_a_copy_counts_the_bytes_it_reads_and_writes(monkeypatch):
    work, amount = counted(monkeypatch, lambda: ceiling.copy_rate(CPU, 0.1))
    target = work()
    assert amount == 2 * target.nbytes == 2 * ceiling.COPY_BYTES["cpu"]


def counted(monkeypatch, measure):
    """The work that a measurement does, and the amount that it takes it for."""
    given = []
    monkeypatch.setattr(ceiling, "measure_rate", lambda name, work, amount, *_: given.append((work, amount)))
    measure()
    return given[0]


def test_the_precision_of_matmuls_is_restored():
    before = torch.get_float32_matmul_precision()
    ceiling.matmul_rate("tf32", CPU, 0.01)
    assert torch.get_float32_matmul_precision() == before


def test_the_command_prints_a_table_and_stores_the_record(tmp_path, capsys):
    assert main(["ceiling", "--sustained_s", "0.05", "--results_dir", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("ceiling_")
    assert json.loads(path.read_text())["rates"] == printed["rates"]
    assert [rate["name"] for rate in printed["rates"]] == ["bf16", "fp32", "copy"]
    (table,) = ceiling_answer(decode(path.read_bytes(), CeilingRecord), path).tables
    assert len(table.rows) == 3


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(["ceiling", "--sustained_s", "0.01", "--results_dir", str(blocker / "x")]) == 2
    record, line = capsys.readouterr().err.rstrip().split("\n")
    assert len(json.loads(record)["rates"]) == 3
    assert "cannot be written" in line


@pytest.mark.parametrize("words", [["--sustained_s", "0"], ["--sustained_s", "x"], ["more"]])
def test_mistakes_are_one_line(words, capsys):
    assert main(["ceiling", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_datasheet_is_of_the_same_kind_of_work():
    assert datasheet_rate("NVIDIA H200", "bf16") == 989.4e12
    assert datasheet_rate("NVIDIA H200", "copy") == 4.8e12
    assert datasheet_rate("unheard of", "bf16") is None
