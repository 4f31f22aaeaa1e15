"""Peak rates of GPUs, dense, per data type and product, each with its source (reference/gpus.csv)."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.precision import peak_column
from lmbench.reference.published import load_rows


class Gpu(Struct, frozen=True):
    """Datasheet rates of one product, at the datasheet's boost clock, as datasheets print them.

    Rates are dense (never "with sparsity"), in TFLOP/s; a multiply-add counts as two. `half` is the rate of matrix
    units on float16, and on bfloat16 where the product has that (as TF32, since Ampere), with float32 accumulation,
    which PyTorch's matmuls use (GeForce cards run at half rate there). `tf32` is None where the product has no such
    unit. `fp32` is the rate without matrix units. `memory` is in GB/s; `size` in a datasheet's GB, which are 2^30 bytes
    (an H200's "141 GB" are 143 771 MiB to NVML), and of which CUDA offers up to 2 % less. `workspace` is in MiB (see
    matmul_workspace_bytes).

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

    def flops_per_s(self, dtype: str) -> float | None:
        """The rate of matrix products in `bf16`, `fp16`, `tf32` or `fp32`; None where the GPU has no unit for them."""
        if dtype == "bf16" and self.tf32 is None:
            return None
        teraflops = {"bf16": self.half, "fp16": self.half, "tf32": self.tf32, "fp32": self.fp32}[dtype]
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


def peak_flops(gpu_name: str, precision: str, matmul_precision: str = "highest") -> Peak | None:
    """Dense peak for a run's matmuls, or None where GPU, precision or such a unit is unknown: never a guess.

    Args:
        gpu_name: as NVML or torch report it.
        precision: Lightning's precision string, e.g. ``32-true`` or ``bf16-mixed``.
        matmul_precision: PyTorch's float32 matmul precision. GPUs without TF32 compute in float32 whatever it is.
    """
    gpu, dtype = find_gpu(gpu_name), peak_column(precision, matmul_precision)
    if gpu is None or dtype is None:
        return None
    if dtype == "tf32" and gpu.tf32 is None:
        dtype = "fp32"
    rate = gpu.flops_per_s(dtype)
    return None if rate is None else Peak(rate, dtype, gpu.source)
