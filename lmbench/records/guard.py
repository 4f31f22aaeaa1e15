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


def not_applicable(name: str, reason: str) -> Guard:
    """A guard that cannot be judged here, which is not a pass."""
    return Guard(name, "n/a", message=reason)


def at_most(
    name: str,
    value: float | None,
    limit: float,
    unit: str,
    message: str,
    advice: str,
    unknown: str = "",
    otherwise: Status = "warn",
) -> Guard:
    """A guard that passes up to the limit and gives `advice` only where it does not; `n/a` for the reason `unknown`
    where there is no figure."""
    if value is None:
        return not_applicable(name, unknown)
    is_passed = value <= limit
    return Guard(name, "pass" if is_passed else otherwise, value, limit, unit, message, "" if is_passed else advice)


def not_passed(guards: Iterable[Guard]) -> list[Guard]:
    """Those that somebody should read."""
    return [guard for guard in guards if guard.status in ("warn", "fail")]
