"""What several ranks of one measurement agree on before its window, and what one of them waits for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, all_gather_object, distributed_c10d, get_world_size

from lmbench.errors import UsageError

#: The kind of error of a rank that only heard of another one's.
COLLECTIVE_FAILED = "CollectiveFailed"


def refuse_unlike(facts: Mapping[str, Any]) -> None:
    """Raises UsageError, on every rank, where the ranks do not have the same of each of these facts."""
    ranks: list[Any] = [None] * get_world_size()
    all_gather_object(ranks, facts)
    for name, value in ranks[0].items():
        for rank, its in enumerate(ranks):
            if its.get(name) != value:
                raise UsageError(
                    f"ranks must be alike: {name} is {value!r} on rank 0 and {its.get(name)!r} on rank {rank}; start "
                    "all of them with the same code, settings and devices"
                )


def limit_waits(timeout_s: float) -> None:
    """Let no collective of any group wait for longer; each had its group's time for what is built and compiled."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def failed_collective(exception: BaseException) -> str | None:
    """The collective that an exception is about, by PyTorch's flight recorder; None where it is about none."""
    dump: Callable[..., bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not (isinstance(exception, DistError) or "gloo" in str(exception)):
        return None
    entries = json.loads(dump(True, False)).get("entries", [])
    # Gloo's all stay `scheduled`, and it raises from the last one; NCCL's begin later than they are issued.
    entry = next((entry for entry in entries if entry["state"] == "started"), entries[-1] if entries else None)
    if entry is None:
        return None
    sizes = ", ".join(" x ".join(map(str, size)) for size in entry["input_sizes"])
    return f"{entry['profiling_name']}, number {entry['collective_seq_id']} of its group, of {sizes} elements"
