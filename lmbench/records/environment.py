# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What a run's times may depend on: versions, code, GPU, host, flags, variables."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct, field

from lmbench.records.field import Bytes, Count, Flag, Seconds, Text


class Versions(Struct):
    """Environment: versions of what takes part."""

    python: Annotated[Text, "python", "Version of Python."] = None
    torch: Annotated[Text, "torch", "Version of PyTorch."] = None
    cuda: Annotated[Text, "cuda", "CUDA that PyTorch was built with."] = None
    cudnn: Annotated[Text, "cudnn", "cuDNN that PyTorch loaded."] = None
    driver: Annotated[Text, "driver", "NVIDIA driver."] = None
    lightning: Annotated[Text, "lightning", "Version of Lightning."] = None
    torchmetrics: Annotated[Text, "torchmetrics", "Version of torchmetrics."] = None
    wandb: Annotated[Text, "wandb", "Version of wandb."] = None
    lmbench: Annotated[Text, "lmbench", "Version of lmbench."] = None


class Revision(Struct):
    """Environment: where a git checkout stands."""

    commit: Annotated[Text, "commit", "Git commit of the folder's repository."] = None
    is_dirty: Annotated[Flag, "dirty", "Tracked files there differ from the commit."] = None


class Code(Struct):
    """Environment: the code that ran."""

    project: Revision = field(default_factory=Revision)
    lmbench: Revision = field(default_factory=Revision)


class Gpu(Struct):
    """Environment: the GPU."""

    name: Annotated[Text, "GPU", "Name of the device."] = None
    uuid: Annotated[Text, "UUID", "The device's UUID."] = None
    sku: Annotated[Text, "SKU", "Board part number."] = None
    pci_bus_id: Annotated[Text, "PCI id", "PCI bus id."] = None
    compute_capability: Annotated[Text, "capability", "CUDA compute capability."] = None
    memory_total_bytes: Annotated[Bytes, "memory", "Memory of the device."] = None
    power_limit_w: Annotated[float | None, "W", "power limit", "Power limit in force."] = None
    power_limit_default_w: Annotated[float | None, "W", "default limit", "Power limit by default."] = None
    max_sm_clock_hz: Annotated[float | None, "Hz", "max SM clock", "Highest SM clock."] = None
    is_mig: Annotated[Flag, "MIG", "The device is split by MIG."] = None


class Host(Struct):
    """Environment: the machine."""

    hostname: Annotated[Text, "host", "Name of the machine."] = None
    system: Annotated[Text, "system", "Operating system and kernel."] = None
    cpu_model: Annotated[Text, "CPU", "Model of the processor."] = None
    core_count: Annotated[Count, "cores", "Logical cores of the machine."] = None
    affinity: Annotated[list[int] | None, "tree", "affinity", "Cores that the process may use."] = None
    memory_total_bytes: Annotated[Bytes, "host memory", "Memory of the machine."] = None
    python_iteration_s: Annotated[Seconds, "Python score", "Host score: one turn of a small pure-Python loop.", "down"] = None
    kernel_launch_s: Annotated[Seconds, "launch score", "Host score: issuing one tiny kernel (on a CPU: one tiny operator).", "down"] = None


class GarbageCollection(Struct):
    """Environment: garbage collection outside the window."""

    is_enabled: Annotated[Flag, "gc", "Automatic garbage collection is on outside the window."] = None
    thresholds: Annotated[list[int] | None, "tree", "gc thresholds", "Its thresholds."] = None
    frozen_count: Annotated[Count, "gc frozen", "Objects frozen before the window."] = None


class Flags(Struct):
    """Environment: PyTorch's global switches."""

    float32_matmul_precision: Annotated[Text, "float32 matmuls", "`highest` is fp32, `high` is TF32."] = None
    cuda_matmul_allow_tf32: Annotated[Flag, "TF32 matmul", "TF32 allowed in matmuls."] = None
    cudnn_allow_tf32: Annotated[Flag, "TF32 cuDNN", "TF32 allowed in cuDNN."] = None
    cudnn_benchmark: Annotated[Flag, "cudnn.benchmark", "cuDNN tries its algorithms."] = None
    cudnn_deterministic: Annotated[Flag, "cudnn.deterministic", "cuDNN is kept to deterministic algorithms."] = None
    deterministic_algorithms: Annotated[Flag, "deterministic", "PyTorch is kept to deterministic algorithms."] = None
    anomaly_mode: Annotated[Flag, "anomaly mode", "Autograd's anomaly detection is on."] = None
    allocator_backend: Annotated[Text, "allocator", "CUDA memory allocator."] = None
    thread_count: Annotated[Count, "threads", "PyTorch's threads within an operator."] = None


class Environment(Struct):
    """Environment: everything around a run."""

    versions: Versions = field(default_factory=Versions)
    code: Code = field(default_factory=Code)
    gpu: Gpu = field(default_factory=Gpu)
    host: Host = field(default_factory=Host)
    gc: GarbageCollection = field(default_factory=GarbageCollection)
    flags: Flags = field(default_factory=Flags)
    variables: Annotated[dict[str, str] | None, "tree", "variables", "Environment variables from an allow-list; never a secret."] = None
