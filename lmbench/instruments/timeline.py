"""From border stamps to step records (device spans, host spans and lags), and from lags to the verdict who waits.

A timeline is a sequence of marks; the time between two neighbouring marks belongs to the phase that began at the
first. So the phases of a step partition it, and their sum is the step by construction; that the sum of the steps is
the window is checked against a second clock elsewhere.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lmbench.instruments.clock import HostClock
from lmbench.records.field import PerPhase
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import BORDERS, EXCLUDED, PHASES, Phase


class Mark(NamedTuple):
    stamp: Any
    host_ns: int
    phase: str  # that begins here


@dataclass
class Step:
    """A step that ended: its record, of which spans and lags follow when the device has passed it, and where the ring
    of scalars will have its losses (of each micro-batch) and its loss scale.

    `scalars` are the logged values by name: a slot of the ring (int) for a device scalar, a float for a host number.
    `lags_s` are seconds that the device was behind the host, by phase: at both ends of each of its parts.
    """

    record: StepRecord
    loss_slots: list[int] = field(default_factory=list)
    scalars: dict[str, list[int | float]] = field(default_factory=dict)
    scale_slot: int | None = None
    lags_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Timeline:
    """Marks in, finished steps out."""

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self._stamp = clock.stamp
        self._marks: list[Mark] = []
        #: Steps whose marks are set but perhaps not yet reached by the device.
        self._pending: deque[tuple[Step, list[Mark]]] = deque()
        self._base_host_ns = 0
        self._device_s = 0.0  # device time since the base, at the first undrained mark
        # How much faster the device's clock runs than the host's, once it has been measured over a window.
        self.drift = 0.0

    def start(self, phase: str = "other") -> None:
        """Begin anew at an idle device: the next step starts here, and lags count from here."""
        self._pending.clear()
        self._marks = []
        self.border(phase)
        self._base_host_ns = self._marks[0].host_ns
        self._device_s = 0.0

    def border(self, phase: str) -> None:
        """A phase begins."""
        # The host's time is taken first: a mark on an idle device is then behind by its own launch, never ahead.
        host_ns = time.perf_counter_ns()
        self._marks.append(Mark(self._stamp(), host_ns, phase))

    def note(self) -> None:
        """One more mark inside the running phase (a block's border in a probe step)."""
        if self._marks:
            self.border(self._marks[-1].phase)

    def end_step(self, step: Step) -> None:
        """The step ends here, and the next begins."""
        self.border("other")
        self._pending.append((step, self._marks))
        self._marks = self._marks[-1:]

    def drain(self) -> list[Step]:
        """The steps that the device has finished since the last call, oldest first. Never waits."""
        finished = []
        while self._pending and self.clock.is_reached(self._pending[0][1][-1].stamp):
            step, marks = self._pending.popleft()
            self._resolve(step, marks)
            finished.append(step)
        return finished

    def _resolve(self, step: Step, marks: list[Mark]) -> None:
        """Complete a step by its spans and lags."""
        clock, record = self.clock, step.record
        device_s, host_s = defaultdict[str, float](float), defaultdict[str, float](float)
        for start, end in pairwise(marks):
            lag_s, span_s = self._lag_s(start), clock.seconds(start.stamp, end.stamp)
            self._device_s += span_s
            device_s[start.phase] += span_s
            host_s[start.phase] += (end.host_ns - start.host_ns) * 1e-9
            if clock.has_lag:
                step.lags_s[start.phase] += lag_s, self._lag_s(end)
        # The last mark is the next step's first: it stays out of the pool until that step is resolved.
        clock.recycle(mark.stamp for mark in marks[:-1])
        record.excluded_s = device_s.pop(EXCLUDED, 0.0)
        host_s.pop(EXCLUDED, None)
        record.step_s, record.step_host_s = sum(device_s.values()), sum(host_s.values())
        for phase in PHASES:
            # A phase that was never seen has no time, which is not the same as no duration.
            setattr(record, f"{phase}_s", device_s.get(phase))
            setattr(record, f"{phase}_host_s", host_s.get(phase))
        for border in BORDERS:
            lags_s = step.lags_s.get("other" if border == "step" else border)
            setattr(record, f"lag_{border}_s", lags_s[-1] if lags_s else None)

    def _lag_s(self, mark: Mark) -> float:
        """Lag at a mark, when `_device_s` has been advanced to it."""
        return self._device_s - (mark.host_ns - self._base_host_ns) * 1e-9 * (1.0 + self.drift)

    def calibrate(self) -> float | None:
        """Measure, and from now on correct, how much faster the device's clock ran than the host's since `start`.

        Call on an idle device after a `drain`: the lag of one more mark, which should be zero there, is the drift. None
        where the clock has no lag.
        """
        if not self.clock.has_lag:
            return None
        self._device_s += self.since_step_s()
        self._marks = self._marks[-1:]
        elapsed_s = (self._marks[0].host_ns - self._base_host_ns) * 1e-9
        if elapsed_s > 0:
            self.drift += self._lag_s(self._marks[0]) / elapsed_s
        return self.drift

    def since_step_s(self) -> float:
        """Device seconds from the end of the last step to now, on an idle device."""
        self.border("other")
        while not self.clock.is_reached(self._marks[-1].stamp):
            pass
        return sum(self.clock.seconds(start.stamp, end.stamp) for start, end in pairwise(self._marks))


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


def block_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose ends are marked: the members of every list of modules, and what runs beside them (embedding,
    head), each compiled one as a whole."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        elif child._compiled_call_impl is None and next(child.children(), None) is not None:
            yield from block_modules(child)
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
        # TorchScript's modules take no hooks.
        blocks = dict.fromkeys(m for m in block_modules(module) if not isinstance(m, torch.jit.ScriptModule))
        modules = list(blocks)[:MAX_MARKED_MODULES]
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
