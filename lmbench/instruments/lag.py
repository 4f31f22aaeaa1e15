"""Is a phase waiting for the host? The verdict from the lowest lag inside it, by marks at every block's border."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lmbench.instruments.timeline import Step
from lmbench.records.field import PerPhase
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.vocabulary import Phase

# Under 0.25 ms of lag the device waits for the host; nine probe steps of ten must say the same.
HOST_BOUND_LAG_S = 0.25e-3
AGREEMENT_FRACTION = 0.9

# Waiting for data is the host's by definition, and `other` is the host's own work between phases.
JUDGED_PHASES: tuple[Phase, ...] = ("forward", "backward", "clip", "optimizer", "zero_grad")


def lag_verdicts(steps: Sequence[Step]) -> PerPhase[LagVerdict]:
    """The verdict on each phase seen, from the lowest lag inside it in each probe step.

    Empty where the clock has no lag (a CPU run, the sync clock).
    """
    verdicts: PerPhase[LagVerdict] = PerPhase()
    for phase in JUDGED_PHASES:
        of_steps = [step.lags_s[phase] for step in steps if phase in step.lags_s]
        lags = sorted(map(min, of_steps))
        if not lags:
            continue
        waiting = sum(lag < HOST_BOUND_LAG_S for lag in lags) / len(lags)
        agree = max(waiting, 1.0 - waiting)
        word: LagWord = "mixed" if agree < AGREEMENT_FRACTION else ("host-bound" if waiting > 0.5 else "queued")
        # Each part of the phase begins where the one before ends.
        marks = 1 + min(map(len, of_steps)) // 2
        verdicts.set(phase, LagVerdict(word, lags[len(lags) // 2], agree, marks))
    return verdicts


# More marks than this in one phase would themselves slow the host.
MAX_MARKED_MODULES = 256


def block_modules(module: nn.Module) -> list[nn.Module]:
    """The modules whose ends are marked: the members of every list of modules, else the children of the first module
    that has more than one child; then everything beside them on the way down (embedding, head). TorchScript's modules
    take no hooks."""
    unique = dict.fromkeys(child for child in _walk(module) if not isinstance(child, torch.jit.ScriptModule))
    return list(unique)[:MAX_MARKED_MODULES]


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        elif any(isinstance(m, nn.ModuleList | nn.Sequential) for m in child.modules()) or (
            len(list(module.children())) == 1 and len(list(child.children())) > 1
        ):
            yield from _walk(child)
        else:
            yield child


class ProbeMarks(ExitStack):
    """Calls `note` whenever a block's forward ends and whenever the gradient of its output is ready, until `close`.

    Gradients are watched by hooks on the output tensors: module backward hooks would insert views into the graph.

    A module compiled as a whole runs without its inner hooks; then `count` stays what it was and the borders decide.
    """

    def __init__(self, module: nn.Module, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note
        modules = block_modules(module)
        self.count = len(modules)
        for marked in modules:
            compiled = marked._compiled_call_impl
            if compiled is None:
                self.callback(marked.register_forward_hook(self._forward).remove)
            else:
                # A compiled call does not look at hooks that come after its compilation.
                marked._compiled_call_impl = partial(self._call, compiled)
                self.callback(setattr, marked, "_compiled_call_impl", compiled)

    def _call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        self._forward(None, args, output)
        return output

    def _forward(self, module: nn.Module | None, inputs: Any, output: Any) -> None:
        self._note()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._note())
                break
