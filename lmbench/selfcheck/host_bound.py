"""Does the lag tell a device that waits for the host from one that is busy?"""

from __future__ import annotations

import time

import torch

from lmbench.measure.schedule import Schedule
from lmbench.selfcheck.planted import Block, Planted, Work, measure, nothing
from lmbench.selfcheck.result import CheckResult, judged, needs_gpu

SCHEDULE = Schedule(warmup_steps=3, steps=10, probe_steps=10)
BLOCKS = 8


def verdicts(device: torch.device) -> list[CheckResult]:
    """Planted hosts and devices that are too slow, each with the verdict its forward must get."""
    if device.type == "cpu":
        return [needs_gpu("host-bound verdicts", "host and device are the same there")]
    heavy, tiny = _matmuls(device, 12), _tiny_kernels(device)

    def stack(work: Work, last: Work | None = None) -> Planted:
        blocks = [Block(work, work) for _ in range(BLOCKS - 1)]
        return Planted([*blocks, Block(last or work, work)])

    cases = (
        ("host sleep in forward", stack(lambda: time.sleep(2e-3)), "host-bound"),
        ("loop of tiny kernels", stack(tiny), "host-bound"),
        ("queue of large matmuls", stack(heavy), "queued"),
        ("heavy kernel ends a starved phase", stack(tiny, _matmuls(device, 60)), "host-bound"),
        ("one slow block among heavy ones", _one_slow(heavy), "host-bound"),
    )
    return [_judge(name, module, expected, device) for name, module, expected in cases]


def _one_slow(heavy: Work) -> Planted:
    """The host sleeps through everything that was queued before it: the device starves once in the forward."""
    blocks = [Block(heavy, nothing) for _ in range(BLOCKS)]
    blocks[4] = Block(lambda: time.sleep(0.25), nothing)
    return Planted(blocks)


def _judge(name: str, module: Planted, expected: str, device: torch.device) -> CheckResult:
    verdicts = measure(module, device, SCHEDULE).run.probe.verdicts
    forward = verdicts.forward if verdicts is not None else None
    if forward is None:
        return judged(name, False, expected, "no verdict")
    found = f"{forward.verdict} (min lag {(forward.min_lag_s or 0.0) * 1e3:.3f} ms)"
    return judged(name, forward.verdict == expected, expected, found)


def _matmuls(device: torch.device, count: int) -> Work:
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def work() -> None:
        with torch.no_grad():
            for _ in range(count):
                a @ a

    return work


def _tiny_kernels(device: torch.device) -> Work:
    x = torch.zeros(8, device=device)

    def work() -> None:
        with torch.no_grad():
            for _ in range(200):
                x.add_(1.0)

    return work


CHECKS = (verdicts,)
