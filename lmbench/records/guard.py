"""What a guard is: one check of the measurement's validity, with its figure, its limit and advice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Status = Literal["pass", "warn", "fail", "n/a"]

#: The guard whose warning makes a comparison of sides that were not measured in turn undecided.
BUSY_MACHINE = "busy_machine"


class Guard(Struct, frozen=True):
    """One check.

    `value` and `limit` are in `unit`, None where the check has no figure; `advice` is empty unless it is
    needed.
    """

    name: str
    status: Status
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    message: str = ""
    advice: str = ""


def at_most(name: str, value: float, limit: float, unit: str, message: str, advice: str) -> Guard:
    """A guard that warns above the limit, and gives `advice` only then."""
    is_passed = value <= limit
    return Guard(name, "pass" if is_passed else "warn", value, limit, unit, message, "" if is_passed else advice)


def not_passed(guards: Iterable[Guard]) -> list[Guard]:
    """Those that somebody should read."""
    return [guard for guard in guards if guard.status in ("warn", "fail")]
