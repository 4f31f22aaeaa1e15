"""Whether a trace can be believed: guards on launches, phases, classes and clocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmbench.kernels.trace.events import NONE
from lmbench.kernels.trace.kernels import Trace
from lmbench.kernels.trace.kinds import UNCLASSIFIED
from lmbench.kernels.trace.phases import OUTSIDE, UNLINKED
from lmbench.kernels.trace.shares import PhaseShares, captured_s, unclassified_s
from lmbench.kernels.trace.verdicts import PhaseVerdict
from lmbench.records.guard import Guard, Status, at_most, not_applicable

UNCLASSIFIED_LIMIT = 0.05
OUTSIDE_LIMIT = 0.01
SUM_LIMIT = 0.001
SPAN_LIMIT = 0.01
# Clocks of host and device are aligned by the profiler to about a microsecond.
EARLY_TOLERANCE_NS = 1_000
_AGAIN = "record the trace again, with fewer steps if it is large"


@dataclass(frozen=True)
class Completeness:
    """Launches and kernels that lack each other, and kernels that start before their launch.

    Of the kernels without launch `launched_before` were launched before the trace began, as their ids tell.
    `launches_without_kernel` are those that should have one: a call while a stream is captured into a graph starts
    nothing (`captured_launches`), and a fill of no bytes neither (`empty_fills`: all fills that the device shows
    nothing of, as the trace does not tell their sizes).
    """

    kernels: int
    launches: int
    kernels_without_launch: int
    without_launch_s: float
    launched_before: int
    launches_without_kernel: int
    captured_launches: int
    empty_fills: int
    shared_launches: int
    kernels_before_launch: int
    worst_early_s: float


def completeness(trace: Trace) -> Completeness:
    """Count them."""
    kernels, launches = trace.kernels, trace.events.launches
    has_launch = kernels.launch != NONE
    used = np.unique(kernels.launch[has_launch])
    early_ns = np.zeros(0, dtype=np.int64)
    if len(used):
        early_ns = launches.start_ns[kernels.launch[has_launch]] - kernels.start_ns[has_launch]
    early_ns = early_ns[early_ns > EARLY_TOLERANCE_NS]
    is_alone = np.ones(len(launches.names), dtype=np.bool_)
    is_alone[used] = False
    is_captured = is_alone & launches.is_captured
    is_fill = is_alone & ~is_captured & np.array(["memset" in name.lower() for name in launches.names], dtype=np.bool_)
    is_missing = is_alone & ~is_captured & ~is_fill
    # Launches without a kernel can have the correlation id of one that has.
    without = launches.correlation[is_missing]
    # Correlation ids rise with the calls.
    known = launches.correlation[launches.correlation != NONE]
    unlinked = trace.events.device.correlation[~has_launch]
    return Completeness(
        kernels=len(kernels.names),
        launches=len(launches.names),
        kernels_without_launch=int((~has_launch).sum()),
        without_launch_s=float(kernels.duration_ns[~has_launch].sum()) / 1e9,
        launched_before=int(((unlinked != NONE) & (unlinked < known.min())).sum()) if len(known) else 0,
        launches_without_kernel=int(is_missing.sum()),
        captured_launches=int(is_captured.sum()),
        empty_fills=int(is_fill.sum()),
        shared_launches=int((np.isin(without, launches.correlation[used]) & (without != NONE)).sum()),
        kernels_before_launch=len(early_ns),
        worst_early_s=float(early_ns.max(initial=0)) / 1e9,
    )


def trace_guards(
    trace: Trace, found: Completeness, shares: list[PhaseShares], verdicts: list[PhaseVerdict]
) -> list[Guard]:
    """All guards of a trace with kernels."""
    total = captured_s(trace.kernels)
    no_kind_s, no_part_s = unclassified_s(shares)
    return [
        _every_kernel_has_a_launch(found, total),
        _every_launch_has_a_kernel(found),
        _order(found),
        _sum(shares, total),
        _outside(trace, shares, total),
        _classified("kind", no_kind_s, total),
        _classified("part", no_part_s, total),
        _spans(verdicts),
        *_unread(trace),
        *_unfinished(trace),
        *_damage(trace),
    ]


def why_no_kernels(trace: Trace) -> str:
    """Why a trace has no kernels: it is of a CPU, or the device was not recorded; empty where it has some."""
    if trace.events.has_kernels:
        return ""
    if unread := _unread_devices(trace):
        return f"{unread} are not read, only kernels, copies and fills of CUDA, ROCm and XPU devices"
    if count := len(trace.events.launches.names):
        return f"there are {count:,} launches and not one kernel, as the device was not recorded"
    return "a trace of a CPU has operators and no kernels"


def device_guards(trace: Trace) -> list[Guard]:
    """The guard of a trace without kernels: whether there should be some."""
    launches, why = len(trace.events.launches.names), why_no_kernels(trace)
    if unread := trace.events.unread.total():
        return [Guard("device_recorded", "fail", unread, 0, "1", why, "the host's operators are all that is shown")]
    if not launches:
        return [not_applicable("device_recorded", why), *_unfinished(trace)]
    # With ProfilerActivity.CPU alone PyTorch notes the calls, too.
    advice = (
        "record it with ProfilerActivity.CUDA among the activities; if it was, PyTorch lacked permission for CUPTI "
        "(NVIDIA's error ERR_NVGPUCTRPERM) or had lost it to another profiler"
    )
    return [Guard("device_recorded", "fail", launches, 0, "1", why, advice)]


def _every_kernel_has_a_launch(found: Completeness, total: float) -> Guard:
    share = found.without_launch_s / total if total else 0.0
    message = f"{found.kernels_without_launch:,} of {found.kernels:,} kernels have no launch in the trace"
    advice = f"their phase and part are unknown and shown as {UNLINKED}, {UNCLASSIFIED}"
    status: Status = "fail" if share > UNCLASSIFIED_LIMIT else "warn"
    if found.launched_before:
        all_or = "all" if found.launched_before == found.kernels_without_launch else f"{found.launched_before:,}"
        message += f", {all_or} of them launched before it began"
        advice += "; synchronize the device before the profiler starts"
    if found.launched_before == found.kernels_without_launch:
        # Nothing was lost: they are the end of what came before.
        status = "warn"
    else:
        advice += f"; {_AGAIN}"
    return at_most("kernels_without_launch", share, 0.0, "fraction", message, advice=advice, otherwise=status)


def _unread_devices(trace: Trace) -> str:
    """Such as `1,313 events of an MTIA device`, empty without any."""
    counted = [f"{count:,} events of {device}" for device, count in trace.events.unread.items()]
    return " and ".join(counted)


def _unread(trace: Trace) -> list[Guard]:
    """A warning where a trace has kernels, and events of a device that is not read besides."""
    if not trace.events.unread:
        return []
    message, advice = f"{_unread_devices(trace)} are not read", "what is shown is not all that ran"
    return [Guard("device_recorded", "warn", trace.events.unread.total(), 0, "1", message, advice)]


def _unfinished(trace: Trace) -> list[Guard]:
    """A warning where events have no duration."""
    if not (count := trace.events.unfinished):
        return []
    message = f"{count:,} events have no duration, or one below zero, and are left out"
    return [Guard("unfinished_events", "warn", count, 0, "1", message, "the profiler stopped while they ran")]


def _damage(trace: Trace) -> list[Guard]:
    """A warning where the run's record cannot be read: its settings and its own clocks are then missing."""
    if trace.source.run is None or not trace.source.run.damage:
        return []
    advice = "the trace is shown without what the run knows: settings, event spans, lag, FLOPs"
    return [Guard("run_record", "warn", None, None, "", f"the run's record: {trace.source.run.damage}", advice)]


def _every_launch_has_a_kernel(found: Completeness) -> Guard:
    share = found.launches_without_kernel / found.launches if found.launches else 0.0
    message = f"{found.launches_without_kernel:,} of {found.launches:,} launches have no kernel in the trace"
    advice = f"kernels are missing, so that times are too short; {_AGAIN}"
    if found.shared_launches:
        message += f", {found.shared_launches:,} share the correlation id of another"
        advice = "whose kernel is whose is a guess by time; give a trace as torch.profiler wrote it"
    status: Status = "fail" if share > UNCLASSIFIED_LIMIT else "warn"
    return at_most("launches_without_kernel", share, 0.0, "fraction", message, advice=advice, otherwise=status)


def _order(found: Completeness) -> Guard:
    early = f"{found.worst_early_s * 1e6:.1f} us"
    message = f"{found.kernels_before_launch:,} kernels start before their launch, by up to {early}"
    advice = f"the clocks of host and device do not fit, so that gaps and waits are wrong; {_AGAIN}"
    return at_most(
        "kernels_before_launch", found.kernels_before_launch, 0, "1", message, advice=advice, otherwise="fail"
    )


def _sum(shares: list[PhaseShares], total: float) -> Guard:
    difference = abs(sum(share.kernel_s for share in shares) / total - 1) if total else 0.0
    message = f"the phases' kernel times sum to the captured time within {100 * difference:.2f} %"
    return at_most(
        "phase_sum", difference, SUM_LIMIT, "fraction", message, advice="a fault of lmbench", otherwise="fail"
    )


def _outside(trace: Trace, shares: list[PhaseShares], total: float) -> Guard:
    if trace.timeline.source == "none":
        return not_applicable("outside", "the trace has no ranges of phases; all kernels are outside")
    outside = next((share.kernel_s for share in shares if share.phase == OUTSIDE), 0.0)
    share = outside / total if total else 0.0
    message = f"{100 * share:.1f} % of kernel time lies outside of every phase"
    return at_most("outside", share, OUTSIDE_LIMIT, "fraction", message, advice="it is shown as a phase of its own")


def _classified(axis: str, unknown_s: float, total: float) -> Guard:
    share = unknown_s / total if total else 0.0
    message = f"{100 * share:.1f} % of kernel time has no {axis}"
    advice = f"read shares by {axis} with that in mind"
    if axis == "part":
        advice += "; parts need lmbench's own recording (module ranges), and for a compiled model one that compiled it"
    return at_most(f"unclassified_{axis}", share, UNCLASSIFIED_LIMIT, "fraction", message, advice=advice)


def _spans(verdicts: list[PhaseVerdict]) -> Guard:
    """Event span against the trace's window, for phases that are long and queued: elsewhere borders may differ."""
    found = [
        (abs(one.clock.window_s / one.device_span_s - 1), one.phase)
        for one in verdicts
        if one.verdict == "queued" and one.device_span_s and one.device_span_s > 1e-3
    ]
    if not found:
        return not_applicable("device_span", "no phase of a millisecond or more is queued, or there are no event spans")
    worst, phase = max(found)
    message = f"{phase}'s time by events and by the trace differ by {100 * worst:.2f} %"
    advice = "the trace may lack steps, or another stream was busy"
    return at_most("device_span", worst, SPAN_LIMIT, "fraction", message, advice=advice)
