"""Ends processes that the user's code forked and that come back to the training."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from lightning.pytorch import Callback

from lmbench.errors import ExitCode, tell
from lmbench.python_process import die_with_parent


class OneProcess(Callback):
    """Ends a process that the user's code forked within the training, before it trains on and writes to the record.

    Such a process may also wait for ever, since it lacks the threads of its parent. So it ends with its parent.

    It logs nothing.
    """

    def __init__(self) -> None:
        self._pid, self._thread, self.is_over = os.getpid(), threading.get_ident(), False
        # What is registered stays as long as the process, and would keep the module and its device memory.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _end_with_parent(reference()))

    def check(self, *arguments: Any) -> None:
        """Takes and ignores the arguments of Lightning's hooks."""
        if os.getpid() != self._pid:
            tell(f"your code forked process {os.getpid()}, which came back to the training; it was ended")
            os._exit(ExitCode.USER_CODE)

    on_train_batch_end = on_validation_batch_end = on_exception = check  # type: ignore[assignment]


def _end_with_parent(callback: OneProcess | None) -> None:
    if callback is None or callback.is_over:
        return
    # The kernel takes the end of the forking thread for the parent's.
    if (os.getppid(), threading.get_ident()) == (callback._pid, callback._thread):
        die_with_parent()
