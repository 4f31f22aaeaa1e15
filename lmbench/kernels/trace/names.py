"""Kernel names that a person can read: a C++ signature of a thousand letters down to the words that tell it apart."""

from __future__ import annotations

import re
from functools import lru_cache

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
