"""What one check found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Status = Literal["pass", "fail", "n/a"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the table: what was planted, what came back, and how far off it may be."""

    name: str
    status: Status
    expected: str
    found: str
    limit: str = ""


Check = Callable[[torch.device], list[CheckResult]]


def judged(name: str, is_right: bool, expected: str, found: str, limit: str = "") -> CheckResult:
    return CheckResult(name, "pass" if is_right else "fail", expected, found, limit)


def within(name: str, expected_s: float, found_s: float, fraction: float) -> CheckResult:
    """A duration that must come back within a fraction of itself."""
    error = found_s / expected_s - 1.0
    return judged(
        name,
        abs(error) <= fraction,
        f"{expected_s * 1e3:.3f} ms",
        f"{found_s * 1e3:.3f} ms ({error:+.2%})",
        f"{fraction:.1%}",
    )


def needs_gpu(name: str, why: str) -> CheckResult:
    """A check that says nothing on a CPU, with the reason."""
    return CheckResult(name, "n/a", "", f"not on a CPU: {why}")
