"""Predicts the memory of a configuration of `lmbench fit`, as a process of its own; needs no GPU and no weights.

    python -m lmbench.fit.prediction REQUEST [OPTIONS OF lmbench fit]

prints the forecast as JSON after a record separator.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from lmbench.callbacks import Compiler
from lmbench.data.batches import TokenBatch
from lmbench.data.datamodule import TokenData
from lmbench.data.shapes import BatchShape, ShapeData
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.fit.command_line import CommandLine
from lmbench.fit.fake_step import MOST_MICRO_BATCHES, STEPS, run_fake_step
from lmbench.fit.measurement import Measurement
from lmbench.fit.modes import apply_mode
from lmbench.fit.run import find_modules_in_current_folder
from lmbench.fit.surroundings import quiet
from lmbench.fit.trainer import TRAINER_DEFAULTS, BenchTrainer
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.ending import is_usage_error
from lmbench.instruments.own_code import own_lines
from lmbench.memory.forecast import Forecast, Request
from lmbench.memory.prediction.cuda_on_cpu import act_like_cuda
from lmbench.memory.predictor import Predictor, Trial
from lmbench.standard_output import result_alone, write_result

# What changes nothing of the memory, or would end two steps too soon.
_PLAIN: dict[str, Any] = {
    **TRAINER_DEFAULTS,
    "accelerator": "cpu",
    "precision": None,
    "compile": False,
    "profiler": None,
    "plugins": None,
    "callbacks": None,
    "max_steps": STEPS,
    "max_time": None,
    "limit_train_batches": None,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
    "val_check_interval": None,
    "check_val_every_n_epoch": None,
}


class Unpredictable(UsageError):
    """A module that fake tensors cannot run."""


class Prediction:
    """A configuration of `lmbench fit`, understood and not run; `step` tries it on fake tensors.

    `has_context` says that the model's context can be chosen: both model and data are lmbench's own.
    """

    def __init__(self, words: list[str]) -> None:
        self._line = line = CommandLine("fit", words)
        self._flags = vars(line.config.trainer)
        plan = Measurement("fit", line.model, line.build("measure"), self._flags)
        self.mode, self.zero_grad = plan.mode, plan.zero_grad
        self.precision = str(self._flags["precision"] or "32-true")
        compiled = self._flags["compile"]
        self.compile_options = (
            CompileOptions() if compiled is True else CompileOptions(**vars(compiled)) if compiled else None
        )
        self.micro_batches = min(self._flags["accumulate_grad_batches"], MOST_MICRO_BATCHES)
        self._batch: Any = None
        self._data = line.build("data")
        self.is_own_data = isinstance(self._data, TokenData | ShapeData)
        self.has_context = self.is_own_data and "context_length" in line.config.model

    @property
    def batch_size(self) -> int:
        """Samples in the batch that is given."""
        if isinstance(self._data, TokenData | ShapeData):
            return self._data.batch_size
        sizes = _leading_sizes(self._user_batch(None))
        return sizes[0] if sizes else 1

    @property
    def context_length(self) -> int | None:
        return self._data.context_length if isinstance(self._data, TokenData | ShapeData) else None

    def step(self, batch_size: int, context_length: int | None, keep_blocks: int | None, workspace_bytes: int) -> Trial:
        """One fake step; `keep_blocks` and `workspace_bytes` as in `run_fake_step`."""
        resident_count = None
        if isinstance(self._data, TokenData) and self._data.placement == "device":
            resident_count = self._data.num_batches
        return run_fake_step(
            lambda: self._module(batch_size, context_length),
            self._trainer,
            lambda module: self._shaped_batch(module, batch_size, context_length),
            precision=self.precision,
            micro_batches=self.micro_batches,
            compile_options=self.compile_options,
            resident_count=resident_count,
            keep_blocks=keep_blocks,
            workspace_bytes=workspace_bytes,
        )

    def _module(self, batch_size: int, context_length: int | None) -> LightningModule:
        # What follows from the data follows here too.
        sizes = {"batch_size": batch_size, "context_length": context_length} if self.is_own_data else {}
        changes = {name: size for name, size in sizes.items() if name in self._line.config.model}
        built: LightningModule = self._line.build("model", **changes)
        apply_mode(built, self.mode, self.zero_grad)
        return built

    def _trainer(self, callbacks: list[Callback]) -> Trainer:
        trainer = BenchTrainer(
            **{**self._flags, **_PLAIN, "callbacks": callbacks, "accumulate_grad_batches": self.micro_batches}
        )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(next(one for one in callbacks if isinstance(one, Compiler)))
        return trainer

    def _shaped_batch(self, module: LightningModule, batch_size: int, context_length: int | None) -> Any:
        if isinstance(self._data, ShapeData):
            assert context_length is not None
            return BatchShape(batch_size, context_length)
        if self.is_own_data:
            assert context_length is not None
            tokens = torch.empty(batch_size, context_length, dtype=torch.int64, device="meta")
            return TokenBatch(tokens, tokens)
        batch = self._user_batch(module)
        given = _leading_sizes(batch)

        def scaled(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape and given and shape[0] == given[0]:
                shape[0] = batch_size
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        return apply_to_collection(batch, torch.Tensor, scaled)

    def _user_batch(self, module: LightningModule | None) -> Any:
        """The first batch of the user's own loader, with real values; of a module's once that is there."""
        if self._batch is None:
            with _disable_current_modes():
                owner: LightningDataModule | LightningModule = self._data or module or self._line.build("model")
                owner.prepare_data()
                if self._data is not None:
                    owner.setup("fit")
                self._batch = next(iter(owner.train_dataloader()), None)
            if self._batch is None:
                raise UsageError("nothing to predict with: the training data has no batch")
        return self._batch


def _leading_sizes(batch: Any) -> list[int]:
    found: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim:
            found.append(tensor.shape[0])
        return tensor

    apply_to_collection(batch, torch.Tensor, note)
    return found


def forecast(words: list[str], request: Request) -> Forecast:
    """The forecast for a configuration.

    Raises:
        UsageError: the words are wrong, or the module cannot be run on fake tensors.
    """
    started = time.perf_counter()
    act_like_cuda()
    plan = Prediction(words)
    workspace_bytes = 0 if request.gpu is None else request.gpu.workspace_bytes

    def take_step(batch_size: int, context_length: int | None, keep_blocks: int | None) -> Trial:
        with _told():
            return plan.step(batch_size, context_length, keep_blocks, workspace_bytes)

    batch_size, context_length = plan.batch_size, plan.context_length
    predictor = Predictor(take_step, batch_size, context_length, is_slow=plan.compile_options is not None)
    made = Forecast(
        batch_size=batch_size,
        context_length=context_length,
        precision=plan.precision,
        mode=plan.mode,
        zero_grad=plan.zero_grad,
        is_compiled=plan.compile_options is not None,
        phases=predictor.phases,
        reserved_bytes=predictor.reserved_bytes,
        method=predictor.method,
        gpu=request.gpu,
    )
    if request.gpu is not None:
        gpu = request.gpu
        made.fits = gpu.fits(predictor.reserved_bytes)
        if request.finds_largest:
            made.largest_batch_size = predictor.largest_batch(gpu)
            if plan.has_context:
                made.largest_context_length = predictor.largest_context(gpu)
    made.took_s = time.perf_counter() - started
    return made


class _told:
    """Turns what fake tensors cannot do into one line with the place in the user's code."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or is_usage_error(error):
            return
        place = _user_line(error)
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            why = f"{place} needs a value ({error.func}), and a prediction has none; leave such a line to logging hooks"
        else:
            why = f"{place}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise Unpredictable(f"cannot be predicted: {why}") from error


def _user_line(error: BaseException) -> str:
    last = (own_lines(error) or traceback.extract_tb(error.__traceback__))[-1]
    return f"{Path(last.filename).name}:{last.lineno}" + (f" `{last.line}`" if last.line else "")


def main(args: list[str]) -> int:
    """Print the forecast, or the user's mistake in one line; returns the exit code."""
    quiet()
    find_modules_in_current_folder()
    try:
        made = forecast(args[1:], msgspec.json.decode(args[0], type=Request))
    except Exception as error:
        if not is_usage_error(error):
            raise
        tell(str(error))
        return ExitCode.USAGE
    write_result(msgspec.json.encode(made).decode())
    return ExitCode.OK


if __name__ == "__main__":
    # The user's own code may print.
    with result_alone(until_exit=True):
        raise SystemExit(main(sys.argv[1:]))
