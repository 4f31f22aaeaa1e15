"""Fake tensors as on a GPU: the CPU chooses the operators that CUDA would choose, and every allocation is noted."""

from __future__ import annotations

import copyreg
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, register_flop_formula
from torch.utils.weak import WeakIdKeyDictionary

from lmbench.autocast import FLOAT32, list_of, registered
from lmbench.code_owners import Owner, code_owner, location_of
from lmbench.flop_counter import Routing, without_values
from lmbench.memory.allocator import Allocation, Stretch
from lmbench.memory.blocks import Category
from lmbench.sizes import attention_flops

_HALVES = (torch.bfloat16, torch.float16)
#: The getter of a tensor's dtype, which a lazy module's parameter allows nobody else.
_DTYPE: Any = torch._C.TensorBase.dtype
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_SDPA = functional.scaled_dot_product_attention
_SDPA_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

_LIBRARY = torch.library.Library("aten", "IMPL")


@cache
def act_like_cuda() -> None:
    """Give this process's CPU the autocast lists and optimizer defaults of CUDA; this cannot be undone."""
    cuda, cpu = registered("cuda"), registered("cpu")
    for name in sorted(cuda - cpu):
        # Those of the lower precision consist of operators that a CPU's lists have; the widest precision needs nothing.
        if list_of(name, "cuda") == FLOAT32:
            _LIBRARY.impl(name, _in_float32(name), "AutocastCPU")
    for name in sorted(cpu - cuda):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    _LIBRARY.impl("_scaled_dot_product_flash_attention_for_cpu", _attention, "Meta", allow_override=True)
    # PyTorch's counter of FLOPs has no formulas for the fused attention of a CPU.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    register_flop_formula(fused)(lambda q, k, v, *_, **__: attention_flops(q, k, v))
    register_flop_formula(backward)(lambda out, q, k, v, *_, **__: attention_flops(q, k, v, is_backward=True))
    # A CPU has only some kinds of attention kernels: always allow the unfused one, so that Dynamo gets a shape from it.
    choose = attention._sdpa_kernel

    def with_unfused(backends: Iterable[SDPBackend], set_priority: bool = False) -> None:
        choose([*backends, SDPBackend.MATH], set_priority)

    attention._sdpa_kernel = with_unfused
    # By default an optimizer updates all parameters in one call (foreach) on CUDA, but in a loop on a CPU.
    name = "_get_foreach_kernels_supported_devices"
    supported = getattr(optimizer, name)()
    setattr(optimizer, name, lambda: [*supported, "cpu"])
    # Do not initialize: values take no memory, and trunc_normal_ reads them, which a fake tensor does not allow.
    for filler in dir(nn.init):
        if filler.endswith("_") and not filler.startswith("_"):
            setattr(nn.init, filler, lambda tensor, *_, **__: tensor)
    # Fake parameters cannot be changed in place, neither to another dtype nor to the size that a lazy module infers.
    nn.Module._apply = _convert  # type: ignore[method-assign]
    for unsized in (UninitializedParameter, UninitializedBuffer):
        unsized.__new__ = _unsized(unsized.__new__)  # type: ignore[method-assign]
        unsized.materialize = _materialize  # type: ignore[method-assign, assignment]
    # CUDA's kernel keeps a mask of one byte for each element, a CPU's keeps one in the dtype of its input.
    _LIBRARY.impl("dropout", _dropout, "AutogradCPU")
    # Logs, prints and metrics copy tensors and read their values; a fake tensor stands for ones.
    torch.Tensor.__deepcopy__ = _copy_of(torch.Tensor.__deepcopy__)  # type: ignore[method-assign]
    FakeTensor.__format__ = lambda tensor, form: format(_ones(tensor), form)  # type: ignore[method-assign]
    FakeTensor.numpy = lambda tensor, **_: _ones(tensor).numpy()  # type: ignore[method-assign]


def _convert(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply`, but each parameter becomes in place what a conversion makes of it: tied ones stay tied."""
    # Children first, as PyTorch's does: the order of the frees decides where later tensors lie.
    for child in module.children() if recurse else ():
        child._apply(convert)
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                converted = convert(parameter)
            if converted is not parameter:
                _become(parameter, nn.Parameter(converted, parameter.requires_grad))
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else convert(buffer)
    return module


def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Turn a tensor into another one, for all that hold it, such as optimizers."""
    # `torch.utils.swap_tensors` refuses fake tensors, to which their mode has weak references, and those with views.
    tensor.__class__, tensor.__dict__, other.__dict__ = type(other), other.__dict__, tensor.__dict__
    # DTensor has slots.
    for slot in copyreg._slotnames(type(other)):  # type: ignore[attr-defined]
        setattr(tensor, slot, getattr(other, slot))
    torch._C._swap_tensor_impl(tensor, other)


def _unsized(make: Callable[..., Any]) -> Any:
    """A maker of a lazy module's parameters without a size: real ones without memory, since fake ones have a size."""

    def new(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return make(*args, **{**kwargs, "device": "meta"})

    return staticmethod(new)


def _materialize(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """Turn a lazy module's parameter into a fake one of a size."""
    empty = torch.empty(shape, dtype=dtype or _DTYPE.__get__(tensor))
    _become(tensor, nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty)


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`torch.dropout` by the operator of CUDA."""
    return torch.native_dropout(tensor, p, train)[0] if train and p else tensor


def _copy_of(copy: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`Tensor.__deepcopy__` that works among fake tensors, where PyTorch's refuses real ones and known values."""

    def deepcopy(tensor: Any, memo: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return copy(tensor, memo)
        if id(tensor) not in memo:
            duplicate = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            duplicate._is_param = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = duplicate
        return memo[id(tensor)]

    return deepcopy


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor of ones of that shape and dtype, which takes the memory of one element."""
    with _disable_current_modes():
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)


def _in_float32(name: str) -> Callable[..., Any]:
    """An implementation of an operator for the CPU's autocast that runs it in float32, as CUDA's autocast does.

    An operator with a `dtype`, such as `sum`, gets float32 there, and converts while it computes. All others get their
    inputs converted.
    """
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    parameters = [argument.name for argument in operator._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(parameters, args, strict=False)), **kwargs}
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if "dtype" not in parameters:
                named = tree_map_only(torch.Tensor, lambda x: x.float() if x.dtype in _HALVES else x, named)
            elif named.get("dtype") is None and named["self"].dtype in _HALVES:
                named["dtype"] = torch.float32
            return operator(**named)

    return run


class CudaAttention(TorchFunctionMode):
    """Makes the fused attention operator take a fused kernel where CUDA would, and `torch.tensor` take fake scalars.

    A CPU has one fused kernel, which refuses dropout. Its outputs, the values and one float32 per head and token, are
    those of each of CUDA's kernels. The unfused kernel runs where CUDA has no other (float64), or no other is allowed.
    """

    #: Whether the memory-efficient kernel is the only fused one that is allowed.
    is_efficient_alone = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            # PyTorch cannot read the values of fake tensors in a list.
            args = tree_map_only(FakeTensor, lambda tensor: _ones(tensor).tolist(), args)
        if func in (torch.Tensor.backward, torch.autograd.backward):
            # PyTorch has taken this mode off, and a checkpoint's forward within the backward needs it.
            with patch.object(torch.autograd, _engine_run_backward.__name__, self._run_backward):
                return func(*args, **kwargs)
        if func in _RECURRENT:
            raise NotImplementedError("cuDNN runs this layer on a GPU, and only there tells what it keeps")
        if func is not _SDPA:
            return func(*args, **kwargs)
        cuda = torch.backends.cuda
        has_flash_or_cudnn = cuda.flash_sdp_enabled() or cuda.cudnn_sdp_enabled()
        has_efficient = cuda.mem_efficient_sdp_enabled()
        named = {**dict(zip(_SDPA_PARAMETERS, args, strict=False)), **kwargs}
        if named["query"].dtype is torch.float64 or not (has_flash_or_cudnn or has_efficient):
            with sdpa_kernel(SDPBackend.MATH):
                return func(**named)
        CudaAttention.is_efficient_alone = has_efficient and not has_flash_or_cudnn
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return func(**{**named, "dropout_p": 0.0})

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return _engine_run_backward(*args, **kwargs)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The outputs of fused attention in the layout of CUDA's kernels, which decides whether later operators copy them.

    Flash and cuDNN take the layout of the query. The memory-efficient kernel, the only one for float32, writes tokens
    before heads (aten/src/ATen/native/transformers/cuda/attention.cu, `at::empty({B, M, num_heads, Kv})`).
    """
    batch, heads, tokens, _width = query.shape
    if query.dtype is torch.float32 or CudaAttention.is_efficient_alone:
        values = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
    else:
        values = torch.empty_like(query)
    return values, query.new_empty((batch, tokens, heads), dtype=torch.float32).transpose(1, 2)


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
