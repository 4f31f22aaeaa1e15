"""A process of its own for everything that W&B does: it may hang, crash or change its environment alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

# What would make wandb stay offline, take the run for another one, be silent about what goes wrong, or use the
# background process of a WandbLogger in this process.
_DROPPED = ("WANDB_MODE", "WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SILENT", "WANDB_QUIET")


@dataclass(frozen=True)
class Ended:
    """How a process ended: `exit_code` is None where it was stopped at its time limit."""

    exit_code: int | None
    lines: list[str]


def run_module(module: str, words: Sequence[str], timeout_s: float) -> Ended:
    """Run `python -m module words`, at most so long; whatever ends the wait ends the process too.

    It hears no Ctrl-C of the terminal, so that this process decides.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    with (
        # By itself wandb would leave logs and caches in the working directory and in the user's home.
        tempfile.TemporaryDirectory(prefix="lmbench-wandb-", ignore_cleanup_errors=True) as scratch,
        # A file, not a pipe: wandb's own background process would keep a pipe open.
        tempfile.TemporaryFile() as output,
    ):
        process = subprocess.Popen(
            # -P: the installed modules, as in this process, whatever lies in the working directory.
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "WANDB_DIR": scratch, "WANDB_CACHE_DIR": scratch, "WANDB_ERROR_REPORTING": "false"},
            start_new_session=True,
        )
        exit_code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Ended(exit_code, [line.strip() for line in text.splitlines() if line.strip()])
