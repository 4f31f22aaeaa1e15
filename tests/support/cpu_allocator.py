"""The caching allocator's history, imitated on a CPU: true addresses and lifetimes of every storage, so that a
recording can be tried whole without a GPU."""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from traceback import walk_stack

import planted_memory
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmbench.device.cpu import Cpu


class CpuHistory(TorchDispatchMode):
    """Remembers storages that operators make while it is on; those that are older it meets where they are used."""

    latest: CpuHistory | None = None

    def __init__(self, device):
        super().__init__()
        CpuHistory.latest = self
        self.memory = planted_memory.Allocator(is_on=False)

    # lmbench.device.history.History

    def start(self, max_entries, *, resets_peaks):
        self.memory.max_entries, self.memory.is_on = max_entries, True
        self.__enter__()

    def drop_workspaces(self):
        pass

    def peaks(self):
        return [self.memory.peak] * 3

    def write(self, path):
        self.memory.segments = {address: block["held"] for address, block in self.memory.live.items()}
        planted_memory.write(path, self.memory)

    def stop(self):
        if self.memory.is_on:
            self.memory.is_on = False
            self.__exit__(None, None, None)

    # what happens

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._meet((args, kwargs), is_new=False)
        result = func(*args, **(kwargs or {}))
        self._meet(result, is_new=True)
        return result

    def _meet(self, values, is_new):
        for tensor in filter(torch.is_tensor, tree_leaves(values)):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if address and address not in self.memory.live:
                self.memory.hold(address, -(-size // 512) * 512, size, _stack(), is_new)
                weakref.finalize(storage, self._gone, address)

    def _gone(self, address):
        if self.memory.is_on:
            self.memory.free(address, _stack())


def _stack():
    frames = list(walk_stack(sys._getframe(2)))[:60]
    return tuple((frame.f_code.co_name, frame.f_code.co_filename, line) for frame, line in frames)


class CpuWithHistory(Cpu):
    """A CPU whose allocator has such a history."""

    def history(self):
        return CpuHistory(self.device)


def annotate(name):
    """In the place of `record_function`: ranges go to the latest history."""
    return nullcontext() if CpuHistory.latest is None else CpuHistory.latest.memory.range(name)
