"""Catch host-device synchronizations with the stack of the code that caused them."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import torch

from lmbench.records.measured import HiddenSync

# Folders whose frames are machinery, not the line that asked for the synchronize.
_MACHINERY = tuple(str(Path(module.__file__).parent) for module in (torch, lightning, contextlib) if module.__file__)


class SyncTrap:
    """Between `arm` and `disarm` every synchronizing CUDA call is noted, by `torch.cuda.set_sync_debug_mode`.

    PyTorch warns of the calls its own operators make (`.item()`, `nonzero`, pageable copies), not of explicit
    `torch.cuda.synchronize()`; see the documentation of `set_sync_debug_mode`.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._locations: dict[str, str] = {}

    def arm(self) -> None:
        self._catcher = warnings.catch_warnings()
        self._catcher.__enter__()
        warnings.simplefilter("always")
        self._show, warnings.showwarning = warnings.showwarning, self._note
        torch.cuda.set_sync_debug_mode("warn")

    def disarm(self) -> list[HiddenSync]:
        """Stop, and return what was found, most frequent first."""
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._show
        self._catcher.__exit__(None, None, None)
        return [HiddenSync(self._locations[stack], count, stack) for stack, count in self._seen.most_common()]

    def _note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "Synchronization debug mode is a prototype" in str(message):
            return
        if "synchronizing CUDA operation" not in str(message):
            self._show(message, *args, **kwargs)
            return
        frames = traceback.extract_stack()[:-1]
        # The innermost frame that is neither torch's nor Lightning's is the user's line.
        own = [f for f in frames if not f.filename.startswith((*_MACHINERY, "<"))]
        where = own[-1] if own else frames[-1]
        stack = "".join(traceback.format_list(frames[-12:]))
        self._seen[stack] += 1
        self._locations[stack] = f"{where.filename}:{where.lineno} in {where.name}: {where.line}"
