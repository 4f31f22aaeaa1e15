"""One measurement, from a command line or a Python call to the closed record.

Importing this package sets what has to be set before Lightning is imported.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

# LightningCLI 2.6 calls interfaces that jsonargparse has deprecated; users can do nothing about these warnings.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def _import_torchmetrics() -> None:
    """Import torchmetrics, which Lightning imports, without scipy.signal.

    torchmetrics imports scipy.signal only to put back `hamming`, which SciPy removed in 2022 and a speech metric needs.
    That takes a fifth of the time of all imports, so torchmetrics gets a stand-in module that has `hamming` already.
    """
    name = "scipy.signal"
    if name not in sys.modules:
        stand_in = ModuleType(name)
        stand_in.hamming = None  # type: ignore[attr-defined]
        sys.modules[name] = stand_in
        try:
            import torchmetrics  # noqa: F401
        finally:
            del sys.modules[name]
            vars(sys.modules.get("scipy", stand_in)).pop("signal", None)


_import_torchmetrics()
