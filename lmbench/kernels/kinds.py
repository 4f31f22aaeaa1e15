"""Kernels by name: what kind of work each does, and a name short enough to be read.

The kind follows from ordered rules on the name, first match wins; its operator decides the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from lmbench.kernels.parts import UNCLASSIFIED

KINDS = (
    "gemm", "conv", "attention", "softmax", "norm", "pooling", "reduction", "elementwise", "index", "optimizer",
    "memcpy", "comm", UNCLASSIFIED,
)  # fmt: skip
#: The kind of matrix products.
MATMUL = "gemm"
#: Kinds that tensor cores work for, in one precision or another.
PRODUCTS = (MATMUL, "conv")
#: The precision of products that no tensor core works for.
FULL_FP32 = "fp32 off the tensor cores"

# Rules, as verbose regular expressions: behind `#` stands whose names a line is about.
#
# Of names that say it at their beginning. Inductor's are made of the operators in them: `triton_poi_fused_mm_3`
# prepares a product, and is none.
_BEGINNINGS = (
    ("memcpy", r"^(Memcpy|Memset)[ ] | ^memset\d*$ | ^__amd_rocclr_(copy|fill)"),
    ("attention", r"^triton_tem_\w*attention"),
    ("gemm", r"^triton_(tem|mm|bmm|convolution\d?d?)(_|$)"),
    ("softmax", r"^triton_(per|red|fused)_\w*softmax"),
    ("norm", r"^triton_(per|red|fused)_\w*(layer_norm|rms_norm|group_norm|batch_norm)"),
    ("optimizer", r"^triton_for_"),
    ("reduction", r"^triton_(per|red|spl)_ | ^triton_fused_(\w*_)?(sum|mean|amax|amin|argmax|argmin|var|prod)(_|$)"),
    ("elementwise", r"^triton_(poi|fused)_"),
    # Inductor itself does not know what it is.
    (UNCLASSIFIED, r"^triton_unk_"),
    # A CUDA graph takes its inputs by copying them all at once.
    ("elementwise", r"multi_tensor_apply_kernel.*\bCopy<"),
)

# Of functions, in small letters with `_` between words: of the last component of the name, and where that says nothing,
# of all. Template arguments name types and functors, and would match by accident.
_FUNCTIONS = (
    (
        "comm",
        r"""
        nccl | rccl | nvshmem | rocshmem | msccl | oneccl | userbuffers  # libraries, Transformer Engine
        | (?<!sm)all_?reduce | all_?gather | reduce_?scatter | all_?to_?all | ^(one|two)_?shot_ | multimem_  # PyTorch
        | cross_device_reduce | quick_?reduce  # vLLM, SGLang, AITER
        | moe_comm | \b(deep_)?ep:: | \b(inter|intra)node | pplx | \bep_(dispatch|combine)  # DeepEP, MORI
        """,
    ),
    (
        "index",
        r"""
        ^(?!.*(rotary|rope)).*embedding | bounds_check_ind | bucketize  # FBGEMM
        | ^(?!.*(bmm|softmax)).*jagged | lxu_cache | permut | _offsets_range
        | (reshape_and|concat_and|convert_and)_cache | (store|append|set|write)_\w*(kv|mla)_?(cache|buffer)  # vLLM
        | kv_ind(ices|ptr) | token_(ids|pool) | row_id_map  # SGLang, Transformer Engine
        | (moe|experts?)_(align|sort|first|prefix|maps) | count_\w*expert  # experts
        | (?<![a-z])rout(e|ing)(?![a-z]) | slot_mapping | (pre|post)_reorder
        | ep_(scatter|gather) | expand_(to_fused|input_rows) | ^finalize_(moe|kernel)  # SGLang, DeepSeek, TensorRT-LLM
        | im2d?\d?_?col | col2_?im | vol2(col|im)  # a convolution's matrix, laid out
        """,
    ),
    (
        "attention",
        r"""
        attention | (?<![a-z])attn | flash_?(fwd|bwd|attn|decod|mla) | \bflash:: | fmha | (?<![a-z])m?mha | _sdpa
        | splitkv | merge_?states | (prefill|decode)_with\w*kv_?cache  # FlashInfer
        | reduce_segments | (?<![a-z])mla_(?!kv) | ^pa_(fwd|bf16|fp16|decode)  # vLLM, AITER
        | sage_?(fwd|bwd)  # SageAttention
        | delta_rule | linear_attn | thd_\w*correction  # FLA, Transformer Engine
        | ^_?(fwd|bwd)_(grouped_)?kernel(_stage\d | _split_?k | _flash | _d[kqv] | _fuse | $)  # Triton's
        | ^_split_k_reduce$  # xformers
        | ^bwd_(pre|post)process$ | dot_do_o | convert_dq_  # AOTriton, cuDNN
        """,
    ),
    ("softmax", r"soft_?max | cross_entropy | logsumexp"),
    (
        "norm",
        r"""
        (layer|rms|group|batch|instance|qk|l2|weight)_?norm | welford
        | rowwise_moments | gamma_beta | compute_grad_input | compute_\w*(gradients|fused_params)  # ATen, apex
        | (?<![a-z])bn_(fw|bw|stats) | (?<![a-z])ln_\w*(fwd|bwd)  # cuDNN, Transformer Engine
        """,
    ),
    (
        "optimizer",
        r"""
        multi_tensor | (?<![a-z])(adam|lamb|sgd|lion)(?![a-z]) | adam[wx] | adagrad | adafactor | rmsprop
        | amp_update | amp_non_finite | lpnorm_cleanup  # ATen
        | k_(optimizer|precondition)  # bitsandbytes
        """,
    ),
    ("pooling", r"pool(?!ed) | adaptive_?(average|max) | roi_align"),
    # Before what they prepare: layout for a convolution, positions for attention.
    ("elementwise", r"^(folded_)?(nchw|nhwc)_ | repack | rotary | (?<![a-z])rope(?![a-z])"),
    (
        "gemm",
        r"""
        gemm | gemv | matmul | mul_mat | (?<![a-z])b?mm(t?_|$) | grouped_mm | split_?k | xmma | wmma
        | nvjet | cublas | dot_kernel | reduce_1_?block_kernel | \bepilogue::impl  # cuBLAS and its parts
        | [shic]cudnn | \d{3}cudnn | cask_cudnn | (?<![a-z])[dw]grad | fprop  # cuDNN's engines, by direction
        | winograd | conv(?!er) | (?<![a-z])fft[12]d_[rc]2[rc]_\d | pointwise_mult_and_sum  # its others: Fourier's
        | \bcutlass | cijk_ | fmoe | (?<![a-z])wv_?split  # CUTLASS, Tensile, AITER, vLLM on ROCm
        | mqa_logits | fused_moe | moe_stage\d(?!.*reduc) | marlin | machete | [bs]gmv  # vLLM
        | lora_(shrink|expand) | llmm
        | block_?persist | persist_?rnn  # cuDNN's recurrent cells, product and all
        """,
    ),
    ("elementwise", r"quant | cast | qparam | _to_(float|half|bfloat16|bf16|fp16|fp8)"),
    (
        "index",
        r"""
        (?<!with_)index | indices | gather | scatter | _segment(?!ed) | sort | top_?k | radix | histogram | bincount
        | unique | non_?zero | partition | device_(select|compact) | multinomial | sampling | nms_ | grid_sampler
        | compute_grad_weight | krn_partial | (^|_)compute_cuda_kernel  # ATen: of embeddings; repeat_interleave
        | embs | fused_mapping | position_kernel | dense_representation  # FBGEMM, DeepSeek, SGLang
        """,
    ),
    (
        "reduction",
        r"""
        reduc | (?<![a-z])scan | arg_?(max|min) | cumsum | prefix_sum | (?<![a-z])sum(?![a-z]) | amax | nrm2 | asum
        | nll_?loss | criterion | ctc_loss | _persistent(_|$)  # losses; nvFuser
        """,
    ),
    (
        "elementwise",
        r"""
        element_?wise | pointwise | cat_array | concat | chunk_cat | copy | fill | memset | transpose | convert | pack
        | triu | tril | where | lerp | distribution | random | bernoulli | dropout | generate_seed | arange | range_
        | act_and_mul | activation | [a-z]lu(?![a-z]) | gated_act | gated_kernel | sigmoid | tanh | swiglu | bias
        | residual
        | masked_ | clamp | scal(e|_) | axpy | (?<![a-z])(add|sub|mul|div|pad)(?![a-z]) | padding
        | upsample | flip | roll_ | shuffle | swizzle | reorder
        | sub_tensor | miopen_(active|neuron) | (?<![a-z])op\d?d?_\w*tensor | add_tensor  # MIOpen
        | lstm | gru_cell | rnn_?cell
        """,
    ),
)
# Of what general launchers were given: those of CUTLASS, CK, Thrust and rocPRIM say nothing else.
_ARGUMENTS = (
    ("attention", r"[Ff]mha | flash:: | FlashAttn | [Aa]ttention"),
    ("gemm", r"[Gg]emm | [Gg]emv | cutlass | [Cc]onv(?!er) | cublas"),
    ("norm", r"[Nn]orm"),
    ("softmax", r"[Ss]oft_?[Mm]ax"),
    ("index", r"[Ss]ort | partition | copy_if | unique | select(?!or) | histogram"),
    ("reduction", r"reduce | scan"),
    ("elementwise", r"transform | parallel_for | for_each | [Ee]lementwise | [Qq]uant"),
)
_LAUNCHERS = re.compile(
    r"Kernel2|device_kernel|kernel_sm\d+|^[Kk]ernel$|kentry|trampoline_kernel|_kernel_agent|static_kernel"
)
# Of the operator around the launch, without its namespace.
_OPERATORS = (
    ("attention", r"[Aa]ttention | [Ff]lash"),  # of a torch.autograd.Function it is the class
    (
        "gemm",
        r"""
        ^(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|mv|addmv|dot|einsum|_scaled_mm|_grouped_mm)\b
        | ^_?(cudnn_|miopen_|mkldnn_|slow_)?conv(?!er)
        """,
    ),
    ("softmax", r"softmax"),
    ("norm", r"(layer|rms|group|batch)_?norm"),
    ("optimizer", r"^_foreach | ^_fused_(adam|sgd|adagrad) | ^_amp_"),
    ("pooling", r"_pool(?!ed)"),
    ("index", r"^(embedding|index|gather|scatter|masked_select|nonzero|sort|topk|take)"),
    (
        "reduction",
        r"^(sum|mean|max|min|amax|amin|argmax|argmin|norm|linalg_vector_norm|any|all|cumsum|nll_loss|logsumexp)",
    ),
    (
        "elementwise",
        r"""
        ^(add|sub|mul|div|pow|rsqrt|sqrt|neg|exp|log|copy_|_to_copy|to|fill_|zero_|silu|gelu|sigmoid|tanh|masked_fill
        |cat|clone|where|lerp|addcmul|addcdiv|arange|tril|triu|dropout|native_dropout|bernoulli|uniform|normal|upsample)
        """,
    ),
)
_COMMUNICATION = re.compile(r"^(c10d|nccl|record_param_comms|_c10d_functional|symm_mem)")
_BETWEEN_WORDS = re.compile(r"(?<=[a-z\d])(?=[A-Z])")


def _reader(rules: Iterable[tuple[str, str]]) -> Callable[[str], str]:
    """A function of names: the kind of the first rule that fits, empty if none does."""
    patterns = [(kind, re.compile(pattern, re.VERBOSE)) for kind, pattern in rules]
    return lambda text: next((kind for kind, pattern in patterns if pattern.search(text)), "")


_by_beginning, _by_function, _by_arguments, _by_operator = map(
    _reader, (_BEGINNINGS, _FUNCTIONS, _ARGUMENTS, _OPERATORS)
)


# Convolutions among products: by cuDNN's and MIOpen's engines, or by their operator.
_CONVOLUTION = re.compile(
    r"[a-z]cudnn_|\dcudnn|cask_cudnn|[dw]grad|fprop|winograd|conv(?!er)|implicit_gemm|igemm_(fwd|bwd|wrw)|fft[12]d",
    re.IGNORECASE,
)
# Types of a product's inputs in its name, the first that is there: of cuBLAS, cuDNN, CUTLASS and hipBLASLt (`BBS`).
_PRECISIONS = (
    ("fp8", r"e4m3|e5m2|fp8|_F8|nvjet_(sm\d+_)?[qr][qr]"),
    ("bf16", r"bf16|bfloat16|_BBS_|_B_BS?_|_BSS_|nvjet_(sm\d+_)?t"),
    (FULL_FP32, r"simt|(volta|ampere|maxwell)_sgemm|scudnn|f32f32_f32f32"),
    ("fp16", r"fp16|f16|[Hh]alf|h884|h1688|hgemm|_HHS_|_HSS_|_H_H|nvjet_(sm\d+_)?h"),
    ("tf32", r"tf32|xf32|s1688"),
    ("fp64", r"dgemm|f64|<double"),
    (FULL_FP32, r"sgemm|(gemv|gemm|dot|dgrad|wgrad|winograd|convolve|engine)\w*<(int, int, )?float"),
)
_precision = tuple((precision, re.compile(pattern)) for precision, pattern in _PRECISIONS)


@lru_cache(maxsize=4096)
def precision_of(name: str, kind: str) -> str:
    """Precision of a product's inputs by its kernel's name, empty for other kinds and where the name tells none."""
    if kind not in PRODUCTS:
        return ""
    return next((precision for precision, pattern in _precision if pattern.search(name)), "")


def is_layout_transform(name: str) -> bool:
    """Whether a kernel only changes the layout of images for a convolution."""
    return bool(re.search(r"nchw_?to_?nhwc|nhwc_?to_?nchw|^batched_transpose_\d", name, re.IGNORECASE))


def kind_of(name: str, category: str = "kernel", operator: str = "") -> str:
    """Kind of a device event by its full name; `operator` is the one that launched it, such as `aten::mm`."""
    kind = _kind_of(name, category, operator)
    is_convolution = kind == MATMUL and (_CONVOLUTION.search(name) or _CONVOLUTION.search(operator))
    return "conv" if is_convolution else kind


def _kind_of(name: str, category: str, operator: str) -> str:
    """The kind, with convolutions among the matrix products.

    Looked at in this order, the first that tells: the name's beginning, the function, its namespaces, what a general
    launcher was given, the operator. `unclassified` where none tells.
    """
    if category != "kernel":
        return "memcpy"
    if kind := _by_beginning(name):
        return kind
    function = _LIBRARIES.sub("", base_name(name))
    last = function.rpartition("::")[2]
    # Words in small letters: `gather_top_k` of `gatherTopK`.
    last_words, words = (_BETWEEN_WORDS.sub("_", text).lower() for text in (last, function))
    kind = _by_arguments(name) if _LAUNCHERS.search(last) else _by_function(last_words)
    if kind := kind or _by_function(words):
        return kind
    if _COMMUNICATION.search(operator):
        return "comm"
    # An operator may be a call of Inductor's kernel, by its name.
    by_operator = _by_beginning(operator) if operator.startswith("triton_") else ""
    return by_operator or _by_operator(operator.rpartition("::")[2]) or UNCLASSIFIED


# Names of libraries: the letters "gemm" in `fbgemm_gpu` are no product.
_LIBRARIES = re.compile(r"\b(fbgemm_gpu|deep_gemm|grouped_gemm|flashinfer|sgl_kernel|at_cuda_detail)::|_deep_gemm$")
_NOISE = re.compile(r"^std::enable_if<.*?>::type |\(anonymous namespace\)::|<unnamed>::|\bvoid\b|\bstatic\b")
_LENGTH = re.compile(r"[1-9]\d{0,3}")
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
    if name.startswith("_Z"):
        return "::".join(_mangled(name)) or name
    text = _NOISE.sub("", name).strip()
    return text.partition("<")[0].partition("(")[0].strip() or text


def _mangled(name: str) -> list[str]:
    """The components of a mangled name (`_ZN2ck6deviceI...` is `ck::device`), up to its arguments.

    Each stands behind its own length, by the Itanium C++ ABI.
    """
    components: list[str] = []
    place = 3 if name.startswith("_ZN") else 2
    while match := _LENGTH.match(name, place):
        place = match.end() + int(match[0])
        if place > len(name):
            # Cut short.
            return []
        if not name.startswith("_GLOBAL__N_", match.end()):
            components.append(name[match.end() : place])
    return components


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """The shortest name that still says what ran, such as `vec_elementwise[add]`."""
    if name.startswith(("Memcpy ", "Memset ")):
        return name
    last = base_name(name).rpartition("::")[2]
    if name.startswith("_Z") or not {"<", "("} & set(name):
        return _plain(last)
    arguments = "".join(name.partition("<")[1:])
    if _LAUNCHERS.search(last):
        # What CUTLASS's launchers run: a generated name such as `cutlass_80_simt_sgemm_128x64_8x5_nn`, or a type.
        words = [word.rpartition("::")[2] for word in _WORD.findall(arguments)]
        words.sort(key=lambda word: not word.startswith("cutlass_"))
        return next((word for word in words if not word.startswith("enable_")), last)
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
