"""The host's time for a step, on a device that takes only so much work in advance."""

from __future__ import annotations

import time

import pytest
import torch
from lightning.pytorch import LightningModule
from planted_device import PlantedDevice
from torch.utils.data import DataLoader

from lmbench.callbacks import HostStep
from lmbench.device import DEVICES
from lmbench.instruments.window import Schedule

from conftest import measure

BLOCKS, WORK_S, HOST_S = 4, 0.05, 0.01


class SmallQueue(PlantedDevice):
    """Takes new work only once all other work is done."""

    def give(self, work_s):
        self.synchronize()
        super().give(work_s)


class Slow(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layer, self.device = torch.nn.Linear(1, 1), device

    def forward(self, x):
        time.sleep(HOST_S)
        self.device.give(WORK_S)
        return self.layer(x)


class Queued(LightningModule):
    def __init__(self, device):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Slow(device) for _ in range(BLOCKS))

    def training_step(self, batch):
        for block in self.blocks:
            batch = block(batch)
        return batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def timed(module, warmup_steps=4, **flags):
    """The window of a training, and the host's time for one of its steps."""
    schedule, loader = Schedule(warmup_steps, 3), DataLoader(torch.ones(40, 1))
    window, session = measure(module, HostStep(), loader=loader, schedule=schedule, **flags)
    return window, session.run.profile.host_step_s


def test_the_hosts_time_for_a_step_has_its_work_without_its_waits_for_the_device(monkeypatch):
    device = SmallQueue()
    monkeypatch.setitem(DEVICES, "cpu", lambda _: device)
    window, host_s = timed(Queued(device))
    waited_s = (BLOCKS - 1) * (WORK_S - HOST_S)
    assert min(record.step_host_s for record in window) >= waited_s
    assert BLOCKS * HOST_S <= host_s < window[0].step_host_s - waited_s / 2


def test_a_short_warm_up_does_not_time_the_host():
    assert timed(Queued(PlantedDevice()), warmup_steps=2)[1] is None


@pytest.mark.gpu
def test_a_long_queue_of_launches_is_no_time_of_the_host():
    """A thousand launches fill the queue of a CUDA device; a step has four times as many, which take long."""

    class Launches(Slow):
        def forward(self, x):
            work = torch.ones(1 << 24, device=x.device)
            for _ in range(1000):
                work.add_(1.0)
            return self.layer(x)

    module = Queued(None)
    module.blocks = torch.nn.ModuleList(Launches(None) for _ in range(BLOCKS))
    window, host_s = timed(module, accelerator="cuda")
    assert host_s < 0.75 * min(record.step_host_s for record in window)
