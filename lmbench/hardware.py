"""Peak rates of GPUs, dense, per data type and product, each with the document it was taken from."""

from __future__ import annotations

from typing import NamedTuple

from lmbench.errors import UsageError
from lmbench.precision import peak_column


class Gpu(NamedTuple):
    """Datasheet rates of one product, at the datasheet's boost clock, as datasheets print them.

    Rates are dense (never "with sparsity"), in TFLOP/s; a multiply-add counts as two. `half` is the rate of matrix
    units on float16, and on bfloat16 where the product has that (as TF32, since Ampere), with float32 accumulation,
    which PyTorch's matmuls use (GeForce cards run at half rate there). `tf32` is None where the product has no such
    unit. `fp32` is the rate without matrix units. `memory` is in GB/s; `size` in a datasheet's GB, which are 2^30 bytes
    (an H200's "141 GB" are 143 771 MiB to NVML), and of which CUDA offers up to 2 % less.

    The name is the one that NVML and torch.cuda.get_device_name report, without a leading "NVIDIA ".
    """

    name: str
    half: float
    tf32: float | None
    fp32: float
    memory: float
    size: int
    source: str

    def flops_per_s(self, dtype: str) -> float | None:
        """The rate of matrix products in `bf16`, `fp16`, `tf32` or `fp32`; None where the GPU has no unit for them."""
        if dtype == "bf16" and self.tf32 is None:
            return None
        teraflops = {"bf16": self.half, "fp16": self.half, "tf32": self.tf32, "fp32": self.fp32}[dtype]
        return None if teraflops is None else teraflops * 1e12

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory * 1e9

    @property
    def memory_size_bytes(self) -> int:
        return self.size * 2**30


class Peak(NamedTuple):
    """The rate that a run's matmuls are held against, in FLOP/s, the data type it is for, and its source."""

    flops_per_s: float
    dtype: str
    source: str


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet and Hopper architecture whitepaper"
_H100_NVL = "NVIDIA H100 Tensor Core GPU datasheet, NVL column (printed with sparsity, halved)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (printed with sparsity, halved)"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (printed with sparsity, halved)"
_B200 = "NVIDIA HGX B200 and DGX B200 datasheets (for 8 GPUs, tensor rates with sparsity: divided by 8, halved)"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_ADA_PRO = "NVIDIA Ada GPU architecture whitepaper for professional visualization"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"

GPUS: tuple[Gpu, ...] = tuple(Gpu(*row) for row in (
    ("B200", 2250, 1125, 75, 8000, 180, _B200),
    ("GH200 480GB", 989.4, 494.7, 67, 4000, 96, _GH200),
    ("H200", 989.4, 494.7, 67, 4800, 141, _H200),
    ("H100 80GB HBM3", 989.4, 494.7, 67, 3350, 80, _H100),
    ("H100 NVL", 835.5, 417.5, 60, 3900, 94, _H100_NVL),
    ("H100 PCIe", 756, 378, 51, 2000, 80, _H100),
    ("A100-SXM4-80GB", 312, 156, 19.5, 2039, 80, _A100),
    ("A100-SXM4-40GB", 312, 156, 19.5, 1555, 40, _A100),
    ("A100 80GB PCIe", 312, 156, 19.5, 1935, 80, _A100),
    ("A100-PCIE-40GB", 312, 156, 19.5, 1555, 40, _A100),
    ("A40", 149.7, 74.8, 37.4, 696, 48, "NVIDIA A40 datasheet"),
    ("A10", 125, 62.5, 31.2, 600, 24, "NVIDIA A10 datasheet"),
    ("L40S", 362.05, 183, 91.6, 864, 48, "NVIDIA L40S datasheet"),
    ("L40", 181.05, 90.5, 90.5, 864, 48, "NVIDIA L40 datasheet"),
    ("L4", 121, 60, 30.3, 300, 24, "NVIDIA L4 datasheet (halved)"),
    ("Tesla T4", 65, None, 8.1, 300, 16, "NVIDIA T4 datasheet"),
    ("T4", 65, None, 8.1, 300, 16, "NVIDIA T4 datasheet"),
    ("Tesla V100-SXM2-16GB", 125, None, 15.7, 900, 16, _V100),
    ("Tesla V100-SXM2-32GB", 125, None, 15.7, 900, 32, _V100),
    ("Tesla V100-PCIE-16GB", 112, None, 14, 900, 16, _V100),
    ("Tesla V100-PCIE-32GB", 112, None, 14, 900, 32, _V100),
    ("Tesla V100S-PCIE-32GB", 130, None, 16.4, 1134, 32, _V100),
    ("RTX 6000 Ada Generation", 364.2, 182.1, 91.1, 960, 48, _ADA_PRO),
    ("RTX A6000", 154.8, 77.4, 38.7, 768, 48, _GA102),
    ("GeForce RTX 5090", 209.5, 104.8, 104.8, 1792, 32, _BLACKWELL),
    ("GeForce RTX 5080", 112.6, 56.3, 56.3, 960, 16, _BLACKWELL),
    ("GeForce RTX 5070 Ti", 87.9, 43.9, 43.9, 896, 16, _BLACKWELL),
    ("GeForce RTX 5070", 61.7, 30.9, 30.9, 672, 12, _BLACKWELL),
    ("GeForce RTX 4090", 165.2, 82.6, 82.6, 1008, 24, _ADA),
    ("GeForce RTX 4080", 97.5, 48.7, 48.7, 716.8, 16, _ADA),
    ("GeForce RTX 4070 Ti", 80.2, 40.1, 40.1, 504, 12, _ADA),
    ("GeForce RTX 3090 Ti", 80, 40, 40, 1008, 24, _GA102),
    ("GeForce RTX 3090", 71, 35.6, 35.6, 936, 24, _GA102),
))  # fmt: skip

_BY_NAME = {gpu.name.casefold(): gpu for gpu in GPUS}


def find_gpu(gpu_name: str) -> Gpu | None:
    """The table's row for a name as NVML or torch report it, or None.

    Only whole names match: a laptop part, a "D" or "SUPER" variant or a MIG slice is another product with
    other rates.
    """
    return _BY_NAME.get(" ".join(gpu_name.split()).casefold().removeprefix("nvidia "))


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


def matmul_workspace_bytes(gpu_name: str, compute_major: int | None = None) -> int:
    """What PyTorch keeps for cuBLAS for each thread that multiplies: 32 MiB on Hopper and Blackwell, 8.125 MiB on
    earlier ones (pytorch/pytorch:aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`).

    Args:
        gpu_name: as NVML or torch report it; enough for the table's GPUs.
        compute_major: the first part of the compute capability, for other GPUs; None counts as a late one.
    """
    gpu = find_gpu(gpu_name)
    if gpu is not None:
        is_late = gpu.name.startswith(("H1", "H2", "GH", "B2", "GeForce RTX 50"))
    else:
        is_late = compute_major is None or compute_major >= 9
    return 32 * 2**20 if is_late else 8_519_680


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
