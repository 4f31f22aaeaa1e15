"""What a precision means is told in one place, and is what Lightning does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from lmbench.fit.trainer import BenchTrainer
from lmbench.precision import (
    FP32_MATMUL,
    PRECISIONS,
    TF32_MATMUL,
    find_precision,
    matmul_label,
    peak_column,
    short_label,
)

from conftest import QUIET


class Dtypes(LightningModule):
    """Notes the dtypes of its weight and of its product."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0].to(self.net.weight.dtype))
        self.seen = self.net.weight.dtype, out.dtype
        return out.float().pow(2).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 4)), 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", [name for name, precision in PRECISIONS.items() if precision.runs_on_cpu])
def test_the_dtypes_are_those_that_lightning_computes_in(name):
    module, precision = Dtypes(), PRECISIONS[name]
    # Lightning's own Trainer would take bfloat16 for 16-mixed on a CPU.
    trainer = BenchTrainer(**QUIET | {"max_steps": 1}, precision=name)
    trainer.fit(module)
    assert module.seen == (precision.weight_dtype(), precision.compute_dtype())
    assert isinstance(trainer.precision_plugin, MixedPrecision) == precision.is_mixed
    assert module.net.weight.element_size() == precision.weight_bytes


def test_lightnings_short_names_are_understood_and_others_are_not_guessed():
    assert [find_precision(name) for name in ("32", "bf16", "16", "64")] == [
        PRECISIONS[name] for name in ("32-true", "bf16-mixed", "16-mixed", "64-true")
    ]
    assert find_precision("nf4") is None


def test_only_fp16_autocast_has_a_scaler():
    assert [name for name, precision in PRECISIONS.items() if precision.has_scaler] == ["16-mixed"]


def test_the_pair_decides_peak_and_caption():
    assert [peak_column("32-true", matmul) for matmul in ("highest", "high", "medium")] == ["fp32", "tf32", "tf32"]
    assert [peak_column(name, "high") for name in ("bf16-mixed", "16-true", "64-true", "nf4")] == [
        "bf16", "fp16", None, None,
    ]  # fmt: skip
    assert [matmul_label(name) for name in ("highest", "high", None)] == [FP32_MATMUL, TF32_MATMUL, None]
    assert [short_label("32-true", label) for label in (FP32_MATMUL, TF32_MATMUL)] == ["fp32", "TF32"]
    assert short_label("bf16-mixed", TF32_MATMUL) == "bf16-mixed"


def test_everything_a_measurement_imports_leaves_scipys_signal_processing_out():
    code = "import sys, lmbench.fit.run; sys.exit('scipy.signal' in sys.modules); "
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
    code = "import lmbench.fit, scipy, scipy.signal; scipy.signal.find_peaks([0, 1, 0])"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
