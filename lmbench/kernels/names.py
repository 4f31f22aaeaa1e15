"""What kernels, operators, modules, ranges and calls are, by the rules of names.toml."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec


def read_toml(file: str) -> dict[str, Any]:
    """A file beside this one."""
    content: dict[str, Any] = msgspec.toml.decode(Path(__file__).with_name(file).read_bytes())
    return content


NAMES = read_toml("names.toml")


def reader(key: str) -> Callable[[str], str]:
    """A function of names: what the first rule that fits of the list under this key says, empty if none does."""
    rules = [(word, re.compile(pattern, re.VERBOSE)) for word, pattern in NAMES[key]]
    return lru_cache(8192)(lambda name: next((word for word, pattern in rules if pattern.search(name)), ""))
