"""What autocast does with each of PyTorch's operators on a device, as this PyTorch has registered it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

LOWER, FLOAT32, WIDEST = (
    f"autocast's {name}" for name in ("lower-precision list", "float32 list", "list for the widest dtype of several")
)
_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
#: Operators that run in the lower precision (ATen/autocast_mode.h and autocast_mode.cpp, torch 2.13).
_LOWER = """
_addmm_activation _convolution _native_multi_head_attention _scaled_dot_product_flash_attention _thnn_fused_gru_cell
_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell
linalg_multi_dot linalg_vecdot linear lstm_cell matmul mkldnn_rnn_layer mm mv prelu rnn_relu_cell rnn_tanh_cell
scaled_dot_product_attention
"""
#: Operators that run in the widest precision of their inputs. All other registered operators run in float32.
_WIDEST = {
    "cuda": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "cpu": "cat index_copy stack",
}
#: Functions that Python sees as one call, and the operator among those they consist of that decides.
_DECIDED_BY = {
    "cross_entropy": "nll_loss",
    "einsum": "bmm",
    "grid_sample": "grid_sampler",
    "gru": "linear",
    "interpolate": "upsample_nearest2d",
    "lstm": "linear",
    "multi_head_attention_forward": "linear",
    "rnn_relu": "linear",
    "rnn_tanh": "linear",
    "rpow": "pow",
    "upsample": "upsample_nearest2d",
}


def registered(device_type: str) -> set[str]:
    """PyTorch's operators that autocast has an implementation of, with their overloads: `softmax.int`.

    Those of other libraries, such as torchvision after its import, are left out.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key(_KEYS[device_type])
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def list_of(operator: str, device_type: str) -> str:
    """The list of a registered operator, with or without its overload."""
    name = operator.partition(".")[0]
    if name in _LOWER.split():
        return LOWER
    return WIDEST if name in _WIDEST[device_type].split() else FLOAT32


@cache
def autocast_lists(device_type: str) -> Mapping[str, str]:
    """The list of each function under the name that Python calls it by; empty for a device without autocast's lists."""
    if device_type not in _KEYS:
        return {}
    operators = {name.partition(".")[0] for name in registered(device_type)}
    lists = {name.strip("_"): list_of(name, device_type) for name in operators}
    return lists | {name: lists[operator] for name, operator in _DECIDED_BY.items() if operator in lists}
