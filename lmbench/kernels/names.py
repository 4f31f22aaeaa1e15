"""Classification by name, after the rules of names.toml: kernels, operators, modules, ranges and runtime calls.

A kernel's name tells its kind of work, its precision and a short name to show; the name of a module or operator tells
the part of the model. A kernel's kind follows from ordered rules on its name, of which the first match wins; where no
rule matches, the operator that launched it decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from lmbench.records.vocabulary import MODULE

#: A word, and patterns of the names that it stands for.
Rule = tuple[str, ...]


class WaitCause(NamedTuple):
    """The words for a cause of waits for the host, in which `{calls}` stands for runtime calls, and its remedy."""

    words: str
    remedy: str


class Names(Struct, forbid_unknown_fields=True):
    """The content of names.toml, which says what each list is for; `rules` are those of each `reader`."""

    parts: tuple[str, ...]
    kinds: tuple[str, ...]
    memory_kinds: list[str]
    weightless: set[str]
    rules: dict[str, list[Rule]]
    bus_factors: dict[str, int]
    element_bytes: dict[str, int]
    operations: list[str]
    causes: dict[str, WaitCause]
    phase_parts: dict[str, str]


NAMES = msgspec.toml.decode(Path(__file__).with_name("names.toml").read_bytes(), type=Names)


def reader(rules: str) -> Callable[[str], str]:
    """A function that returns the word of the first of these rules whose pattern is in a name, or an empty string."""
    patterns = [(word, re.compile("|".join(patterns), re.VERBOSE)) for word, *patterns in NAMES.rules[rules]]
    return lru_cache(8192)(lambda name: next((word for word, pattern in patterns if pattern.search(name)), ""))


UNCLASSIFIED = "unclassified"
#: The part, in a report, of compiled kernels that work for several parts at once.
FUSED = "several"
PARTS, KINDS = NAMES.parts, NAMES.kinds
_ORDER = {part: position for position, part in enumerate(PARTS)}
#: The kind of matrix products.
MATMUL = "gemm"
#: Kinds of kernels that can run on tensor cores.
PRODUCTS = (MATMUL, "conv")
#: Precisions of products that multiply in full float32: without tensor cores, or with TF32 off.
FULL_FP32 = ("fp32 off the tensor cores", "fp32")

_by_name, _by_class = reader("module_names"), reader("module_classes")
#: The part of an operator by its name alone; empty for operators that any part uses.
operator_part = reader("operator_parts")
# lmbench's ranges have the path; Lightning's PyTorchProfiler puts the class before it; PyTorch's have class and number.
# FSDP2 makes a class of its own of each module's: FSDPBlock of Block.
_MODULE = re.compile(
    rf"{re.escape(MODULE)}(.*)$|\[pl\]\[module\][^:]*: (.+)$|nn\.Module: (?:FSDP(?=[A-Z]))?(.+?)(?:_\d+)?$"
)
_by_beginning, _by_function = reader("kernel_beginnings"), reader("kernel_functions")
_by_arguments, _by_operator = reader("kernel_arguments"), reader("kernel_operators")
_type, _precision = reader("types"), reader("precisions")
# The operation that a general launcher runs, in its template arguments: the last occurrence of the first pattern found.
_OPERATIONS = [re.compile(pattern) for pattern in NAMES.operations]
_LAUNCHERS = re.compile(
    r"Kernel2|device_kernel|kernel_sm\d+|^[Kk]ernel$|kentry|trampoline_kernel|_kernel_agent|static_kernel"
)
_COMMUNICATION = re.compile(r"^(c10d|nccl|record_param_comms|_c10d_functional|symm_mem)")
_BETWEEN_WORDS = re.compile(r"(?<=[a-z\d])(?=[A-Z])")
# Products that are convolutions: engines of cuDNN and MIOpen, and operators.
_CONVOLUTION = re.compile(
    r"[a-z]cudnn_|\dcudnn|cask_cudnn|[dw]grad|fprop|winograd|conv(?!er)|implicit_gemm|igemm_(fwd|bwd|wrw)|fft[12]d",
    re.IGNORECASE,
)
# Names of libraries are removed first: the letters "gemm" in `fbgemm_gpu` do not make a kernel a product.
_LIBRARIES = re.compile(r"\b(fbgemm_gpu|deep_gemm|grouped_gemm|flashinfer|sgl_kernel|at_cuda_detail)::|_deep_gemm$")
_NOISE = re.compile(r"^std::enable_if<.*?>::type |\(anonymous namespace\)::|<unnamed>::|\bvoid\b|\bstatic\b")
_LENGTH = re.compile(r"[1-9]\d{0,3}")
# Template arguments that name nothing that runs.
_NO_NAME = re.compile(r"enable_|\d|(true|false|bool|unsigned|char|short|int|long|float|double)$")
_WORD = re.compile(r"[\w$]+(?:::[\w$]+)*")


def precision_of(name: str, kind: str, float32_matmul: str | None = None) -> str:
    """The precision of a product's inputs by its kernel's name; empty for other kinds and where the name does not tell.

    `float32_matmul` is PyTorch's float32 matmul precision, if known: `highest` tells fp32 from TF32 where names cannot.
    """
    precision = _precision(name) if kind in PRODUCTS else ""
    return "fp32" if precision == "fp32 or tf32" and float32_matmul == "highest" else precision


@lru_cache(maxsize=8192)
def kind_of(name: str, category: str = "kernel", operator: str = "") -> str:
    """The kind of a device event by its full name; `operator` is the one that launched it, such as `aten::mm`.

    The first of these that matches a rule decides: the name's beginning; the function's last component, or the template
    arguments of a general launcher; the function with its namespaces; the operator. Else it is `unclassified`.
    """
    if category != "kernel":
        return "memcpy"
    function = _LIBRARIES.sub("", base_name(name))
    last = function.rpartition("::")[2]
    # Rules match snake case: `gatherTopK` becomes `gather_top_k`.
    last_words, words = (_BETWEEN_WORDS.sub("_", text).lower() for text in (last, function))
    by_last = _by_arguments(name) if _LAUNCHERS.search(last) else _by_function(last_words)
    # The name of an operator may be that of an Inductor kernel.
    by_operator = _by_beginning(operator) or _by_operator(operator.rpartition("::")[2]) or UNCLASSIFIED
    if _COMMUNICATION.search(operator):
        by_operator = "comm"
    kind = _by_beginning(name) or by_last or _by_function(words) or by_operator
    return "conv" if kind == MATMUL and (_CONVOLUTION.search(name) or _CONVOLUTION.search(operator)) else kind


def base_name(name: str) -> str:
    """The function's qualified name without return type, template arguments and parameters.

    In a mangled name each component follows its own length (Itanium C++ ABI): `_ZN2ck6deviceI...` is `ck::device`.
    """
    if not name.startswith("_Z"):
        text = _NOISE.sub("", name).strip()
        return text.partition("<")[0].partition("(")[0].strip() or text
    components = []
    end = 3 if name.startswith("_ZN") else 2
    while match := _LENGTH.match(name, end):
        begin, end = match.end(), match.end() + int(match[0])
        if end > len(name):
            # The profiler cut the name short.
            return name
        if not name.startswith("_GLOBAL__N_", begin):
            components.append(name[begin:end])
    return "::".join(components) or name


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """A short name that still tells what ran, such as `vec_elementwise[add]`."""
    if name.startswith(("Memcpy ", "Memset ")):
        return name
    base = base_name(name)
    last = base.rpartition("::")[2]
    if last == "kernel":
        # Only the namespaces tell what it is.
        return base
    arguments = "".join(name.partition("<")[1:])
    is_plain = name.startswith("_Z") or not {"<", "("} & set(name)
    if not is_plain and _LAUNCHERS.search(last):
        # CUTLASS's launchers name what they run: a generated `cutlass_80_simt_sgemm_128x64_8x5_nn`, or else a type.
        words = [word.rpartition("::")[2] for word in _WORD.findall(arguments)]
        words.sort(key=lambda word: not word.startswith("cutlass_"))
        return next((word for word in words if not _NO_NAME.match(word)), last)
    plain = last if is_plain else re.sub(r"_kernel(?=_|$)", "", last)
    for pattern, replacement in NAMES.rules["generated"]:
        plain = re.sub(pattern, replacement, plain)
    operations = next(filter(None, (pattern.findall(arguments) for pattern in _OPERATIONS)), [])
    if is_plain or not operations:
        return plain
    # Add the type, unless it is float32.
    operation = f"{operations[-1]} {_type(arguments)}".strip()
    return plain if operation in plain else f"{plain}[{operation}]"


def part_of(path: str, classes: Mapping[str, str] | None = None) -> str | None:
    """The part of a module by its path in `named_modules`, such as `qkv` for `blocks.3.attention.q`; None if unknown.

    Args:
        path: the path; a prefix in front of it makes no difference.
        classes: class name by path, for modules whose own name tells no part.
    """
    names = path.split(".")
    for depth in reversed(range(len(names))):
        name, above = names[depth], names[:depth]
        part = _by_name(name)
        # Models use these names for different parts: the modules above decide.
        if name in ("output", "c_proj", "dense", "proj") and "attention" in map(_by_name, above):
            part = "output"
        elif name == "output":
            # In a block it is BERT's second feed-forward matrix, outside of blocks the head.
            part = "ffn" if any(map(str.isdecimal, above)) else "head"
        class_name = (classes or {}).get(".".join(names[: depth + 1]), name)
        if part := part or _by_class(class_name.removeprefix("FSDP")):
            return part
    return None


def joined(parts: Iterable[str]) -> str:
    """The parts of one kernel as one word such as `residual+norm`, in the model's order; `unclassified` without any."""
    return "+".join(sorted(set(parts), key=part_order)) or UNCLASSIFIED


def part_order(part: str) -> tuple[int, str]:
    """A sorting key for the model's order; a joined part comes right after the first of its parts."""
    return _ORDER.get(part.partition("+")[0], len(PARTS)), part


@lru_cache(maxsize=4096)
def module_path(name: str) -> str | None:
    """The path of the module that a range is around, or its class; None for other ranges and operators."""
    match = _MODULE.match(name)
    return match[match.lastindex or 0] if match else None
