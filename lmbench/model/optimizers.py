"""Optimizers by name, each with the implementations that PyTorch has of it. Another one is an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lmbench.errors import UsageError, suggest


def _sgd(parameters: Iterable[nn.Parameter], *, betas: tuple[float, float], **rest: Any) -> SGD:
    return SGD(parameters, momentum=betas[0], **rest)


# "loop" must turn both off: PyTorch takes foreach by itself where neither is set.
_FUSED_FOREACH_LOOP: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"fused": False, "foreach": False},
}


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer by name.

    build takes parameters, lr, weight_decay, betas, and the flags of a variant; variants has these flags by the
    variant's name, the default one first, and is empty for an optimizer that has one implementation.
    """

    build: Callable[..., Optimizer]
    variants: Mapping[str, Mapping[str, bool]]


OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": OptimizerKind(AdamW, _FUSED_FOREACH_LOOP),
    "SGD": OptimizerKind(_sgd, _FUSED_FOREACH_LOOP),
}


@dataclass(frozen=True)
class ChosenOptimizer:
    """`label` is what records and tables say, `AdamW fused`; `build` makes it for parameters."""

    label: str
    build: Callable[[Iterable[nn.Parameter]], Optimizer]


def choose_optimizer(name: str, variant: str | None, **settings: Any) -> ChosenOptimizer:
    """An optimizer with its settings (lr, weight_decay, betas), in a variant of it or (None) its default one.

    Raises:
        UsageError: there is no such optimizer, or it has no such variant.
    """
    if name not in OPTIMIZERS:
        is_variant = any(name in kind.variants for kind in OPTIMIZERS.values())
        hint = f"; {name} is a variant: --model.optimizer_variant {name}" if is_variant else suggest(name, OPTIMIZERS)
        raise UsageError(f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}{hint}")
    kind = OPTIMIZERS[name]
    if variant is not None and variant not in kind.variants:
        raise UsageError(
            f"{name} has no variant {variant!r}; choose one of {', '.join(kind.variants) or 'null'}"
            f"{suggest(variant, kind.variants)}"
        )
    used = variant or next(iter(kind.variants), None)
    if used is None:
        return ChosenOptimizer(name, partial(kind.build, **settings))
    return ChosenOptimizer(f"{name} {used}", partial(kind.build, **settings, **kind.variants[used]))
