"""Records as JSON that every reader understands.

JSON has no NaN or infinity, and null must keep meaning "not measured". A non-finite number is stored as null,
and its name with `nan`, `inf` or `-inf` under `nonfinite`; `decode` puts the numbers back.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from lmbench.records.vocabulary import Record

NONFINITE = "nonfinite"


def encode(record: Record, indent: int | None = None) -> str:
    """A record as strict JSON; 0-dimensional numpy or torch values become numbers, other objects text."""
    try:
        return _dump(record, indent)
    except (ValueError, TypeError):
        # A number that JSON has not, or a key; looking for them beforehand takes longer than the encoding.
        found: dict[str, str] = {}
        finite = _without_nonfinite(record, "", found)
        return _dump({**finite, NONFINITE: found} if found else finite, indent)


def _dump(record: Record, indent: int | None) -> str:
    separators = (",", ":") if indent is None else None
    return json.dumps(record, indent=indent, separators=separators, allow_nan=False, default=_plain)


def decode(text: str | bytes) -> Record:
    """A record from its JSON, non-finite numbers put back.

    Raises ValueError if the text is not a JSON object.
    """
    try:
        record = json.loads(text)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    found = record.pop(NONFINITE, None)
    for path, name in found.items() if isinstance(found, dict) else ():
        _put(record, path.split("."), float(str(name)))
    return record


def _without_nonfinite(value: Any, path: str, found: dict[str, str]) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        found[path] = str(float(value))
        return None
    if isinstance(value, dict):
        return {str(key): _without_nonfinite(item, _join(path, key), found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item, _join(path, index), found) for index, item in enumerate(value)]
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _put(holder: Any, keys: list[str], value: float) -> None:
    """Set the value at a path of keys and list indices, if it leads anywhere (keys may have dots)."""
    for key in keys[:-1]:
        holder = _step_into(holder, key)
    last = keys[-1]
    if isinstance(holder, dict) and last in holder:
        holder[last] = value
    elif isinstance(holder, list) and last.isdecimal() and int(last) < len(holder):
        holder[int(last)] = value


def _step_into(holder: Any, key: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, list) and key.isdecimal() and int(key) < len(holder):
        return holder[int(key)]
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        item = value.item()
        return item if not isinstance(item, float) or math.isfinite(item) else str(item)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def is_nonfinite(value: Any) -> bool:
    """Whether a value is a float that is nan or infinite."""
    return isinstance(value, float) and not math.isfinite(value)
