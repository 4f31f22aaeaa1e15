"""What precisions mean, and how fast GPUs are in each.

The only place that reads Lightning's precision strings and PyTorch's float32 matmul precision. A precision is a pair:
the compute precision (`--trainer.precision`) and how float32 matrix products are computed
(`--measure.matmul_precision`). Peak rates are dense, per data type and product, each with its source
(reference/gpus.csv). Works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.reference import load_rows

if TYPE_CHECKING:
    import torch


#: Bytes of PyTorch's dtypes that have more than 2.
_BYTES = {"float64": 8, "float32": 4}


class Precision(Struct, frozen=True):
    """One of Lightning's precisions (reference/precisions.csv), and the short form that it still takes.

    compute and weights are PyTorch's names of dtypes: that of matrix products (under a mixed precision the lower one),
    and that of parameters and optimizer state. peak is the datasheet's column for the products, None without one:
    float64 is not in lmbench's table. With a loss scaler the gradients of a step may be dropped.
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
        """Products in a lower precision than the weights have."""
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


#: By Lightning's name, in the order of tables.
PRECISIONS = {precision.name: precision for precision in load_rows("precisions.csv", Precision)}

#: float32 matrix products by PyTorch's name, and as tables say it.
FP32_MATMUL, TF32_MATMUL = "highest (fp32)", "high (TF32)"
MATMUL_LABELS = {"highest": FP32_MATMUL, "high": TF32_MATMUL, "medium": "medium (bf16)"}


def find_precision(name: str) -> Precision | None:
    """The meaning of Lightning's name, None for one that a plugin made up."""
    return next((meaning for meaning in PRECISIONS.values() if name in (meaning.name, meaning.short)), None)


def matmul_label(matmul_precision: str | None) -> str | None:
    """How float32 matrix products are computed, as a table says it: `high (TF32)`; None where nobody knows."""
    return None if matmul_precision is None else MATMUL_LABELS.get(matmul_precision, matmul_precision)


def short_label(precision: str, matmul: str | None) -> str:
    """One word for precision and `matmul_label`: `fp32` and `TF32` for the two ways of `32-true`, else its own name."""
    is_fp32 = find_precision(precision) == PRECISIONS["32-true"]
    return {FP32_MATMUL: "fp32", TF32_MATMUL: "TF32"}.get(matmul or "", precision) if is_fp32 else precision


class Gpu(Struct, frozen=True):
    """Datasheet rates of one product, at the datasheet's boost clock, as datasheets print them.

    Rates are dense (never "with sparsity"), in TFLOP/s; a multiply-add counts as two. `half` is the rate of matrix
    units on float16, and on bfloat16 where the product has that (as TF32, since Ampere), with float32 accumulation,
    which PyTorch's matmuls use (GeForce cards run at half rate there). `tf32` is None where the product has no such
    unit. `fp32` is the rate without matrix units. `memory` is in GB/s; `size` in a datasheet's GB, which are 2^30 bytes
    (an H200's "141 GB" are 143 771 MiB to NVML), and of which CUDA offers up to 2 % less. `workspace` is in MiB (see
    matmul_workspace_bytes). `fp8` is None where the product has no such unit.

    The name is the one that NVML and torch.cuda.get_device_name report, without a leading "NVIDIA ".
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
        """The rate of products in `fp8`, `bf16`, `fp16`, `tf32` or `fp32`; None where the GPU has no unit for them."""
        if dtype == "bf16" and self.tf32 is None:
            return None
        rates = {"fp8": self.fp8, "bf16": self.half, "fp16": self.half, "tf32": self.tf32, "fp32": self.fp32}
        teraflops = rates[dtype]
        return None if teraflops is None else teraflops * 1e12


class Peak(NamedTuple):
    """The rate that a run's matmuls are held against, in FLOP/s, the data type it is for, and its source."""

    flops_per_s: float
    dtype: str
    source: str


GPUS = load_rows("gpus.csv", Gpu)


def find_gpu(gpu_name: str) -> Gpu | None:
    """The table's row for a name as NVML or torch report it, or None.

    Only whole names match: a laptop part, a "D" or "SUPER" variant or a MIG slice is another product with
    other rates.
    """
    name = " ".join(gpu_name.split()).casefold().removeprefix("nvidia ")
    return next((gpu for gpu in GPUS if gpu.name.casefold() == name), None)


def named_gpu(name: str) -> Gpu:
    """The table's row for a name that a person gives: a whole name, or a part of one row's name only.

    Raises:
        UsageError: no row has it in its name, or several have.
    """
    rows = [gpu for gpu in GPUS if name.strip() and name.casefold() in gpu.name.casefold()]
    gpu = find_gpu(name) or (rows[0] if len(rows) == 1 else None)
    if gpu is None:
        known = ", ".join(row.name for row in rows or GPUS)
        raise UsageError(f"{'several GPUs are called' if rows else 'no GPU is known as'} {name!r}; known: {known}")
    return gpu


def matmul_workspace_bytes(gpu_name: str) -> int:
    """What PyTorch keeps for cuBLAS for each thread that multiplies: 32 MiB on Hopper, Blackwell and GPUs that the
    table lacks, 8.125 MiB on earlier ones (pytorch/pytorch:aten/src/ATen/cuda/CublasHandlePool.cpp,
    `parseChosenWorkspaceSize`).

    Args:
        gpu_name: as NVML or torch report it.
    """
    gpu = find_gpu(gpu_name)
    return int((32 if gpu is None else gpu.workspace) * 2**20)


def peak_flops(
    gpu_name: str, precision: str, matmul_precision: str = "highest", fp8_fraction: float = 0.0
) -> Peak | None:
    """Dense peak for a run's matmuls, or None where GPU, precision or such a unit is unknown: never a guess.

    In fp8 it is the rate at which all FLOPs would be done if each product ran at its own peak, since attention and the
    layers that are left out multiply in bf16. So 100 % is attainable, and the most.

    Args:
        gpu_name: as NVML or torch report it.
        precision: Lightning's precision string, e.g. ``32-true`` or ``bf16-mixed``.
        matmul_precision: PyTorch's float32 matmul precision. GPUs without TF32 compute in float32 whatever it is.
        fp8_fraction: of an fp8 precision the share of FLOPs that are multiplied in fp8.
    """
    gpu, meaning = find_gpu(gpu_name), find_precision(precision)
    dtype = None if meaning is None else meaning.peak
    if gpu is None or dtype is None:
        return None
    # On CUDA any float32 matmul precision but `highest` means TF32 (in cuBLAS `medium` acts like `high`).
    if dtype == "fp32" and matmul_precision != "highest" and gpu.tf32 is not None:
        dtype = "tf32"
    rate = gpu.flops_per_s(dtype)
    if dtype == "fp8" and rate is not None:
        rate = 1 / (fp8_fraction / rate + (1 - fp8_fraction) / (gpu.half * 1e12))
        dtype = f"fp8 for {fp8_fraction:.1%} of the FLOPs, bf16 for the rest"
    return None if rate is None else Peak(rate, dtype, gpu.source)
