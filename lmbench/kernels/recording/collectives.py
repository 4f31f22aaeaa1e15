"""The rates of collectives between the ranks of one machine: NCCL on its GPUs, or gloo between processes on a CPU.

Bandwidths are those of nccl-tests (NVIDIA/nccl-tests:doc/PERFORMANCE.md). Each collective is also timed beside matrix
products, as the backward of a training overlaps both.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing

from lmbench.device import best_device
from lmbench.errors import UsageError
from lmbench.files import ScratchFolder
from lmbench.kernels.ceiling import MESSAGES_BYTES, CollectiveRate
from lmbench.kernels.communication import bus_factor_of
from lmbench.kernels.recording.ceiling import device_seconds
from lmbench.progress import progress

#: Edge of the square matrices that are multiplied beside a collective: a product takes as long as a small collective.
_PRODUCT_SIZE, _CPU_PRODUCT_SIZE = 2048, 256
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
#: Stretches of calls in a row, of which the best counts, and the most calls in one.
_STRETCHES, _MOST_CALLS = 3, 100

Work = Callable[[], Any]


def measure_collectives(ranks: int | None, budget_s: float) -> list[CollectiveRate]:
    """Start processes for the ranks, and measure every collective between 2, 4, 8, ... and all of them.

    Args:
        ranks: processes; None for one on each GPU, or two on a CPU. On GPUs there are at most as many.
        budget_s: about how long all collectives are timed. Sizes that would take too long are left out.

    Raises:
        UsageError: there are fewer than two ranks, or more than GPUs.
    """
    is_gpu = best_device().type != "cpu"
    count = torch.accelerator.device_count() if is_gpu else 2
    ranks = ranks or count
    if ranks < 2 or (is_gpu and ranks > count):
        limit = f", and at most one for each of {count} GPUs" if is_gpu else ""
        raise UsageError(f"--ranks is {ranks}; collectives need 2 or more{limit}")
    with ScratchFolder("collectives") as folder:
        cast(Any, torch.multiprocessing).spawn(_be_rank, (ranks, budget_s, folder), nprocs=ranks)
        return msgspec.json.decode(Path(folder, "rates.json").read_bytes(), type=list[CollectiveRate])


def _be_rank(rank: int, ranks: int, budget_s: float, folder: str) -> None:
    """Measure as one rank; rank 0 writes the rates into the folder."""
    device = best_device()
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        backend = "gloo"
    else:
        device = torch.device(device.type, rank)
        torch.accelerator.set_device_index(rank)
        # The ranks agree by gloo, which the GPUs do not notice.
        backend = f"cpu:gloo,{device.type}:nccl"
    # All ranks are on this machine, whose name may not lead to an address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torch 2.13 has new names for two collectives, which torch 2.11 lacks.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    counts = sorted({*(2**power for power in range(1, ranks.bit_length())), ranks})
    cell_s = budget_s / (len(counts) * len(_COLLECTIVES) * len(MESSAGES_BYTES))
    rates = []
    with progress("collectives", len(counts) * len(_COLLECTIVES), is_measured_here=True) as task:
        for count in counts:
            group = dist.new_group(range(count), backend=backend)
            if rank < count:
                for kind in _COLLECTIVES:
                    if rank == 0:
                        task.begin(f"{kind} between {count} ranks")
                    rates += _rates(kind, group, count, device, cell_s)
            _largest(0.0)
    if rank == 0:
        Path(folder, "rates.json").write_bytes(msgspec.json.encode(rates))
    dist.destroy_process_group()


def _rates(kind: str, group: Any, count: int, device: torch.device, cell_s: float) -> list[CollectiveRate]:
    """The rates of one kind of collective in a group of `count` ranks, by size of message.

    They end at the size that would take much longer than `cell_s`.
    """
    size, dtype = (_CPU_PRODUCT_SIZE, torch.float32) if device.type == "cpu" else (_PRODUCT_SIZE, torch.bfloat16)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    multiply = partial(torch.matmul, a, b, out=torch.empty_like(a))

    def seconds(begin: Work | None, products: int, calls: int) -> float:
        """Mean seconds of a call on the slowest rank: a collective, matrix products beside it, or both."""

        def work() -> None:
            collective = begin() if begin is not None else None
            for _ in range(products):
                multiply()
            if collective is not None:
                collective.wait()

        _largest(0.0, group)
        return _largest(device_seconds(device, work, calls) / calls, group)

    rates = []
    # Warm up.
    seconds(None, 1, 20)
    product_s = seconds(None, 1, 20)
    for most_bytes in MESSAGES_BYTES:
        elements = most_bytes // 4 // count * count
        begin = _collective(kind, group, count, torch.randn(elements, device=device))
        seconds(begin, 0, 2)
        once_s = seconds(begin, 0, 2)
        calls = int(min(max(cell_s / (3 * _STRETCHES * once_s), 1), _MOST_CALLS))
        products = max(1, round(once_s / product_s))
        # Alternate, so that a busy moment does not fall on one of the three alone.
        stretches = [
            (seconds(begin, 0, calls), seconds(None, products, calls), seconds(begin, products, calls))
            for _ in range(_STRETCHES)
        ]
        alone_s, compute_s, together_s = map(min, zip(*stretches, strict=True))
        message_bytes, bus_factor = elements * 4, bus_factor_of(kind, count)
        rates.append(
            CollectiveRate(
                collective=kind,
                ranks=count,
                message_bytes=message_bytes,
                seconds=alone_s,
                bus_bytes_per_s=message_bytes * bus_factor / alone_s,
                compute_s=compute_s,
                together_s=together_s,
            )
        )
        # The next message is ten times as large, and takes 4 + 3 * _STRETCHES calls at least.
        if 10 * (4 + 3 * _STRETCHES) * alone_s > 2 * cell_s:
            break
    return rates


def _collective(kind: str, group: Any, count: int, whole: torch.Tensor) -> Work:
    """Begins the collective on the whole tensor, and on one part for each rank."""
    part = whole[: len(whole) // count].clone()
    begins = {
        "all-reduce": partial(dist.all_reduce, whole),
        "all-gather": partial(dist.all_gather_into_tensor, whole, part),
        "reduce-scatter": partial(dist.reduce_scatter_tensor, part, whole),
        "all-to-all": partial(dist.all_to_all_single, whole.clone(), whole),
        "broadcast": partial(dist.broadcast, whole, 0),
    }
    return partial(begins[kind], group=group, async_op=True)


def _largest(value: float, group: Any = None) -> float:
    """The largest of the ranks' values, by gloo; the ranks wait for each other."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.item()
