"""A forecast of what a configuration will take, by phase and category; whom to ask for one; and what would make a run
fit that ran out of memory. Works without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import msgspec
from msgspec import Struct

from lmbench.configs import may_run, read_yaml
from lmbench.errors import UsageError
from lmbench.masking import leaves
from lmbench.memory.blocks import Category
from lmbench.precision import matmul_workspace_bytes, named_gpu
from lmbench.progress import progress
from lmbench.python_process import ProcessFailed, run_python
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import BACKWARD_MODES, Phase

#: What a process takes of a GPU before its first tensor: context, kernels, libraries. About this much on an H200
#: (estimate; nvidia-smi shows 500 to 620 MiB for a process of PyTorch 2 that did one matrix product).
CONTEXT_BYTES = 600 * 2**20
#: Of the datasheet's size, what CUDA offers: 97.9 % to 99.2 % of it are known (RTX 4090 23.5 of 24, H200 139.8 of 141).
OFFERED_FRACTION = 0.985


class PhasePeak(Struct):
    """The most allocated at once in a phase, as the allocator counts it, in bytes by category, and the operator that
    reaches it. `region` is empty, or the part of the backward that has the logits (`first`) or has not (`rest`)."""

    phase: Phase
    peak: dict[Category, int]
    operator: str
    region: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.peak.values())


class Gpu(Struct):
    """The GPU that it shall fit on."""

    name: str
    total_bytes: int
    workspace_bytes: int

    def fits(self, reserved_bytes: int) -> bool:
        """Whether the allocator can hold so much beside the process's own part."""
        return reserved_bytes + CONTEXT_BYTES <= self.total_bytes


class Largest(Struct):
    """The largest value that fits, of those that are tried, and what the allocator holds then; null where none does."""

    value: int | None
    reserved_bytes: int | None = None


class Forecast(Struct):
    """What `lmbench memory` tells of a configuration: of several ranks, what rank 0 takes, whose part is the largest.

    `run_peak_bytes` is the most from the first step on, `phases` are those of a steady step. Without a GPU named or
    here, nothing is said of fitting. `is_sharded` says that ranks share parameters, gradients and optimizer state
    evenly (null: they split some), and `fewest_gpus` how many are enough then, null if no number is.
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
    gpu: Gpu | None = None
    fits: bool | None = None
    largest_batch_size: Largest | None = None
    largest_context_length: Largest | None = None
    strategy: str = "auto"
    world_size: int = 1
    run_peak_bytes: int = 0
    is_sharded: bool | None = False
    fewest_gpus: int | None = None
    took_s: float = 0.0

    @property
    def highest(self) -> PhasePeak:
        return max(self.phases, key=lambda phase: phase.total_bytes)


class Request(Struct):
    """What the process that predicts is asked beside the words of `lmbench fit`."""

    gpu: Gpu | None
    finds_largest: bool


def gpu_for(name: str | None) -> Gpu | None:
    """The GPU of that name, without a name the first one of this machine; None where there is none.

    Raises:
        UsageError: no GPU is known by that name.
    """
    if name is not None:
        known = named_gpu(name)
        offered = int(known.size * 2**30 * OFFERED_FRACTION)
        return Gpu(known.name, offered, matmul_workspace_bytes(known.name))
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, memory = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    # What the driver keeps for itself is in NVML's total (torch sees 139.8 of an H200's 140.4 GiB).
    total_bytes = memory.total - getattr(memory, "reserved", 0)
    return Gpu(name, total_bytes, matmul_workspace_bytes(name))


def gpu_of(run: RunRecord) -> Gpu | None:
    """The GPU that a run had, by its record; None of a run on a CPU, and where its memory's size is not known."""
    gpu, total_bytes = run.environment.gpu if run.environment else None, run.memory.device_total_bytes
    if run.device_type != "cuda" or gpu is None or gpu.name is None or total_bytes is None:
        return None
    return Gpu(gpu.name, total_bytes, matmul_workspace_bytes(gpu.name))


def ask_forecast(words: list[str], request: Request, heard: Callable[[str], None] | None = None) -> Forecast:
    """The forecast for a configuration, given as the words after `lmbench fit`.

    A process of its own makes it, since what it changes of PyTorch is changed for good. `heard` is called with what it
    tells of where it stands; by default that is shown.

    Raises:
        UsageError: the words are wrong, or the module cannot be run on fake tensors.
        ProcessFailed: the process broke.
    """
    if heard is None:
        with progress("predicting memory") as task:
            return ask_forecast(words, request, task.note)
    printed = run_python("-m", "lmbench.fit.prediction", msgspec.json.encode(request).decode(), *words, heard=heard)
    return msgspec.json.decode(printed, type=Forecast)


#: lmbench's own Transformer, whose options are known.
_OWN_MODEL = "lmbench.model.language_model.LanguageModel"
#: Predictions are made by processes of one thread or two, and each takes some hundred megabytes.
_AT_ONCE = 2


@dataclass(frozen=True)
class Remedy:
    """A change, as the words that make it, and what was predicted for it (None: it could not be, for the reason)."""

    change: str
    words: tuple[str, ...]
    forecast: Forecast | None = None
    reason: str = ""

    @property
    def peak_bytes(self) -> float:
        """The predicted peak; infinite where there is none, so that it is sorted last."""
        return self.forecast.highest.total_bytes if self.forecast else math.inf


@dataclass(frozen=True)
class Shortage:
    """A run that ran out of memory: what is predicted for it as it is, and for each change of it, best first."""

    run: RunRecord
    gpu: Gpu | None
    as_it_is: Remedy
    remedies: list[Remedy]


def explain(run: RunRecord, path: Path, ask: Callable[..., Forecast] = ask_forecast) -> Shortage:
    """Predict the run as it was and with each change that may help; takes some 10 s each, two at a time.

    `path` is the run's folder, whose configuration is predicted; none that may run more than lmbench's own code, since
    the run may come from anywhere. `ask` is who predicts.
    """
    gpu, config = gpu_of(run), path / "config.yaml"
    for name, value in leaves(read_yaml(config, "config.yaml")[1]):
        if may_run(value, path) and not name.startswith(("measure.", "wandb.")):
            reason = f"{name} may run code; if you trust it: lmbench memory --config {quote(str(config))}"
            return Shortage(run, gpu, Remedy("as it is", (), reason=reason), [])

    def predicted(remedy: Remedy) -> Remedy:
        finds_largest = not remedy.words and gpu is not None
        task.begin(remedy.change)
        try:
            forecast = ask([f"--config={config}", *remedy.words], Request(gpu, finds_largest), task.note)
        except (UsageError, ProcessFailed) as error:
            return replace(remedy, reason=str(error))
        return replace(remedy, forecast=forecast)

    changes = [Remedy("as it is", ()), *_changes(run)]
    with progress("predicting what would fit", len(changes)) as task:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            as_it_is, *remedies = pool.map(predicted, changes)
        remedies += map(predicted, _smaller_batch(run, as_it_is))
    return Shortage(run, gpu, as_it_is, sorted(remedies, key=lambda remedy: remedy.peak_bytes))


def _changes(run: RunRecord) -> list[Remedy]:
    """What may help, leaving out what the run had already."""
    is_own = run.model.name == _OWN_MODEL
    is_plain = is_own and run.model.checkpoint == "none" and run.mode in BACKWARD_MODES
    changes = [
        (run.precision == "32-true", "bfloat16 autocast", "--trainer.precision=bf16-mixed"),
        (
            run.precision != "bf16-true", "bfloat16 throughout: weights too, look at the loss",
            "--trainer.precision=bf16-true",
        ),
        (is_own and run.model.attention in ("naive", "sdpa_math"), "fused attention", "--model.attention=sdpa"),
        (is_plain, "checkpoint each block", "--model.checkpoint=block"),
        (is_plain, "selective checkpoints", "--model.checkpoint=selective"),
    ]  # fmt: skip
    return [Remedy(change, (word,)) for may_help, change, word in changes if may_help]


def _smaller_batch(run: RunRecord, as_it_is: Remedy) -> Iterator[Remedy]:
    """The largest batch that fits, accumulated to what the batch was; that changes no result but the time."""
    batch, forecast = run.data.batch_size, as_it_is.forecast
    largest = None if forecast is None else forecast.largest_batch_size
    if not batch or largest is None or not largest.value:
        return
    size = next(size for size in range(min(largest.value, batch), 0, -1) if batch % size == 0)
    if size < batch:
        before = value_at(run, "config.trainer.accumulate_grad_batches")
        times = batch // size * (before if isinstance(before, int) else 1)
        words = (f"--data.batch_size={size}", f"--trainer.accumulate_grad_batches={times}")
        yield Remedy(f"batch {size}, {times} of them accumulated: the same step", words)
