"""Books the host's time to the phase and to whoever's work is running: a hook, a logger, the loader, the collector."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from pathlib import Path
from typing import Any

import lightning
from torch.utils.data import IterableDataset

from lmbench.code_owners import location_of
from lmbench.instruments.phases import PhaseTrack
from lmbench.records.host_time import OwnedTime
from lmbench.records.vocabulary import PHASES

#: Most entries of a record.
_KEPT = 30
_LIGHTNING = str(Path(lightning.__file__).parent)


class HostLedger:
    """Books every moment to one phase and one owner, so that the owners of a phase sum to the phase by construction.

    The owner is the innermost one that was entered and not left; an empty one is Lightning's loop and PyTorch. The time
    of `self.log` within a hook is thus not the hook's.
    """

    def __init__(self, track: PhaseTrack) -> None:
        self._owners = [""]
        self._spans_ns = Counter[tuple[str, str]]()
        self._calls = Counter[tuple[str, str]]()
        self._phase, self._since_ns = track.current, time.perf_counter_ns()

    def book(self, phase: str | None = None) -> None:
        """Book the time since the last call; a listener of the track, which calls it with the phase that begins."""
        now_ns = time.perf_counter_ns()
        self._spans_ns[self._phase, self._owners[-1]] += now_ns - self._since_ns
        self._phase, self._since_ns = phase or self._phase, now_ns

    def enter(self, owner: str) -> None:
        self.book()
        self._owners.append(owner)
        self._calls[self._phase, owner] += 1

    def leave(self) -> None:
        self.book()
        # The first hook that ends may have begun before the ledger did.
        if len(self._owners) > 1:
            self._owners.pop()

    def collect(self, moment: str, facts: Any) -> None:
        """Book a garbage collection; a member of `gc.callbacks`."""
        if moment == "start":
            self.enter("garbage collection")
        else:
            self.leave()

    def timed(self, function: Callable[..., Any], owner: str) -> Callable[..., Any]:
        """The function, whose calls are booked to an owner; an empty one is the line that calls `self.log`."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(owner or _calling_line())
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call

    def owned_times(self, steps: int) -> list[OwnedTime]:
        """The owners' times per step, the longest first."""
        return [
            OwnedTime(phase, owner, self._calls[phase, owner] / steps, span_ns * 1e-9 / steps)
            for (phase, owner), span_ns in self._spans_ns.most_common(_KEPT)
            if owner and phase in PHASES
        ]


def _calling_line() -> str:
    """The line outside of Lightning that called `self.log` or `self.log_dict`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIGHTNING):
        frame = frame.f_back
    return f"self.log ({location_of(frame.f_code.co_filename, frame.f_lineno)})"


def reader_of(loader: Any) -> str:
    """The method of a loader's dataset that reads samples."""
    dataset = getattr(loader, "dataset", loader)
    hook = "__iter__" if dataset is loader or isinstance(dataset, IterableDataset) else "__getitem__"
    return with_location(f"{type(dataset).__name__}.{hook}", getattr(dataset, hook, None))


def with_location(name: str, function: Any) -> str:
    """The name with file and line of a function, if these are known: `Slow.on_train_end (slow.py:14)`."""
    code = getattr(unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({location_of(code.co_filename, code.co_firstlineno)})"
