"""What lmbench's own hooks cost the host: a clock around every one of them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer

from lmbench.callbacks import MeasurementSession, Observer
from lmbench.callbacks.observer import STEP_HOOKS
from lmbench.measure.phases import BorderProfiler, Scope
from lmbench.measure.schedule import ProbeKind
from lmbench.records.vocabulary import Stage


class HookClock:
    """Adds up host time spent inside wrapped functions; one called by another is part of it, not more.

    `spent_ns` and `calls` count outermost calls, `nested_calls` the others; `by_name` has [ns, calls] of each.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, list[int]] = {}
        self.spent_ns = self.calls = self.nested_calls = 0
        self._started_ns: int | None = None

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, clocked."""
        entry = self.by_name.setdefault(name, [0, 0])

        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if self._started_ns is not None:
                self.nested_calls += 1
                return function(*args, **kwargs)
            self._started_ns = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - self._started_ns
                self._started_ns = None
                self.spent_ns += spent
                self.calls += 1
                entry[0] += spent
                entry[1] += 1

        return clocked

    def restart(self) -> None:
        """Count from here, also within a call that is going on."""
        self.spent_ns = self.calls = self.nested_calls = 0
        for entry in self.by_name.values():
            entry[:] = [0, 0]
        if self._started_ns is not None:
            self._started_ns = time.perf_counter_ns()

    def read_ns(self) -> int:
        """Nanoseconds spent so far, with those of a call that is going on."""
        running = 0 if self._started_ns is None else time.perf_counter_ns() - self._started_ns
        return self.spent_ns + running


class HookWatch(Observer):
    """Reads a HookClock at every step's end in the window; `record` holds what it found."""

    def __init__(self, clock: HookClock) -> None:
        self.clock = clock
        self.record: dict[str, Any] = {}
        self._readings: list[int] = []
        self._counts = (0, 0)

    def window_opened(self) -> None:
        self._readings = [0]
        self.clock.restart()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        # Not in `window_closed`: before that the session waits for the device, which is no hook's cost.
        if stage is Stage.WINDOW:
            self._readings.append(self.clock.read_ns())
            self._counts = (self.clock.calls, self.clock.nested_calls)

    def window_closed(self) -> None:
        steps = len(self._readings) - 1
        spent = [end - start for start, end in zip(self._readings, self._readings[1:], strict=False)]
        calls, nested_calls = (count / steps for count in self._counts)
        call_s, nested_call_s = clocking_costs()
        self.record = {
            "step_mean_s": statistics.fmean(spent) * 1e-9,
            "step_median_s": statistics.median(spent) * 1e-9,
            "calls": calls,
            "nested_calls": nested_calls,
            "clocking_s": calls * call_s + nested_calls * nested_call_s,
            "by_name": {
                name: {"step_mean_s": ns * 1e-9 / steps, "calls": count / steps}
                for name, (ns, count) in sorted(self.clock.by_name.items(), key=lambda item: -item[1][0])
            },
        }


def clocking_costs(calls: int = 20_000) -> tuple[float, float]:
    """Seconds that the clock itself adds to its figure: for each outermost call, and for each nested one."""

    def nothing() -> None:
        pass

    def many(function: Callable[[], Any]) -> int:
        start = time.perf_counter_ns()
        for _ in range(calls):
            function()
        return time.perf_counter_ns() - start

    clock = HookClock()
    empty = clock.wrap("empty", nothing)
    many(empty)
    outermost = clock.spent_ns
    nested = clock.wrap("many", many)(empty)
    plain = many(nothing)
    return tuple(max(0, spent - plain) * 1e-9 / calls for spent in (outermost, nested))  # type: ignore[return-value]


def clock_hooks(trainer: Trainer, clock: HookClock) -> HookWatch:
    """Put the clock around all that lmbench adds to a step of this trainer; once, in a process of its own.

    What Lightning itself spends on calling a callback is not in it: that shows in the harness's difference to
    a Trainer without callbacks.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (Observer, MeasurementSession)):
            _wrap_callback(callback, clock)
    for owner, names in ((BorderProfiler, ("start", "stop", "profile")), (Scope, ("__enter__", "__exit__"))):
        for name in names:
            setattr(owner, name, clock.wrap(f"{owner.__name__}.{name}", getattr(owner, name)))
    watch = HookWatch(clock)
    # The last observer, so that a step's reading holds all the others' work; the session stays last of all.
    callbacks.insert(len(callbacks) - 1, watch)
    return watch


def _wrap_callback(callback: Callback, clock: HookClock) -> None:
    for name in STEP_HOOKS:
        if getattr(callback, name) is not None:
            wrapped = clock.wrap(f"{type(callback).__name__}.{name}", getattr(callback, name))
            setattr(callback, name, wrapped)
