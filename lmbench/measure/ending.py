"""What ended a run: outcome, exit code and the record's `error`, from an exception."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lmbench.errors import ExitCode, UsageError
from lmbench.interruption import Terminated, received
from lmbench.measure.oom import out_of_memory

_SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "SIGINT (Ctrl-C)", signal.SIGTERM: "SIGTERM"}


@dataclass(frozen=True)
class Ending:
    """How a run ended; `error` is None where it ended by itself."""

    outcome: str
    exit_code: ExitCode
    error: dict[str, Any] | None = None


COMPLETE = Ending("ok", ExitCode.OK)


def is_usage_error(exception: BaseException) -> bool:
    """Whether an exception is the user's mistake: a line says it all."""
    return isinstance(exception, UsageError | MisconfigurationException)


def judge(exception: BaseException, phase: str) -> Ending:
    """The ending that an exception makes; once a signal came, whatever is raised is its doing."""
    signum = _signal_behind(exception)
    if signum is not None:
        return interrupted(signum, phase)
    memory = out_of_memory(exception)
    if memory is not None:
        facts = error_facts(type(exception).__name__, memory.message, phase)
        facts.update(requested_bytes=memory.requested_bytes, where=memory.where)
        return Ending("oom", ExitCode.OUT_OF_MEMORY, facts)
    exit_code = ExitCode.USAGE if is_usage_error(exception) else ExitCode.INTERNAL
    return Ending("error", exit_code, error_facts(type(exception).__name__, str(exception), phase))


def interrupted(signum: int, phase: str) -> Ending:
    """The ending of a run that a signal ended."""
    name = signal.Signals(signum).name
    facts = error_facts(name, f"stopped by {_SIGNAL_NAMES.get(signum, name)}", phase)
    exit_code = ExitCode.TERMINATED if signum == signal.SIGTERM else ExitCode.INTERRUPTED
    return Ending("interrupted", exit_code, facts)


def failed(kind: str, message: str, phase: str | None, exit_code: ExitCode = ExitCode.INTERNAL) -> Ending:
    """The ending of a run that failed without an exception of its own."""
    return Ending("error", exit_code, error_facts(kind, message, phase))


def error_facts(kind: str, message: str, phase: str | None) -> dict[str, Any]:
    """The record's `error`."""
    line = " ".join(message.split())[:2000]
    return {"kind": kind, "message": line, "phase": phase, "requested_bytes": None, "where": None}


def _signal_behind(exception: BaseException) -> int | None:
    first = received()
    if first is None and isinstance(exception, KeyboardInterrupt):
        return signal.SIGINT
    if first is None and isinstance(exception, SIGTERMException | Terminated):
        return signal.SIGTERM
    return first
