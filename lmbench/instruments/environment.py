"""The surroundings of a run on which its times may depend: versions, code, flags, variables, host and device."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import all_gather_object, get_world_size

from lmbench import version
from lmbench.device import device_of
from lmbench.errors import UsageError
from lmbench.files import short_digest
from lmbench.instruments.host import host_facts
from lmbench.masking import is_secret
from lmbench.programs import git_output
from lmbench.records.run import Code, Flags, Revision, RunEnvironment, Versions
from lmbench.records.vocabulary import Values

T = TypeVar("T")

#: Beginnings of the names of variables that are recorded, unless a name looks like a secret's: those that PyTorch, its
#: libraries, the C library and the loader of libraries read.
_ALLOWED = (
    "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_TF32", "NCCL_", "GLOO_", "HIP_", "HSA_", "MIOPEN_", "PYTORCH_", "TORCH",
    "TRITON_", "ATEN_", "ONEDNN_", "DNNL_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_TUNABLES",
    "LD_PRELOAD", "PYTHONMALLOC",
)  # fmt: skip


def capture_environment(device: torch.device, subject: type | None = None) -> RunEnvironment:
    """The `environment` of a run's record.

    Call it after all settings are made, and outside the window, because it synchronizes.

    Args:
        device: the run's device.
        subject: the measured class. The project is the repository that tracks its file, else that of the current
            folder, which the class may not come from.
    """
    sensor, project = device_of(device).sensor(), Revision()
    with suppress(TypeError, OSError):
        if subject is not None and not subject.__module__.startswith("lmbench."):
            file = Path(inspect.getfile(subject))
            project = git_state(file.parent, holds=file.name)
    return RunEnvironment(
        versions=versions(sensor.driver()),
        code=Code(
            project=project if project.commit else git_state(Path.cwd()),
            lmbench=git_state(Path(version.__file__).parent, holds="__init__.py"),
        ),
        gpu=sensor.facts(),
        host=host_facts(device),
        flags=torch_flags(),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.upper().startswith(_ALLOWED) and not is_secret(name)
        },
    )


def versions(driver: str | None) -> Versions:
    """Versions of Python, PyTorch, CUDA, the driver and packages; packages are not imported for it."""
    cudnn: int | None = torch.backends.cudnn.version() if torch.version.cuda else None
    return Versions(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        driver=driver,
        lightning=metadata.version("lightning"),
        lmbench=version.__version__,
    )


def torch_flags() -> Flags:
    """PyTorch's global switches; None where PyTorch refuses to read one, since old and new TF32 settings conflict."""
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
    """The commit of a folder's repository, whether tracked files differ from it, and a digest of the differences.

    All are None without git or a repository.

    Args:
        folder: a folder in the repository.
        holds: a file of the folder. If the repository does not track it, all are None too: a package that is installed
            below a project is not part of the project.
    """
    if holds is not None and git_output(folder, "ls-files", "--error-unmatch", holds) is None:
        return Revision()
    # Untracked files do not count, because the results folder would make every second run dirty.
    state = git_output(folder, "describe", "--always", "--exclude=*", "--abbrev=64", "--dirty")
    if state is None:
        return Revision()
    commit, _, dirty = state.partition("-")
    if not dirty:
        return Revision(commit, False)
    # Two runs of an edited tree are runs of one code only if the edits are the same.
    changes = git_output(folder, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD")
    return Revision(commit, True, None if changes is None else short_digest(changes))


def refuse_unlike(facts: Values) -> None:
    """Compare this rank's facts with those of all other ranks.

    Raises:
        UsageError: the ranks differ in one of the facts; raised on every rank.
    """
    ranks: list[Any] = [None] * get_world_size()
    all_gather_object(ranks, facts)
    for name, value in ranks[0].items():
        for rank, rank_facts in enumerate(ranks):
            if rank_facts.get(name) != value:
                raise UsageError(
                    f"ranks must be alike: {name} is {value!r} on rank 0 and {rank_facts.get(name)!r} on rank {rank}; "
                    "start all of them with the same code, settings and devices"
                )
