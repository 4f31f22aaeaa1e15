"""A user's own callback, data and module that do something bad at a chosen moment."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader

M_MMAP_THRESHOLD = -3


class Speechless(RuntimeError):
    """An exception whose message cannot be read."""

    def __str__(self):
        raise SystemExit(3)


class Planted(Callback):
    """Does its `deed` the `at`-th time (from 0) that Lightning calls the hook.

    Deeds: `raise`, `exit`, `leave` (`os._exit`), `speechless` (an exception without a message), `fork` (of a process
    that raises), `daemons` (three processes of sessions of their own), a signal such as `sigint`, `swallowed_sigint`,
    and `exhaust`, which leaves the process 2 MiB more address space than it has.
    """

    def __init__(self, hook: str, deed: str, at: int = 0):
        self._left = at
        self._deed = getattr(self, f"_{deed}", None) or partial(signal.raise_signal, getattr(signal, deed.upper()))
        setattr(self, hook, self._called)

    def _called(self, *_, **__):
        self._left -= 1
        if self._left == -1:
            self._deed()

    def _raise(self):
        raise ValueError("planted in the user's own code")

    def _exit(self):
        raise SystemExit(0)

    def _leave(self):
        os._exit(0)

    def _speechless(self):
        raise Speechless

    def _fork(self):
        if not os.fork():
            raise ValueError("planted in a fork")

    def _daemons(self):
        for words in (["sleep", "60"], ["sh", "-c", "sleep 60 & echo $!"]):
            process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
            with Path("daemons").open("a") as file:
                file.write(f"{process.pid}\n{process.stdout.readline().decode() if words[0] == 'sh' else ''}")

    def _swallowed_sigint(self):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def _exhaust(self):
        leave_address_space(2 * 1024**2)


def _fail_in(place, bad_place):
    if place == bad_place:
        raise KeyError("lr")


class Data(LightningDataModule):
    """Two random numbers a sequence; the item `bad_item` cannot be read, and the hook `bad_hook` raises."""

    def __init__(self, bad_item: int = -1, num_workers: int = 0, bad_hook: str = ""):
        super().__init__()
        self._bad_hook = bad_hook
        _fail_in("__init__", bad_hook)
        self._bad_item, self._num_workers = bad_item, num_workers

    def train_dataloader(self):
        return DataLoader(self, 2, num_workers=self._num_workers, collate_fn=self._collate)

    def _collate(self, items):
        _fail_in("collate", self._bad_hook)
        return torch.stack(items)

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if index == self._bad_item:
            raise ValueError("planted in the data")
        return torch.ones(2) * index / 10_000


class Net(LightningModule):
    """Fails in step `bad_step` or in the hook `bad_hook`, and has no finite loss in step `nan_step`."""

    def __init__(self, bad_step: int = -1, nan_step: int = -1, bad_hook: str = ""):
        super().__init__()
        self._bad_hook = bad_hook
        _fail_in("__init__", bad_hook)
        self._bad_step, self._nan_step = bad_step, nan_step
        self.net = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        if batch_idx == self._bad_step:
            raise ValueError("planted in training_step")
        loss = self.net(batch).square().mean()
        self._deeper()
        if self._bad_hook == "detach":
            return loss.detach()
        return loss * float("nan") if batch_idx == self._nan_step else loss

    def _deeper(self):
        _fail_in("forward", self._bad_hook)

    def configure_optimizers(self):
        _fail_in("configure_optimizers", self._bad_hook)
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def return_freed_memory():
    """From now on a large tensor's memory goes back to the system, so that the next one has to ask for it again."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)


def leave_address_space(size_bytes):
    """Let this process grow by so much and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
