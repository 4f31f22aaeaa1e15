"""A log of the memory that operators on fake tensors would take on a GPU."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from lmbench.code_owners import Owner, code_owner, location_of
from lmbench.flop_counter import Routing, without_values
from lmbench.memory.allocator import Allocation, Stretch
from lmbench.memory.blocks import Category

#: Operators that cuBLAS runs.
MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation"})
_DEVICE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
#: Operators that make the truth of a check that all is well, such as `loss.isfinite().all()`.
_TRUE = ("aten.all.", "aten.isfinite.", "aten.mul.", "aten.logical_and.", "aten.bitwise_and.")


class Tracker(TorchDispatchMode):
    """A log of all allocations, and of the phases that they fall into.

    `allocations` and `stretches` are complete once the last phase is over. A storage is one allocation, however many
    tensors use it.

    Args:
        workspace_bytes: the memory that cuBLAS takes at a thread's first product, and keeps. The backward has its own
            thread.
    """

    def __init__(self, workspace_bytes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations = list[Allocation]()
        self.stretches = list[Stretch]()
        #: The number of elements of the logits, after a softmax over them.
        self.logits_numel: int | None = None
        #: FLOPs of matrix products and attention, and bytes moved to the host.
        self.flops, self.host_bytes = 0.0, 0.0
        #: What was assumed about values that fake tensors do not have, each once, with the user's line.
        self.assumed = dict[str, None]()
        #: The number of events so far.
        self.now = 0
        self.phase: Any = "setup"
        self._begin, self._region, self._operator, self._is_paused = 0, "", "", False
        self._making: Category | None = None
        self._seen: Any = WeakIdKeyDictionary()
        self._workspace_bytes = workspace_bytes
        self._has_workspace = set[bool]()
        self._routing = Routing()

    def enter(self, phase: str, region: str = "") -> None:
        """Begin a phase, or a region of it."""
        self.stretches.append(Stretch(self._begin, self.now, self.phase, self._region))
        self.now += 1
        self._begin, self.phase, self._region = self.now, phase, region

    def allocate(self, size_bytes: int, category: Category | None, made_by: str, numel: int = 0) -> Allocation:
        """Log an allocation that belongs to no tensor; `free` ends it."""
        self.now += 1
        self.allocations.append(Allocation(size_bytes, self.now, category, made_by, numel))
        return self.allocations[-1]

    def multiply(self) -> None:
        """Allocate cuBLAS's workspace at the first product of each thread."""
        is_backward = self.phase == "backward"
        if is_backward not in self._has_workspace:
            self._has_workspace.add(is_backward)
            self.allocate(self._workspace_bytes, "workspaces", "cuBLAS")

    def free(self, allocation: Allocation) -> None:
        """End an allocation, unless it has ended."""
        if allocation.end is None:
            self.now += 1
            allocation.end = self.now

    def note(self, tensor: torch.Tensor, category: Category | None = None) -> Allocation:
        """The allocation behind a tensor, logged if it is new, with the category if one is given."""
        parts: Sequence[torch.Tensor] = ()
        if tensor.layout is torch.sparse_coo:
            parts = tensor._indices(), tensor._values()
        elif is_traceable_wrapper_subclass(tensor):
            # The storage of a wrapper, such as a quantized optimizer state, or a tensor that is split over ranks and
            # holds this rank's part, has the apparent size and no memory.
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        if parts:
            # DTensor lists its device mesh, too.
            return [self.note(part, category) for part in parts if isinstance(part, torch.Tensor)][-1]
        storage = tensor.untyped_storage()
        allocation: Allocation | None = self._seen.get(storage)
        if allocation is None:
            allocation = self._stored(storage, category or self._making, self._operator, tensor.numel())
        allocation.category = category or allocation.category
        return allocation

    def move(self, module: nn.Module) -> None:
        """Take the allocations so far for the host's, but for those of a module, which is moved to the device."""
        moved = set[int]()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not is_lazy(tensor):
                moved.add(id(self.note(tensor)))
            return tensor

        module._apply(note)
        for allocation in self.allocations:
            if id(allocation) not in moved:
                allocation.size_bytes = 0

    def _stored(self, storage: Any, category: Category | None, made_by: str, numel: int = 0) -> Allocation:
        allocation = self._seen[storage] = self.allocate(storage.nbytes(), category, made_by, numel)
        weakref.finalize(storage, self.free, allocation)
        return allocation

    @contextmanager
    def making(self, category: Category) -> Iterator[None]:
        """A context in which new allocations have this category, unless they are noted under another."""
        with patch.object(self, "_making", category):
            yield

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """A context that logs storages that change size without an operator, as FSDP2's gathered parameters do."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            before = self._seen.get(storage) if storage.nbytes() != size else None
            resize(storage, size)
            if before is not None:
                self.free(before)
                self._stored(storage, before.category, "resize_")

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is logged, since operators are only traced."""
        with patch.object(self, "_is_paused", True):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Two of three calls ask for the device; the default path through Python takes as long as an operator.
            return args[0].fake_device
        if DTensor in types:
            # DTensor then calls the operators on this rank's parts.
            return NotImplemented
        if func is _WAIT:
            # On a GPU, waiting for a collective copies nothing.
            return args[0]
        try:
            out = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            if (out := self._assume(func, args)) is None:
                raise
        self._routing.follow(func, args, out)
        if self._is_paused:
            return out
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        if func._schema.name.rpartition("::")[2] in MATMULS:
            self.multiply()
        if func._schema.name in OPDEFS:
            self.assumed[f"{func._schema.name}: its outputs alone take memory"] = None
        self._operator = str(func)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        if func is torch.ops.aten._log_softmax.default:
            self.logits_numel = out.numel()
        return out

    def _assume(self, func: Any, args: Any) -> Any:
        """The result of an operator that needs values: ones, even shares for experts, other masks that keep everything.

        None where none is safe: a whole number may be a length, on which memory depends.
        """
        name, tensor = func._schema.name.removeprefix("aten::"), args[0]
        out = without_values(func, args, self._routing, keeps_all=True)
        if out is None and name == "_local_scalar_dense":
            out = self._routing.mask_sizes.get(tensor.untyped_storage())
        if out is not None and any(map(self._routing.is_routed, tree_leaves(args))):
            self._tell("the same number of tokens for each expert")
        elif isinstance(out, float):
            self._tell("its number taken as 1")
        elif name == "_local_scalar_dense" and tensor.dtype is torch.bool:
            made_by = self.note(tensor).made_by
            is_asserted = (self._reader()[1].line or "").startswith("assert ") and ".any." not in made_by
            out = is_asserted or made_by.startswith(_TRUE)
            self._tell(f"its tensor taken as {str(out).lower()}")
        elif out is not None and name != "bincount":
            self._tell("a mask that keeps everything")
        return out

    def _reader(self) -> tuple[Owner, traceback.FrameSummary]:
        """The line that reads a value and its owner; not a check of Lightning or torchmetrics."""
        owners = ((code_owner(frame.filename), frame) for frame in reversed(traceback.extract_stack()))
        return next(pair for pair in owners if pair[0] not in ("lmbench", "pytorch"))

    def _tell(self, clause: str) -> None:
        owner, frame = self._reader()
        if owner == "user":
            self.assumed[f"{location_of(frame.filename, frame.lineno)} `{frame.line}`: {clause}"] = None
