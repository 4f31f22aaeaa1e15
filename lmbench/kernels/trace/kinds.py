"""Kernels by name: what kind of work each does, and a name short enough to be read.

The kind follows from ordered rules on the name, first match wins; its operator decides the rest.
"""

from __future__ import annotations

import re
from functools import lru_cache

KINDS = (
    "gemm", "attention", "softmax", "norm", "reduction", "elementwise", "index", "optimizer", "memcpy", "comm",
    "unclassified",
)  # fmt: skip
UNCLASSIFIED = "unclassified"

#: The parts in the model's order. Scores, mask, softmax and values exist apart only in naive attention; a fused kernel
#: does all four, and its part is `attention`. The last three are no parts of a model.
PARTS = (
    "embedding", "norm", "qkv", "rope", "scores", "mask", "softmax", "values", "attention", "output", "ffn", "residual",
    "head", "loss", "optimizer", "data", "comm", UNCLASSIFIED,
)  # fmt: skip
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


_NOISE = re.compile(r"^std::enable_if<.*?>::type |\(anonymous namespace\)::|<unnamed>::|\bvoid\b|\bstatic\b")
_WORD = re.compile(r"[\w$]+(?:::[\w$]+)*")
# What a general launcher runs, by its template arguments: the first pattern that is there, its last occurrence.
_OPERATIONS = (
    re.compile(r"\bstd::(plus|minus|multiplies|divides)\b"),
    re.compile(r"\bCUDAFunctor(?:OnSelf)?_(\w+)"),
    re.compile(r"\b(\w+?)(?:_kernel)?(?:_impl|_cuda_kernel|_cuda)*(?:<[\w:, ]*>)?\(at::Tensor"),
    re.compile(r"\bUnaryOpFunctor<[^>]*>, (?:\w+::)*(\w+)<"),
    re.compile(r"\b(?!A?Unary|B?Unary|Binary|Ternary|Pointwise)(\w+?)Functor<"),
    re.compile(r"\b(\w+?)(?:_functor|Ops)<"),
)
_LAUNCHERS = re.compile(r"Kernel2|device_kernel|kernel_sm\d+|^Kernel$")
_TYPES = (("bf16", "BFloat16"), ("bf16", "bfloat16"), ("f16", "c10::Half"), ("f16", "__half"))
# What generated names have in common, or say twice; types, layout and tile stay.
_GENERATED = (
    (re.compile(r"_stage\d+_warpsize\w*$|_execute_kernel\w*$|_kernel0_0$"), ""),
    (re.compile(r"cudnn_generated_fort_native_"), "cudnn_"),
    (re.compile(r"_(\w?\w\d\d)\1_\1\1_\1_"), r"_\1_"),
    (re.compile(r"_n_tilesize"), "_"),
    (re.compile(r"^vectorized_elementwise"), "vec_elementwise"),
)


def base_name(name: str) -> str:
    """The function's qualified name without return type, template arguments and parameters."""
    text = _NOISE.sub("", name).strip()
    return text.partition("<")[0].partition("(")[0].strip() or text


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """The shortest name that still says what ran, such as `vec_elementwise[add]`."""
    if name.startswith(("Memcpy ", "Memset ")):
        return name
    if "<" not in name and "(" not in name:
        return _plain(name)
    function = base_name(name)
    last = function.rpartition("::")[2]
    arguments = name[name.find("<") :] if "<" in name else ""
    if _LAUNCHERS.search(last):
        return _launched(arguments) or last
    last = _plain(re.sub(r"_kernel(?=_|$)", "", last))
    inner = _operation(arguments)
    return f"{last}[{inner}]" if inner and inner not in last else last


def _plain(name: str) -> str:
    for pattern, replacement in _GENERATED:
        name = pattern.sub(replacement, name)
    return name


def _operation(arguments: str) -> str:
    """The operation named in the template arguments, with the type where that is not float32."""
    for pattern in _OPERATIONS:
        if words := pattern.findall(arguments):
            kind = next((short for short, long in _TYPES if long in arguments), "")
            return f"{words[-1]} {kind}".strip()
    return ""


def _launched(arguments: str) -> str:
    """What cutlass's launchers run: a generated name such as `cutlass_80_simt_sgemm_128x64_8x5_nn`, or a type."""
    words = [word.rpartition("::")[2] for word in _WORD.findall(arguments)]
    generated = (word for word in words if word.startswith("cutlass_"))
    return next(generated, "") or next((word for word in words if not word.startswith("enable_")), "")
