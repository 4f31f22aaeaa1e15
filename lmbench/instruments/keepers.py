"""Who keeps memory, and who collects garbage: containers that grew over some steps, and calls of the collector."""

from __future__ import annotations

import gc
import inspect
import re
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lmbench.code_owners import location_of, responsible_frame
from lmbench.records.endurance import Collector

#: A container explains the growth of memory if its new items hold this share of it.
_LEAST_FRACTION = 0.1
#: Containers within containers are followed so far to the object that holds them.
_DEPTH = 4
#: A line that fills a container.
_FILLS = re.compile(r"\.(append|extend|add|insert|update|setdefault)\w*\(|\]\s*=|\+=")


class GrowingContainers:
    """Finds the container that grew most since this object was made, among all that Python's collector knows."""

    def __init__(self) -> None:
        kinds = (list, dict, set, deque)
        self._sizes = [(item, len(item)) for item in gc.get_objects() if type(item) in kinds]

    def keeper(self, steps: int, bytes_per_step: float) -> str | None:
        """What keeps memory, as `a list of tensors in Module.kept, model.py:12`; None if no container explains it.

        Args:
            steps: steps since this object was made, each of which added an item.
            bytes_per_step: growth of memory per step.
        """
        most_bytes, keeper = _LEAST_FRACTION * steps * bytes_per_step, None
        for container, size in self._sizes:
            if container is self._sizes or len(container) - size < steps:
                continue
            values = container.values() if isinstance(container, dict) else container
            items = list(islice(values, size, None))
            held_bytes = 0
            # Items may hold each other, or their container.
            with suppress(RecursionError):
                held_bytes = sum(map(_held_bytes, tree_leaves(items)))
            if held_bytes > most_bytes:
                kind = "tensor" if isinstance(items[0], torch.Tensor) else type(items[0]).__name__
                most_bytes = held_bytes
                keeper = f"a {type(container).__name__} of {kind}s{_place(container)}"
        return keeper


def garbage_bytes() -> int:
    """Collect garbage, and tell the bytes of the tensors and arrays in it, which only reference cycles kept."""
    flags, first = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sum(map(_held_bytes, gc.garbage[first:]))
    finally:
        # A Ctrl-C may come while it collects.
        gc.set_debug(flags)
        del gc.garbage[first:]


def _held_bytes(leaf: Any) -> int:
    """The bytes of a tensor's whole storage, an array or a text; 0 for other values and for layouts without storage."""
    # Garbage holds weak proxies too, which raise where their object is gone.
    with suppress(NotImplementedError, RuntimeError, ReferenceError):
        if isinstance(leaf, torch.Tensor):
            return int(leaf.untyped_storage().nbytes())
        if isinstance(leaf, np.ndarray):
            return leaf.nbytes
        if isinstance(leaf, bytes | bytearray | str):
            return len(leaf)
    return 0


def _place(container: Any) -> str:
    """The attribute or global that holds a container, also within others, and the line that fills it; or empty."""
    level, seen = [container], {id(container)}
    for _ in range(_DEPTH):
        holders = [holder for value in level for holder in gc.get_referrers(value)]
        level = [holder for holder in holders if isinstance(holder, dict | list) or hasattr(holder, "__dict__")]
        for owner in level:
            for name, value in getattr(owner, "__dict__", {}).items():
                if id(value) in seen:
                    return f" in {_filled(owner, name)}"
        seen.update(map(id, level))
    return ""


def _filled(owner: Any, name: str) -> str:
    """An owner's attribute with the line of the owner's source that fills it, or else that mentions it."""
    source = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
    attribute = f"{source.__name__}.{name}"
    with suppress(OSError, TypeError, IndexError):
        lines, first = inspect.getsourcelines(source)
        mentions = [
            (number, line) for number, line in enumerate(lines, max(first, 1)) if re.search(rf"\b{name}\b", line)
        ]
        number = next((number for number, line in mentions if _FILLS.search(line)), mentions[0][0])
        attribute += f", {location_of(inspect.getfile(source), number)}"
    return attribute


class CollectorWatch:
    """Times collections of garbage, and notes which lines called for them, until `undo` is closed.

    Args:
        facts: the record that is filled in.
        note: is called with the seconds of each collection.
        undo: ends the watch.
    """

    def __init__(self, facts: Collector, note: Callable[[float], None], undo: ExitStack) -> None:
        self._facts, self._note = facts, note
        self._places = Counter[str]()
        facts.count, facts.total_s = 0, 0.0
        gc.callbacks.append(self._collects)
        undo.callback(gc.callbacks.remove, self._collects)

    def _collects(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
            return
        length_s = time.perf_counter() - self._began_s
        self._facts.count = (self._facts.count or 0) + 1
        self._facts.total_s = (self._facts.total_s or 0.0) + length_s
        self._note(length_s)
        # With the collector off, as in lmbench's window, only a call collects.
        if not gc.isenabled():
            frame = responsible_frame(traceback.extract_stack()[:-1])
            self._places[f"{frame.filename}:{frame.lineno} in {frame.name}"] += 1
            self._facts.location = self._places.most_common(1)[0][0]
