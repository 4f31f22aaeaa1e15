# ruff: noqa: E501 (tables, one row a line)
"""Fields of run.json under `environment`: versions, code, GPU, host, flags."""

from __future__ import annotations

from lmbench.records.old_field import group

_VERSIONS = group(
    "Environment",
    "run",
    tuple(
        (name, "text", name, meaning)
        for name, meaning in (
            ("python", "Version of Python."),
            ("torch", "Version of PyTorch."),
            ("cuda", "CUDA that PyTorch was built with."),
            ("cudnn", "cuDNN that PyTorch loaded."),
            ("driver", "NVIDIA driver."),
            ("lightning", "Version of Lightning."),
            ("torchmetrics", "Version of torchmetrics."),
            ("wandb", "Version of wandb."),
            ("lmbench", "Version of lmbench."),
        )
    ),
    prefix="environment.versions.",
)

_CODE = group(
    "Environment",
    "run",
    (
        ("project.commit", "text", "commit", "Git commit of the working directory's repository."),
        ("project.is_dirty", "flag", "dirty", "Tracked files there differ from the commit."),
        (
            "lmbench.commit",
            "text",
            "lmbench commit",
            "Git commit of lmbench's own source, where it is a checkout.",
        ),
        ("lmbench.is_dirty", "flag", "lmbench dirty", "Tracked files there differ from the commit."),
    ),
    prefix="environment.code.",
)

_GPU = group(
    "Environment",
    "run",
    (
        ("name", "text", "GPU", "Name of the device."),
        ("uuid", "text", "UUID", "The device's UUID."),
        ("sku", "text", "SKU", "Board part number."),
        ("pci_bus_id", "text", "PCI id", "PCI bus id."),
        ("compute_capability", "text", "capability", "CUDA compute capability."),
        ("memory_total_bytes", "bytes", "memory", "Memory of the device."),
        ("power_limit_w", "W", "power limit", "Power limit in force."),
        ("power_limit_default_w", "W", "default limit", "Power limit by default."),
        ("max_sm_clock_hz", "Hz", "max SM clock", "Highest SM clock."),
        ("is_mig", "flag", "MIG", "The device is split by MIG."),
    ),
    prefix="environment.gpu.",
)

_HOST = group(
    "Environment",
    "run",
    (
        ("hostname", "text", "host", "Name of the machine."),
        ("system", "text", "system", "Operating system and kernel."),
        ("cpu_model", "text", "CPU", "Model of the processor."),
        ("core_count", "count", "cores", "Logical cores of the machine."),
        ("affinity", "tree", "affinity", "Cores that the process may use."),
        ("memory_total_bytes", "bytes", "host memory", "Memory of the machine."),
        ("python_iteration_s", "s", "Python score", "Host score: one turn of a small pure-Python loop.", "down"),
        ("kernel_launch_s", "s", "launch score", "Host score: issuing one tiny kernel (on a CPU: one tiny operator).", "down"),
    ),
    prefix="environment.host.",
)  # fmt: skip

_GC = group(
    "Environment",
    "run",
    (
        ("is_enabled", "flag", "gc", "Automatic garbage collection is on outside the window."),
        ("thresholds", "tree", "gc thresholds", "Its thresholds."),
        ("frozen_count", "count", "gc frozen", "Objects frozen before the window."),
    ),
    prefix="environment.gc.",
)

_FLAGS = group(
    "Environment",
    "run",
    (
        ("float32_matmul_precision", "text", "float32 matmuls", "`highest` is fp32, `high` is TF32."),
        ("cuda_matmul_allow_tf32", "flag", "TF32 matmul", "TF32 allowed in matmuls."),
        ("cudnn_allow_tf32", "flag", "TF32 cuDNN", "TF32 allowed in cuDNN."),
        ("cudnn_benchmark", "flag", "cudnn.benchmark", "cuDNN tries its algorithms."),
        ("cudnn_deterministic", "flag", "cudnn.deterministic", "cuDNN is kept to deterministic algorithms."),
        ("deterministic_algorithms", "flag", "deterministic", "PyTorch is kept to deterministic algorithms."),
        ("anomaly_mode", "flag", "anomaly mode", "Autograd's anomaly detection is on."),
        ("allocator_backend", "text", "allocator", "CUDA memory allocator."),
        ("thread_count", "count", "threads", "PyTorch's threads within an operator."),
    ),
    prefix="environment.flags.",
)

_VARIABLES = group(
    "Environment",
    "run",
    (
        (
            "environment.variables",
            "tree",
            "variables",
            "Environment variables from an allow-list; never a secret.",
        ),
    ),
)

ENVIRONMENT_FIELDS = (*_VERSIONS, *_CODE, *_GPU, *_HOST, *_GC, *_FLAGS, *_VARIABLES)
