"""What kind of work a kernel does: ordered rules on its name, first match wins, its operator decides the rest."""

from __future__ import annotations

import re

from lmbench.kernels.trace.names import base_name

KINDS = (
    "gemm", "attention", "softmax", "norm", "reduction", "elementwise", "index", "optimizer", "memcpy", "comm",
    "unclassified",
)  # fmt: skip
UNCLASSIFIED = "unclassified"
#: The kind of matrix products.
MATMUL = "gemm"

# On the whole name, template arguments and all: there stands what a general launcher such as cutlass's really runs.
_WHOLE = (
    ("comm", r"^(?!triton_).*(nccl|rccl|nvshmem|all_?reduce_kernel|allgather|reduce_?scatter_kernel)"),
    ("memcpy", r"^Memcpy |^Memset |^memset\d*$"),
    # A CUDA graph takes its inputs by copying them all at once.
    ("elementwise", r"multi_tensor_apply_kernel.*\bCopy<"),
    # Triton's own names are made of the operators in them: `triton_poi_fused_mm_3` prepares a product, and is none.
    ("attention", r"^triton_tem_\w*attention"),
    ("gemm", r"^triton_(tem|mm|bmm)_"),
    ("softmax", r"^triton_(per|red)_\w*softmax"),
    ("norm", r"^triton_(per|red)_\w*(layer_norm|rms_norm|group_norm|batch_norm)"),
    ("optimizer", r"^triton_for_"),
    ("reduction", r"^triton_(per|red)_"),
    ("elementwise", r"^triton_(poi|unk)_"),
    (
        "attention",
        r"flash_?(fwd|bwd|attn|attention)|\bflash::|fmha|AttentionKernel|_sdpa_|att(ention|n)_(fwd|bwd|kernel)|splitkv_mla",
    ),
)

# On the name of the function alone: template arguments name types and functors, and would match by accident.
_FUNCTION = (
    ("softmax", r"softmax|cross_entropy"),
    ("norm", r"layer_?norm|rms_?norm|group_?norm|batch_?norm|RowwiseMoments|GammaBeta|ComputeGradInput"),
    ("optimizer", r"multi_tensor|adam|\blamb_|_sgd|amp_update|amp_non_finite|lpnorm_cleanup"),
    (
        "gemm",
        r"gemm|gemv|xmma|nvjet|split_?k|cublas|\bcutlass|matmul|dot_kernel|reduce_1Block_kernel|winograd|conv\dd|marlin|[bs]gmv",
    ),
    (
        "index",
        r"(?<!with_)index|gather|scatter|embedding|_segment|sort|topk|compute_grad_weight|histogram"
        r"|unique|nonzero|partition|krn_partial",
    ),
    ("reduction", r"reduce|scan|argm(ax|in)|cumsum|prefix_sum"),
    (
        "elementwise",
        r"elementwise|pointwise|CatArray|chunk_cat|copy|fill|triu|tril|dropout|where|cast|transpose|lerp|distribution|arange"
        r"|range_|silu|gelu|swiglu|rope|rotary|scale|unpack|pack",
    ),
)
_RULES_WHOLE = [(kind, re.compile(pattern)) for kind, pattern in _WHOLE]
_RULES_FUNCTION = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _FUNCTION]

_OPERATORS = (
    ("comm", r"^(c10d|nccl|record_param_comms|_c10d_functional)"),
    ("attention", r"attention|flash"),
    (
        "gemm",
        r"^(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|mv|addmv|dot|einsum|_scaled_mm|_grouped_mm|(cudnn_)?convolution)\b",
    ),
    ("softmax", r"softmax"),
    ("norm", r"layer_norm|rms_norm|group_norm|batch_norm"),
    ("optimizer", r"^_foreach|^_fused_(adam|sgd|adagrad)|^_amp_"),
    ("index", r"^(embedding|index|gather|scatter|masked_select|nonzero|sort|topk|take)"),
    (
        "reduction",
        r"^(sum|mean|max|min|amax|amin|argmax|argmin|norm|linalg_vector_norm|any|all|cumsum|nll_loss|logsumexp)",
    ),
    (
        "elementwise",
        r"^(add|sub|mul|div|pow|rsqrt|sqrt|neg|exp|log|copy_|_to_copy|to|fill_|zero_|silu|gelu|sigmoid|tanh|masked_fill"
        r"|cat|clone|where|lerp|addcmul|addcdiv|arange|tril|triu|dropout|native_dropout|bernoulli|uniform|normal)",
    ),
)
_RULES_OPERATOR = [(kind, re.compile(pattern)) for kind, pattern in _OPERATORS]


def kind_of(name: str, category: str = "kernel", operator: str = "") -> str:
    """Kind of a device event by its full name; `operator` is the one that launched it, such as `aten::mm`."""
    if category != "kernel":
        return "memcpy"
    for kind, pattern in _RULES_WHOLE:
        if pattern.search(name):
            return kind
    function = base_name(name)
    for kind, pattern in _RULES_FUNCTION:
        if pattern.search(function):
            return kind
    # The general launchers of cutlass and cublas say only in their arguments what they run.
    if re.search(r"gemm|gemv|cutlass", name, re.IGNORECASE):
        return "gemm"
    bare = operator.removeprefix("aten::")
    return next((kind for kind, pattern in _RULES_OPERATOR if pattern.search(bare)), UNCLASSIFIED)
