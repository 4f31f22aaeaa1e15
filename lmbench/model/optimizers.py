"""PyTorch's optimizers by name, each with its implementations: fused, foreach and loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lmbench.errors import UsageError, check_known
from lmbench.records.vocabulary import Values

NamedParameters = Iterable[tuple[str, nn.Parameter]]

# "loop" turns both off, since PyTorch chooses foreach if neither is set.
_VARIANTS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"fused": False, "foreach": False},
}
#: Optimizers that are fused by default, which works on GPUs and CPUs. For others PyTorch chooses the variant.
_FUSED = ("Adam", "AdamW", "SGD")
#: Classes of torch.optim that cannot train a model: the base class, and one for sparse gradients alone.
_UNFIT = ("Optimizer", "SparseAdam")
#: Optimizers whose update depends on a whole matrix, so that joining two matrices into one changes it.
BY_MATRIX = ("Muon", "Adafactor")
#: Names of matrices outside the hidden layers, which Muon leaves to AdamW.
_NOT_HIDDEN = re.compile(r"embed|head|\bw[tp]e\b")


class ChosenOptimizer(NamedTuple):
    """An optimizer with its settings. `label` is its name in records and tables, such as `AdamW fused`."""

    label: str
    build: Callable[[NamedParameters], Optimizer]


class CombinedOptimizer(Optimizer):
    """Several optimizers for different parameters that step as one, since Lightning's automatic loop takes one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts, self.label = parts, " + ".join(type(part).__name__ for part in parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give each part its groups of this optimizer, and the state of all."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state, part.param_groups = self.state, list(islice(groups, len(part.param_groups)))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Values) -> None:
        super().load_state_dict(state_dict)
        # Loading makes new groups and new state.
        self._share()


def _plain(kind: Callable[..., Optimizer], named_parameters: NamedParameters, **settings: Any) -> Optimizer:
    """An optimizer for all parameters, with the settings that it takes."""
    taken = signature(kind).parameters
    settings = {setting: value for setting, value in settings.items() if setting in taken}
    return kind([parameter for _, parameter in named_parameters], **settings)


def _muon(kind: Callable[..., Optimizer], parameters: NamedParameters, betas: Any, **settings: Any) -> Optimizer:
    """Muon for the hidden layers' matrices, with updates as large as AdamW's, and AdamW for all other parameters."""
    hidden, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in parameters:
        (hidden if parameter.ndim == 2 and not _NOT_HIDDEN.search(name) else others).append(parameter)
    parts = [kind(hidden, **settings, adjust_lr_fn="match_rms_adamw")] if hidden else []
    if others:
        parts.append(AdamW(others, **settings, betas=betas, fused=True))
    return CombinedOptimizer(parts)


def choose_optimizer(name: str, variant: str | None, **settings: Any) -> ChosenOptimizer:
    """An optimizer of torch.optim with the settings (lr, weight_decay, betas) that it takes.

    The first of the betas is SGD's momentum. `variant` is the implementation: fused, foreach or loop. None stands for
    the optimizer's default.

    Raises:
        UsageError: there is no such optimizer, it has no such variant, or PyTorch refuses its settings.
    """
    kinds = {
        kind_name: kind
        for kind_name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind_name not in _UNFIT
    }
    name = name.removeprefix("torch.optim.")
    check_known("optimizer", name, kinds)
    parameters, label = signature(kinds[name]).parameters, name
    build: Callable[..., Optimizer] = _plain
    if name == "Muon":
        build, label = _muon, "Muon + AdamW"
    elif name == "SGD":
        settings["momentum"] = settings["betas"][0]
    if variant is None and name in _FUSED:
        variant = "fused"
    if variant is not None:
        variants = [known for known, flags in _VARIANTS.items() if flags.keys() & parameters]
        check_known(f"variant of {name}", variant, variants)
        settings |= {flag: value for flag, value in _VARIANTS[variant].items() if flag in parameters}
        label = f"{name} {variant}"
    chosen = ChosenOptimizer(label, partial(build, kinds[name], **settings))
    try:
        # PyTorch checks the settings when an optimizer is made. A trial shows mistakes before the network is built.
        chosen.build([("", nn.Parameter(torch.zeros(1, 1, device="cpu")))])
    except ValueError as error:
        raise UsageError(f"optimizer {chosen.label}: {error}") from error
    return chosen
