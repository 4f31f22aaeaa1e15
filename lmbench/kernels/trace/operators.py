"""What an operator by itself says about the part of the model it works for."""

from __future__ import annotations

import re
from functools import lru_cache

from lmbench.kernels.trace.recorded import MODULE

ENGINE = "autograd::engine::evaluate_function: "
GRAPH_CALL = "## Call CompiledFxGraph "
ACCUMULATE = "torch::autograd::AccumulateGrad"
# Lightning's PyTorchProfiler names the type before the path.
_LIGHTNING_MODULE = re.compile(r"^\[pl\]\[module\][^:]*: (.+)$")

# Backward nodes and `_backward` operators carry the forward operator's name in theirs.
_PARTS = (
    ("embedding", re.compile(r"^(aten::embedding|EmbeddingBackward)")),
    ("loss", re.compile(r"cross_entropy|nll_loss|log_softmax|NllLoss|LogSoftmax|CrossEntropy", re.IGNORECASE)),
    ("attention", re.compile(r"scaled_dot_product|ScaledDotProduct|flash_attention|efficient_attention|FlashAttn")),
    ("softmax", re.compile(r"^(aten::_?softmax|aten::_softmax_backward|SoftmaxBackward)")),
    ("norm", re.compile(r"layer_norm|rms_norm|LayerNorm|RmsNorm|RMSNorm|batch_norm|group_norm", re.IGNORECASE)),
)
_PRODUCT = re.compile(r"^aten::(matmul|bmm|baddbmm|einsum)$")
_SUM = re.compile(r"^aten::(add|add_)$")


@lru_cache(maxsize=4096)
def operator_part(name: str) -> str | None:
    """Part by the operator's name alone, None for operators that any part uses."""
    return next((part for part, pattern in _PARTS if pattern.search(name)), None)


def module_path(name: str) -> str | None:
    """The module that a range is around, None for other ranges."""
    if name.startswith(MODULE):
        return name[len(MODULE) :]
    match = _LIGHTNING_MODULE.match(name)
    return match[1] if match else None


def is_product(name: str) -> bool:
    """A matrix product as attention uses for scores and values."""
    return _PRODUCT.match(name) is not None


def is_sum(name: str) -> bool:
    """An addition, which directly in a block is the residual's."""
    return _SUM.match(name) is not None
