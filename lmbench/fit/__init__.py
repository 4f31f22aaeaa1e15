"""One measurement, from a command line or a Python call to the closed record.

Importing this package sets what has to be set before Lightning is imported.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# LightningCLI 2.6 calls interfaces that jsonargparse has deprecated; users can do nothing about these warnings.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


class _Later:
    """An attribute of a module that is imported once somebody uses it."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(import_module(self._module), self._name), attribute)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> _Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


def _import_lightning() -> None:
    """Import Lightning without scipy.signal, transformers and garbage collections, which take half of its time.

    torchmetrics, which Lightning imports, imports scipy.signal only to put back `hamming`, which SciPy removed in 2022
    and a speech metric needs, and transformers for a metric of texts. Meanwhile both have stand-ins.
    """
    names = ["scipy.signal", *(["transformers"] if find_spec("transformers") else [])]
    stand_ins = {name: _StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    collects = gc.isenabled()
    gc.disable()
    try:
        import lightning.pytorch  # noqa: F401
    finally:
        for name, stand_in in stand_ins.items():
            del sys.modules[name]
            vars(sys.modules.get("scipy", stand_in)).pop("signal", None)
        if collects:
            gc.enable()


_import_lightning()
