"""`lmbench.measure`: measure an existing module in this process, and restore the module and the process afterwards."""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
import warnings
from collections import UserList
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import Dataset

from lmbench.callbacks import PhaseTimer
from lmbench.data.datamodule import ShapeData, TokenData
from lmbench.errors import ExitCode, UsageError, check_known
from lmbench.files import ScratchFolder
from lmbench.fit.choice import LOADERS, NO_MODULE
from lmbench.fit.command_line import settings_of
from lmbench.fit.measurement import Measurement, complete_record, usual_mode
from lmbench.fit.ranks import count_to_start
from lmbench.fit.settings import MeasureSettings, check_limits
from lmbench.fit.trainer import LOGGERS, TRAINER_DEFAULTS, quiet
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.ending import is_usage_error, user_traceback
from lmbench.instruments.host import reset_peak_rss
from lmbench.interruption import Terminated
from lmbench.model.attention_layer import AttentionLayer
from lmbench.model.hugging_face import HuggingFace
from lmbench.model.language_model import LanguageModel
from lmbench.records.passes import PASS
from lmbench.records.vocabulary import Values
from lmbench.rooms import ROOMS
from lmbench.runs import Run, read_run

# Attributes that a mode, compilation and Lightning itself set on a module and its parts.
_SET_ON_MODULE = (
    "training", "backward", "optimizer_step", "optimizer_zero_grad", "_trainer", "_compiled_call_impl", "_device",
    "_dtype",
)  # fmt: skip

_cudnn = torch.backends.cudnn
#: State of the process: pairs of a getter and a setter.
_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    # Raises RuntimeError where PyTorch's old and new TF32 settings were mixed.
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: _cudnn.benchmark, partial(setattr, _cudnn, "benchmark")),
    (lambda: _cudnn.deterministic, partial(setattr, _cudnn, "deterministic")),
)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the state of the process at the end.

    Restored are random states (Python, NumPy, PyTorch with CUDA), environment variables, PyTorch's default dtype,
    float32 matmul precision, cuDNN and determinism flags, anomaly mode, warning filters and the levels of loggers
    that `quiet` sets. Signal handlers and the garbage collector are restored by the code that changes them. CUDA's peak
    counters, of which there is one set, and Dynamo's caches are not restored.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(patch.dict(os.environ))
        anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        stack.enter_context(torch.autograd.set_detect_anomaly(*anomaly))
        has_cuda = torch.cuda.is_initialized()
        if not has_cuda:
            # A CUDA context that is created within would start from the seed of the measurement.
            stack.callback(torch.cuda.manual_seed_all, torch.initial_seed())
        stack.callback(_set_rng_states, _collect_rng_states(include_cuda=has_cuda))
        for read, restore in _STATES:
            with suppress(RuntimeError):
                stack.callback(restore, read())
        for logger in map(logging.getLogger, LOGGERS):
            stack.callback(logger.setLevel, logger.level)
        yield


@contextmanager
def untouched(module: LightningModule, data: object) -> Iterator[None]:
    """Restore a module that is trained, moved, converted, compiled or changed by a mode within.

    Afterwards it has its device, its dtype, the training modes of its parts, its own methods, its gradients and what of
    it is frozen again. Its weights stay trained. Tensors that it built within are moved to the CPU and the default
    dtype. `data` gets its trainer back.
    """
    states = [(part, dict(vars(part))) for part in module.modules()]
    # By name: a module that is moved or converted has new buffers. Gradients wait on the host, where no peak has them.
    tensor_states = {
        name: (t.device, t.dtype, t.requires_grad, t.grad if t.grad is None else t.grad.cpu())
        for name, t in _named_tensors(module)
    }
    for _, tensor in _named_tensors(module):
        tensor.grad = None
    trainer = data.trainer if isinstance(data, LightningDataModule) else None
    try:
        yield
    finally:
        for name, tensor in _named_tensors(module):
            default_dtype = torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype
            default = torch.device("cpu"), default_dtype, tensor.requires_grad, None
            device, dtype, requires_gradient, gradient = tensor_states.get(name, default)
            tensor.grad = None
            if (tensor.device, tensor.dtype) != (device, dtype):
                tensor.data = tensor.data.to(device, dtype)
            if tensor.requires_grad != requires_gradient:
                tensor.requires_grad_(requires_gradient)
            if gradient is not None:
                tensor.grad = gradient.to(device)
        for part, attributes in states:
            for name in _SET_ON_MODULE:
                vars(part).pop(name, None)
                if name in attributes:
                    vars(part)[name] = attributes[name]
        if isinstance(data, LightningDataModule):
            data.trainer = trainer


def _named_tensors(module: LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


#: How to give data, for error lines.
_DATA = "give a DataLoader, an instance of a LightningDataModule, or a batch as data"
_measuring = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """Within, this is the only measurement of the process: each of two would be in the other's figures.

    Raises:
        UsageError: another one runs.
    """
    if not _measuring.acquire(blocking=False):
        raise UsageError("another measurement runs in this process, and each would be in the other's figures; wait")
    try:
        yield
    finally:
        _measuring.release()
        # Trainer, optimizer and batch are in reference cycles, which hold device memory until Python collects them.
        gc.collect()


def measure(
    module: LightningModule,
    data: Any = None,
    *,
    precision: str | int = "32-true",
    compile: bool | Mapping[str, Any] = False,
    instrument: str = "timing",
    seed: int = 0,
    trainer: Mapping[str, Any] | None = None,
    results_dir: str | Path | None = None,
    copy: bool = False,
    **settings: Any,
) -> Run:
    """Measure a module in this process, as `lmbench fit` does in a process of its own; one at a time, also in threads.

    The process is left as it was (random states, flags, signal handlers, warnings, variables). The module is left as it
    was except for its weights, which are trained unless `copy` is set. PyTorch's CUDA peak counters are reset, and
    Dynamo's caches with `compile`.

    Args:
        module: a LightningModule.
        data: a LightningDataModule, a loader (any iterable of batches, or a list of batches), or one batch (a tensor,
            tuple, mapping or list of tensors) for every step. None takes the module's own train_dataloader
            (val_dataloader for inference); lmbench's models get random tokens.
        precision: Lightning's name, such as bf16-mixed, or one of fp8, such as fp8-tensorwise.
        compile: true for torch.compile, or its options (`lmbench.instruments.compiling.CompileOptions`) by name.
        instrument: the pass, as in a sweep's passes, or that of an installed room. kernels records a trace, memory the
            allocator's history, dtypes the dtypes of a probe step; sync synchronizes at every phase. All but timing and
            dtypes slow the steps down, so that step times are no longer the model's own.
        seed: the run's seed.
        trainer: further flags of Lightning's Trainer, such as accelerator, callbacks, accumulate_grad_batches.
        results_dir: folder in which to keep the result's folder; None keeps nothing on the disk.
        copy: measure a deep copy of the module; `blocks`, which would cut the module itself, always does.
        settings: those of `lmbench.MeasureSettings` by name: steps, warmup_steps, mode, matmul_precision, ... By
            default the mode is train_step, or forward_backward for attention by itself, which has nothing to optimize.
            With `steps` the window has just so many; without it at least 20, and 3 s, or `min_window_s`.

    Returns:
        The run, with outcome `ok`, or `oom` if memory ran out.

    Raises:
        UsageError: an argument cannot be measured; the message is one line.
        Exception: whatever the code of the module, the data or a callback raised.
    """
    if not isinstance(module, LightningModule):
        raise UsageError(f"{getattr(module, '__name__', type(module).__name__)} {NO_MODULE}")
    defaults: Values = {"mode": usual_mode(type(module)), "results_dir": str(results_dir or "")}
    if "steps" in settings:
        # Who asks for a number of steps gets it, however short the window is.
        defaults["min_window_s"] = 0.0
    schedule = settings_of("measure", MeasureSettings, **{**defaults, **settings})
    flags = {**TRAINER_DEFAULTS, "precision": precision, "compile": compile, **(trainer or {})}
    groups = _groups(instrument, flags)
    copy = copy or schedule.blocks is not None
    with _alone():
        run_or_failure = _run(deepcopy(module) if copy else module, data, schedule, groups, seed)
    if isinstance(run_or_failure, BaseException):
        raise run_or_failure
    return run_or_failure


def _groups(instrument: str, flags: Values) -> Values:
    """The settings of the rooms, the timer and the Trainer, by group, for a measurement with this instrument.

    Raises:
        UsageError: there is no such instrument, or a flag of the Trainer is of a measurement that is not made here.
    """
    check_known("instrument", instrument, PASS)
    if isinstance(flags["compile"], Mapping):
        flags["compile"] = settings_of("compile", CompileOptions, **flags["compile"])
    check_limits(flags)
    with undisturbed():
        quiet()
        rank_count = count_to_start({"num_nodes": 1, "strategy": "auto", "accelerator": "auto", **flags})
    if rank_count > 1:
        raise UsageError("several devices need a process each: `lmbench fit` starts them, or torchrun your own program")
    rooms = {room.name: vars(room.load("settings")()) for room in ROOMS if room.settings}
    groups = {**rooms, "timer": {}, "trainer": flags}
    for option, value in PASS[instrument].options.items():
        group, _, name = option.partition(".")
        groups[group][name] = value
    return groups


def _run(
    module: LightningModule, data: Any, settings: MeasureSettings, groups: Values, seed: int
) -> Run | BaseException:
    """Measure with everything restored afterwards; returns the run, or the exception to raise instead."""
    is_kept = bool(settings.results_dir)
    with ExitStack() as stack:
        if not is_kept:
            settings.results_dir = stack.enter_context(ScratchFolder("run"))
        stack.enter_context(undisturbed())
        quiet()
        reset_peak_rss()
        command = "validate" if settings.mode == "inference" else "fit"
        source = _data_for(module, data, LOADERS[command])
        stack.enter_context(untouched(module, source))
        measurement = Measurement(command, type(module), settings, groups)
        recorder = measurement.recorder
        options = {"verbose": False} if command == "validate" else {}
        timer = PhaseTimer(**groups["timer"])
        failure = measurement.run(lambda: (module, source, timer, groups["trainer"]), seed=seed, **options)
        if failure is None and recorder.exit_code is ExitCode.USAGE and recorder.run.error is not None:
            failure = UsageError(recorder.run.error.message or "nothing was measured")
        elif recorder.exit_code is ExitCode.OUT_OF_MEMORY and failure is not None:
            # The frames of the traceback hold the tensors that filled the memory.
            traceback.clear_frames(failure.__traceback__)
            failure = None
        elif recorder.run.outcome == "interrupted":
            # Lightning turns a Ctrl-C into SystemExit.
            is_by_ctrl_c = recorder.exit_code is ExitCode.INTERRUPTED
            failure = KeyboardInterrupt() if is_by_ctrl_c else Terminated(ExitCode.TERMINATED)
        elif failure is not None and is_usage_error(failure):
            failure = UsageError(str(failure))
        elif failure is not None:
            failure = failure.with_traceback(user_traceback(failure) or failure.__traceback__)
        if failure is not None:
            if is_kept and recorder.folder is not None:
                failure.add_note(f"lmbench keeps the result so far: {recorder.folder.path}")
            return failure
        complete_record(recorder)
        return read_run(recorder.result.path)


def _data_for(module: LightningModule, data: Any, loader: str) -> Any:
    """The Trainer's data: a LightningDataModule, a loader, or None for the module's own loader.

    Raises:
        UsageError: the module has no loader, or `data` is a class, a dataset, a text or a path.
    """
    if isinstance(data, LightningDataModule):
        return data
    if data is None:
        if isinstance(module, LanguageModel):
            data = TokenData(context_length=module.context_length, vocab_size=module.vocab_size)
        elif isinstance(module, HuggingFace):
            data = TokenData(**module.token_settings())
        elif isinstance(module, AttentionLayer):
            data = ShapeData(batch_size=module.size.batch, context_length=module.size.seq)
        elif not is_overridden(loader, module):
            raise UsageError(f"{type(module).__name__} has no {loader}(); {_DATA}")
        return data
    if isinstance(data, str | bytes | Path):
        raise UsageError(f"data is {str(data)[:80]!r}; {_DATA}")
    if isinstance(data, type) or (isinstance(data, Dataset) and not hasattr(data, "__iter__")):
        raise UsageError(f"data is {getattr(data, '__name__', type(data).__name__)}; {_DATA}")
    if isinstance(data, list) and not any(isinstance(item, torch.Tensor) for item in data):
        # Lightning would take a plain list for several loaders.
        return UserList(data)
    is_batch = isinstance(data, torch.Tensor | tuple | list | Mapping) or not hasattr(data, "__iter__")
    return repeat(data) if is_batch else data
