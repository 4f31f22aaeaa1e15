"""Everything around a run that its times may depend on: versions, code, devices, host, flags, variables."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

import lmbench
from lmbench.instruments.device_state import DeviceSensor
from lmbench.instruments.host import host_facts
from lmbench.masking import is_secret
from lmbench.records.environment import Code, Environment, Flags, GarbageCollection, Revision, Versions

T = TypeVar("T")

#: Only variables whose names begin so are recorded, and none whose name looks like a secret's.
_ALLOWED = ("CUDA_", "PYTORCH_", "TORCH", "NCCL_", "OMP_", "MKL_")

_GIT_TIMEOUT_S = 5.0


def capture_environment(device: torch.device) -> Environment:
    """The `environment` of a run's record.

    Call it when all settings are made, outside the window: it synchronizes.
    """
    sensor = DeviceSensor(device)
    return Environment(
        versions=versions(sensor.driver()),
        code=Code(
            project=git_state(Path.cwd()),
            lmbench=git_state(Path(lmbench.__file__).parent, holds="__init__.py"),
        ),
        gpu=sensor.facts(),
        host=host_facts(device),
        gc=GarbageCollection(gc.isenabled(), list(gc.get_threshold()), gc.get_freeze_count()),
        flags=torch_flags(),
        # Sorted; never one whose name looks like a secret's.
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.upper().startswith(_ALLOWED) and not is_secret(name)
        },
    )


def versions(driver: str | None) -> Versions:
    """Versions of what takes part. Packages are asked for their metadata, not imported."""
    cudnn: int | None = torch.backends.cudnn.version() if torch.version.cuda else None
    packages: dict[str, str] = {}
    for package in ("lightning", "torchmetrics", "wandb"):
        with suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package)
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        driver=driver,
        lmbench=lmbench.__version__,
        **packages,
    )


def torch_flags() -> Flags:
    """Global switches; None where reading one is refused (old and new TF32 settings exclude each other)."""
    cudnn = torch.backends.cudnn
    return Flags(
        float32_matmul_precision=_or_none(torch.get_float32_matmul_precision),
        cuda_matmul_allow_tf32=_or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
        cudnn_allow_tf32=_or_none(lambda: cudnn.allow_tf32),
        cudnn_benchmark=cudnn.benchmark,
        cudnn_deterministic=cudnn.deterministic,
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        anomaly_mode=torch.is_anomaly_enabled(),
        allocator_backend=torch.cuda.get_allocator_backend() if torch.version.cuda else None,
        thread_count=torch.get_num_threads(),
    )


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except RuntimeError:
        return None


def git_state(folder: Path, holds: str | None = None) -> Revision:
    """`commit` of the repository that the folder belongs to; `is_dirty` if its tracked files differ from it.

    Both are None without git or a repository. With `holds` also where the repository does not track that file
    of the folder: a package installed below somebody's project is not part of it.
    """
    if holds is not None and _git(folder, "ls-files", "--error-unmatch", holds) is None:
        return Revision()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return Revision()
    # Untracked files do not count: the results folder itself would make every second run dirty.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Revision(commit, None if changed is None else bool(changed))


def _git(folder: Path, *args: str) -> str | None:
    # Without the optional lock a status of ours cannot get in the way of a user's git command.
    command, variables = ["git", "-C", str(folder), *args], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        output = subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=_GIT_TIMEOUT_S, env=variables
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip()
