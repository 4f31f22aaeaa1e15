# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What a run's times may depend on: versions, code, GPU, host, flags, variables."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct, field

from lmbench.records.field import About


class Versions(Struct):
    """Environment: versions of what takes part."""

    python: Annotated[str | None, About("text", "python", "Version of Python.")] = None
    torch: Annotated[str | None, About("text", "torch", "Version of PyTorch.")] = None
    cuda: Annotated[str | None, About("text", "cuda", "CUDA that PyTorch was built with.")] = None
    cudnn: Annotated[str | None, About("text", "cudnn", "cuDNN that PyTorch loaded.")] = None
    driver: Annotated[str | None, About("text", "driver", "NVIDIA driver.")] = None
    lightning: Annotated[str | None, About("text", "lightning", "Version of Lightning.")] = None
    torchmetrics: Annotated[str | None, About("text", "torchmetrics", "Version of torchmetrics.")] = None
    wandb: Annotated[str | None, About("text", "wandb", "Version of wandb.")] = None
    lmbench: Annotated[str | None, About("text", "lmbench", "Version of lmbench.")] = None


class Revision(Struct):
    """Environment: where a git checkout stands."""

    commit: Annotated[str | None, About("text", "commit", "Git commit of the folder's repository.")] = None
    is_dirty: Annotated[bool | None, About("flag", "dirty", "Tracked files there differ from the commit.")] = None


class Code(Struct):
    """Environment: the code that ran."""

    project: Revision = field(default_factory=Revision)
    lmbench: Revision = field(default_factory=Revision)


class Gpu(Struct):
    """Environment: the GPU."""

    name: Annotated[str | None, About("text", "GPU", "Name of the device.")] = None
    uuid: Annotated[str | None, About("text", "UUID", "The device's UUID.")] = None
    sku: Annotated[str | None, About("text", "SKU", "Board part number.")] = None
    pci_bus_id: Annotated[str | None, About("text", "PCI id", "PCI bus id.")] = None
    compute_capability: Annotated[str | None, About("text", "capability", "CUDA compute capability.")] = None
    memory_total_bytes: Annotated[int | None, About("bytes", "memory", "Memory of the device.")] = None
    power_limit_w: Annotated[float | None, About("W", "power limit", "Power limit in force.")] = None
    power_limit_default_w: Annotated[float | None, About("W", "default limit", "Power limit by default.")] = None
    max_sm_clock_hz: Annotated[float | None, About("Hz", "max SM clock", "Highest SM clock.")] = None
    is_mig: Annotated[bool | None, About("flag", "MIG", "The device is split by MIG.")] = None


class Host(Struct):
    """Environment: the machine."""

    hostname: Annotated[str | None, About("text", "host", "Name of the machine.")] = None
    system: Annotated[str | None, About("text", "system", "Operating system and kernel.")] = None
    cpu_model: Annotated[str | None, About("text", "CPU", "Model of the processor.")] = None
    core_count: Annotated[int | None, About("count", "cores", "Logical cores of the machine.")] = None
    affinity: Annotated[list[int] | None, About("tree", "affinity", "Cores that the process may use.")] = None
    memory_total_bytes: Annotated[int | None, About("bytes", "host memory", "Memory of the machine.")] = None
    python_iteration_s: Annotated[float | None, About("s", "Python score", "Host score: one turn of a small pure-Python loop.", "down")] = None
    kernel_launch_s: Annotated[float | None, About("s", "launch score", "Host score: issuing one tiny kernel (on a CPU: one tiny operator).", "down")] = None


class GarbageCollection(Struct):
    """Environment: garbage collection outside the window."""

    is_enabled: Annotated[bool | None, About("flag", "gc", "Automatic garbage collection is on outside the window.")] = None
    thresholds: Annotated[list[int] | None, About("tree", "gc thresholds", "Its thresholds.")] = None
    frozen_count: Annotated[int | None, About("count", "gc frozen", "Objects frozen before the window.")] = None


class Flags(Struct):
    """Environment: PyTorch's global switches."""

    float32_matmul_precision: Annotated[str | None, About("text", "float32 matmuls", "`highest` is fp32, `high` is TF32.")] = None
    cuda_matmul_allow_tf32: Annotated[bool | None, About("flag", "TF32 matmul", "TF32 allowed in matmuls.")] = None
    cudnn_allow_tf32: Annotated[bool | None, About("flag", "TF32 cuDNN", "TF32 allowed in cuDNN.")] = None
    cudnn_benchmark: Annotated[bool | None, About("flag", "cudnn.benchmark", "cuDNN tries its algorithms.")] = None
    cudnn_deterministic: Annotated[bool | None, About("flag", "cudnn.deterministic", "cuDNN is kept to deterministic algorithms.")] = None
    deterministic_algorithms: Annotated[bool | None, About("flag", "deterministic", "PyTorch is kept to deterministic algorithms.")] = None
    anomaly_mode: Annotated[bool | None, About("flag", "anomaly mode", "Autograd's anomaly detection is on.")] = None
    allocator_backend: Annotated[str | None, About("text", "allocator", "CUDA memory allocator.")] = None
    thread_count: Annotated[int | None, About("count", "threads", "PyTorch's threads within an operator.")] = None


class Environment(Struct):
    """Environment: everything around a run."""

    versions: Versions = field(default_factory=Versions)
    code: Code = field(default_factory=Code)
    gpu: Gpu = field(default_factory=Gpu)
    host: Host = field(default_factory=Host)
    gc: GarbageCollection = field(default_factory=GarbageCollection)
    flags: Flags = field(default_factory=Flags)
    variables: Annotated[dict[str, str] | None, About("tree", "variables", "Environment variables from an allow-list; never a secret.")] = None
