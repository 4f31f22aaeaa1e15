"""The content of a W&B run: its name, configuration, summary and tables."""

from __future__ import annotations

import msgspec
import pytest
from runs import BASE

from lmbench.records.measured import RunError
from lmbench.records.run import RunRecord, SweepPlace
from lmbench.wandb.child import (
    config_of,
    name_of,
    summary_of,
    tables_of,
)


@pytest.fixture
def h200():
    """The record of a real run on an H200."""
    return msgspec.convert(BASE, RunRecord)


def test_a_summary_has_some_40_important_numbers_in_the_units_of_their_names(h200):
    summary = summary_of(h200, "ok")
    assert summary["throughput/mfu_percent"] == pytest.approx(100 * h200.throughput.mfu_fraction)
    assert summary["throughput/model_tflops_per_s"] == pytest.approx(h200.throughput.model_flops_per_s / 1e12)
    assert summary["memory/peak_allocated_gib"] == pytest.approx(h200.memory.run_peak_allocated_bytes / 2**30)
    assert summary["guards/failed_count"] == sum(guard.status == "fail" for guard in h200.guards)
    assert 35 <= len(summary) <= 60
    assert not [name for name in summary if name.endswith(("_bytes", "_fraction", "_flops_per_s"))]


def test_a_run_s_name_tells_model_precision_compile_and_batch(h200):
    assert name_of(h200) == "small, fp32, eager, batch 4, context 512"
    h200.precision, h200.compile.is_enabled, h200.compile.mode = "bf16-mixed", True, "default"
    axes = {"model.attention": "naive", "measure.grad": 0.5, "model.hf_token": "t0psecret"}
    h200.model.attention, h200.mode, h200.is_profiled = "naive", "forward", True
    h200.sweep = SweepPlace(name="mine", study="attention_parts", cell="c", axes=axes, repeat=2)
    name = name_of(h200)
    words = "small, forward, bf16-mixed, compiled, batch 4, context 512, naive, grad 0.5, hf_token ***, kernels"
    assert name == f"{words} r2"
    config = config_of(h200)
    assert (config["model/hf_token"], config["sweep"], config["study"]) == ("***", "mine", "attention_parts")
    assert config["pass"] == "kernels"
    assert config["label"] == words
    assert "t0psecret" not in str([config_of(h200), tables_of(h200), name])
    assert name_of(RunRecord(1, "error", run_id="x")) == "x"


def test_a_run_that_measured_nothing_says_why():
    record = RunRecord(1, "error", error=RunError("ValueError"))
    assert list(tables_of(record)) == ["tables/record"]
    assert summary_of(record, "error") == {"outcome": "error", "error/kind": "ValueError"}
