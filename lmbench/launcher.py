"""What a launcher of processes (torchrun, SLURM, MPI) says of this one."""

from __future__ import annotations

import os

from lmbench.errors import UsageError

#: Variables with the number of processes, and with the place of this one among them.
_COUNTS = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE",
)  # fmt: skip
_PLACES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK",
    "PMI_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK",
)  # fmt: skip


def check_launcher(world_size: int = 1) -> None:
    """Raises UsageError where a variable says that this is one of more processes than `world_size`, or holds no
    number."""
    for names, most in ((_COUNTS, world_size), (_PLACES, world_size - 1)):
        for name in names:
            value = os.environ.get(name, "0")
            if not value.isdecimal():
                raise UsageError(f"{name} is {value!r}; a launcher of processes sets a whole number there; unset it")
            if int(value) > most:
                raise UsageError(
                    f"{name} is {value}: this is one process of several, and {world_size} is to be measured; ask for "
                    f"all with --trainer.devices and --trainer.num_nodes, start one alone, or unset {name}"
                )
