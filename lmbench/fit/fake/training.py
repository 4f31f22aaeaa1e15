"""A training of a few steps on fake tensors, from the words of `lmbench fit`: it needs no GPU and no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

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
from lmbench.errors import UsageError, check_at_least, error_line, tell, unknown
from lmbench.fit.command_line import CommandLine
from lmbench.fit.fake.ranks import FirstRank, act_as_one_rank, fake_ranks
from lmbench.fit.fake.step import (
    MOST_MANUAL_BATCHES,
    MOST_MICRO_BATCHES,
    FakeBatches,
    StepWatch,
    callbacks_with_memory,
    leave_meta,
    trial_of,
)
from lmbench.fit.measurement import Measurement, apply_mode
from lmbench.fit.mixed_precision import Fp8Tokens
from lmbench.fit.strategies import STRATEGIES
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.flop_counter import group_every_dtype, skip_value_checks
from lmbench.instruments import recomputing
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.ending import is_usage_error, user_lines
from lmbench.instruments.module_parts import AlikeBlocks
from lmbench.instruments.phases import BorderProfiler, PhaseTrack
from lmbench.instruments.subject import tensors_of
from lmbench.memory.fake_gpu import CudaAttention, act_like_cuda
from lmbench.memory.predictor import FakeStep, Predictor, Shape
from lmbench.memory.tracker import Tracker
from lmbench.precision import PRECISIONS, find_precision
from lmbench.report.strategies import strategy_text

# Trainer flags that affect memory and that the prediction takes from the configuration unchanged.
_KEPT_FLAGS = ("strategy", "num_nodes", "gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm", "recompute")


class FakeTraining:
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
        act_like_cuda()
        self._workspace_bytes = workspace_bytes
        self._line = line = CommandLine("fit", words)
        self._flags = vars(line.build("trainer"))
        devices = self._flags["devices"]
        count = str(len(devices) if isinstance(devices, list) else devices)
        if not count.isdecimal() or not int(count):
            raise UsageError(f"trainer.devices is {devices}; a prediction needs a number, as in --trainer.devices 8")
        self._devices = int(count)
        check_at_least(1, "trainer", num_nodes=self._flags["num_nodes"])
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
    def shape(self) -> Shape:
        """Samples in the configuration's batch, and tokens in a sample."""
        if self._data is not None:
            return Shape(self._data.batch_size, self._data.context_length)
        return Shape(_samples(self._user_batch(None)), None)

    def predictor(self) -> Predictor:
        """The predictor of the configuration's memory."""
        options, recompute = self.compile_options, self._flags["recompute"]
        # A graph of the whole network takes a second to trace for each block.
        is_whole_graph = options is not None and not options.regional
        # Few blocks tell nothing of all where some of these are computed again, or several together.
        treats_alike = recompute is None or (recompute.first is None and recompute.group == 1)
        is_slow = is_whole_graph and treats_alike
        return Predictor(self.step, self.shape, is_slow, self.blocks_per_group)

    def step(self, shape: Shape, keep_blocks: int | None) -> FakeStep:
        """Run steps as `run` does, told in a line on standard error; returns the steady one's peaks."""
        size = f"batch {shape.batch_size}" + (f" x context {shape.context_length}" if shape.context_length else "")
        tell(f"a step of {size}" + (f" on {self.world_size} GPUs" if self.world_size > 1 else ""))
        tracker, watch = self.run(shape, keep_blocks)
        return trial_of(tracker, watch.steady_from, watch.blocks.count)

    def run(self, shape: Shape, keep_blocks: int | None, needs_borders: bool = False) -> tuple[Tracker, StepWatch]:
        """Run a few steps on fake tensors, up to a steady one.

        Args:
            shape: samples in the batch, and tokens in a sample.
            keep_blocks: length to cut lists of alike blocks to; None cuts nothing.
            needs_borders: whether to note the borders of blocks. Then nothing is compiled that would hide them.
        """
        micro_batches = min(self.micro_batches, MOST_MICRO_BATCHES)
        tracker, track = Tracker(self._workspace_bytes), PhaseTrack()
        data = self._data
        resident_count = data.num_batches if isinstance(data, TokenData) and data.placement == "device" else 0
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
            sizes = {} if data is None else shape._asdict()
            changes = {name: size for name, size in sizes.items() if name in self._line.config.model}
            module: LightningModule = self._line.build("model", **changes)
            tracker.move(module)
            apply_mode(module, self.mode, self.zero_grad)
            # Fake tensors have no values for callbacks that write, and for metrics to check.
            configure = module.configure_callbacks
            module.configure_callbacks = lambda: callbacks_with_memory(configure())  # type: ignore[method-assign]
            skip_value_checks(module)
            blocks = AlikeBlocks(module, keep_blocks)
            watch = StepWatch(tracker, track, blocks, options, self._users_data, patches, needs_borders)
            trainer = self._trainer(tracker, track, watch, micro_batches)
            with tracker.paused():
                batch = self._shaped_batch(module, shape)
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

    def _shaped_batch(self, module: LightningModule, shape: Shape) -> Any:
        if self._data is not None:
            assert shape.context_length is not None
            sizes = BatchShape(shape.batch_size, shape.context_length)
            tokens = torch.empty(sizes, dtype=torch.int64, device="meta")
            return sizes if isinstance(self._data, ShapeData) else TokenBatch(tokens, tokens)
        batch = self._user_batch(module)
        samples = _samples(batch)

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            first = [shape.batch_size if length == samples else length for length in tensor.shape[:1]]
            return torch.empty((*first, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

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


def _samples(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one."""
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim), 1)


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
