"""What a launcher of processes (torchrun, SLURM, MPI) says of this one."""

from __future__ import annotations

import os
import re

from lmbench.errors import UsageError

#: Variables with the number of processes, and with the place of this one among them.
_COUNT = re.compile(
    "(LOCAL_)?WORLD_SIZE|SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE)|FLUX_JOB_SIZE|PMI_SIZE"
    "|(OMPI_COMM_WORLD|MV2_COMM_WORLD|JSM_NAMESPACE)_SIZE"
)
_PLACE = re.compile(
    "((LOCAL|NODE|GROUP)_)?RANK|SLURM_(PROCID|LOCALID)|FLUX_TASK_RANK|PMI_RANK"
    "|(OMPI_COMM_WORLD|MV2_COMM_WORLD|JSM_NAMESPACE)_RANK"
)


def check_launcher(world_size: int = 1) -> None:
    """Raises UsageError where a variable says that this is one of more processes than `world_size`, or holds no
    number."""
    for name, value in os.environ.items():
        most = world_size if _COUNT.fullmatch(name) else world_size - 1
        if most == world_size or _PLACE.fullmatch(name):
            if not value.isdecimal():
                raise UsageError(f"{name} is {value!r}; a launcher of processes sets a whole number there; unset it")
            if int(value) > most:
                raise UsageError(
                    f"{name} is {value}: this is one process of several, and {world_size} is to be measured; ask for "
                    f"all with --trainer.devices and --trainer.num_nodes, start one alone, or unset {name}"
                )
