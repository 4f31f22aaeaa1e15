"""Finds code that makes the host wait for the device."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import torch

from lmbench.callbacks.observer import Observer
from lmbench.instruments.window import ProbeKind
from lmbench.records.measured import HiddenSync

# Folders whose frames are machinery, not the line that asked for the synchronize.
_MACHINERY = tuple(str(Path(module.__file__).parent) for module in (torch, lightning, contextlib) if module.__file__)


class SyncFinder(Observer):
    """Runs one unmeasured step under CUDA's sync debug mode and lists where it synchronized, most frequent first.

    PyTorch warns of the calls its own operators make (`.item()`, `nonzero`, pageable copies), not of explicit
    `torch.cuda.synchronize()`; see the documentation of `torch.cuda.set_sync_debug_mode`.

    Leaves `probe.hidden_syncs`: a list of `{location, stack, count}`; null on a CPU, where nothing is asynchronous.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._counts: Counter[tuple[str, str]] = Counter()

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is not ProbeKind.SYNC or self.session.device.type != "cuda":
            return
        self._counts.clear()
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        self._show, warnings.showwarning = warnings.showwarning, self._note
        self._undo.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn")

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.SYNC and self.session.device.type == "cuda":
            self._undo.close()
            syncs = self._counts.most_common()
            self.session.run.probe.hidden_syncs = [HiddenSync(where, count, stack) for (where, stack), count in syncs]

    def run_closing(self, exception: BaseException | None) -> None:
        # An exception in the probe step itself: its warnings are the user's again.
        self._undo.close()

    def _note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "Synchronization debug mode is a prototype" in str(message):
            return
        if "synchronizing CUDA operation" not in str(message):
            self._show(message, *args, **kwargs)
            return
        frames = traceback.extract_stack()[:-1]
        # The innermost frame that is neither torch's nor Lightning's is the user's line.
        where = next((f for f in reversed(frames) if not f.filename.startswith((*_MACHINERY, "<"))), frames[-1])
        location = f"{where.filename}:{where.lineno} in {where.name}: {where.line}"
        self._counts[location, "".join(traceback.format_list(frames[-12:]))] += 1
