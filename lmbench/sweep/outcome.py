"""What a run's record says in the end, from what its process wrote and how it ended."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmbench.errors import ExitCode
from lmbench.records.fields import SCHEMA_VERSION
from lmbench.records.load import Run
from lmbench.records.vocabulary import DAMAGED, KILLED, OUTCOMES, RUNNING, Record
from lmbench.sweep.supervise import End

_LAST_LINES = 3
_LOG_TAIL_BYTES = 20_000
_PREFIX = "lmbench: "
# Colours and cursor movements.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_UNFINISHED = (RUNNING, KILLED, DAMAGED)
# From here on an exit code tells of a signal, or that the process's parent was killed with it.
_LOST = 128


def new_record(run_id: str, words: Sequence[str]) -> Record:
    """The record of a run whose process left none."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "outcome": RUNNING,
        "error": None,
        "exit_code": None,
        "started_at": None,
        "ended_at": None,
        "command": words[0],
        "argv": list(words),
        "replay_command": shlex.join(["lmbench", *words]),
    }


def judge(found: Run | None, end: End, timeout_s: float, log: Path) -> Record:
    """The fields of the record that tell how the run ended: `outcome`, `error`, `exit_code`.

    What the process recorded itself stands, unless the sweep ended it at its time limit.
    """
    told = found.run if found is not None and found.outcome in OUTCOMES else {}
    phase = _phase(found)
    code = int(end.code) if end.code >= 0 else None
    if end.by == "timeout" and told.get("outcome") in (None, "interrupted"):
        return _ending("timeout", code, "Timeout", f"no end within {timeout_s:g} s; it was stopped", phase)
    if told.get("outcome") == "error" and end.oom_evidence is not None:
        # A loader's process, say, whose end the main one could not explain.
        message = f"{end.oom_evidence}; {(told['error'] or {}).get('message')}"
        return _ending("oom", code, "OutOfMemoryKill", message, phase, where="host")
    if told:
        return {name: told.get(name) for name in ("outcome", "error", "exit_code")}
    if end.by == "interruption":
        return _ending("interrupted", code, "Interrupted", "the sweep was stopped", phase)
    return _unrecorded(end, phase, last_lines(log))


#: By exit code, how a process ended that left no record: outcome, the error's kind, and what to say.
_BY_CODE: dict[int, tuple[str, str, str]] = {
    ExitCode.OK: ("error", "NoResult", "it ended well and left no result"),
    ExitCode.USAGE: ("error", "UsageError", ""),
    ExitCode.OUT_OF_MEMORY: ("oom", "OutOfMemory", ""),
    ExitCode.INTERRUPTED: ("interrupted", "Interrupted", "somebody stopped its process"),
    ExitCode.TERMINATED: ("interrupted", "Interrupted", "somebody stopped its process"),
}


def _unrecorded(end: End, phase: str, lines: list[str]) -> Record:
    """The ending of a process that could not or did not record one."""
    code = end.code if end.code >= 0 else None
    last = f"; its last words: {' | '.join(lines)}" if lines else "; it said nothing"
    if end.oom_evidence is not None and (code is None or code >= _LOST):
        message = f"the kernel ended it for lack of memory ({end.oom_evidence}){last}"
        return _ending("oom", code, "OutOfMemoryKill", message, phase, where="host")
    if code is None:
        name = end.signal.name if end.signal is not None else f"signal {-end.code}"
        return _ending("error", code, name, f"ended by {name}{last}", phase)
    outcome, kind, message = _BY_CODE.get(code, ("error", "ExitCode", f"ended with exit code {code}"))
    if not message:
        # lmbench's own line says it all.
        said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
        return _ending(outcome, code, kind, said[-1] if said else f"exit code {code}{last}", phase)
    return _ending(outcome, code, kind, f"{message}{last}", phase)


def skipped(first: Record) -> Record:
    """The ending of a repeat that would only do again what the first one failed at."""
    error = first.get("error") or {}
    message = f"repeat 0 ended with {first['outcome']}: {error.get('message')}"
    return _ending("skipped", None, "Skipped", message, error.get("phase"))


def is_unfinished(outcome: str) -> bool:
    """Whether a record does not tell how its run ended."""
    return outcome in _UNFINISHED


def is_hopeless(first: Record) -> bool:
    """Whether a first repeat ended in a way that others of its cell would end as well."""
    return first["outcome"] in ("oom", "timeout") or (
        first["outcome"] == "error" and first.get("exit_code") == ExitCode.USAGE
    )


def last_lines(log: Path, count: int = _LAST_LINES) -> list[str]:
    """The last lines of a process's output that are not empty."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [_ESCAPES.sub("", line).strip() for line in text.replace("\r", "\n").splitlines()]
    return [line for line in lines if line][-count:]


def _phase(found: Run | None) -> str:
    """Where a run was when it ended; where it could not tell, the stage of its last step."""
    if found is None or not found.run:
        return "setup"
    error = found.run.get("error") or {}
    if not is_unfinished(found.outcome) and error.get("phase"):
        return str(error["phase"])
    if "environment" not in found.run:
        return "setup"
    return str(found.steps[-1].get("stage", "warmup")) if found.steps else "warmup"


def _ending(
    outcome: str, code: int | None, kind: str, message: str, phase: str | None, where: str | None = None
) -> Record:
    error: dict[str, Any] = {
        "kind": kind,
        "message": " ".join(message.split())[:2000],
        "phase": phase,
        "requested_bytes": None,
        "where": where,
    }
    return {"outcome": outcome, "error": error, "exit_code": code}
