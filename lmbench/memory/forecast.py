"""Forecasts of a configuration's memory by phase and category. Works without torch: a process of its own makes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from lmbench.memory.blocks import Category
from lmbench.precision import GPUS, matmul_workspace_bytes, named_gpu
from lmbench.progress import progress
from lmbench.python_process import run_python
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import Phase

#: The memory that a process takes on a GPU before its first tensor: context, kernels, libraries. An estimate for an
#: H200: nvidia-smi shows 500 to 620 MiB for a process of PyTorch 2 that did one matrix product.
CONTEXT_BYTES = 600 * 2**20
#: The share of the datasheet's size that CUDA offers, seen from 97.9 % (RTX 4090, 23.5 of 24) to 99.2 % (H200, 139.8 of
#: 141).
OFFERED_FRACTION = 0.985


Answer = TypeVar("Answer")


class PhasePeak(Struct):
    """The peak of a phase in bytes by category, as the allocator counts them, and the operator that reaches it.

    `region` is empty, or the part of the backward with the logits (`first`) or without them (`rest`).
    """

    phase: Phase
    peak: dict[Category, int]
    operator: str
    region: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.peak.values())


class TargetGpu(Struct):
    """A GPU to predict for: its memory, and the workspace that cuBLAS takes on it."""

    name: str
    total_bytes: int
    workspace_bytes: int

    @property
    def room_bytes(self) -> int:
        """The bytes that the allocator can reserve beside the process's own memory."""
        return self.total_bytes - CONTEXT_BYTES

    def fits(self, reserved_bytes: float) -> bool:
        """Whether the allocator can reserve so much."""
        return reserved_bytes <= self.room_bytes


class FitOnGpu(Struct):
    """Whether a configuration fits on a GPU, and the largest that does; None if not even the smallest does, or if the
    size cannot be varied."""

    gpu: TargetGpu
    fits: bool
    largest_batch_size: int | None
    largest_context_length: int | None


class Forecast(Struct):
    """The predicted memory of a configuration; of several ranks that of rank 0, whose part is the largest.

    `phases` are those of a steady step; `run_peak_bytes` is the peak from the first step on. `is_sharded` says that
    ranks share parameters, gradients and optimizer state evenly (None: they split only some); `fewest_gpus` is then the
    number of GPUs that is enough, None if no number is. `assumed` are the user's lines that read values, each with what
    was assumed, since a prediction has only shapes.
    """

    batch_size: int
    context_length: int | None
    precision: str
    mode: str
    zero_grad: str
    is_compiled: bool
    phases: list[PhasePeak]
    reserved_bytes: int
    method: str
    strategy: str = "auto"
    world_size: int = 1
    run_peak_bytes: int = 0
    is_sharded: bool | None = False
    fewest_gpus: int | None = None
    assumed: list[str] = []
    on_gpus: list[FitOnGpu] = []
    took_s: float = 0.0

    @property
    def highest(self) -> PhasePeak:
        return max(self.phases, key=lambda phase: phase.total_bytes)


class Request(Struct, tag=True):
    """The part of a request to the predicting process that is not an option of `lmbench fit`: the GPUs to predict for,
    and whether to find the largest batch and context that fit on them."""

    gpus: list[TargetGpu]
    finds_largest: bool = False


def gpu_for(name: str | None) -> TargetGpu | None:
    """The GPU of that name, or without a name the first one of this machine; None if the machine has none.

    Raises:
        UsageError: no GPU is known by that name.
    """
    if name is not None:
        sheet = named_gpu(name)
        offered_bytes = int(sheet.size * 2**30 * OFFERED_FRACTION)
        return TargetGpu(sheet.name, offered_bytes, matmul_workspace_bytes(sheet.name))
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        # What PyTorch calls device 0, or at least a card of the same kind.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(first)) if first.isdecimal() else by_uuid(first)
        name, memory = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    # NVML's total includes the memory that the driver keeps for itself (torch sees 139.8 of an H200's 140.4 GiB).
    return TargetGpu(name, memory.total - getattr(memory, "reserved", 0), matmul_workspace_bytes(name))


def gpus_for(names: str | None) -> list[TargetGpu]:
    """The GPUs of these names, parted by commas, or of `all`, the smallest first; without names the first one here.

    Raises:
        UsageError: no GPU is known by a name.
    """
    listed = [gpu.name for gpu in GPUS] if names == "all" else names.split(",") if names else [None]
    gpus = [gpu for name in listed if (gpu := gpu_for(name)) is not None]
    return sorted(gpus, key=lambda gpu: gpu.total_bytes)


def gpu_of(run: RunRecord) -> TargetGpu | None:
    """The GPU of a run, by its record; None for a run on a CPU, or if the size of its memory is unknown."""
    name, total_bytes = run.environment.gpu.name, run.memory.device_total_bytes
    if not run.is_on_gpu or name is None or total_bytes is None:
        return None
    return TargetGpu(name, total_bytes, matmul_workspace_bytes(name))


def ask_forecast(words: list[str], request: Request) -> Forecast:
    """The forecast for a configuration, with its progress shown. Raises as `ask` does."""
    with progress("predicting memory") as task:
        return ask(words, request, Forecast, task.note)


def ask(
    words: list[str], request: Struct, answer: type[Answer], heard: Callable[[str], None] = lambda text: None
) -> Answer:
    """The answer of the predicting process, which is one of its own, since its changes to PyTorch cannot be undone.

    Args:
        words: the configuration, as options of `lmbench fit`.
        request: the question about it, such as a `Request`.
        answer: the type of the answer.
        heard: called with each progress message of the process.

    Raises:
        UsageError: the words are wrong, or the module cannot be run on fake tensors.
        ProcessFailed: the process failed.
    """
    printed = run_python("-m", "lmbench.fit.prediction", msgspec.json.encode(request).decode(), *words, heard=heard)
    return msgspec.json.decode(printed, type=answer)
