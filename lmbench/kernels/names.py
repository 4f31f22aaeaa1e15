"""What kernels, operators, modules, ranges and calls are by their names, as the rules of names.toml have it: the kind
of work of a kernel, its precision, a name short enough to be read; the part of the model of a module or an operator.

A kernel's kind follows from ordered rules on its name, first match wins; its operator decides the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from lmbench.records.vocabulary import MODULE

NAMES: dict[str, Any] = msgspec.toml.decode(Path(__file__).with_name("names.toml").read_bytes())


def reader(key: str) -> Callable[[str], str]:
    """A function of names: what the first rule that fits of the list under this key says, empty if none does."""
    rules = [(word, re.compile(pattern, re.VERBOSE)) for word, pattern in NAMES[key]]
    return lru_cache(8192)(lambda name: next((word for word, pattern in rules if pattern.search(name)), ""))


UNCLASSIFIED = "unclassified"
#: Kernels of a compiled model that do the work of several parts at once.
FUSED = "several"
PARTS: tuple[str, ...] = tuple(NAMES["parts"])
_ORDER = {part: place for place, part in enumerate(PARTS)}
KINDS: tuple[str, ...] = tuple(NAMES["kinds"])
#: The kind of matrix products.
MATMUL = "gemm"
#: Kinds that tensor cores work for, in one precision or another.
PRODUCTS = (MATMUL, "conv")
#: Precisions of products that are multiplied in float32: where no tensor core works for them, or TF32 was off.
FULL_FP32 = ("fp32 off the tensor cores", "fp32")

_by_name, _by_class = map(reader, ("module_names", "module_classes"))
#: Part by the operator's name alone, empty for operators that any part uses.
operator_part = reader("operator_parts")
# Lightning's PyTorchProfiler names the type before the path; PyTorch itself the type alone, and a number.
_MODULE = re.compile(rf"{re.escape(MODULE)}(.*)$|\[pl\]\[module\][^:]*: (.+)$|nn\.Module: (.+?)(?:_\d+)?$")
_by_beginning, _by_function, _by_arguments, _by_operator = map(
    reader, ("kernel_beginnings", "kernel_functions", "kernel_arguments", "kernel_operators")
)
_type = reader("types")
_precision = reader("precisions")
# What a general launcher runs, by its template arguments: the first pattern that is there, its last occurrence.
_OPERATIONS = [re.compile(pattern) for pattern in NAMES["operations"]]
_LAUNCHERS = re.compile(
    r"Kernel2|device_kernel|kernel_sm\d+|^[Kk]ernel$|kentry|trampoline_kernel|_kernel_agent|static_kernel"
)
_COMMUNICATION = re.compile(r"^(c10d|nccl|record_param_comms|_c10d_functional|symm_mem)")
_BETWEEN_WORDS = re.compile(r"(?<=[a-z\d])(?=[A-Z])")
# Convolutions among products: by cuDNN's and MIOpen's engines, or by their operator.
_CONVOLUTION = re.compile(
    r"[a-z]cudnn_|\dcudnn|cask_cudnn|[dw]grad|fprop|winograd|conv(?!er)|implicit_gemm|igemm_(fwd|bwd|wrw)|fft[12]d",
    re.IGNORECASE,
)
# Names of libraries: the letters "gemm" in `fbgemm_gpu` are no product.
_LIBRARIES = re.compile(r"\b(fbgemm_gpu|deep_gemm|grouped_gemm|flashinfer|sgl_kernel|at_cuda_detail)::|_deep_gemm$")
_NOISE = re.compile(r"^std::enable_if<.*?>::type |\(anonymous namespace\)::|<unnamed>::|\bvoid\b|\bstatic\b")
_LENGTH = re.compile(r"[1-9]\d{0,3}")
_WORD = re.compile(r"[\w$]+(?:::[\w$]+)*")


def precision_of(name: str, kind: str, float32_matmul: str | None = None) -> str:
    """Precision of a product's inputs by its kernel's name, and by PyTorch's float32 matmul precision where that is
    known; empty for other kinds and where neither tells."""
    precision = _precision(name) if kind in PRODUCTS else ""
    return "fp32" if precision == "fp32 or tf32" and float32_matmul == "highest" else precision


@lru_cache(maxsize=8192)
def kind_of(name: str, category: str = "kernel", operator: str = "") -> str:
    """Kind of a device event by its full name; `operator` is the one that launched it, such as `aten::mm`.

    Looked at in this order, the first that tells: the name's beginning, the function, its namespaces, what a general
    launcher was given, the operator. `unclassified` where none tells.
    """
    if category != "kernel":
        return "memcpy"
    function = _LIBRARIES.sub("", base_name(name))
    last = function.rpartition("::")[2]
    # Words in small letters: `gather_top_k` of `gatherTopK`.
    last_words, words = (_BETWEEN_WORDS.sub("_", text).lower() for text in (last, function))
    by_last = _by_arguments(name) if _LAUNCHERS.search(last) else _by_function(last_words)
    # An operator may be a call of Inductor's kernel, by its name.
    by_operator = _by_beginning(operator) or _by_operator(operator.rpartition("::")[2]) or UNCLASSIFIED
    if _COMMUNICATION.search(operator):
        by_operator = "comm"
    kind = _by_beginning(name) or by_last or _by_function(words) or by_operator
    return "conv" if kind == MATMUL and (_CONVOLUTION.search(name) or _CONVOLUTION.search(operator)) else kind


def base_name(name: str) -> str:
    """The function's qualified name without return type, template arguments and parameters.

    In a mangled name (`_ZN2ck6deviceI...` is `ck::device`) each component stands behind its own length, by the Itanium
    C++ ABI.
    """
    if not name.startswith("_Z"):
        text = _NOISE.sub("", name).strip()
        return text.partition("<")[0].partition("(")[0].strip() or text
    components: list[str] = []
    place = 3 if name.startswith("_ZN") else 2
    while match := _LENGTH.match(name, place):
        begin, place = match.end(), match.end() + int(match[0])
        if place > len(name):
            # Cut short.
            return name
        if not name.startswith("_GLOBAL__N_", begin):
            components.append(name[begin:place])
    return "::".join(components) or name


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """The shortest name that still says what ran, such as `vec_elementwise[add]`."""
    if name.startswith(("Memcpy ", "Memset ")):
        return name
    last, arguments = base_name(name).rpartition("::")[2], "".join(name.partition("<")[1:])
    is_plain = name.startswith("_Z") or not {"<", "("} & set(name)
    if not is_plain and _LAUNCHERS.search(last):
        # What CUTLASS's launchers run: a generated name such as `cutlass_80_simt_sgemm_128x64_8x5_nn`, or a type.
        words = [word.rpartition("::")[2] for word in _WORD.findall(arguments)]
        words.sort(key=lambda word: not word.startswith("cutlass_"))
        return next((word for word in words if not word.startswith("enable_")), last)
    plain = last if is_plain else re.sub(r"_kernel(?=_|$)", "", last)
    for pattern, replacement in NAMES["generated"]:
        plain = re.sub(pattern, replacement, plain)
    operations = next(filter(None, (pattern.findall(arguments) for pattern in _OPERATIONS)), [])
    if is_plain or not operations:
        return plain
    # With the type where that is not float32.
    operation = f"{operations[-1]} {_type(arguments)}".strip()
    return plain if operation in plain else f"{plain}[{operation}]"


def part_of(module_path: str, classes: Mapping[str, str] | None = None) -> str | None:
    """Part of a module by its path in `named_modules`, e.g. `blocks.3.attention.q` -> `qkv`; None if nothing tells.

    Args:
        module_path: the path; a prefix in front of it makes no difference.
        classes: class name by path, for modules whose own name says nothing.
    """
    names = module_path.split(".")
    for place in reversed(range(len(names))):
        name, above = names[place], names[:place]
        part = _by_name(name)
        # Names that different models give to different things: where the module sits decides.
        if name in ("output", "c_proj", "dense", "proj") and "attention" in map(_by_name, above):
            part = "output"
        elif name == "output":
            # BERT's second feed-forward matrix; the others lie inside a module named `mlp`, which decides.
            part = "ffn" if any(map(str.isdecimal, above)) else "head"
        if part := part or _by_class((classes or {}).get(".".join(names[: place + 1]), name)):
            return part
    return None


def joined(parts: Iterable[str]) -> str:
    """Several parts of one kernel as `residual+norm`, in the model's order; `unclassified` if there is none."""
    return "+".join(sorted(set(parts), key=part_order)) or UNCLASSIFIED


def part_order(part: str) -> tuple[int, str]:
    """A sorting key: the model's order, a joined part after the first of its parts."""
    return _ORDER.get(part.partition("+")[0], len(PARTS)), part


@lru_cache(maxsize=4096)
def module_path(name: str) -> str | None:
    """The module that a range is around, or its class; None for other ranges and operators."""
    match = _MODULE.match(name)
    return match[match.lastindex or 0] if match else None
