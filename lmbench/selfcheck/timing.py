"""Are phases as long as the work that was planted in them, and do the clocks agree?"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lmbench.measure.clock import synchronize
from lmbench.measure.schedule import Schedule
from lmbench.records.vocabulary import Span
from lmbench.selfcheck.planted import Block, Measured, Planted, Work, measure, spin
from lmbench.selfcheck.result import CheckResult, judged, needs_gpu, within

# Planted lengths, all different so that no phase can pass with another's time, and long enough for the 0.2 ms that a
# slow host needs around them to stay well under 1 %.
FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.060, 0.080, 0.040
SCHEDULE = Schedule(warmup_steps=2, steps=12)


def known_durations(device: torch.device) -> list[CheckResult]:
    """Work of a known length in each phase comes back within 1 %, and the steps sum to the window."""
    lengths: dict[Span, float] = {"forward": FORWARD_S, "backward": BACKWARD_S, "optimizer": OPTIMIZER_S}
    works: dict[Span, Work] = {}
    truths: dict[Span, Callable[[], float]] = {}
    for phase, length in lengths.items():
        works[phase], truths[phase] = _work_of(length, device)
    module = Planted([Block(works["forward"], works["backward"])], works["optimizer"])
    run = measure(module, device, SCHEDULE)
    results = [within(f"known duration in {phase}", truths[phase](), run.median_s(phase), 0.01) for phase in lengths]
    return [*results, _identity(run, device)]


def _work_of(length_s: float, device: torch.device) -> tuple[Work, Callable[[], float]]:
    """Work of about this length, and a way to learn its true one by an independent clock."""
    if device.type == "cpu":
        return spin(length_s), lambda: length_s
    cycles = int(length_s / _synchronized_s(lambda: torch.cuda._sleep(10**7), device) * 10**7)

    def work() -> None:
        torch.cuda._sleep(cycles)

    return work, lambda: _synchronized_s(work, device)


def _synchronized_s(work: Work, device: torch.device, repeats: int = 10) -> float:
    """Seconds a kernel takes, by the host's clock around a queue of several between two synchronizes."""
    work()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def _identity(run: Measured, device: torch.device) -> CheckResult:
    limit = 1e-3 if device.type == "cuda" else 5e-3
    error = run.identity_error_fraction
    return judged("steps sum to the window", abs(error) <= limit, "0 %", f"{error:+.4%}", f"{limit:.1%}")


def clocks_agree(device: torch.device) -> list[CheckResult]:
    """Whole steps by device events, by a synchronize at each border, and by one synchronize a step."""
    name = "events and sync agree per step"
    if device.type == "cpu":
        return [needs_gpu(name, "both are the host's clock there")]
    work, _ = _work_of(FORWARD_S, device)
    module = Planted([Block(work, work) for _ in range(3)], work)
    by_events = measure(module, device, SCHEDULE).median_s("step")
    by_sync = measure(module, device, SCHEDULE, clock="sync").median_s("step")
    return [within(name, by_sync, by_events, 0.01)]


CHECKS = (known_durations, clocks_agree)
