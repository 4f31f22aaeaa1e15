"""`lmbench.measure`: a measurement in this process, of a module that exists."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import Dataset

from lmbench.callbacks import PhaseTimer, RunRecorder
from lmbench.data.datamodule import TokenData
from lmbench.data.shapes import ShapeData
from lmbench.errors import ExitCode, UsageError, suggest
from lmbench.fit.choice import LOADERS, why_no_module
from lmbench.fit.command_line import settings_of
from lmbench.fit.completion import complete_record
from lmbench.fit.measurement import Measurement
from lmbench.fit.modes import usual_mode
from lmbench.fit.settings import MeasureSettings, MemorySettings, Mode, refuse_dtypes, refuse_least
from lmbench.fit.surroundings import quiet, undisturbed, untouched
from lmbench.fit.trainer import TRAINER_DEFAULTS, as_list
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.ending import is_usage_error
from lmbench.instruments.own_code import own_traceback
from lmbench.interruption import held
from lmbench.model.attention_layer import AttentionLayer
from lmbench.model.hugging_face import HuggingFace
from lmbench.model.language_model import LanguageModel
from lmbench.records.passes import PASS
from lmbench.runs import Run, read_run

#: One measurement at a time: two would measure each other.
_alone = threading.Lock()


@dataclass(frozen=True)
class _Repeated:
    """A loader whose every batch is the same one."""

    batch: Any = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch)


@dataclass(frozen=True)
class _Listed:
    """A loader of the batches of a list, which Lightning would take for a list of loaders."""

    batches: list[Any] = field(repr=False)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def measure(
    module: LightningModule,
    data: Any = None,
    *,
    steps: int = 20,
    warmup_steps: int = 5,
    min_window_s: float = 3.0,
    probe_steps: int = 10,
    mode: Mode | None = None,
    precision: str | int = "32-true",
    matmul_precision: Literal["highest", "high"] = "highest",
    compile: bool | Mapping[str, Any] = False,
    zero_grad: Literal["auto", "after_step", "native"] = "auto",
    gradient_norm: bool = False,
    instrument: Literal["timing", "sync", "kernels", "memory", "dtypes"] = "timing",
    seed: int = 0,
    trainer: Mapping[str, Any] | None = None,
    results_dir: str | Path | None = None,
    copy: bool = False,
) -> Run:
    """Measure a module in this process, as `lmbench fit` does in one of its own.

    The process is left as it was (random states, flags, signal handlers, warnings, variables), and so is the module,
    but for its weights, which are trained; with `copy` they are not. PyTorch's CUDA peak counters are reset, and with
    `compile` Dynamo's caches. Works in notebooks and threads, one measurement at a time.

    Args:
        module: a LightningModule.
        data: a LightningDataModule, a loader (any iterable of batches, also a list of them), or one batch (a tensor,
            tuple, mapping or list of tensors), which every step gets. None is what the module's own train_dataloader
            gives; lmbench's models get random tokens.
        steps: the window's steps, at least.
        warmup_steps: steps before the window.
        min_window_s: the window's seconds, at least.
        probe_steps: unmeasured steps after the window that look at the lag inside phases; 0 leaves out all probes.
        mode: inference (on validation_step), forward (graph kept), forward_backward (no optimizer) or train_step; None
            is train_step, and forward_backward for attention by itself, which has nothing to optimize.
        precision: Lightning's, such as bf16-mixed.
        matmul_precision: float32 matrix products: highest is fp32, high is TF32.
        compile: torch.compile, or its options (`lmbench.instruments.compiling.CompileOptions`) by name.
        zero_grad: after_step frees gradients as soon as they are used, native is Lightning's order; auto is after_step
            for lmbench's own models.
        gradient_norm: record the gradient norm of every step.
        instrument: what the module is looked at with beside its times, as in a sweep's passes: kernels records a trace,
            memory the allocator's history, dtypes the dtypes of a probe step; sync synchronizes at every phase. Of all
            but timing and dtypes the step times are not the step's own speed.
        seed: of the run.
        trainer: further flags of Lightning's Trainer, such as accelerator, callbacks, accumulate_grad_batches.
        results_dir: keep the result in a folder below this one; None keeps nothing on the disk.
        copy: measure a deep copy of the module.

    Returns:
        The run, whose outcome is `ok`, or `oom` where memory ran out.

    Raises:
        UsageError: something given cannot be measured; one line.
        Exception: whatever the module's, the data's or a callback's own code raised.
    """
    if not isinstance(module, LightningModule):
        if isinstance(module, type):
            raise UsageError(f"{module.__name__} is a class; measure takes an instance, such as {module.__name__}()")
        raise UsageError(
            f"{type(module).__name__} is no lightning.pytorch.LightningModule{why_no_module(type(module))}"
        )
    settings = settings_of(
        "measure",
        MeasureSettings,
        mode=usual_mode(type(module)) if mode is None else mode,
        warmup_steps=warmup_steps,
        steps=steps,
        min_window_s=min_window_s,
        probe_steps=probe_steps,
        matmul_precision=matmul_precision,
        zero_grad=zero_grad,
        gradient_norm=gradient_norm,
        results_dir=str(results_dir or ""),
    )
    settings.schedule()
    flags = _flags(trainer, precision, compile)
    if instrument not in PASS:
        raise UsageError(f"instrument is {instrument!r}; allowed: {', '.join(PASS)}{suggest(str(instrument), PASS)}")
    options: dict[str, dict[str, Any]] = {"memory": vars(MemorySettings()), "dtypes": {}, "timer": {}, "trainer": flags}
    for option, value in PASS[instrument].options.items():
        group, _, name = option.partition(".")
        options[group][name] = value
    if instrument == "dtypes":
        refuse_dtypes(str(precision), probe_steps)
    if not _alone.acquire(blocking=False):
        raise UsageError("another measurement runs in this process, and each would be in the other's figures; wait")
    try:
        outcome = _measured(deepcopy(module) if copy else module, data, settings, options, seed, bool(results_dir))
    finally:
        _alone.release()
        # Trainer, optimizer and batch are in cycles, and nothing tells Python's collector how much of a device that is.
        gc.collect()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _measured(
    module: LightningModule,
    data: Any,
    settings: MeasureSettings,
    options: Mapping[str, dict[str, Any]],
    seed: int,
    is_kept: bool,
) -> Run | BaseException:
    """The run, or what is to be raised instead."""
    with ExitStack() as stack:
        if not is_kept:
            settings.results_dir = stack.enter_context(
                TemporaryDirectory(prefix="lmbench-", ignore_cleanup_errors=True)
            )
        stack.enter_context(undisturbed())
        quiet()
        command = "validate" if settings.mode == "inference" else "fit"
        given = _data_for(module, data, LOADERS[command])
        stack.enter_context(untouched(module, given))
        flags = options["trainer"]
        callbacks = [*as_list(flags.pop("callbacks", None)), PhaseTimer(**options["timer"])]
        measurement = Measurement(command, type(module), settings, flags, options)
        recorder, silent = measurement.recorder, {"verbose": False} if command == "validate" else {}
        failure = None
        try:
            measurement.run(lambda: (module, given, callbacks), seed=seed, **silent)
        except BaseException as error:
            failure = _ended_by(error, recorder)
        if recorder.exit_code is ExitCode.USAGE and recorder.run.error is not None:
            failure = failure or UsageError(recorder.run.error.message or "nothing was measured")
        if failure is not None:
            if is_kept and recorder.folder is not None:
                failure.add_note(f"lmbench keeps the result so far: {recorder.folder.path}")
            return failure
        complete_record(recorder)
        assert recorder.folder is not None
        return read_run(recorder.folder.path)


def _ended_by(error: BaseException, recorder: RunRecorder) -> BaseException | None:
    """Record what ended the run; returns what is to be raised, None where the run tells of it."""
    with held():
        recorder.end_by(error)
    if recorder.exit_code is ExitCode.OUT_OF_MEMORY:
        # The frames hold the tensors that there was no room beside.
        traceback.clear_frames(error.__traceback__)
        return None
    if recorder.run.outcome == "interrupted" and recorder.folder is not None:
        # Lightning has made a SystemExit of it.
        return KeyboardInterrupt()
    if is_usage_error(error):
        return error if isinstance(error, UsageError) else UsageError(str(error))
    return error.with_traceback(own_traceback(error) or error.__traceback__)


def _flags(
    trainer: Mapping[str, Any] | None, precision: str | int, compile: bool | Mapping[str, Any]
) -> dict[str, Any]:
    """The Trainer's flags."""
    given = dict(trainer or {})
    for name in ("precision", "compile"):
        if name in given:
            raise UsageError(f"trainer has {name}, which is an argument of measure: measure(..., {name}=...)")
    refuse_least(given)
    if isinstance(compile, Mapping):
        compile = settings_of("compile", CompileOptions, **compile)
    return {**TRAINER_DEFAULTS, **given, "precision": precision, "compile": compile}


def _data_for(module: LightningModule, data: Any, loader: str) -> Any:
    """What the Trainer is given: a LightningDataModule, a loader, or None for the module's own."""
    if data is None:
        return _own_data(module, loader)
    if isinstance(data, type):
        raise UsageError(f"data is the class {data.__name__}; give an instance, such as {data.__name__}()")
    if isinstance(data, Dataset) and not hasattr(data, "__iter__"):
        name = type(data).__name__
        raise UsageError(f"data is a Dataset, which has no batches; give DataLoader({name}(...), batch_size=4)")
    if isinstance(data, list) and not any(isinstance(item, torch.Tensor) for item in data):
        return _Listed(data)
    is_batch = isinstance(data, torch.Tensor | tuple | list | Mapping) or not hasattr(data, "__iter__")
    return _Repeated(data) if is_batch and not isinstance(data, LightningDataModule) else data


def _own_data(module: LightningModule, loader: str) -> LightningDataModule | None:
    """lmbench's data for its own models; None for another one, which has its own."""
    if isinstance(module, LanguageModel):
        return TokenData(context_length=module.context_length, vocab_size=module.vocab_size)
    if isinstance(module, HuggingFace):
        return TokenData(**module.token_settings())
    if isinstance(module, AttentionLayer):
        return ShapeData(batch_size=module.size.batch, context_length=module.size.seq)
    if getattr(type(module), loader) is getattr(LightningModule, loader):
        raise UsageError(
            f"{type(module).__name__} has no {loader}(); give data: a DataLoader, a LightningDataModule, or a batch"
        )
    return None
