"""Books the host's time to the phase and to whoever's work is running: a hook, a logger, the loader, the collector."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from pathlib import Path
from typing import Any, cast

import lightning
from lightning.pytorch import Trainer
from torch.utils.data import IterableDataset

from lmbench.code_owners import code_owner
from lmbench.instruments.phases import CALLBACK, MODULE, Handler, PhaseTrack
from lmbench.records.host_time import HARNESS, OwnedTime, WorkOwner
from lmbench.records.vocabulary import EXCLUDED, Phase

#: Owners with a smaller share of the host's time are left out of the record.
LEAST_FRACTION = 0.001
_LIGHTNING = str(Path(lightning.__file__).parent)


COLLECTOR = WorkOwner("garbage collection")


class HostLedger:
    """Books every moment to one phase and one owner, so that the owners of a phase sum to the phase by construction.

    The owner is the innermost one that was entered and not left; None is Lightning's loop and PyTorch. The time of
    `self.log` within a hook is thus not the hook's.
    """

    def __init__(self, track: PhaseTrack) -> None:
        self._owners: list[WorkOwner | None] = [None]
        self._spans_ns: Counter[tuple[str, WorkOwner | None]] = Counter()
        self._calls: Counter[tuple[str, WorkOwner | None]] = Counter()
        self._phase, self._since_ns = track.current, time.perf_counter_ns()

    def book(self, phase: str | None = None) -> None:
        """Book the time since the last call; a listener of the track, which calls it with the phase that begins."""
        now_ns = time.perf_counter_ns()
        self._spans_ns[self._phase, self._owners[-1]] += now_ns - self._since_ns
        self._phase, self._since_ns = phase or self._phase, now_ns

    def enter(self, owner: WorkOwner | None) -> None:
        self.book()
        self._owners.append(owner)
        self._calls[self._phase, owner] += 1

    def leave(self) -> None:
        self.book()
        # The first hook that ends may have begun before the ledger did.
        if len(self._owners) > 1:
            self._owners.pop()

    def around(self, trainer: Trainer, action_name: str, start: Handler, stop: Handler) -> tuple[Handler, Handler]:
        """The handlers of an action's start and stop, which also book its time to its owner."""
        owner = owner_of(action_name, trainer)

        def start_booked() -> None:
            start()
            self.enter(owner)

        def stop_booked() -> None:
            self.leave()
            stop()

        return start_booked, stop_booked

    def collect(self, moment: str, facts: Any) -> None:
        """Book a garbage collection; a member of `gc.callbacks`."""
        if moment == "start":
            self.enter(COLLECTOR)
        else:
            self.leave()

    def timed(self, function: Callable[..., Any], owner: WorkOwner | None = None) -> Callable[..., Any]:
        """The function, whose calls are booked to an owner; None books each call of `self.log` to the calling line."""

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
        least_ns = LEAST_FRACTION * self._spans_ns.total()
        return [
            OwnedTime(cast(Phase, phase), *owner, self._calls[phase, owner] / steps, span_ns * 1e-9 / steps)
            for (phase, owner), span_ns in self._spans_ns.most_common()
            if owner is not None and phase != EXCLUDED and span_ns >= least_ns
        ]


def _calling_line() -> WorkOwner:
    """The line outside of Lightning that called `self.log` or `self.log_dict`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIGHTNING):
        frame = frame.f_back
    return WorkOwner("self.log", f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")


def owner_of(action_name: str, trainer: Trainer) -> WorkOwner | None:
    """The owner of an action that Lightning reports to its profiler; None for Lightning's own work.

    Waiting for the loader is owned by its dataset, and a hook that the module did not define by Lightning.
    """
    label, _, hook = action_name.rpartition(".")
    kind, _, key = label.lstrip("[").partition("]")
    subject: Any = None
    if hook == "train_dataloader_next":
        return reader_of(trainer.train_dataloader)
    if kind == CALLBACK:
        subject = next((c for c in trainer.callbacks if c.state_key == key), None)  # type: ignore[attr-defined]
    elif kind == MODULE:
        subject = trainer.lightning_module
    elif kind == "LightningDataModule":
        subject = trainer.datamodule  # type: ignore[attr-defined]
    if subject is None:
        return None
    function = getattr(subject, hook)
    code = _code_of(function)
    writer = code_owner(code.co_filename) if code is not None else "user"
    if kind == CALLBACK and writer == "lmbench":
        return WorkOwner(HARNESS)
    if kind == MODULE and writer in ("lightning", "lmbench"):
        return None
    return function_owner(function, f"{type(subject).__name__}.{hook}")


def reader_of(loader: Any) -> WorkOwner:
    """The method of a loader's dataset that reads samples."""
    dataset = getattr(loader, "dataset", loader)
    is_drawn = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    hook = "__iter__" if is_drawn else "__getitem__"
    name, workers = f"{type(dataset).__name__}.{hook}", getattr(loader, "num_workers", 0)
    return function_owner(getattr(dataset, hook), f"{name} with num_workers={workers}" if workers else name)


def function_owner(function: Any, name: str) -> WorkOwner:
    """The owner that a function or method is."""
    code = _code_of(function)
    return WorkOwner(name, code and f"{Path(code.co_filename).name}:{code.co_firstlineno}")


def _code_of(function: Any) -> Any:
    """The code of a function or method, without its decorators; None for anything else."""
    return getattr(unwrap(function), "__code__", None) if callable(function) else None
