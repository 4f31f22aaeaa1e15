"""One measurement: from a command line or a call to the record. Importing this package prepares Lightning's import."""

from __future__ import annotations

import os
import sys
from types import ModuleType

# LightningCLI 2.6 uses interfaces jsonargparse has deprecated; its notices are not the user's business.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def _import_torchmetrics() -> None:
    """Import torchmetrics, as Lightning does, without scipy.signal.

    Where SciPy is installed torchmetrics imports that, only to give it back a function that it lost in 2022 and
    another package's speech metric wants: a fifth of the time of all imports. Here it finds the function there.
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
