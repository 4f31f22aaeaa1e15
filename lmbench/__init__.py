"""lmbench: measure training loops of Transformer language models, built on Lightning."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lmbench.version import __version__ as __version__

if TYPE_CHECKING:
    from lmbench.callbacks.kernel_capture import KernelProfiler as KernelProfiler
    from lmbench.errors import UsageError as UsageError
    from lmbench.fit.data_parallel import DataParallel as DataParallel
    from lmbench.fit.data_parallel import ShardedOptimizer as ShardedOptimizer
    from lmbench.fit.in_process import measure as measure
    from lmbench.fit.model_parallel import ModelParallel as ModelParallel
    from lmbench.fit.settings import MeasureSettings as MeasureSettings
    from lmbench.fit.teaching import BucketedDDP as BucketedDDP
    from lmbench.fit.teaching import FlatDDP as FlatDDP
    from lmbench.fit.teaching import NaiveDDP as NaiveDDP
    from lmbench.fit.teaching import OverlappedDDP as OverlappedDDP
    from lmbench.instruments.window import Schedule as Schedule
    from lmbench.model.attention_layer import AttentionLayer as AttentionLayer
    from lmbench.model.hugging_face import HuggingFace as HuggingFace
    from lmbench.runs import Run as Run
    from lmbench.runs import load as load
    from lmbench.runs import to_frame as to_frame

# In a checkout `callbacks` and `configs` lie beside this package, and `python -m` in its root imports the checkout, not
# an installed lmbench.
_ROOT = Path(__file__).parents[1]
if not (_ROOT / "lmbench" / "callbacks").is_dir() and (_ROOT / "callbacks").is_dir():
    __path__.append(str(_ROOT))

# The public names and their modules, imported at first use: most of them import torch, which most commands do without.
_MODULES = {
    "AttentionLayer": "lmbench.model.attention_layer",
    "BucketedDDP": "lmbench.fit.teaching",
    "DataParallel": "lmbench.fit.data_parallel",
    "FlatDDP": "lmbench.fit.teaching",
    "HuggingFace": "lmbench.model.hugging_face",
    "KernelProfiler": "lmbench.callbacks.kernel_capture",
    "MeasureSettings": "lmbench.fit.settings",
    "ModelParallel": "lmbench.fit.model_parallel",
    "NaiveDDP": "lmbench.fit.teaching",
    "OverlappedDDP": "lmbench.fit.teaching",
    "Run": "lmbench.runs",
    "Schedule": "lmbench.instruments.window",
    "ShardedOptimizer": "lmbench.fit.data_parallel",
    "UsageError": "lmbench.errors",
    "load": "lmbench.runs",
    "measure": "lmbench.fit.in_process",
    "to_frame": "lmbench.runs",
}
__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
