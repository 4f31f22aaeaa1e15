"""What a precision means is told in one place, and is what Lightning does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision

from lmbench.fit.trainer import BenchTrainer
from lmbench.precision import (
    PRECISIONS,
)

from conftest import QUIET


class Dtypes(LightningModule):
    """Notes the dtypes of its weight and of its product."""

    def __init__(self):
        super().__init__()
        # In fp8 the last linear layer stays as it is.
        self.net, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        product = self.net(torch.ones(16, 16, dtype=self.net.weight.dtype))
        self.dtypes = self.net.weight.dtype, product.dtype
        return product.float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", [name for name, precision in PRECISIONS.items() if precision.runs_on_cpu])
def test_the_dtypes_are_those_that_lightning_computes_in(name):
    module, precision = Dtypes(), PRECISIONS[name]
    # Lightning's own Trainer would take bfloat16 for 16-mixed on a CPU.
    trainer = BenchTrainer(**QUIET | {"max_steps": 1}, precision=name)
    trainer.fit(module, [torch.ones(1)])
    assert module.dtypes == (precision.weight_dtype(), precision.compute_dtype())
    assert isinstance(trainer.precision_plugin, MixedPrecision) == precision.is_mixed
    assert module.net.weight.element_size() == precision.weight_bytes


def test_everything_a_measurement_imports_leaves_scipys_signal_processing_out():
    code = "import sys, lmbench.fit.run; assert 'scipy.signal' not in sys.modules; "
    code += "import scipy, scipy.signal; scipy.signal.find_peaks([0, 1, 0])"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
