"""Parts that several tests share: a small module whose phases last a known time, and a quiet Trainer."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile

# Before torch looks: with more threads, OpenMP's spinning on a busy two-core machine makes these small tests ten times
# slower. What the tests start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Sweeps that tests begin are none of the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="lmbench-tests-")

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from strangers import Sleeping
from torch import nn
from wandb_loopback import PLANTED_KEY, closed_port_url

torch.set_num_threads(1)

# A shell's background job ignores Ctrl-C and `nohup` hang-ups; what the tests start would inherit that.
for _signum, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _default)


def pytest_collection_finish():
    # A window begins with a full collection; of all that was imported it would take 0.3 s, hundreds of times.
    gc.collect()
    gc.freeze()


QUIET = {
    "accelerator": "cpu",
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Sleeper(Sleeping, LightningModule):
    """Each phase sleeps a time of its own, so that a record can be checked against it."""

    forward_s, backward_s, optimizer_s = 0.004, 0.006, 0.003

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])

    def training_step(self, batch, batch_idx):
        self.sleep("forward")
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.sleep("forward")
        return self.net(batch).pow(2).mean()

    def backward(self, loss, *args, **kwargs):
        self.sleep("backward")
        loss.backward()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        # Runs when the update is over, still inside the optimizer's step.
        optimizer.register_step_post_hook(lambda *_: self.sleep("optimizer"))
        return optimizer


class SlowBatches(Sleeping):
    """An endless loader (or one of `count` batches) that sleeps before each batch."""

    data_s = 0.002

    def __init__(self, count=10**9):
        super().__init__()
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            self.sleep("data")
            yield torch.randn(4, 16)


def ratio_to_slept(window, name, *slept, each=1):
    """The median step's `name` over what was really slept in it, in sleeps of which `each` make a step.

    No step may have less than its sleeps. What a step has beyond them is the phase's own work, and on a busy machine
    others' turns between the end of a sleep and the phase's: the median knows of few.
    """
    per_step = [sum(parts) for parts in zip(*slept, strict=True)]
    in_steps = [math.fsum(per_step[i : i + each]) for i in range(0, len(per_step), each)][-len(window) :]
    ratios = [getattr(record, name) / slept_s for record, slept_s in zip(window, in_steps, strict=True)]
    assert min(ratios) >= 1
    return statistics.median(ratios)


def quiet_trainer(*callbacks, **flags):
    return Trainer(callbacks=list(callbacks), **{**QUIET, **flags})


def free_device():
    """Give back what earlier tests left on the GPU: compiled graphs, objects in cycles, workspaces, cached blocks."""
    if not torch.cuda.is_initialized():
        return
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", autouse=True)
def _free_device_of_other_modules():
    """Before the runs that a module's tests share."""
    free_device()


@pytest.fixture(autouse=True)
def _free_device_of_other_tests(request):
    """What is measured on a GPU must not depend on the tests before."""
    if request.node.get_closest_marker("gpu"):
        free_device()


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch):
    """A copy for W&B takes a second a run; the tests of it turn it on again."""
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    """W&B without an account or settings of the user's own; its servers are out of reach."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", closed_port_url())
    for name in ("WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def planted_key(no_account, monkeypatch):
    """The same with a key."""
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)


@pytest.fixture
def small_disk(tmp_path):
    """Makes a folder of tmp_path a disk of its own, a tmpfs of so many KiB."""
    mounted = []

    def put(size_kib, name="results"):
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
def sleeper():
    torch.manual_seed(0)
    return Sleeper()
