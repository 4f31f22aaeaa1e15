"""A module of which one of two ranks does something else than the other one."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time

import lightning.pytorch
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lmbench.version


class Uneven(lightning.pytorch.LightningModule):
    """A user's module whose rank 1 does its `deed` in the tenth step; to sleep, in each step.

    After "late ", the deed is done after the measurement. It fails where ranks share rows of the data.
    """

    def __init__(self, deed: str):
        super().__init__()
        self.net, self.deed = nn.Linear(8, 1), deed
        self.spare = nn.Linear(8, 1) if deed == "spare" else None
        if deed == "differ" and os.environ.get("LOCAL_RANK") == "1":
            lmbench.version.__version__ = "0"
        if deed == "find the folder taken" and os.environ.get("LOCAL_RANK") == "0":
            # As where another command has begun a run of this name since this one looked.
            shutil.copytree("results/other", "results/run")

    def on_train_start(self):
        if self.deed == "reduce slowly":
            self.trainer.strategy.model.register_comm_hook(None, reduce_slowly)

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.deed == "sleep":
            time.sleep(0.03)
        elif self.global_rank == 1 and batch_idx == 9 and self.deed in DEEDS:
            DEEDS[self.deed]()
        if batch_idx == 0 and self.all_gather(batch[1]).unique().numel() < batch[1].numel() * self.trainer.world_size:
            raise ValueError("ranks share rows")
        loss = self.net(batch[0]).square().mean()
        return loss * math.nan if self.deed == "diverge" and self.global_rank == 1 and batch_idx == 9 else loss

    def on_train_end(self):
        if self.global_rank == 1 and self.deed.startswith("late "):
            DEEDS[self.deed.removeprefix("late ")]()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        if self.deed == "run out":
            return DataLoader(Stream(12 if self.global_rank else 400, self.global_rank), 1)
        return DataLoader(TensorDataset(torch.ones(800, 8), torch.arange(800)), 4)


class Stream(IterableDataset):
    """So many rows of a rank, which differ from those of other ranks."""

    def __init__(self, count, rank):
        self.count, self.rank = count, rank

    def __iter__(self):
        return ((torch.ones(8), 2 * row + self.rank) for row in range(self.count))


def reduce_slowly(_, bucket):
    time.sleep(0.02)
    reduced = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def fail():
    raise ValueError("no luck with gloo")


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def hang():
    while True:
        pass


DEEDS = {
    "broadcast": lambda: torch.distributed.broadcast(torch.ones(1000), 1),
    "hang": hang,
    "leave": lambda: os._exit(0),
    "end": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fail": fail,
    "oom": run_out_of_memory,
    "switch": lambda: torch.set_num_threads(3),
}
