"""Named ranges around what runs: for the profiler, for the allocator's history, and by NVTX for an external tool."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

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
        self._step: Range | None = None
        self._phase: Range | None = None

    @property
    def is_in_step(self) -> bool:
        return self._step is not None

    def begin(self, step: int, phase: str) -> None:
        """A step begins, in `phase`; the one before ends."""
        self.end()
        self._step = Range(f"{STEP}{step}", self._uses_nvtx)
        self.border(phase)

    def border(self, phase: str) -> None:
        """Within a step a phase begins; the one before ends."""
        if self._step is None:
            return
        if self._phase is not None:
            self._phase.close()
        self._phase = None if phase == EXCLUDED else Range(f"{PHASE}{phase}", self._uses_nvtx)

    def end(self) -> None:
        for open_range in (self._phase, self._step):
            if open_range is not None:
                open_range.close()
        self._phase = self._step = None


class ModuleRanges:
    """A range around the forward of every module that has a name, until `remove`.

    Inside a compiled region modules run without their hooks, and have no ranges.
    """

    def __init__(self, module: nn.Module, uses_nvtx: bool) -> None:
        self._uses_nvtx = uses_nvtx
        # A recomputed forward (activation checkpointing) runs on the backward's thread.
        self._open = threading.local()
        self._handles: list[RemovableHandle] = []
        self.classes: dict[str, str] = {}
        for name, child in module.named_modules():
            # TorchScript's modules take no hooks.
            if name and not isinstance(child, torch.jit.ScriptModule):
                self._watch(name, child)

    def _watch(self, name: str, module: nn.Module) -> None:
        self.classes[name] = type(module).__name__

        def begin(*_: Any) -> None:
            self._stack().append(Range(f"{MODULE}{name}", self._uses_nvtx))

        def end(*_: Any) -> None:
            if stack := self._stack():
                stack.pop().close()

        self._handles.append(module.register_forward_pre_hook(begin))
        # Also after an exception, which somebody may catch and go on.
        self._handles.append(module.register_forward_hook(end, always_call=True))

    def _stack(self) -> list[Range]:
        return cast(list[Range], self._open.__dict__.setdefault("stack", []))

    def remove(self) -> None:
        """Take the hooks away, and close what an exception left open on this thread."""
        for handle in self._handles:
            handle.remove()
        while stack := self._stack():
            stack.pop().close()
