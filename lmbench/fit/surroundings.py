"""A measurement in somebody else's process leaves that, and the module, as it found them."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule

#: What Lightning says while it sets up and runs, which is about its own calls and not about the measurement.
_LOGGERS = ("lightning.pytorch", "lightning.fabric")

# What a mode, compiling and Lightning itself set on a module that they work with.
_SET_ON_MODULE = (
    "backward", "optimizer_step", "optimizer_zero_grad", "_trainer", "_compiled_call_impl", "_device", "_dtype",
)  # fmt: skip

_HOST = torch.device("cpu")


def _restore_variables(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


#: State of the process: how it is read, and how it is set again.
_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: dict(os.environ), _restore_variables),
)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is done within, the process is afterwards as it was before.

    Random states (Python, NumPy, PyTorch with CUDA), environment variables, PyTorch's default dtype, float32 matmul
    precision, cuDNN and determinism flags and anomaly mode, signal handlers (where this is the main thread), garbage
    collection, filters of warnings, levels of Lightning's loggers. Not CUDA's peak counters, of which there is one set,
    nor Dynamo's caches.
    """
    cudnn = torch.backends.cudnn
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for read, restore in _STATES:
            stack.callback(restore, read())
        stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        stack.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        stack.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        stack.callback(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        stack.callback(_cuda_random_state())
        with suppress(RuntimeError):
            # Refused where old and new TF32 settings were mixed.
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
        if threading.current_thread() is threading.main_thread():
            handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
            stack.callback(_restore_handlers, handlers)
        yield


def _cuda_random_state() -> Callable[[], object]:
    if torch.cuda.is_initialized():
        return partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    seed = torch.initial_seed()

    def restore() -> None:
        # A context that was made within would have begun with the seed that was set for all devices.
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    return restore


def _restore_handlers(before: dict[signal.Signals, Any]) -> None:
    for signum, handler in before.items():
        # None was not set from Python, and cannot be.
        if handler is not None and signal.getsignal(signum) is not handler:
            signal.signal(signum, handler)


@contextmanager
def untouched(module: LightningModule, data: object) -> Iterator[None]:
    """Within, a module may be trained, moved, converted, compiled and changed by a mode; afterwards it is back on its
    device, in its dtype and its parts' training modes, without gradients that it did not have, and as callable as
    before. Its weights stay what training made of them; what it built within is on the CPU, in the default dtype.
    """
    parts = list(module.modules())
    modes = [(part, part.training) for part in parts]
    own = [(part, {name: vars(part)[name] for name in _SET_ON_MODULE if name in vars(part)}) for part in parts]
    tensors = [*module.parameters(), *module.buffers()]
    places = {tensor: (tensor.device, tensor.dtype, tensor.grad is None) for tensor in tensors}
    trainer = data.trainer if isinstance(data, LightningDataModule) else None
    try:
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training
        for tensor in (*module.parameters(), *module.buffers()):
            device, dtype, had_no_gradient = places.get(tensor, (_HOST, _default_dtype(tensor), True))
            if had_no_gradient:
                tensor.grad = None
            if (tensor.device, tensor.dtype) != (device, dtype):
                tensor.data = tensor.data.to(device, dtype)
        for part, before in own:
            for name in _SET_ON_MODULE:
                if name in before:
                    vars(part)[name] = before[name]
                else:
                    vars(part).pop(name, None)
        if isinstance(data, LightningDataModule):
            data.trainer = trainer


def _default_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype


def quiet() -> None:
    """Lightning's tips and notices about its own calls say nothing about the measurement."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
