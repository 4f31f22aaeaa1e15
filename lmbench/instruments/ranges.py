"""Named ranges around steps, phases and modules, for the allocator's history and the profilers."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from lmbench.instruments.module_parts import hooked_modules
from lmbench.instruments.phases import PhaseTrack
from lmbench.records.vocabulary import MODULE, PAUSES, PHASE, STEP


def _opened(name: str, markers: ModuleType | None) -> ExitStack:
    """A named range on this thread, open until the stack is closed; `markers` are those of `Device`."""
    stack = ExitStack()
    stack.enter_context(record_function(name))
    if markers is not None:
        markers.range_push(name)
        stack.callback(markers.range_pop)
    return stack


class StepRanges:
    """A range for each step, and in it a range for each phase, one after the other and never nested.

    Excluded time within a step, such as a validation, lies in no phase range.

    Args:
        track: tells the phases.
        markers: those of `Device`.
    """

    def __init__(self, track: PhaseTrack, markers: ModuleType | None = None) -> None:
        self._track, self._markers = track, markers
        #: The range of the running step, followed by that of the running phase.
        self._open = list[ExitStack]()

    @property
    def is_in_step(self) -> bool:
        return bool(self._open)

    def follow(self, undo: ExitStack) -> None:
        """Begin a range with each phase that begins, until `undo` is closed."""
        self._track.listen(self._border, undo)

    def begin(self, step: int) -> None:
        """Begin a step in the running phase, and end the step before."""
        self.end()
        self._open.append(_opened(f"{STEP}{step}", self._markers))
        self._border(self._track.current)

    def _border(self, phase: str) -> None:
        """Begin a phase within the step, and end the phase before."""
        self._close(1)
        if self._open and phase not in PAUSES:
            self._open.append(_opened(f"{PHASE}{phase}", self._markers))

    def end(self) -> None:
        self._close(0)

    def _close(self, depth: int) -> None:
        while len(self._open) > depth:
            self._open.pop().close()


class _OpenRanges(threading.local):
    """The open ranges of the running thread: activation checkpointing recomputes a forward on autograd's thread."""

    def __init__(self) -> None:
        self.stack = list[ExitStack]()


class ModuleRanges:
    """A range around the forward of every named submodule, until `remove`.

    Compiled modules, and those inside them, run without hooks and have no ranges.

    Attributes:
        classes: the class name of each submodule by its path.
    """

    def __init__(self, module: nn.Module, markers: ModuleType | None = None) -> None:
        self._markers = markers
        self._open = _OpenRanges()
        self._hooks = ExitStack()
        self.classes = {name: type(child).__name__ for name, child in module.named_modules() if name}
        for name, child in hooked_modules(module):
            self._hooks.callback(child.register_forward_pre_hook(partial(self._begin, name)).remove)
            # Also called after an exception, because the caller may catch it and go on.
            self._hooks.callback(child.register_forward_hook(self._end, always_call=True).remove)

    def _begin(self, name: str, *_: Any) -> None:
        self._open.stack.append(_opened(f"{MODULE}{name}", self._markers))

    def _end(self, *_: Any) -> None:
        if self._open.stack:
            self._open.stack.pop().close()

    def remove(self) -> None:
        """Remove the hooks, and close the ranges that an exception left open on this thread."""
        self._hooks.close()
        while self._open.stack:
            self._end()
