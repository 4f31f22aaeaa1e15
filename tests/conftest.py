"""Parts that several tests share: a small module whose phases last a known time, and a quiet Trainer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch looks: with more threads, OpenMP's spinning on a busy two-core machine makes these small tests ten times
# slower. What the tests start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

torch.set_num_threads(1)

# A shell's background job ignores Ctrl-C and `nohup` hang-ups; what the tests start would inherit that.
for _signum, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _default)

QUIET = {
    "accelerator": "cpu",
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Sleeper(LightningModule):
    """Each phase sleeps a time of its own, so that a record can be checked against it."""

    forward_s, backward_s, data_s, optimizer_s = 0.004, 0.006, 0.002, 0.003

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.forward_s)
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.forward_s)
        return self.net(batch).pow(2).mean()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.backward_s)
        loss.backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        # Runs when the update is over, still inside the optimizer's step.
        optimizer.register_step_post_hook(lambda *_: time.sleep(self.optimizer_s))
        return optimizer


class SlowBatches:
    """An endless loader (or one of `count` batches) that takes `Sleeper.data_s` for each batch."""

    def __init__(self, count: int = 10**9) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.count):
            time.sleep(Sleeper.data_s)
            yield torch.randn(4, 16)


def quiet_trainer(*callbacks: Any, **flags: Any) -> Trainer:
    return Trainer(callbacks=list(callbacks), **{**QUIET, **flags})


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for W&B takes a second a run; the tests of it turn it on again."""
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int, str], Path]]:
    """Makes a folder of tmp_path a disk of its own, a tmpfs of so many KiB."""
    mounted: list[Path] = []

    def put(size_kib: int, name: str = "results") -> Path:
        disk = tmp_path / name
        disk.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(disk)]
        if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, check=False).returncode:
            pytest.skip("mounting a small tmpfs needs root; tests with a limit on file sizes do not")
        mounted.append(disk)
        return disk

    yield put
    for disk in mounted:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def sleeper() -> Sleeper:
    torch.manual_seed(0)
    return Sleeper()
