"""Predict the memory of a configuration of `lmbench fit`, as a process of its own that needs no GPU and no weights.

    python -m lmbench.fit.prediction REQUEST [OPTIONS OF lmbench fit]

prints the forecast as JSON, and a line on standard error for each fake step that it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lmbench.callbacks import Compiler
from lmbench.code_owners import location_of
from lmbench.data.datamodule import BatchShape, ShapeData, TokenBatch, TokenData
from lmbench.errors import (
    ExitCode,
    UsageError,
    check_at_least,
    error_line,
    find_modules_in_current_folder,
    tell,
    unknown,
)
from lmbench.fit.command_line import CommandLine
from lmbench.fit.fake_step import (
    MOST_MANUAL_BATCHES,
    MOST_MICRO_BATCHES,
    FakeBatches,
    FirstRank,
    StepWatch,
    act_as_one_rank,
    callbacks_with_memory,
    fake_ranks,
    leave_meta,
    trial_of,
)
from lmbench.fit.measurement import Measurement, apply_mode
from lmbench.fit.mixed_precision import Fp8Tokens
from lmbench.fit.planning import make_plan
from lmbench.fit.strategies import STRATEGIES
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer, quiet
from lmbench.flop_counter import group_every_dtype, skip_value_checks
from lmbench.instruments import recomputing
from lmbench.instruments.alike_blocks import AlikeBlocks
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.ending import is_usage_error, user_lines
from lmbench.instruments.phases import BorderProfiler, PhaseTrack
from lmbench.instruments.subject import tensors_of
from lmbench.memory.fake_gpu import CudaAttention, Tracker, act_like_cuda
from lmbench.memory.forecast import Forecast, Request
from lmbench.memory.plan import PlanRequest
from lmbench.memory.predictor import FakeStep, Predictor
from lmbench.precision import PRECISIONS, find_precision
from lmbench.report.strategies import strategy_text
from lmbench.standard_output import result_alone, write_result

# Trainer flags that affect memory and that the prediction takes from the configuration unchanged.
_KEPT_FLAGS = ("strategy", "num_nodes", "gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm", "recompute")


class Prediction:
    """A parsed configuration of `lmbench fit`; `step` runs one step of it on fake tensors.

    Args:
        words: the configuration, as options of `lmbench fit`.
        workspace_bytes: bytes that cuBLAS allocates once in each thread that multiplies matrices.

    Attributes:
        world_size: ranks of the configuration, one for each device on each node.
        strategy: the strategy's name, with the options that somebody set.
        is_sharded: whether all ranks share parameters, gradients and optimizer state evenly; None if they split some.
        micro_batches: micro-batches of a step.
        options: all settings, by their options' names.
        mode: the mode that is predicted.
        zero_grad: `after_step` or `native`.
        precision: Lightning's name of the precision.
        compile_options: options of torch.compile; None if nothing is compiled.
        is_compiled: whether the model is compiled.
        assumed: what the steps so far assumed about values, each once, with the user's line.
        has_context: whether the context length can be varied, since the data is lmbench's own and the model takes it.

    Raises:
        UsageError: the words are wrong, or devices or strategy cannot be predicted.
    """

    def __init__(self, words: list[str], workspace_bytes: int = 0) -> None:
        self._workspace_bytes = workspace_bytes
        self._line = line = CommandLine("fit", words)
        self._flags = vars(line.build("trainer"))
        devices = self._flags["devices"]
        count = str(len(devices) if isinstance(devices, list) else devices)
        if not count.isdecimal() or not int(count):
            raise UsageError(f"trainer.devices is {devices}; a prediction needs a number, as in --trainer.devices 8")
        self._devices = int(count)
        check_at_least(1, **{"trainer.num_nodes": self._flags["num_nodes"]})
        self.world_size = self._devices * self._flags["num_nodes"]
        strategy = self._flags["strategy"]
        self.strategy = strategy if isinstance(strategy, str) else strategy_text(line.config.trainer.strategy.as_dict())
        if strategy in STRATEGIES:
            strategy = STRATEGIES[strategy]()
        if strategy != "auto" and not isinstance(strategy, DDPStrategy | ModelParallelStrategy):
            raise unknown("trainer.strategy of a prediction", self.strategy, ("auto", *STRATEGIES))
        is_split = getattr(strategy, "_tensor_parallel_size", 1) != 1
        self.is_sharded = None if is_split else isinstance(strategy, ModelParallelStrategy)
        self.blocks_per_group = getattr(strategy, "blocks_per_group", 1)
        plan = Measurement("fit", line.model, line.build("measure"))
        self.mode, self.zero_grad = plan.mode, plan.zero_grad
        self.precision = str(self._flags["precision"] or "32-true")
        precision = find_precision(self.precision)
        if precision is None or not precision.runs_on_cpu:
            allowed = ", ".join(name for name, known in PRECISIONS.items() if known.runs_on_cpu)
            raise UsageError(f"precision {self.precision} cannot be predicted; allowed: {allowed}")
        options = self._flags["compile"]
        self.compile_options = CompileOptions() if options is True else options or None
        self.is_compiled = self.compile_options is not None
        self.micro_batches = self._flags["accumulate_grad_batches"]
        self.options = dict(line.config.items(branches=True))
        self.assumed = dict[str, None]()
        self._batch: Any = None
        data = line.build("data")
        is_own = isinstance(data, TokenData | ShapeData)
        self._data: TokenData | ShapeData | None = data if is_own else None
        self._users_data = None if is_own else data
        self.has_context = self._data is not None and "context_length" in line.config.model

    @property
    def batch_size(self) -> int:
        """Samples in the configuration's batch."""
        if self._data is not None:
            return self._data.batch_size
        return _samples(self._user_batch(None))

    @property
    def context_length(self) -> int | None:
        return None if self._data is None else self._data.context_length

    def predictor(self) -> Predictor:
        """The predictor of the configuration's memory."""
        options, recompute = self.compile_options, self._flags["recompute"]
        # A graph of the whole network takes a second to trace for each block.
        is_whole_graph = options is not None and not options.regional
        # Few blocks tell nothing of all where some of these are computed again, or several together.
        treats_alike = recompute is None or (recompute.first is None and recompute.group == 1)
        is_slow = is_whole_graph and treats_alike
        return Predictor(self.step, self.batch_size, self.context_length, is_slow, self.blocks_per_group)

    def step(self, batch_size: int, context_length: int | None, keep_blocks: int | None) -> FakeStep:
        """Run steps as `run` does, told in a line on standard error; returns the steady one's peaks."""
        shape = f"batch {batch_size}" + (f" x context {context_length}" if context_length else "")
        tell(f"a step of {shape}" + (f" on {self.world_size} GPUs" if self.world_size > 1 else ""))
        tracker, watch = self.run(batch_size, context_length, keep_blocks)
        return trial_of(tracker, watch.steady_from, watch.blocks.count)

    def run(
        self, batch_size: int, context_length: int | None, keep_blocks: int | None, needs_borders: bool = False
    ) -> tuple[Tracker, StepWatch]:
        """Run a few steps on fake tensors, up to a steady one.

        Args:
            batch_size: samples in the batch.
            context_length: tokens in a sample; None for data that is not lmbench's own.
            keep_blocks: length to cut lists of alike blocks to; None cuts nothing.
            needs_borders: whether to note the borders of blocks. Then nothing is compiled that would hide them.
        """
        micro_batches = min(self.micro_batches, MOST_MICRO_BATCHES)
        tracker, track = Tracker(self._workspace_bytes), PhaseTrack()
        resident_count = 0
        if isinstance(self._data, TokenData) and self._data.placement == "device":
            resident_count = self._data.num_batches
        group_every_dtype()
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        is_alone = self.strategy == "auto" and self.world_size == 1
        group = nullcontext() if is_alone else fake_ranks(self.world_size, tracker)
        options = self.compile_options
        # Functions that the user compiles run eagerly, since Dynamo refuses to compile them for fake tensors.
        compiling = torch.compiler.set_stance("force_eager") if options is None else options.splitting()
        with _told(), group, compiling, fakes, tracker, CudaAttention(), ExitStack() as patches:
            # Fake tensors must not overwrite the files that a step saves.
            patches.enter_context(patch.object(torch, "save", lambda *_, **__: None))
            # The model's settings that follow from the data follow this batch.
            sizes = {} if self._data is None else {"batch_size": batch_size, "context_length": context_length}
            changes = {name: size for name, size in sizes.items() if name in self._line.config.model}
            module: LightningModule = self._line.build("model", **changes)
            tracker.move(module)
            apply_mode(module, self.mode, self.zero_grad)
            _keep_from_values(module)
            blocks = AlikeBlocks(module, keep_blocks)
            watch = StepWatch(tracker, track, blocks, options, self._users_data, patches, needs_borders)
            trainer = self._trainer(tracker, track, watch, micro_batches)
            with tracker.paused():
                batch = self._shaped_batch(module, batch_size, context_length)
            with _disable_current_modes():
                mask = self._batch.get("attention_mask") if isinstance(self._batch, Mapping) else None
                watch.is_unpadded = isinstance(mask, torch.Tensor) and bool(mask.all())
            # The first step makes the optimizer's state; DDP makes new buckets in the second.
            count = (3 if isinstance(trainer.strategy, DDPStrategy) else 2) * micro_batches
            count = count if module.automatic_optimization else MOST_MANUAL_BATCHES
            batches = FakeBatches(batch, count, tracker, resident_count)
            with _memory_of_host(tracker):
                trainer.fit(module, train_dataloaders=batches)
            tracker.enter("after")
        self.assumed |= tracker.assumed
        return tracker, watch

    def _trainer(self, tracker: Tracker, track: PhaseTrack, watch: StepWatch, micro_batches: int) -> Any:
        """A Trainer of the configuration for steps on fake tensors, watched."""
        # Build the flags anew, since a strategy keeps the state of its set-up, and a callback its own.
        flags = vars(self._line.build("trainer"))
        own_flags = {
            "accelerator": "cpu", "devices": self._devices, "plugins": FirstRank(),
            "callbacks": [*callbacks_with_memory(flags["callbacks"]), watch],
            "logger": DummyLogger() if self._flags["logger"] else False,
            "max_epochs": 1, "accumulate_grad_batches": micro_batches, "precision": self.precision,
        }  # fmt: skip
        trainer: Any = BenchTrainer(**{**TRAINER_DEFAULTS, **{name: flags[name] for name in _KEPT_FLAGS}, **own_flags})
        # The predictor takes steps with batches of any size.
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Compiler | Fp8Tokens)]
        strategy = trainer.strategy
        # A loss scaler reads values of tensors. Its memory is negligible.
        strategy.precision_plugin.scaler = None
        # Fake parameters are on the right device already, and cannot be moved in place.
        strategy.model_to_device = lambda: leave_meta(strategy.lightning_module)
        strategy.teardown = lambda: None
        strategy.save_checkpoint = lambda *_, **__: None
        if isinstance(strategy, ParallelStrategy):
            act_as_one_rank(strategy, tracker)
        trainer.profiler = BorderProfiler(PassThroughProfiler(), track)
        return trainer

    def _shaped_batch(self, module: LightningModule, batch_size: int, context_length: int | None) -> Any:
        if self._data is not None:
            assert context_length is not None
            if isinstance(self._data, ShapeData):
                return BatchShape(batch_size, context_length)
            tokens = torch.empty(batch_size, context_length, dtype=torch.int64, device="meta")
            return TokenBatch(tokens, tokens)
        batch = self._user_batch(module)
        samples = _samples(batch)

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape[:1] == [samples]:
                shape[0] = batch_size
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        return apply_to_collection(batch, torch.Tensor, resize)

    def _user_batch(self, module: LightningModule | None) -> Any:
        """The first batch of the user's own loader, with real values.

        Without a data module the loader is `module`'s; None builds the module to ask it.

        Raises:
            UsageError: the loader has no batch.
        """
        if self._batch is None:
            with _disable_current_modes():
                data = self._users_data
                owner: LightningDataModule | LightningModule = data or module or self._line.build("model")
                owner.prepare_data()
                if data is not None:
                    owner.setup("fit")
                # As the Trainer combines them, where there are several.
                loaders = CombinedLoader(owner.train_dataloader(), "max_size_cycle")
                self._batch = next((batch for batch, _, _ in loaders if batch is not None), None)
            if self._batch is None:
                raise UsageError("nothing to predict with: the training data has no batch")
        return self._batch


def _memory_of_host(tracker: Tracker) -> Any:
    """A context in which tensors that move to the host take no memory of the device; the tracker counts their bytes."""

    def moved_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        tracker.host_bytes += tensor.untyped_storage().nbytes()
        return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype)

    return patch.object(recomputing, "moved_to_host", moved_to_host)


def _keep_from_values(module: LightningModule) -> None:
    """Switch off a module's callbacks that write, and its metrics' checks of values, which fake tensors lack."""
    configure = module.configure_callbacks
    module.configure_callbacks = lambda: callbacks_with_memory(configure())  # type: ignore[method-assign]
    skip_value_checks(module)


def _samples(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one."""
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim), 1)


def forecast(words: list[str], request: Request) -> Forecast:
    """Predict the memory of a configuration, and answer the request.

    Raises:
        UsageError: the words are wrong, or the module cannot run on fake tensors.
    """
    started = time.perf_counter()
    act_like_cuda()
    gpus = request.gpus
    plan = Prediction(words, max((gpu.workspace_bytes for gpu in gpus), default=0))
    predictor = plan.predictor()
    result = Forecast(
        plan.batch_size, plan.context_length, plan.precision, plan.mode, plan.zero_grad, plan.is_compiled,
        predictor.phases, predictor.reserved_bytes, predictor.method, strategy=plan.strategy,
        world_size=plan.world_size, run_peak_bytes=predictor.run_peak_bytes, is_sharded=plan.is_sharded,
        assumed=list(plan.assumed),
    )  # fmt: skip
    if gpus and request.finds_largest:
        result.on_gpus = predictor.fits_on(gpus, plan.has_context)
    if len(result.on_gpus) == 1 and plan.is_sharded:
        result.fewest_gpus = predictor.fewest_ranks(plan.world_size, gpus[0])
    result.took_s = time.perf_counter() - started
    return result


@contextmanager
def _told() -> Iterator[None]:
    """Report an operation that fake tensors lack in one line, with its place in the user's code."""
    try:
        yield
    except Exception as error:
        if is_usage_error(error):
            raise
        reason = error_line(error)[:300]
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            reason = "this needs the values of a tensor; a prediction has only shapes"
        for frame in user_lines(error)[-1:]:
            reason = f"{location_of(frame.filename, frame.lineno)} `{frame.line}`: {reason}"
        raise UsageError(f"cannot be predicted: {reason}") from error


def main(args: list[str]) -> int:
    """Print the forecast, or one line about the user's mistake; returns the exit code."""
    quiet()
    find_modules_in_current_folder()
    try:
        request = msgspec.json.decode(args[0], type=Request | PlanRequest)
        result: Any
        if isinstance(request, PlanRequest):
            act_like_cuda()
            result = make_plan(args[1:], request, Prediction)
        else:
            result = forecast(args[1:], request)
    except Exception as error:
        if not is_usage_error(error):
            raise
        # The command tells it: on standard error it would be progress.
        write_result(str(error))
        return ExitCode.USAGE
    write_result(msgspec.json.encode(result).decode())
    return ExitCode.OK


if __name__ == "__main__":
    # Keep what the user's code prints out of the JSON on standard output.
    with result_alone(until_exit=True):
        raise SystemExit(main(sys.argv[1:]))
