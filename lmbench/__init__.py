"""lmbench: measure training loops of Transformer language models, built on Lightning."""

from importlib import import_module

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # For `--trainer.profiler lmbench.KernelProfiler`; importing it brings torch, which most commands do without.
    if name == "KernelProfiler":
        return import_module("lmbench.callbacks.kernel_profiler").KernelProfiler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
