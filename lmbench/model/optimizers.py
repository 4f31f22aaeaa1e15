"""PyTorch's optimizers by name, each in the implementations that it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lmbench.errors import UsageError, unknown

NamedParameters = Iterable[tuple[str, nn.Parameter]]

# "loop" must turn both off: PyTorch takes foreach by itself where neither is set.
_VARIANTS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"fused": False, "foreach": False},
}
#: Those whose default is their fused variant, which works on a GPU and on a CPU; others take PyTorch's own choice.
_FUSED = ("Adam", "AdamW", "SGD")
#: No optimizer, and one that takes sparse gradients alone.
_UNFIT = ("Optimizer", "SparseAdam")
#: Those whose update of a matrix depends on all of it: of two that are one they make another update.
BY_MATRIX = ("Muon", "Adafactor")
#: Matrices that Muon leaves to AdamW, by their names: its update is for hidden layers.
_NOT_HIDDEN = re.compile(r"embed|head|\bw[tp]e\b")


class ChosenOptimizer(NamedTuple):
    """An optimizer with its settings; `label` is its name in records and tables, `AdamW fused`."""

    label: str
    build: Callable[[NamedParameters], Optimizer]


class CombinedOptimizer(Optimizer):
    """Several optimizers, each for parameters of its own, that step as one: Lightning's own loop takes one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts, self.label = parts, " + ".join(type(part).__name__ for part in parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
            self.state.update(part.state)
        return loss


def _build(kind: Callable[..., Optimizer], named_parameters: NamedParameters, **settings: Any) -> Optimizer:
    return kind([parameter for _, parameter in named_parameters], **settings)


def _build_muon(kind: Callable[..., Optimizer], parameters: NamedParameters, betas: Any, **rest: Any) -> Optimizer:
    """Muon for the hidden layers' matrices, at AdamW's scale of updates, and AdamW for everything else."""
    hidden, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in parameters:
        (hidden if parameter.ndim == 2 and not _NOT_HIDDEN.search(name) else others).append(parameter)
    parts = [kind(hidden, **rest, adjust_lr_fn="match_rms_adamw")] if hidden else []
    parts += [AdamW(others, **rest, betas=betas, fused=True)] if others else []
    return CombinedOptimizer(parts)


def choose_optimizer(name: str, variant: str | None, **settings: Any) -> ChosenOptimizer:
    """An optimizer of torch.optim with those of the settings (lr, weight_decay, betas) that it has.

    `variant` is how it is implemented: fused, foreach or loop, None for its default.

    Raises:
        UsageError: there is no such optimizer, it has no such variant, or PyTorch refuses its settings.
    """
    kinds = {
        known: kind
        for known, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and known not in _UNFIT
    }
    name = name.removeprefix("torch.optim.")
    if name not in kinds:
        raise unknown("optimizer", name, kinds)
    known, label = signature(kinds[name]).parameters, name
    build: Callable[..., Optimizer] = _build
    if name == "Muon":
        build, label = _build_muon, "Muon + AdamW"
    else:
        # What AdamW's first average is, SGD has as its momentum.
        settings |= {"momentum": settings["betas"][0]} if name == "SGD" else {}
        settings = {setting: value for setting, value in settings.items() if setting in known}
    if variant is None and name in _FUSED:
        variant = "fused"
    if variant is not None:
        variants = [each for each, flags in _VARIANTS.items() if flags.keys() & known]
        if variant not in variants:
            raise unknown(f"variant of {name}", variant, variants)
        settings |= {flag: value for flag, value in _VARIANTS[variant].items() if flag in known}
        label = f"{name} {variant}"
    chosen = ChosenOptimizer(label, partial(build, kinds[name], **settings))
    try:
        # PyTorch checks the settings when an optimizer is made, which a model is only after its network.
        chosen.build([("", nn.Parameter(torch.zeros(1, 1, device="cpu")))])
    except ValueError as error:
        raise UsageError(f"optimizer {chosen.label}: {error}") from error
    return chosen
