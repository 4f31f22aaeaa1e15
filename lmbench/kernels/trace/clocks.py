"""The device's time by phase, from the trace alone: busy, queued gaps between kernels, and waiting for the host."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmbench.kernels.trace.events import NONE, Integers, Launches
from lmbench.kernels.trace.kernels import KernelTable
from lmbench.kernels.trace.phases import NO_PHASE, OUTSIDE, PHASE_ORDER, PhaseTimeline, TracePhase

# On an idle device a kernel starts 2.3 us after its launch call returned (H200, CUDA 13; 5th to 95th percentile 1.9 to
# 2.6 us). If the call returned earlier than this before the kernel in front ended, the kernel lay in the queue, and the
# gap, of about 1.1 us, is the device's own.
QUEUED_LEAD_NS = 2_000
# A kernel that starts later than this after its launch call returned waits for something else than the host: of 24,000
# that an idle H200 started none took more than 4.7 us.
START_NS = 5_000


@dataclass(frozen=True)
class PhaseClock:
    """Means per step of one phase.

    `window_s` is the phase's time on the device, the sum of the three below it: from the phase's first kernel to the
    next phase's first; where the device waits for the host at a border, from when the host came there. `busy_s` is the
    union of kernels, `queued_gap_s` the gaps before kernels that lay in the queue and
    those that went on when the kernel's launch was long over, `host_wait_s` all other gaps,
    `first_wait_s` those of them before the phase's first kernel. `host_s` is the host's time in the phase under the
    profiler. `launches` are calls of the host.
    """

    phase: TracePhase
    host_s: float
    window_s: float
    busy_s: float
    queued_gap_s: float
    queued_gaps: float
    host_wait_s: float
    first_wait_s: float
    launches: float
    kernels: float
    median_kernel_s: float | None

    @property
    def host_s_per_launch(self) -> float | None:
        return self.host_s / self.launches if self.launches else None

    @property
    def wait_fraction(self) -> float | None:
        """Share of the window in which the device waited for the host."""
        return self.host_wait_s / self.window_s if self.window_s > 0 else None


@dataclass(frozen=True)
class _Queue:
    """Kernels by start: when each starts and ends, when all before it are done, and if it lay in the queue then.

    Until `waited_ns` the device waited for the host; for a kernel in the queue that is never after `done_ns`.
    """

    start_ns: Integers
    end_ns: Integers
    done_ns: Integers
    is_queued: npt.NDArray[np.bool_]
    waited_ns: Integers
    launch_ns: Integers


@dataclass(frozen=True)
class Clocks:
    """The phases' clocks in the order of a step, over `steps` steps from the `skipped`th on."""

    phases: list[PhaseClock]
    steps: int
    skipped: int


def phase_clocks(kernels: KernelTable, launches: Launches, timeline: PhaseTimeline) -> Clocks:
    """Clocks of every phase that the host was in or that has kernels.

    lmbench's recording starts on an idle device, where the host first has to get ahead: of several steps the first is
    left out.
    """
    skipped = 1 if len(timeline.step_start_ns) > 1 and len(timeline.step_start_ns) == timeline.steps else 0
    steps = timeline.steps - skipped
    if not kernels.names:
        return Clocks([], steps, skipped)
    host_ns, phases = _host_borders(timeline) if len(timeline.start_ns) else _one_phase(kernels, launches)
    queue = _queue(kernels, launches, int(host_ns[0]))
    borders = _device_borders(host_ns, queue)
    windows = _split(borders, queue)
    first = int(np.searchsorted(host_ns, timeline.step_start_ns[skipped])) if skipped else 0
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for index in range(first, len(phases)):
        of_phase = sums[phases[index]]
        of_phase["host"] += float(host_ns[index + 1] - host_ns[index])
        for name, column in windows.items():
            of_phase[name] += float(column[index])
    launch_ns = np.where(kernels.launch != NONE, queue.launch_ns, -1)
    members = np.flatnonzero(launch_ns >= (host_ns[first] if skipped else -1))
    present = [phase for phase in PHASE_ORDER if phase in sums and (phase not in NO_PHASE or sums[phase]["busy"])]
    return Clocks([_clock(phase, sums[phase], kernels, members, steps) for phase in present], steps, skipped)


def _clock(
    phase: TracePhase, sums: dict[str, float], kernels: KernelTable, members: Integers, steps: int
) -> PhaseClock:
    own = np.array([index for index in members if kernels.phases[index] == phase], dtype=np.int64)
    launch = kernels.launch[own]
    per_step = {name: value / 1e9 / steps for name, value in sums.items()}
    return PhaseClock(
        phase=phase,
        host_s=per_step["host"],
        window_s=per_step["window"],
        busy_s=per_step["busy"],
        queued_gap_s=per_step["gap"],
        queued_gaps=sums["gaps"] / steps,
        host_wait_s=per_step["wait"],
        first_wait_s=per_step["first_wait"],
        launches=len(np.unique(launch[launch != NONE])) / steps,
        kernels=len(own) / steps,
        median_kernel_s=float(np.median(kernels.duration_ns[own])) / 1e9 if len(own) else None,
    )


def _queue(kernels: KernelTable, launches: Launches, begin_ns: int) -> _Queue:
    end_so_far = np.maximum.accumulate(kernels.end_ns)
    # Before the first kernel the device is idle from the beginning of the phases on.
    done = np.concatenate(([min(begin_ns, int(kernels.start_ns[0]))], end_so_far[:-1]))
    has_launch = kernels.launch != NONE
    # Without a launch record nothing says that the host was late.
    returned = np.where(has_launch, launches.end_ns[kernels.launch], 0) if len(launches.names) else done * 0
    begun = np.where(has_launch, launches.start_ns[kernels.launch], kernels.start_ns) if len(launches.names) else done
    is_queued = returned + QUEUED_LEAD_NS <= done
    # A CUDA graph's kernels have one launch, which may still go on: nothing of the host's lies between them.
    is_queued[1:] |= has_launch[1:] & (kernels.launch[1:] == kernels.launch[:-1])
    # The first kernel of all has none in front.
    is_queued[0] = False
    waited = np.where(
        is_queued, done, np.clip(returned + START_NS, np.minimum(done, kernels.start_ns), kernels.start_ns)
    )
    return _Queue(kernels.start_ns, kernels.end_ns, done, is_queued, np.maximum(waited, done), begun)


def _one_phase(kernels: KernelTable, launches: Launches) -> tuple[Integers, list[TracePhase]]:
    """Where nothing tells phases: all of the trace, from its first launch to its last, is outside."""
    begun = [int(kernels.start_ns[0]), *launches.start_ns[:1].tolist()]
    ended = [int(kernels.start_ns[0]), *launches.end_ns[-1:].tolist()]
    return np.array([min(begun), max(ended)], dtype=np.int64), [OUTSIDE]


def _host_borders(timeline: PhaseTimeline) -> tuple[Integers, list[TracePhase]]:
    """Moments when the host goes from one phase to another, and the phase after each; the last ends the last phase."""
    moments: list[int] = []
    phases: list[TracePhase] = []
    for index, phase in enumerate(timeline.phases):
        start, end = int(timeline.start_ns[index]), int(timeline.end_ns[index])
        if moments and moments[-1] < start:
            phases.append(OUTSIDE)
        elif moments:
            moments.pop()
        moments += [start, end]
        phases.append(phase)
    return np.array(moments, dtype=np.int64), phases


def _device_borders(host_ns: Integers, queue: _Queue) -> Integers:
    """When the device goes from one phase to another: with the next kernel launched after the host's border if that one
    lay in the queue, else when both are there, the host and the end of all kernels before."""
    order = np.argsort(queue.launch_ns, kind="stable")
    following = np.searchsorted(queue.launch_ns[order], host_ns, side="left")
    borders = []
    for moment, place in zip(host_ns.tolist(), following.tolist(), strict=True):
        if place == len(order):
            borders.append(max(moment, int(queue.end_ns.max())))
            continue
        kernel = int(order[place])
        start, done = int(queue.start_ns[kernel]), int(queue.done_ns[kernel])
        borders.append(start if queue.is_queued[kernel] else min(max(moment, min(done, start)), start))
    return np.maximum.accumulate(np.array(borders, dtype=np.int64))


def _split(borders: Integers, queue: _Queue) -> dict[str, Integers]:
    """Per window: its length, busy time, queued gaps, their number, host wait, and the wait before the first kernel."""
    count = len(borders) - 1
    in_queue, late = queue.start_ns > queue.waited_ns, queue.waited_ns > queue.done_ns
    gaps = _overlap(borders, queue.waited_ns[in_queue], queue.start_ns[in_queue])
    waits = _overlap(borders, queue.done_ns[late], queue.waited_ns[late])
    place = np.searchsorted(borders, queue.waited_ns[in_queue], side="right") - 1
    counts = np.bincount(place[(place >= 0) & (place < count)], minlength=count)
    # The host can still be in the last phase when the last kernel has ended.
    last = np.minimum(np.array([queue.end_ns.max()]), borders[-1:])
    waits = waits + _overlap(borders, last, borders[-1:])
    following = np.searchsorted(queue.start_ns, borders[:-1], side="left")
    next_start = np.append(queue.start_ns, borders[-1])[following]
    first_wait = np.minimum(np.minimum(next_start, borders[1:]) - borders[:-1], waits)
    window = np.diff(borders)
    return {
        "window": window, "busy": window - gaps - waits, "gap": gaps, "gaps": counts, "wait": waits,
        "first_wait": first_wait,
    }  # fmt: skip


def _overlap(borders: Integers, start: Integers, end: Integers) -> Integers:
    """Length of the intervals (apart from each other, in order) within each window."""
    # The length covered up to a moment grows linearly within intervals, and stands still between them.
    if not len(start):
        return np.zeros(len(borders) - 1, dtype=np.int64)
    covered = np.concatenate(([0], np.cumsum(end - start)))
    place = np.searchsorted(start, borders, side="right") - 1
    inside = np.where(place >= 0, np.minimum(borders, end[place]) - start[place], 0)
    up_to = np.where(place >= 0, covered[np.maximum(place, 0)] + inside, 0)
    return np.diff(up_to)
