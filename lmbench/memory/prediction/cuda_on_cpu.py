"""Lets a CPU choose the operators that CUDA would choose. For the whole process, and for good."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# What CUDA's autocast lists have and a CPU's have not, by operator (torch/include/ATen/autocast_mode.h, torch 2.13).
# All run in float32 but some. These get it as their `dtype`, so that the operator converts as it goes, where another
# one has its inputs converted first;
_FLOAT32_OUT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
# these run in the lower precision, and on a CPU what they are made of does;
_LOWER = """
_convolution _thnn_fused_gru_cell _thnn_fused_lstm_cell addmv addr chain_matmul convolution cudnn_convolution
cudnn_convolution_transpose einsum gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell rnn_tanh_cell
_scaled_dot_product_flash_attention
"""
# and these in the widest precision of their inputs, as they do without autocast.
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
_LEFT = frozenset((_LOWER + _WIDEST).split())
_HALVES = (torch.bfloat16, torch.float16)
_SDPA = functional.scaled_dot_product_attention

_LIBRARY = torch.library.Library("aten", "IMPL")


@cache
def act_like_cuda() -> None:
    """Give this process's CPU CUDA's autocast lists and optimizers' defaults."""
    cuda, cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
    for name in sorted(cuda - cpu - _LEFT):
        _LIBRARY.impl(name, _in_float32(name), "AutocastCPU")
    for name in sorted(cpu - cuda):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    _LIBRARY.impl("_scaled_dot_product_flash_attention_for_cpu", _attention, "Meta", allow_override=True)
    # Where a CPU has no kernel of a kind that is asked for, Dynamo gets a shape from the unfused one.
    choose = attention._sdpa_kernel

    def with_unfused(backends: Iterable[SDPBackend], set_priority: bool = False) -> None:
        choose([*backends, SDPBackend.MATH], set_priority)

    setattr(attention, choose.__name__, with_unfused)
    # An optimizer that is not told how to go over its parameters does it in one call on CUDA, in a loop on a CPU.
    from torch.optim import optimizer

    name = "_get_foreach_kernels_supported_devices"
    supported = getattr(optimizer, name)()
    setattr(optimizer, name, lambda: [*supported, "cpu"])
    # Random values are nobody's memory; trunc_normal_ even looks at them, which a fake tensor cannot bear.
    for filler in dir(nn.init):
        if filler.endswith("_") and not filler.startswith("_"):
            setattr(nn.init, filler, lambda tensor, *_, **__: tensor)


def _registered(key: str) -> set[str]:
    """PyTorch's own operators in a list; other libraries' (torchvision's, from its import on) keep what they have."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    dtype_index = None
    if name in _FLOAT32_OUT.split():
        dtype_index = [argument.name for argument in operator._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if dtype_index is None:
                return operator(*tree_map_only(torch.Tensor, _widened, args), **kwargs)
            dtype = args[dtype_index] if len(args) > dtype_index else kwargs.get("dtype")
            if dtype is None and args[0].dtype in _HALVES:
                return operator(*args[:dtype_index], **{**kwargs, "dtype": torch.float32})
            return operator(*args, **kwargs)

    return run


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


class CudaAttention(TorchFunctionMode):
    """Lets the fused attention operator take a fused kernel where CUDA would.

    A CPU has one fused kernel and refuses dropout in it; its outputs (the values, and one float32 a head and token) are
    those of each of CUDA's. Where CUDA has none (float64), or only the unfused one is allowed, that is taken.
    """

    #: No kernel is allowed but the memory-efficient one.
    is_efficient_alone = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not _SDPA:
            return func(*args, **kwargs)
        cuda = torch.backends.cuda
        others, efficient = cuda.flash_sdp_enabled() or cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        query = args[0] if args else kwargs["query"]
        if query.dtype is torch.float64 or not (others or efficient):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        CudaAttention.is_efficient_alone = efficient and not others
        # Dropout is the fifth argument.
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        else:
            kwargs = {**kwargs, "dropout_p": 0.0}
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return func(*args, **kwargs)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The values of fused attention, laid out as CUDA's kernels do, since what follows copies them or not by that.

    Flash and cuDNN follow the query; the memory-efficient kernel, which is the only one for float32, writes tokens
    before heads (aten/src/ATen/native/transformers/cuda/attention.cu, `at::empty({B, M, num_heads, Kv})`).
    """
    batch, heads, tokens, _width = query.shape
    if query.dtype is torch.float32 or CudaAttention.is_efficient_alone:
        values = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
    else:
        values = torch.empty_like(query)
    return values, query.new_empty((batch, tokens, heads), dtype=torch.float32).transpose(1, 2)
