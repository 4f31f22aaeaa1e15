"""A process of its own for everything that W&B does: it may hang, crash or change its environment alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

# What a process may take to end by itself once it was told to.
_GRACE_S = 3.0


@dataclass(frozen=True)
class Ended:
    """How a process ended: `exit_code` is None where it was stopped at its time limit."""

    exit_code: int | None
    output: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no reason given"


def run_child(module: str, *words: str, environment: Mapping[str, str], timeout_s: float) -> Ended:
    """Run `python -m module words`, at most so long.

    It hears no Ctrl-C of the terminal, so that this process decides; whatever ends the wait ends the process too.
    """
    # A file, not a pipe: wandb's own background process would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            # -P: the installed lmbench, as this process, whatever lies in the working directory.
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            exit_code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _stop(process)
        output.seek(0)
        return Ended(exit_code, _without_secrets(output.read().decode(errors="replace"), environment))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still there, and its group; wandb's background process follows by itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _without_secrets(text: str, environment: Mapping[str, str]) -> str:
    key = environment.get("WANDB_API_KEY")
    return text.replace(key, "***") if key else text
