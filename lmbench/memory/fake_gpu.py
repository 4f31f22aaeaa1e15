"""Fake tensors as on a GPU: the CPU chooses the operators that CUDA would choose."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import register_flop_formula

from lmbench.autocast import FLOAT32, list_of, registered
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
