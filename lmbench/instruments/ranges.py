"""Named ranges around what runs: for the profiler, for the allocator's history, and by NVTX for an external tool."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.profiler import record_function

from lmbench.records.vocabulary import EXCLUDED, MODULE, PHASE, STEP


class Range(ExitStack):
    """One named range on this thread, open from its making until `close`."""

    def __init__(self, name: str, uses_nvtx: bool) -> None:
        super().__init__()
        self.enter_context(record_function(name))
        if uses_nvtx:
            torch.cuda.nvtx.range_push(name)
            self.callback(torch.cuda.nvtx.range_pop)


class StepRanges:
    """Ranges of the steps, and in each of its phases, one after the other, never nested.

    What is no part of a step, such as a validation within it, lies in no phase.
    """

    def __init__(self, uses_nvtx: bool) -> None:
        self._uses_nvtx = uses_nvtx
        #: The running step's range, and in it the running phase's.
        self._open: list[Range] = []

    @property
    def is_in_step(self) -> bool:
        return bool(self._open)

    def begin(self, step: int, phase: str) -> None:
        """A step begins, in `phase`; the one before ends."""
        self.end()
        self._open.append(Range(f"{STEP}{step}", self._uses_nvtx))
        self.border(phase)

    def border(self, phase: str) -> None:
        """Within a step a phase begins; the one before ends."""
        self._close(1)
        if self._open and phase != EXCLUDED:
            self._open.append(Range(f"{PHASE}{phase}", self._uses_nvtx))

    def end(self) -> None:
        self._close(0)

    def _close(self, kept: int) -> None:
        while len(self._open) > kept:
            self._open.pop().close()


class ModuleRanges:
    """A range around the forward of every module that has a name, until `remove`.

    Inside a compiled region modules run without their hooks, and have no ranges.
    """

    def __init__(self, module: nn.Module, uses_nvtx: bool) -> None:
        self._uses_nvtx = uses_nvtx
        # A recomputed forward (activation checkpointing) runs on the backward's thread.
        self._open = threading.local()
        self._hooks = ExitStack()
        self.classes: dict[str, str] = {}
        for name, child in module.named_modules():
            # TorchScript's modules take no hooks.
            if name and not isinstance(child, torch.jit.ScriptModule):
                self.classes[name] = type(child).__name__
                self._hooks.callback(child.register_forward_pre_hook(partial(self._begin, name)).remove)
                # Also after an exception, which somebody may catch and go on.
                self._hooks.callback(child.register_forward_hook(self._end, always_call=True).remove)

    def _begin(self, name: str, *_: Any) -> None:
        self._stack().append(Range(f"{MODULE}{name}", self._uses_nvtx))

    def _end(self, *_: Any) -> None:
        if stack := self._stack():
            stack.pop().close()

    def _stack(self) -> list[Range]:
        return cast(list[Range], self._open.__dict__.setdefault("stack", []))

    def remove(self) -> None:
        """Take the hooks away, and close what an exception left open on this thread."""
        self._hooks.close()
        while self._stack():
            self._end()
