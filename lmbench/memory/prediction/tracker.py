"""Notes every allocation of what runs under it on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lmbench.memory.allocator import Allocation, Stretch
from lmbench.memory.recorded import Category

#: Operators that cuBLAS runs.
MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation"})
_DEVICE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Tracker(TorchDispatchMode):
    """A log of the allocations, with the phases they fall into.

    `allocations` and `stretches` are complete once the last phase is over. A storage is one allocation, however many
    tensors look at it.

    Args:
        workspace_bytes: what cuBLAS takes for good in a thread that multiplies matrices, at its first product. The
            backward runs in a thread of its own.
    """

    def __init__(self, workspace_bytes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations: list[Allocation] = []
        self.stretches: list[Stretch] = []
        #: Elements of the logits, once a softmax over them was seen.
        self.logits_numel: int | None = None
        #: How many events there were.
        self.now = 0
        self.phase: Any = "setup"
        self._begin, self._region, self._operator, self._is_paused = 0, "", "", False
        self._making: Category | None = None
        self._seen: Any = WeakIdKeyDictionary()
        self._workspace_bytes = workspace_bytes
        self._has_workspace: set[bool] = set()

    # what happens

    def enter(self, phase: str, region: str = "") -> None:
        """From now on it is this phase."""
        self.stretches.append(Stretch(self._begin, self.now, self.phase, self._region))
        self.now += 1
        self._begin, self.phase, self._region = self.now, phase, region

    def allocate(self, size_bytes: int, category: Category | None, made_by: str, numel: int = 0) -> Allocation:
        """Note an allocation that no tensor stands for; `free` ends it."""
        self.now += 1
        self.allocations.append(Allocation(size_bytes, self.now, category, made_by, numel))
        return self.allocations[-1]

    def multiply(self) -> None:
        """A product of matrices begins."""
        is_backward = self.phase == "backward"
        if is_backward not in self._has_workspace:
            self._has_workspace.add(is_backward)
            self.allocate(self._workspace_bytes, "workspaces", "cuBLAS")

    def free(self, allocation: Allocation) -> None:
        if allocation.end is None:
            self.now += 1
            allocation.end = self.now

    def note(self, tensor: torch.Tensor, category: Category | None = None) -> Allocation:
        """The allocation behind a tensor, now known to be of a category."""
        # Of a tensor that is split over ranks, this rank's part.
        tensor = getattr(tensor, "_local_tensor", tensor)
        storage = tensor.untyped_storage()
        allocation: Allocation | None = self._seen.get(storage)
        if allocation is None:
            allocation = self._stored(storage, category or self._making, self._operator, tensor.numel())
        allocation.category = category or allocation.category
        return allocation

    def _stored(self, storage: Any, category: Category | None, made_by: str, numel: int = 0) -> Allocation:
        allocation = self._seen[storage] = self.allocate(storage.nbytes(), category, made_by, numel)
        weakref.finalize(storage, self.free, allocation)
        return allocation

    @contextmanager
    def making(self, category: Category) -> Iterator[None]:
        """What is allocated now is of a category, unless somebody says another."""
        before, self._making = self._making, category
        try:
            yield
        finally:
            self._making = before

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """See storages that change their size, as FSDP2's gathered parameters do: no operator tells of it."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            known = self._seen.get(storage) if storage.nbytes() != size else None
            resize(storage, size)
            if known is not None:
                self.free(known)
                self._stored(storage, known.category, "resize_")

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no notes: something is only traced."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Two of three calls ask this, and Python's way to the answer takes as long as an operator.
            return args[0].fake_device
        if DTensor in types:
            # The operators on this rank's parts follow.
            return NotImplemented
        if func is _WAIT:
            # On a GPU it copies nothing.
            return args[0]
        out = func(*args, **(kwargs or {}))
        if self._is_paused:
            return out
        if func._schema.name.rpartition("::")[2] in MATMULS:
            self.multiply()
        self._operator = str(func)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        if func is torch.ops.aten._log_softmax.default:
            self.logits_numel = out.numel()
        return out
