"""Turns stamps at phase borders into step records (device spans, host spans, lags), and lags into verdicts.

A timeline is a sequence of marks. The time between two neighbouring marks belongs to the phase that began at the first.
So the phases of a step sum to the step by construction. The summary checks the sum of steps against a second clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lmbench.device.clock import HostClock
from lmbench.instruments.module_parts import marked_modules
from lmbench.records.field import PerPhase
from lmbench.records.measured import LagVerdict, LagWord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import CHECKPOINT, PAUSES, VALIDATION, Phase

#: The beginning of a phase: stamp of the clock, host time in nanoseconds, and the phase. A dozen are made in each step
#: of the window, so it is a plain tuple, which takes the host a fifth of the time of a NamedTuple.
Mark = tuple[Any, int, str]


@dataclass
class Step:
    """A step that the host has ended, and where its values will be once the device has passed it.

    Attributes:
        record: the step's record; spans and lags are filled in later.
        loss_divisor: the number by which the losses were divided.
        loss_slots: for each micro-batch the loss's slot in the ring of scalars.
        scalars: logged values by name: the ring's slot (int) of a device scalar, or a host number (float).
        scale_slot: the loss scale's slot in the ring.
        lags_s: seconds that the device was behind the host, by phase, at both ends of each part of the phase.
    """

    record: StepRecord
    loss_divisor: int = 1
    loss_slots: list[int] = field(default_factory=list)
    scalars: dict[str, list[int | float]] = field(default_factory=dict)
    scale_slot: int | None = None
    lags_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Timeline:
    """Collects marks and returns the steps that the device has finished.

    Args:
        clock: the clock of the marks.
    """

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self._stamp = clock.stamp
        self._marks = list[Mark]()
        #: Ended steps and their marks, which the device may not have reached.
        self._pending: deque[tuple[Step, list[Mark]]] = deque()
        self._base_host_ns = 0
        #: Device seconds from the base to the first mark that is not drained.
        self._device_s = 0.0
        #: How much faster the device's clock runs than the host's, as a fraction; measured over a window.
        self.drift = 0.0

    def start(self, phase: str = "other") -> None:
        """Start a step, and the count of lags, here on an idle device; forget all marks before."""
        self._pending.clear()
        self._marks = []
        self.border(phase)
        self._base_host_ns = self._marks[0][1]
        self._device_s = 0.0

    def border(self, phase: str) -> None:
        """Mark the beginning of a phase."""
        # Take the host's time first, so that on an idle device a mark is never ahead of the host.
        host_ns = perf_counter_ns()
        self._marks.append((self._stamp(), host_ns, phase))

    def note(self) -> None:
        """Add a mark inside the running phase, such as a block's border in a probe step."""
        if self._marks:
            self.border(self._marks[-1][2])

    def end_step(self, step: Step) -> None:
        """End the step here and begin the next."""
        self.border("other")
        self._pending.append((step, self._marks))
        self._marks = self._marks[-1:]

    def drain(self) -> list[Step]:
        """The steps that the device has finished since the last call, oldest first, without waiting for it."""
        finished = []
        while self._pending and self.clock.is_reached(self._pending[0][1][-1][0]):
            step, marks = self._pending.popleft()
            self._resolve(step, marks)
            finished.append(step)
        return finished

    def _resolve(self, step: Step, marks: list[Mark]) -> None:
        """Fill in the spans and lags of a finished step."""
        clock, record, lags_s = self.clock, step.record, step.lags_s
        device_s, host_s = defaultdict[str, float](float), defaultdict[str, float](float)
        for (stamp, host_ns, phase), (end_stamp, end_ns, _) in pairwise(marks):
            span_s = clock.seconds(stamp, end_stamp)
            device_s[phase] += span_s
            host_s[phase] += (end_ns - host_ns) * 1e-9
            if clock.has_lag:
                lag_s = self._lag_s(host_ns)
                self._device_s += span_s
                lags_s[phase] += lag_s, self._lag_s(end_ns)
        # The last mark is also the next step's first, so its stamp is recycled with that step.
        clock.recycle(stamp for stamp, _, _ in marks[:-1])
        record.checkpoint_s, record.validation_s = device_s.get(CHECKPOINT), device_s.get(VALIDATION)
        record.excluded_s = sum(device_s.pop(pause, 0.0) for pause in PAUSES)
        record.step_s, record.step_host_s = sum(device_s.values()), sum(host_s[phase] for phase in device_s)
        # A phase that never began has a null span, not a span of zero.
        for phase, span_s in device_s.items():
            setattr(record, f"{phase}_s", span_s)
            setattr(record, f"{phase}_host_s", host_s[phase])
            if clock.has_lag:
                # The last phase of a step is `other`, so that its end is the step's.
                setattr(record, f"lag_{'step' if phase == 'other' else phase}_s", lags_s[phase][-1])

    def _lag_s(self, host_ns: int) -> float:
        """Seconds that the device is behind the host at a mark of this host time, which `_device_s` has reached."""
        return self._device_s - (host_ns - self._base_host_ns) * 1e-9 * (1.0 + self.drift)

    def calibrate(self) -> None:
        """Measure how much faster the device's clock ran than the host's since `start`, and correct lags from now on.

        Call it on an idle device after a `drain`. One more mark should have no lag there, so its lag is the drift.
        """
        if not self.clock.has_lag:
            return
        self._device_s += self.since_step_s()
        self._marks = self._marks[-1:]
        host_ns = self._marks[0][1]
        elapsed_s = (host_ns - self._base_host_ns) * 1e-9
        if elapsed_s > 0:
            self.drift += self._lag_s(host_ns) / elapsed_s

    def since_step_s(self) -> float:
        """Device seconds from the end of the last step to now, on an idle device."""
        self.border("other")
        while not self.clock.is_reached(self._marks[-1][0]):
            pass
        return sum(self.clock.seconds(stamp, end_stamp) for (stamp, *_), (end_stamp, *_) in pairwise(self._marks))


# With less lag than this the device waits for the host.
HOST_BOUND_LAG_S = 0.25e-3
# Share of probe steps that must agree on a verdict.
AGREEMENT_FRACTION = 0.8

# Other phases wait for the host by definition: `data` for the loader, `other` for the framework.
JUDGED_PHASES: tuple[Phase, ...] = ("forward", "backward", "clip", "optimizer", "zero_grad")


def lag_verdicts(steps: Sequence[Step]) -> PerPhase[LagVerdict]:
    """The verdict on each phase, from the smallest lag inside the phase in each probe step.

    Empty where the clock has no lag (a run on a CPU, the sync clock).
    """
    verdicts: PerPhase[LagVerdict] = PerPhase()
    for phase in JUDGED_PHASES:
        lags_of_steps = [step.lags_s[phase] for step in steps if phase in step.lags_s]
        if not lags_of_steps:
            continue
        min_lags_s = sorted(map(min, lags_of_steps))
        waiting = sum(lag_s < HOST_BOUND_LAG_S for lag_s in min_lags_s) / len(min_lags_s)
        agree = max(waiting, 1.0 - waiting)
        word: LagWord = "mixed" if agree < AGREEMENT_FRACTION else ("host-bound" if waiting > 0.5 else "queued")
        verdicts.set(phase, LagVerdict(word, min_lags_s[len(min_lags_s) // 2]))
    return verdicts


# More marks than this in a phase would slow the host.
MAX_MARKED_MODULES = 256


class ProbeMarks(ExitStack):
    """Calls `note` when a block's forward ends and when the gradient of its output is ready, until `close`.

    Hooks on the output tensors watch the gradients: backward hooks of modules would insert views into the graph.

    Attributes:
        count: number of marked modules. Inside a module that is compiled as a whole, hooks do not run, and `count` does
            not tell; then the borders of the phase alone decide.
    """

    def __init__(self, module: nn.Module, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note
        # TorchScript modules take no hooks.
        blocks = dict.fromkeys(m for m in marked_modules(module) if not isinstance(m, torch.jit.ScriptModule))
        modules = list(blocks)[:MAX_MARKED_MODULES]
        self.count = len(modules)
        for marked in modules:
            compiled = marked._compiled_call_impl
            if compiled is None:
                self.callback(marked.register_forward_hook(self._forward).remove)
            else:
                # A compiled call ignores hooks that were registered after its compilation.
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
