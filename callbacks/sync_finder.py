"""Finds code that makes the host wait for the device."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from typing import Any

from lmbench.callbacks.observer import Observer
from lmbench.code_owners import responsible_frame
from lmbench.instruments.window import ProbeKind
from lmbench.records.measured import HiddenSync


class SyncFinder(Observer):
    """Runs one probe step under the device's sync debug mode and lists where it synchronized, most frequent first.

    PyTorch warns of synchronizing calls in its own operators (`.item()`, `nonzero`, pageable copies), but not of an
    explicit `torch.cuda.synchronize()`; see `torch.cuda.set_sync_debug_mode`.

    Recorded under `probe`:

    - `hidden_syncs`: a list of `location` (the `responsible_frame`), `count` and `stack`; null on a CPU, where nothing
      is asynchronous.
    """

    def probe_begins(self, kind: ProbeKind) -> None:
        self._debug = self.device.sync_debug if kind is ProbeKind.SYNC else None
        if self._debug is None:
            return
        self._counts = Counter[tuple[str, str]]()
        self.undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        self._show, warnings.showwarning = warnings.showwarning, self._note
        self.undo.callback(self._debug.set_mode, "default")
        self._debug.set_mode("warn")

    def probe_ended(self, kind: ProbeKind) -> None:
        if self._debug is not None:
            self.undo.close()
            syncs = self._counts.most_common()
            self.run.probe.hidden_syncs = [HiddenSync(where, count, stack) for (where, stack), count in syncs]

    def _note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "Synchronization debug mode is a prototype" in str(message):
            return
        if self._debug is None or self._debug.warning not in str(message):
            self._show(message, *args, **kwargs)
            return
        frames = traceback.extract_stack()[:-1]
        frame = responsible_frame(frames)
        location = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        self._counts[location, "".join(traceback.format_list(frames[-12:]))] += 1
