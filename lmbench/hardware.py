"""Peak rates of GPUs, dense, per data type and product, each with the document it was taken from."""

from __future__ import annotations

from dataclasses import dataclass

from lmbench.errors import UsageError
from lmbench.precision import peak_column


@dataclass(frozen=True)
class Gpu:
    """Datasheet rates of one product; dense (never "with sparsity"), at the datasheet's boost clock.

    Rates are FLOP/s (a multiply-add counts as two) and byte/s. bf16 and fp16 are matrix units with float32
    accumulation, which is what PyTorch's matmuls use (GeForce cards run at half rate there); fp32 is
    without matrix units. None means that the product has no such unit. The size of the memory is the datasheet's, whose
    GB are 2^30 bytes (an H200's "141 GB" are 143 771 MiB to NVML); what CUDA offers is up to 2 % less.
    """

    names: tuple[str, ...]
    bf16_flops_per_s: float | None
    fp16_flops_per_s: float
    tf32_flops_per_s: float | None
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    memory_size_bytes: int
    source: str


@dataclass(frozen=True)
class Peak:
    """The rate that a run's matmuls are held against, in FLOP/s, the data type it is for, and its source."""

    flops_per_s: float
    dtype: str
    source: str


def _gpu(
    *names: str, bf16: float | None, fp16: float, tf32: float | None, fp32: float, memory: float, size: int, source: str
) -> Gpu:
    """One table row; rates in TFLOP/s, memory in GB/s and its size in GB, as datasheets print them."""
    tera = 1e12
    return Gpu(
        names=names,
        bf16_flops_per_s=None if bf16 is None else bf16 * tera,
        fp16_flops_per_s=fp16 * tera,
        tf32_flops_per_s=None if tf32 is None else tf32 * tera,
        fp32_flops_per_s=fp32 * tera,
        memory_bytes_per_s=memory * 1e9,
        memory_size_bytes=size * 2**30,
        source=source,
    )


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

# The names are what NVML and torch.cuda.get_device_name report, without a leading "NVIDIA ".
GPUS: tuple[Gpu, ...] = (
    _gpu("B200", bf16=2250, fp16=2250, tf32=1125, fp32=75, memory=8000, size=180, source=_B200),
    _gpu("GH200 480GB", bf16=989.4, fp16=989.4, tf32=494.7, fp32=67, memory=4000, size=96, source=_GH200),
    _gpu("H200", bf16=989.4, fp16=989.4, tf32=494.7, fp32=67, memory=4800, size=141, source=_H200),
    _gpu("H100 80GB HBM3", bf16=989.4, fp16=989.4, tf32=494.7, fp32=67, memory=3350, size=80, source=_H100),
    _gpu("H100 NVL", bf16=835.5, fp16=835.5, tf32=417.5, fp32=60, memory=3900, size=94, source=_H100_NVL),
    _gpu("H100 PCIe", bf16=756, fp16=756, tf32=378, fp32=51, memory=2000, size=80, source=_H100),
    _gpu("A100-SXM4-80GB", bf16=312, fp16=312, tf32=156, fp32=19.5, memory=2039, size=80, source=_A100),
    _gpu("A100-SXM4-40GB", bf16=312, fp16=312, tf32=156, fp32=19.5, memory=1555, size=40, source=_A100),
    _gpu("A100 80GB PCIe", bf16=312, fp16=312, tf32=156, fp32=19.5, memory=1935, size=80, source=_A100),
    _gpu("A100-PCIE-40GB", bf16=312, fp16=312, tf32=156, fp32=19.5, memory=1555, size=40, source=_A100),
    _gpu("A40", bf16=149.7, fp16=149.7, tf32=74.8, fp32=37.4, memory=696, size=48, source="NVIDIA A40 datasheet"),
    _gpu("A10", bf16=125, fp16=125, tf32=62.5, fp32=31.2, memory=600, size=24, source="NVIDIA A10 datasheet"),
    _gpu("L40S", bf16=362.05, fp16=362.05, tf32=183, fp32=91.6, memory=864, size=48, source="NVIDIA L40S datasheet"),
    _gpu("L40", bf16=181.05, fp16=181.05, tf32=90.5, fp32=90.5, memory=864, size=48, source="NVIDIA L40 datasheet"),
    _gpu("L4", bf16=121, fp16=121, tf32=60, fp32=30.3, memory=300, size=24, source="NVIDIA L4 datasheet (halved)"),
    _gpu("Tesla T4", "T4", bf16=None, fp16=65, tf32=None, fp32=8.1, memory=300, size=16, source="NVIDIA T4 datasheet"),
    _gpu("Tesla V100-SXM2-16GB", bf16=None, fp16=125, tf32=None, fp32=15.7, memory=900, size=16, source=_V100),
    _gpu("Tesla V100-SXM2-32GB", bf16=None, fp16=125, tf32=None, fp32=15.7, memory=900, size=32, source=_V100),
    _gpu("Tesla V100-PCIE-16GB", bf16=None, fp16=112, tf32=None, fp32=14, memory=900, size=16, source=_V100),
    _gpu("Tesla V100-PCIE-32GB", bf16=None, fp16=112, tf32=None, fp32=14, memory=900, size=32, source=_V100),
    _gpu("Tesla V100S-PCIE-32GB", bf16=None, fp16=130, tf32=None, fp32=16.4, memory=1134, size=32, source=_V100),
    _gpu(
        "RTX 6000 Ada Generation", bf16=364.2, fp16=364.2, tf32=182.1, fp32=91.1, memory=960, size=48, source=_ADA_PRO
    ),
    _gpu("RTX A6000", bf16=154.8, fp16=154.8, tf32=77.4, fp32=38.7, memory=768, size=48, source=_GA102),
    _gpu("GeForce RTX 5090", bf16=209.5, fp16=209.5, tf32=104.8, fp32=104.8, memory=1792, size=32, source=_BLACKWELL),
    _gpu("GeForce RTX 5080", bf16=112.6, fp16=112.6, tf32=56.3, fp32=56.3, memory=960, size=16, source=_BLACKWELL),
    _gpu("GeForce RTX 5070 Ti", bf16=87.9, fp16=87.9, tf32=43.9, fp32=43.9, memory=896, size=16, source=_BLACKWELL),
    _gpu("GeForce RTX 5070", bf16=61.7, fp16=61.7, tf32=30.9, fp32=30.9, memory=672, size=12, source=_BLACKWELL),
    _gpu("GeForce RTX 4090", bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6, memory=1008, size=24, source=_ADA),
    _gpu("GeForce RTX 4080", bf16=97.5, fp16=97.5, tf32=48.7, fp32=48.7, memory=716.8, size=16, source=_ADA),
    _gpu("GeForce RTX 4070 Ti", bf16=80.2, fp16=80.2, tf32=40.1, fp32=40.1, memory=504, size=12, source=_ADA),
    _gpu("GeForce RTX 3090 Ti", bf16=80, fp16=80, tf32=40, fp32=40, memory=1008, size=24, source=_GA102),
    _gpu("GeForce RTX 3090", bf16=71, fp16=71, tf32=35.6, fp32=35.6, memory=936, size=24, source=_GA102),
)  # fmt: skip

_BY_NAME = {name.casefold(): gpu for gpu in GPUS for name in gpu.names}


def find_gpu(gpu_name: str) -> Gpu | None:
    """The table's row for a name as NVML or torch report it, or None.

    Only whole names match: a laptop part, a "D" or "SUPER" variant or a MIG slice is another product with
    other rates.
    """
    name = " ".join(gpu_name.split()).casefold().removeprefix("nvidia ")
    return _BY_NAME.get(name)


def named_gpu(given: str) -> Gpu:
    """The table's row for a name that a person gives: a whole name, or a part of one row's names only.

    Raises:
        UsageError: no row has it in its name, or several have.
    """
    found = find_gpu(given)
    rows = [gpu for gpu in GPUS if any(given.casefold() in name.casefold() for name in gpu.names)]
    if found is None and len(rows) == 1 and given.strip():
        found = rows[0]
    if found is None:
        known = ", ".join(gpu.names[0] for gpu in (rows or GPUS))
        raise UsageError(
            f"{'several GPUs are called' if rows and given.strip() else 'no GPU is known as'} {given!r}; known: {known}"
        )
    return found


def matmul_workspace_bytes(gpu_name: str, compute_major: int | None = None) -> int:
    """What PyTorch keeps for cuBLAS for each thread that multiplies: 32 MiB on Hopper and Blackwell, 8.125 MiB on
    earlier ones (pytorch/pytorch:aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`).

    Args:
        gpu_name: as NVML or torch report it; tells it of the table's GPUs.
        compute_major: the first part of the compute capability, where it is known; tells it of others. Without either
            it is taken for a late one.
    """
    known = find_gpu(gpu_name)
    if known is not None:
        is_late = any(name.startswith(("H1", "H2", "GH", "B2", "GeForce RTX 50")) for name in known.names)
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
    gpu, column = find_gpu(gpu_name), peak_column(precision, matmul_precision)
    if gpu is None or column is None:
        return None
    if column == "tf32" and gpu.tf32_flops_per_s is None:
        column = "fp32"
    rate: float | None = getattr(gpu, f"{column}_flops_per_s")
    return None if rate is None else Peak(rate, column, gpu.source)
