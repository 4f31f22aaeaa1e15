"""The caching allocator's history, imitated on a CPU: true addresses and lifetimes of every storage, so that a
recording can be tried whole without a GPU."""

from __future__ import annotations

import math
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmbench.memory.recorded import AllocatorPeaks

START_US = 1_790_000_000_000_000


class CpuHistory(TorchDispatchMode):
    """Remembers storages that operators make while it is on; those that are older it meets where they are used."""

    latest: CpuHistory | None = None

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        CpuHistory.latest = self
        self.entries: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, int]] = {}
        self.clock = START_US
        self.allocated = self.peak = 0
        self.is_on = False
        self._known: dict[int, weakref.ref[Any]] = {}

    # lmbench.memory.history.History

    def start(self, max_entries: int, *, resets_peaks: bool) -> None:
        self.max_entries = max_entries
        self.is_on = True
        self.__enter__()

    def drop_workspaces(self) -> None:
        pass

    def peaks(self) -> AllocatorPeaks:
        return AllocatorPeaks(self.peak, self.peak, self.peak)

    def write(self, path: Path) -> int:
        blocks = [
            {"address": address, "size": size, "requested_size": asked, "state": "active_allocated"}
            for address, (size, asked) in sorted(self.live.items())
        ]
        total = sum(block["size"] for block in blocks)
        segment = {"device": 0, "address": 0, "total_size": total, "allocated_size": total, "blocks": blocks}
        content = {
            "segments": [segment], "device_traces": [self.entries[-self.max_entries :]],
            "external_annotations": self.annotations,
        }  # fmt: skip
        path.write_bytes(pickle.dumps(content, protocol=4))
        return path.stat().st_size

    def stop(self) -> None:
        if self.is_on:
            self.is_on = False
            self.__exit__(None, None, None)

    # what happens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor, is_new=True)
        return result

    def _meet(self, tensor: torch.Tensor, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        address, asked = storage.data_ptr(), storage.nbytes()
        if not address or address in self.live:
            return
        size = math.ceil(asked / 512) * 512
        self.live[address] = (size, asked)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        if is_new:
            self._enter("alloc", address, asked)
        weakref.finalize(storage, self._gone, address)

    def _gone(self, address: int) -> None:
        if not self.is_on:
            return
        size, asked = self.live.pop(address)
        self.allocated -= size
        self._enter("free_requested", address, asked)
        self._enter("free_completed", address, asked)

    def _enter(self, action: str, address: int, size: int) -> None:
        self.clock += 2
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.clock}
        self.entries.append({**entry, "frames": _frames()})

    def mark(self, name: str, stage: str) -> None:
        self.clock += 2
        if self.is_on:
            self.annotations.append({"name": name, "stage": stage, "device": 0, "time_us": self.clock})


def _frames() -> list[dict[str, Any]]:
    found, frame = [], sys._getframe(4)
    while frame is not None and len(found) < 60:
        code = frame.f_code
        found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found


class Annotating:
    """In the place of `record_function`: ranges go to the latest history."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self._mark("START")

    def __exit__(self, *_: object) -> None:
        self._mark("END")

    def _mark(self, stage: str) -> None:
        if CpuHistory.latest is not None:
            CpuHistory.latest.mark(self.name, stage)
