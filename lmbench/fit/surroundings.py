"""A measurement in somebody else's process leaves that, and the module, as it found them."""

from __future__ import annotations

import logging
import os
import random
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


def _cuda_random_state() -> tuple[list[torch.Tensor] | None, int]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None, torch.initial_seed()


def _restore_cuda(before: tuple[list[torch.Tensor] | None, int]) -> None:
    states, seed = before
    if states is not None:
        torch.cuda.set_rng_state_all(states)
    elif torch.cuda.is_initialized():
        # The context that was made within began with the seed that was set for all devices.
        torch.cuda.manual_seed_all(seed)


_cudnn = torch.backends.cudnn
#: State of the process: how it is read, and how it is set again.
_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (_cuda_random_state, _restore_cuda),
    (torch.get_default_dtype, torch.set_default_dtype),
    # Refused where old and new TF32 settings were mixed.
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: _cudnn.benchmark, partial(setattr, _cudnn, "benchmark")),
    (lambda: _cudnn.deterministic, partial(setattr, _cudnn, "deterministic")),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda before: torch.set_anomaly_enabled(*before),
    ),
    (lambda: dict(os.environ), _restore_variables),
)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is done within, the process is afterwards as it was before.

    Random states (Python, NumPy, PyTorch with CUDA), environment variables, PyTorch's default dtype, float32 matmul
    precision, cuDNN and determinism flags and anomaly mode, filters of warnings, levels of Lightning's loggers.
    Signal handlers and the garbage collector are restored by those who change them. Not CUDA's peak counters, of which
    there is one set, nor Dynamo's caches.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for read, restore in _STATES:
            with suppress(RuntimeError):
                stack.callback(restore, read())
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
        yield


@contextmanager
def untouched(module: LightningModule, data: object) -> Iterator[None]:
    """Within, a module may be trained, moved, converted, compiled and changed by a mode; afterwards it is back on its
    device, in its dtype and its parts' training modes, without gradients that it did not have, and as callable as
    before. Its weights stay what training made of them; what it built within is on the CPU, in the default dtype.
    """
    before = [(part, part.training, dict(vars(part))) for part in module.modules()]
    tensors = [*module.parameters(), *module.buffers()]
    places = {tensor: (tensor.device, tensor.dtype, tensor.grad is None) for tensor in tensors}
    trainer = data.trainer if isinstance(data, LightningDataModule) else None
    try:
        yield
    finally:
        for tensor in (*module.parameters(), *module.buffers()):
            usual_dtype = torch.get_default_dtype() if tensor.is_floating_point() else tensor.dtype
            device, dtype, had_no_gradient = places.get(tensor, (_HOST, usual_dtype, True))
            if had_no_gradient:
                tensor.grad = None
            if (tensor.device, tensor.dtype) != (device, dtype):
                tensor.data = tensor.data.to(device, dtype)
        for part, was_training, variables in before:
            part.training = was_training
            for name in _SET_ON_MODULE:
                vars(part).pop(name, None)
                if name in variables:
                    vars(part)[name] = variables[name]
        if isinstance(data, LightningDataModule):
            data.trainer = trainer


def quiet() -> None:
    """Lightning's tips and notices about its own calls say nothing about the measurement."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
