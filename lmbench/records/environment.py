# ruff: noqa: E501 (tables, one field a line)
"""What a run's times may depend on: versions, code, GPU, host, flags, variables."""

from __future__ import annotations

from msgspec import Struct

from lmbench.records.field import Bytes, Count, Flag, Hertz, Seconds, Text, Watts, part


class Versions(Struct):
    """Environment: versions of what takes part.

    Attributes:
        python: python. Version of Python.
        torch: torch. Version of PyTorch.
        cuda: cuda. CUDA that PyTorch was built with.
        cudnn: cudnn. cuDNN that PyTorch loaded.
        driver: driver. NVIDIA driver.
        lightning: lightning. Version of Lightning.
        torchmetrics: torchmetrics. Version of torchmetrics.
        wandb: wandb. Version of wandb.
        lmbench: lmbench. Version of lmbench.
    """

    python: Text = None
    torch: Text = None
    cuda: Text = None
    cudnn: Text = None
    driver: Text = None
    lightning: Text = None
    torchmetrics: Text = None
    wandb: Text = None
    lmbench: Text = None


class Revision(Struct):
    """Environment: where a git checkout stands.

    Attributes:
        commit: commit. Git commit of the folder's repository.
        is_dirty: dirty. Tracked files there differ from the commit.
    """

    commit: Text = None
    is_dirty: Flag = None


class Code(Struct):
    """Environment: the code that ran."""

    project: Revision = part(Revision)
    lmbench: Revision = part(Revision)


class Gpu(Struct):
    """Environment: the GPU.

    Attributes:
        name: GPU. Name of the device.
        uuid: UUID. The device's UUID.
        sku: SKU. Board part number.
        pci_bus_id: PCI id. PCI bus id.
        compute_capability: capability. CUDA compute capability.
        memory_total_bytes: memory. Memory of the device.
        power_limit_w: power limit. Power limit in force.
        power_limit_default_w: default limit. Power limit by default.
        max_sm_clock_hz: max SM clock. Highest SM clock.
        is_mig: MIG. The device is split by MIG.
    """

    name: Text = None
    uuid: Text = None
    sku: Text = None
    pci_bus_id: Text = None
    compute_capability: Text = None
    memory_total_bytes: Bytes = None
    power_limit_w: Watts = None
    power_limit_default_w: Watts = None
    max_sm_clock_hz: Hertz = None
    is_mig: Flag = None


class Host(Struct):
    """Environment: the machine.

    Attributes:
        hostname: host. Name of the machine.
        system: system. Operating system and kernel.
        cpu_model: CPU. Model of the processor.
        core_count: cores. Logical cores of the machine.
        affinity: affinity. Cores that the process may use.
        memory_total_bytes: host memory. Memory of the machine.
        python_iteration_s: Python score (lower is better). Host score: one turn of a small pure-Python loop.
        kernel_launch_s: launch score (lower is better). Host score: issuing one tiny kernel (on a CPU: one tiny operator).
    """

    hostname: Text = None
    system: Text = None
    cpu_model: Text = None
    core_count: Count = None
    affinity: list[int] | None = None
    memory_total_bytes: Bytes = None
    python_iteration_s: Seconds = None
    kernel_launch_s: Seconds = None


class GarbageCollection(Struct):
    """Environment: garbage collection outside the window.

    Attributes:
        is_enabled: gc. Automatic garbage collection is on outside the window.
        thresholds: gc thresholds. Thresholds of Python's garbage collector.
        frozen_count: gc frozen. Objects frozen before the window.
    """

    is_enabled: Flag = None
    thresholds: list[int] | None = None
    frozen_count: Count = None


class Flags(Struct):
    """Environment: PyTorch's global switches.

    Attributes:
        float32_matmul_precision: float32 matmuls. `highest` is fp32, `high` is TF32.
        cuda_matmul_allow_tf32: TF32 matmul. TF32 allowed in matmuls.
        cudnn_allow_tf32: TF32 cuDNN. TF32 allowed in cuDNN.
        cudnn_benchmark: cudnn.benchmark. cuDNN tries its algorithms.
        cudnn_deterministic: cudnn.deterministic. cuDNN is kept to deterministic algorithms.
        deterministic_algorithms: deterministic. PyTorch is kept to deterministic algorithms.
        anomaly_mode: anomaly mode. Autograd's anomaly detection is on.
        allocator_backend: allocator. CUDA memory allocator.
        thread_count: threads. PyTorch's threads within an operator.
    """

    float32_matmul_precision: Text = None
    cuda_matmul_allow_tf32: Flag = None
    cudnn_allow_tf32: Flag = None
    cudnn_benchmark: Flag = None
    cudnn_deterministic: Flag = None
    deterministic_algorithms: Flag = None
    anomaly_mode: Flag = None
    allocator_backend: Text = None
    thread_count: Count = None


class Environment(Struct):
    """Environment: everything around a run.

    Attributes:
        variables: variables. Environment variables from an allow-list; never a secret.
    """

    versions: Versions = part(Versions)
    code: Code = part(Code)
    gpu: Gpu = part(Gpu)
    host: Host = part(Host)
    gc: GarbageCollection = part(GarbageCollection)
    flags: Flags = part(Flags)
    variables: dict[str, str] | None = None
