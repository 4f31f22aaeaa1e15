"""lmbench: measure training loops of Transformer language models, built on Lightning."""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# In a checkout, which `python -m` in its root finds before any installed lmbench, two packages lie beside this one.
_ROOT = Path(__file__).parents[1]
if not (_ROOT / "lmbench" / "callbacks").is_dir() and (_ROOT / "callbacks").is_dir():
    __path__.append(str(_ROOT))


def __getattr__(name: str) -> object:
    # For `--trainer.profiler lmbench.KernelProfiler`; importing it brings torch, which most commands do without.
    if name == "KernelProfiler":
        return import_module("lmbench.callbacks.kernel_profiler").KernelProfiler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
