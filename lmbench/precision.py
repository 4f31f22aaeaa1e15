"""Precisions, and the peak rates of GPUs in each.

Only this module reads Lightning's precision strings and PyTorch's float32 matmul precision. A run has a pair of
precisions: the compute precision (`--trainer.precision`) and the precision of float32 matrix products
(`--measure.matmul_precision`). Peak rates are dense, by GPU and data type, each with its source (reference/gpus.csv).
The module works without torch.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple, cast

from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.reference import load_rows

if TYPE_CHECKING:
    import torch


#: Bytes of the dtypes with more than 2 bytes.
_BYTES = {"float64": 8, "float32": 4}


class Precision(Struct, frozen=True):
    """One of Lightning's precisions (reference/precisions.csv).

    `short` is the short name that Lightning still accepts. `compute` is the dtype of matrix products (under a mixed
    precision the lower one), `weights` that of parameters and optimizer state, both by PyTorch's names. `peak` is the
    column of the products' rate in reference/gpus.csv; None for float64, which has no column. `has_scaler` means that a
    loss scaler is used, which may skip the update of a step.
    """

    name: str
    compute: str
    weights: str
    short: str | None = None
    peak: str | None = None
    has_scaler: bool = False
    runs_on_cpu: bool = True

    @property
    def is_mixed(self) -> bool:
        """Whether products have a lower precision than the weights."""
        return self.compute != self.weights

    @property
    def weight_bytes(self) -> int:
        return _BYTES.get(self.weights, 2)

    @property
    def compute_bytes(self) -> int:
        return _BYTES.get(self.compute, 2)

    def compute_dtype(self) -> torch.dtype:
        import torch

        return cast("torch.dtype", getattr(torch, self.compute))

    def weight_dtype(self) -> torch.dtype:
        import torch

        return cast("torch.dtype", getattr(torch, self.weights))


#: Precisions by Lightning's name, in the order of tables.
PRECISIONS = {precision.name: precision for precision in load_rows("precisions.csv", Precision)}

#: Labels in tables for the precision of float32 matrix products, by PyTorch's name.
FP32_MATMUL, TF32_MATMUL = "highest (fp32)", "high (TF32)"
MATMUL_LABELS = {"highest": FP32_MATMUL, "high": TF32_MATMUL, "medium": "medium (bf16)"}


def find_precision(name: str) -> Precision | None:
    """The precision with Lightning's name, long or short; None for a name that a plugin defined."""
    return next((precision for precision in PRECISIONS.values() if name in (precision.name, precision.short)), None)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in records: `float32`."""
    return str(dtype).removeprefix("torch.")


def matmul_label(matmul_precision: str | None) -> str | None:
    """The label in tables for the precision of float32 matrix products: `high (TF32)`; None where it is unknown."""
    return None if matmul_precision is None else MATMUL_LABELS.get(matmul_precision, matmul_precision)


def short_label(precision: str, matmul: str | None) -> str:
    """One word for a precision and its `matmul_label`: `fp32` or `TF32` for `32-true`, else the precision's name."""
    is_fp32 = find_precision(precision) == PRECISIONS["32-true"]
    return {FP32_MATMUL: "fp32", TF32_MATMUL: "TF32"}.get(matmul or "", precision) if is_fp32 else precision


class Gpu(Struct, frozen=True):
    """Datasheet rates of one GPU product at its boost clock, as datasheets print them.

    Rates are dense (never "with sparsity"), in TFLOP/s; a multiply-add counts as two FLOPs.

    Attributes:
        name: name from NVML and torch.cuda.get_device_name, without a leading "NVIDIA ".
        half: rate of the matrix units on float16, and on bfloat16 if the GPU has it (with TF32 or fp8). It is
            the rate with float32 accumulation, which PyTorch's matmuls use; GeForce cards have half their rate there.
        fp32: rate without matrix units.
        memory: memory bandwidth in GB/s.
        size: memory in a datasheet's GB, which are 2^30 bytes: an H200's "141 GB" are 143 771 MiB to NVML. CUDA offers
            up to 2 % less.
        workspace: MiB for cuBLAS (see `matmul_workspace_bytes`).
        source: the datasheet.
        tf32: rate of the matrix units on TF32; None where the GPU has none.
        fp8: rate of the matrix units on fp8; None where the GPU has none.
    """

    name: str
    half: float
    fp32: float
    memory: float
    size: int
    workspace: float
    source: str
    tf32: float | None = None
    fp8: float | None = None

    def flops_per_s(self, dtype: str) -> float | None:
        """The rate of products in `fp8`, `bf16`, `fp16`, `tf32` or `fp32`, in FLOP/s; None where the GPU has none."""
        if dtype == "bf16" and self.tf32 is None and self.fp8 is None:
            return None
        rates = {"fp8": self.fp8, "bf16": self.half, "fp16": self.half, "tf32": self.tf32, "fp32": self.fp32}
        teraflops = rates[dtype]
        return None if teraflops is None else teraflops * 1e12


class Peak(NamedTuple):
    """The peak rate for a run's matrix products, the data type that it is for, and its source."""

    flops_per_s: float
    dtype: str
    source: str


GPUS = load_rows("gpus.csv", Gpu)


def find_gpu(gpu_name: str) -> Gpu | None:
    """The GPU with the name that NVML or torch report; None if it is not in the table.

    Only whole names match: a laptop part, a "D" or "SUPER" variant or a MIG slice is another product with other rates.
    """
    name = " ".join(gpu_name.split()).casefold().removeprefix("nvidia ")
    return next((gpu for gpu in GPUS if gpu.name.casefold() == name), None)


def named_gpu(name: str) -> Gpu:
    """The GPU with a name that a person gives, spaces aside: its whole name, or a part that no other GPU's name has.

    Raises:
        UsageError: no GPU's name contains the part, or several do.
    """
    part = name.casefold().replace(" ", "")
    rows = [gpu for gpu in GPUS if part and part in gpu.name.casefold().replace(" ", "")]
    gpu = find_gpu(name) or (rows[0] if len(rows) == 1 else None)
    if gpu is None:
        if rows:
            options = " or ".join(f"--gpu {shlex.quote(row.name)}" for row in rows)
            raise UsageError(f"several GPUs are called {name!r}; say {options}")
        raise UsageError(f"no GPU is known as {name!r}; known: {', '.join(row.name for row in GPUS)}")
    return gpu


def matmul_workspace_bytes(gpu_name: str) -> int:
    """Memory that PyTorch keeps for cuBLAS, for each thread that multiplies matrices.

    It is 32 MiB on Hopper, Blackwell and unknown GPUs, 8.125 MiB on earlier ones
    (pytorch/pytorch:aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`).

    Args:
        gpu_name: name from NVML or torch.
    """
    gpu = find_gpu(gpu_name)
    return int((32 if gpu is None else gpu.workspace) * 2**20)


def peak_flops(
    gpu_name: str, precision: str, matmul_precision: str = "highest", fp8_fraction: float = 0.0
) -> Peak | None:
    """Dense peak rate for a run's matrix products; None, never a guess, where the GPU or its rate is unknown.

    In fp8 attention and some layers still multiply in bf16. Then the peak is the mean rate if each product runs at the
    peak of its own data type. So 100 % utilization is attainable, and the most.

    Args:
        gpu_name: name from NVML or torch.
        precision: Lightning's precision string, such as ``32-true`` or ``bf16-mixed``.
        matmul_precision: PyTorch's float32 matmul precision. GPUs without TF32 always compute in float32.
        fp8_fraction: share of the FLOPs that are multiplied in fp8, for an fp8 precision.
    """
    gpu, known_precision = find_gpu(gpu_name), find_precision(precision)
    dtype = None if known_precision is None else known_precision.peak
    if gpu is None or dtype is None:
        return None
    # On CUDA every float32 matmul precision except `highest` means TF32: in cuBLAS `medium` acts like `high`.
    if dtype == "fp32" and matmul_precision != "highest" and gpu.tf32 is not None:
        dtype = "tf32"
    rate = gpu.flops_per_s(dtype)
    if dtype == "fp8" and rate is not None:
        rate = 1 / (fp8_fraction / rate + (1 - fp8_fraction) / (gpu.half * 1e12))
        dtype = f"fp8 for {fp8_fraction:.1%} of the FLOPs, bf16 for the rest"
    return None if rate is None else Peak(rate, dtype, gpu.source)
