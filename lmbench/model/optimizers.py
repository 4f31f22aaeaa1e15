"""Optimizers by name, each with the implementations that PyTorch has of it. Another one is an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lmbench.errors import UsageError, suggest, unknown

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
        UsageError: there is no such optimizer, or it has no such variant.
    """
    if name not in OPTIMIZERS:
        if any(name in kind.variants for kind in OPTIMIZERS.values()):
            raise UsageError(f"{name!r} is no optimizer but a variant: --model.optimizer_variant {name}")
        raise unknown("optimizer", name, OPTIMIZERS)
    build, variants = OPTIMIZERS[name]
    if variant is not None and variant not in variants:
        raise UsageError(
            f"{name} has no variant {variant!r}; choose one of {', '.join(variants) or 'null'}"
            f"{suggest(variant, variants)}"
        )
    variant = variant or next(iter(variants), None)
    if variant is None:
        return ChosenOptimizer(name, partial(build, **settings))
    return ChosenOptimizer(f"{name} {variant}", partial(build, **settings, **variants[variant]))
