"""Predicts the memory of a configuration of `lmbench fit`, as a process of its own; needs no GPU and no weights.

    python -m lmbench.fit.prediction REQUEST [OPTIONS OF lmbench fit]

prints the forecast as JSON, and tells each step that it tries on standard error.
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lmbench.callbacks import Compiler
from lmbench.data.datamodule import BatchShape, ShapeData, TokenBatch, TokenData
from lmbench.errors import ExitCode, UsageError, check_at_least, find_modules_in_current_folder, tell, unknown
from lmbench.fit.command_line import CommandLine
from lmbench.fit.fake_step import (
    MOST_MICRO_BATCHES,
    AlikeBlocks,
    CategoryTeller,
    FakeBatches,
    FirstRank,
    act_as_one_rank,
    fake_ranks,
    precision_plugin,
    trial_of,
)
from lmbench.fit.measurement import Measurement, apply_mode
from lmbench.fit.model_parallel import STRATEGIES
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer, quiet
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.ending import is_usage_error, own_lines
from lmbench.instruments.phases import BorderProfiler, PhaseTrack
from lmbench.memory.fake_gpu import CudaAttention, Tracker, act_like_cuda
from lmbench.memory.forecast import Forecast, Request
from lmbench.memory.predictor import Predictor, Trial
from lmbench.standard_output import result_alone, write_result

# The Trainer's flags that memory depends on, beside those that a prediction gives itself.
_KEPT = ("strategy", "num_nodes", "gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm")


class Prediction:
    """A configuration of `lmbench fit`, understood and not run; `step` tries it on fake tensors.

    `has_context` says that the model's context can be chosen: both model and data are lmbench's own.
    """

    def __init__(self, words: list[str]) -> None:
        self._line = line = CommandLine("fit", words)
        self._flags = vars(line.build("trainer"))
        devices = self._flags["devices"]
        count = str(len(devices) if isinstance(devices, list) else devices)
        if not count.isdecimal() or not int(count):
            raise UsageError(f"trainer.devices is {devices}; a prediction needs a number, as in --trainer.devices 8")
        self._devices = int(count)
        check_at_least(1, **{"trainer.num_nodes": self._flags["num_nodes"]})
        #: Ranks of the configuration, one for each device on each node.
        self.world_size = self._devices * self._flags["num_nodes"]
        strategy = self._flags["strategy"]
        self.strategy = strategy if isinstance(strategy, str) else type(strategy).__name__
        if not (isinstance(strategy, DDPStrategy | ModelParallelStrategy) or self.strategy.startswith(STRATEGIES)):
            raise unknown("trainer.strategy of a prediction", self.strategy, STRATEGIES)
        is_split = self.strategy == "tensor_parallel" or getattr(strategy, "_tensor_parallel_size", 1) != 1
        #: Whether all ranks share parameters, gradients and optimizer state evenly; None where they split some.
        is_sharded = self.strategy.startswith("fsdp2") or isinstance(strategy, ModelParallelStrategy)
        self.is_sharded = None if is_split else is_sharded
        plan = Measurement("fit", line.model, line.build("measure"), self._flags)
        self.mode, self.zero_grad = plan.mode, plan.zero_grad
        self.precision = str(self._flags["precision"] or "32-true")
        compiled = self._flags["compile"]
        self.compile_options = CompileOptions(**({} if compiled is True else vars(compiled))) if compiled else None
        self.is_compiled = self.compile_options is not None
        self._micro_batches = min(self._flags["accumulate_grad_batches"], MOST_MICRO_BATCHES)
        self._batch: Any = None
        data = line.build("data")
        self._users_data = None if isinstance(data, TokenData | ShapeData) else data
        self._data = data if isinstance(data, TokenData | ShapeData) else None
        self.has_context = self._data is not None and "context_length" in line.config.model

    @property
    def batch_size(self) -> int:
        """Samples in the batch of the configuration."""
        return next(iter(_leading_sizes(self._user_batch(None))), 1) if self._data is None else self._data.batch_size

    @property
    def context_length(self) -> int | None:
        return None if self._data is None else self._data.context_length

    def step(self, batch_size: int, context_length: int | None, keep_blocks: int | None, workspace_bytes: int) -> Trial:
        """The peaks of a steady step on fake tensors, by phase and region.

        Args:
            keep_blocks: cut lists of alike blocks to so many.
            workspace_bytes: what a thread that multiplies matrices takes for it.
        """
        tracker, track = Tracker(workspace_bytes), PhaseTrack()
        resident_count = None
        if isinstance(self._data, TokenData) and self._data.placement == "device":
            resident_count = self._data.num_batches
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        is_alone = self.strategy == "auto" and self.world_size == 1
        group = nullcontext() if is_alone else fake_ranks(self.world_size, tracker)
        with group, fakes, tracker, CudaAttention():
            # What follows from the data follows here too.
            sizes = {} if self._data is None else {"batch_size": batch_size, "context_length": context_length}
            known = {name: size for name, size in sizes.items() if name in self._line.config.model}
            module: LightningModule = self._line.build("model", **known)
            apply_mode(module, self.mode, self.zero_grad)
            blocks = AlikeBlocks(module, keep_blocks)
            teller = CategoryTeller(tracker, track, blocks, self.compile_options)
            own = {
                "accelerator": "cpu", "devices": self._devices, "plugins": FirstRank(), "callbacks": [teller],
                "max_epochs": 1, "accumulate_grad_batches": self._micro_batches,
            }  # fmt: skip
            # Built anew, since a strategy keeps what it was set up with.
            flags = vars(self._line.build("trainer"))
            trainer = BenchTrainer(**{**TRAINER_DEFAULTS, **{name: flags[name] for name in _KEPT}, **own})
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.remove(next(callback for callback in callbacks if isinstance(callback, Compiler)))
            strategy = trainer.strategy
            strategy.precision_plugin = precision_plugin(self.precision, strategy)
            # It is where it shall be; and a fake parameter cannot be moved in place.
            strategy.model_to_device = strategy.teardown = lambda: None  # type: ignore[method-assign]
            if isinstance(strategy, ParallelStrategy):
                act_as_one_rank(strategy, tracker)
            trainer.profiler = BorderProfiler(PassThroughProfiler(), track)  # type: ignore[attr-defined]
            with tracker.paused():
                batch = self._shaped_batch(module, batch_size, context_length)
            # The first step makes the optimizer's state, the second one of DDP new buckets.
            steps = 3 if isinstance(strategy, DDPStrategy) else 2
            batches = FakeBatches(batch, steps * self._micro_batches, tracker, resident_count)
            trainer.fit(module, train_dataloaders=batches)
            tracker.enter("after")
        return trial_of(tracker, teller.steady_from, blocks.count)

    def _shaped_batch(self, module: LightningModule, batch_size: int, context_length: int | None) -> Any:
        if self._data is not None:
            assert context_length is not None
            if isinstance(self._data, ShapeData):
                return BatchShape(batch_size, context_length)
            tokens = torch.empty(batch_size, context_length, dtype=torch.int64, device="meta")
            return TokenBatch(tokens, tokens)
        batch = self._user_batch(module)
        before = _leading_sizes(batch)[:1]

        def scaled(tensor: torch.Tensor) -> torch.Tensor:
            first, rest = list(tensor.shape[:1]), tensor.shape[1:]
            shape = ([batch_size] if first and first == before else first) + list(rest)
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        return apply_to_collection(batch, torch.Tensor, scaled)

    def _user_batch(self, module: LightningModule | None) -> Any:
        """The first batch of the user's own loader, with real values; of a module's once that is there."""
        if self._batch is None:
            with _disable_current_modes():
                data = self._users_data
                owner: LightningDataModule | LightningModule = data or module or self._line.build("model")
                owner.prepare_data()
                if data is not None:
                    owner.setup("fit")
                self._batch = next(iter(owner.train_dataloader()), None)
            if self._batch is None:
                raise UsageError("nothing to predict with: the training data has no batch")
        return self._batch


def _leading_sizes(batch: Any) -> list[int]:
    sizes: list[int] = []
    apply_to_collection(batch, torch.Tensor, lambda tensor: sizes.extend(tensor.shape[:1]))
    return sizes


def forecast(words: list[str], request: Request) -> Forecast:
    """The forecast for a configuration.

    Raises:
        UsageError: the words are wrong, or the module cannot be run on fake tensors.
    """
    started = time.perf_counter()
    act_like_cuda()
    plan, gpu = Prediction(words), request.gpu
    workspace_bytes = 0 if gpu is None else gpu.workspace_bytes
    predictor = _predictor(plan, workspace_bytes)
    result = Forecast(
        plan.batch_size, plan.context_length, plan.precision, plan.mode, plan.zero_grad, plan.is_compiled,
        predictor.phases, predictor.reserved_bytes, predictor.method, gpu, strategy=plan.strategy,
        world_size=plan.world_size, run_peak_bytes=predictor.run_peak_bytes, is_sharded=plan.is_sharded,
    )  # fmt: skip
    if gpu is not None:
        result.fits = gpu.fits(predictor.reserved_bytes)
    if gpu is not None and request.finds_largest:
        result.largest_batch_size = predictor.largest(gpu)
        result.largest_context_length = predictor.largest(gpu, is_context=True) if plan.has_context else None
        if plan.is_sharded:

            def reserve(count: int) -> int:
                other = Prediction([*words, f"--trainer.devices={count}", "--trainer.num_nodes=1"])
                return (predictor if count == plan.world_size else _predictor(other, workspace_bytes)).reserved_bytes

            result.fewest_gpus = predictor.fewest_ranks(plan.world_size, gpu, reserve)
    result.took_s = time.perf_counter() - started
    return result


def _predictor(plan: Prediction, workspace_bytes: int) -> Predictor:
    def take_step(batch_size: int, context_length: int | None, keep_blocks: int | None) -> Trial:
        shape = f"batch {batch_size}" + (f" x context {context_length}" if context_length else "")
        tell(f"a step of {shape}" + (f" on {plan.world_size} GPUs" if plan.world_size > 1 else ""))
        try:
            return plan.step(batch_size, context_length, keep_blocks, workspace_bytes)
        except Exception as error:
            if is_usage_error(error):
                raise
            # What fake tensors cannot do is one line, with the place in the user's code.
            last = (own_lines(error) or traceback.extract_tb(error.__traceback__))[-1]
            place = f"{Path(last.filename).name}:{last.lineno}" + (f" `{last.line}`" if last.line else "")
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise UsageError(f"cannot be predicted: {place}: {reason}") from error

    return Predictor(take_step, plan.batch_size, plan.context_length, is_slow=plan.is_compiled)


def main(args: list[str]) -> int:
    """Print the forecast, or the user's mistake in one line; returns the exit code."""
    quiet()
    find_modules_in_current_folder()
    try:
        result = forecast(args[1:], msgspec.json.decode(args[0], type=Request))
    except Exception as error:
        if not is_usage_error(error):
            raise
        tell(str(error))
        return ExitCode.USAGE
    write_result(msgspec.json.encode(result).decode())
    return ExitCode.OK


if __name__ == "__main__":
    # The user's own code may print.
    with result_alone(until_exit=True):
        raise SystemExit(main(sys.argv[1:]))
