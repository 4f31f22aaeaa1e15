"""Optimizers by name, each with the implementations that PyTorch has of it. Another one is an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lmbench.errors import UsageError, unknown

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def _adamw(named_parameters: NamedParameters, **settings: Any) -> Optimizer:
    return AdamW([parameter for _, parameter in named_parameters], **settings)


def _sgd(named_parameters: NamedParameters, *, betas: tuple[float, float], **settings: Any) -> Optimizer:
    return SGD([parameter for _, parameter in named_parameters], momentum=betas[0], **settings)


# "loop" must turn both off: PyTorch takes foreach by itself where neither is set.
_FUSED_FOREACH_LOOP: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"fused": False, "foreach": False},
}


class OptimizerKind(NamedTuple):
    """An optimizer by name.

    `build` takes named parameters, which it may treat differently by name and shape, lr, weight_decay, betas, and the
    flags of a variant. `variants` has these flags by the variant's name, the default one first, and is empty for an
    optimizer that has one implementation.
    """

    build: Callable[..., Optimizer]
    variants: Mapping[str, Mapping[str, bool]]


OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": OptimizerKind(_adamw, _FUSED_FOREACH_LOOP),
    "SGD": OptimizerKind(_sgd, _FUSED_FOREACH_LOOP),
}


class ChosenOptimizer(NamedTuple):
    """An optimizer with its settings; `label` is its name in records and tables, `AdamW fused`."""

    label: str
    build: Callable[[NamedParameters], Optimizer]


def choose_optimizer(name: str, variant: str | None, **settings: Any) -> ChosenOptimizer:
    """An optimizer with its settings (lr, weight_decay, betas), in a variant of it or (None) its default one.

    Raises:
        UsageError: there is no such optimizer, it has no such variant, or PyTorch refuses its settings.
    """
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    build, variants = OPTIMIZERS[name]
    variant = variant or next(iter(variants), None)
    chosen = ChosenOptimizer(name, partial(build, **settings))
    if variant is not None:
        if variant not in variants:
            raise unknown(f"variant of {name}", variant, variants)
        chosen = ChosenOptimizer(f"{name} {variant}", partial(build, **settings, **variants[variant]))
    try:
        # PyTorch checks the settings when an optimizer is made, which a model is only after its network.
        chosen.build([("", nn.Parameter(torch.zeros(1, 1, device="cpu")))])
    except ValueError as error:
        raise UsageError(f"optimizer {chosen.label}: {error}") from error
    return chosen
