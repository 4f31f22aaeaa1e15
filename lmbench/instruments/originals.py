"""Whether the functions that time a run and wait for its device are still the original ones."""

from __future__ import annotations

import re
import time
from pkgutil import resolve_name
from types import BuiltinFunctionType

from lmbench.code_owners import code_owner

_BUILTIN = (
    "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "clock_gettime", "sleep",
)  # fmt: skip
#: Functions written in Python, by the owner of their code.
_PYTHON = {
    "pytorch": (
        "torch.cuda:synchronize", "torch.accelerator:synchronize", "torch.cuda:Event.record",
        "torch.cuda:Event.elapsed_time", "torch.cuda:Event.query", "torch.cuda:Event.synchronize",
        "torch.cuda:Stream.synchronize",
    ),
    "lmbench": (
        "lmbench.device:synchronize", "lmbench.device.clock:HostClock.stamp", "lmbench.device.clock:HostClock.seconds",
        "lmbench.device.cuda:EventClock.stamp", "lmbench.device.cuda:EventClock.seconds",
    ),
}  # fmt: skip


def replaced_functions() -> list[str]:
    """Names of the clocks and synchronizes in this process that something else stands for.

    An original of `time` is C code of its own name; the code of any other one lies in a file of its package.
    """
    builtins = ((name, getattr(time, name)) for name in _BUILTIN)
    replaced = [
        f"time.{name}"
        for name, function in builtins
        if not isinstance(function, BuiltinFunctionType) or (function.__module__, function.__name__) != ("time", name)
    ]
    for owner, names in _PYTHON.items():
        for name in names:
            code = getattr(resolve_name(name), "__code__", None)
            # A decorator of PyTorch makes a function whose code is PyTorch's too, of another name.
            if code is None or (code_owner(code.co_filename), code.co_name) != (owner, re.split("[:.]", name)[-1]):
                replaced.append(name.replace(":", "."))
    return replaced
