"""Dotted paths into nested records: `window.wall_s` is `run["window"]["wall_s"]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmbench.records.vocabulary import Record


def lookup(record: Record, path: str) -> Any:
    """The value at a dotted path, or None where any part of the path is missing or null."""
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def number(record: Record, path: str) -> float | None:
    """The number at a dotted path, or None where there is none (a flag is not a number)."""
    value = lookup(record, path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def leaves(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted path, value) whose value is not a filled dict; lists count as values."""
    for key, value in record.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
