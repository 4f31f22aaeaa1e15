"""One measurement, from a command line or a Python call to the closed record.

Importing this package sets what has to be set before Lightning is imported.
"""

from __future__ import annotations

import gc
import os
import sys
from types import ModuleType

# LightningCLI 2.6 calls interfaces that jsonargparse has deprecated; users can do nothing about these warnings.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def _import_lightning() -> None:
    """Import Lightning without scipy.signal and without garbage collections, which take a third of its time.

    torchmetrics, which Lightning imports, imports scipy.signal only to put back `hamming`, which SciPy removed in 2022
    and a speech metric needs. So torchmetrics gets a stand-in module that has `hamming` already.
    """
    name, collects = "scipy.signal", gc.isenabled()
    stand_in = ModuleType(name)
    stand_in.hamming = None  # type: ignore[attr-defined]
    is_needed = sys.modules.setdefault(name, stand_in) is stand_in
    gc.disable()
    try:
        import lightning.pytorch  # noqa: F401
    finally:
        if is_needed:
            del sys.modules[name]
            vars(sys.modules.get("scipy", stand_in)).pop("signal", None)
        if collects:
            gc.enable()


_import_lightning()
