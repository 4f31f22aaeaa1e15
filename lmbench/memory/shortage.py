"""Why a run ran out of the device's memory, and what would make it fit, each with the peak that is predicted for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.memory.forecast import Forecast, Gpu, Request, ask_forecast, gpu_of
from lmbench.progress import progress
from lmbench.python_process import ProcessFailed
from lmbench.records.measured import RefusedAllocation
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import BACKWARD_MODES

#: lmbench's own Transformer, whose options are known.
_OWN_MODEL = "lmbench.model.language_model.LanguageModel"
#: Predictions are made by processes of one thread or two, and each takes some hundred megabytes.
_AT_ONCE = 2
#: Let the allocator grow segments instead of keeping parts of many in vain (PyTorch's notes on CUDA's memory).
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


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

    @property
    def unused_bytes(self) -> int:
        """Reserved by the allocator and not allocated, when it was refused: in pieces too small for what was asked."""
        refused = self.run.memory.refused or RefusedAllocation()
        return (refused.reserved_bytes or 0) - (refused.allocated_bytes or 0)

    @property
    def is_fragmented(self) -> bool:
        """By its tensors the run fits, and what was asked for would have fitted into what was held in vain and what
        was free: only the pieces were too small."""
        refused, forecast = self.run.memory.refused, self.as_it_is.forecast
        if refused is None or forecast is None or self.gpu is None:
            return False
        room_bytes = self.unused_bytes + (refused.device_free_bytes or 0)
        return room_bytes >= (refused.requested_bytes or math.inf) and self.gpu.fits(forecast.highest.total_bytes)


def explain(run: RunRecord, path: Path, ask: Callable[..., Forecast] = ask_forecast) -> Shortage:
    """Predict the run as it was and with each change that may help; takes some 10 s each, two at a time.

    `path` is the run's folder, whose configuration is predicted. `ask` is who predicts.
    """
    gpu = gpu_of(run)

    def predicted(remedy: Remedy) -> Remedy:
        finds_largest = not remedy.words and gpu is not None
        task.begin(remedy.change)
        try:
            forecast = ask([f"--config={path / 'config.yaml'}", *remedy.words], Request(gpu, finds_largest), task.note)
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
