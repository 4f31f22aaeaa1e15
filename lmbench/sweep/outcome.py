"""What only the sweep can say in a run's record: how its process ended where that could not record it, and its cost."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmbench.errors import ExitCode
from lmbench.masking import masked_words
from lmbench.records.load import Run
from lmbench.records.measured import RunError
from lmbench.records.run import SCHEMA_VERSION, Cost, RunRecord
from lmbench.records.vocabulary import DAMAGED, KILLED, OUTCOMES, RUNNING
from lmbench.sweep.process import End

_LAST_LINES = 3
_LOG_TAIL_BYTES = 20_000
_PREFIX = "lmbench: "
# Colours and cursor movements.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# From here on an exit code tells of a signal.
_SIGNALLED = 128


@dataclass(frozen=True)
class Ending:
    """How a run ended, as its record says it."""

    outcome: str
    error: RunError | None
    exit_code: int | None

    @property
    def is_hopeless(self) -> bool:
        """Whether others of the same cell would end in the same way."""
        return self.outcome in ("oom", "timeout") or (self.outcome == "error" and self.exit_code == ExitCode.USAGE)


def ending_of(record: RunRecord) -> Ending:
    """How a run ended, by its record."""
    return Ending(record.outcome, record.error, record.exit_code)


def new_record(run_id: str, words: Sequence[str]) -> RunRecord:
    """The record of a run whose process left none."""
    argv = masked_words(words)
    replay = shlex.join(["lmbench", *argv])
    return RunRecord(SCHEMA_VERSION, RUNNING, run_id=run_id, command=words[0], argv=argv, replay_command=replay)


def is_unfinished(found: Run) -> bool:
    """Whether a record does not tell how its run ended."""
    return found.outcome in (RUNNING, KILLED, DAMAGED)


def judge(found: Run | None, end: End, timeout_s: float, log: Path) -> Ending:
    """How a run ended, from what its process wrote and how that ended.

    What the process recorded itself stands, unless the sweep ended it at its time limit.
    """
    told = ending_of(found.record) if found is not None and found.outcome in OUTCOMES else None
    phase = _phase(found)
    code = int(end.code) if end.code >= 0 else None
    if end.by == "timeout" and (told is None or told.outcome == "interrupted"):
        return _ending("timeout", code, "Timeout", f"no end within {timeout_s:g} s; it was stopped", phase)
    if told is not None and told.outcome == "error" and end.oom_evidence is not None:
        # A loader's process, say, whose end the main one could not explain.
        message = f"{end.oom_evidence}; {told.error.message if told.error is not None else None}"
        return _ending("oom", code, "OutOfMemoryKill", message, phase, where="host")
    if told is not None:
        return told
    if end.by == "interruption":
        return _ending("interrupted", code, "Interrupted", "the sweep was stopped", phase)
    return _unrecorded(end, phase, last_lines(log))


#: By exit code, how a process ended that left no record: outcome, the error's kind, and what to say.
_BY_CODE: dict[int, tuple[str, str, str]] = {
    ExitCode.OK: ("error", "NoResult", "it ended well and left no result"),
    ExitCode.USAGE: ("error", "UsageError", ""),
    ExitCode.OUT_OF_MEMORY: ("oom", "OutOfMemory", ""),
    ExitCode.USER_CODE: ("error", "UserCode", ""),
    ExitCode.INTERRUPTED: ("interrupted", "Interrupted", "somebody stopped its process"),
    ExitCode.TERMINATED: ("interrupted", "Interrupted", "somebody stopped its process"),
}


def _unrecorded(end: End, phase: str, lines: list[str]) -> Ending:
    """The ending of a process that could not or did not record one."""
    code = end.code if end.code >= 0 else None
    last = f"; its last words: {' | '.join(lines)}" if lines else "; it said nothing"
    if end.oom_evidence is not None and (code is None or code >= _SIGNALLED):
        message = f"the kernel ended it for lack of memory ({end.oom_evidence}){last}"
        return _ending("oom", code, "OutOfMemoryKill", message, phase, where="host")
    if end.lost is not None:
        return no_server(end.lost, phase)
    if code is None:
        name = end.signal.name if end.signal is not None else f"signal {-end.code}"
        return _ending("error", code, name, f"ended by {name}{last}", phase)
    outcome, kind, message = _BY_CODE.get(code, ("error", "ExitCode", f"ended with exit code {code}"))
    if not message:
        # lmbench's own line says it all.
        said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
        return _ending(outcome, code, kind, said[-1] if said else f"exit code {code}{last}", phase)
    return _ending(outcome, code, kind, f"{message}{last}", phase)


def no_server(reason: str, phase: str = "setup") -> Ending:
    """The ending of a run whose process had no server to be forked from, or lost it."""
    return _ending("error", None, "ServerLost", reason, phase)


def skipped(first: Ending) -> Ending:
    """The ending of a repeat that would only do again what the first one failed at."""
    error = first.error or RunError()
    return _ending("skipped", None, "Skipped", f"repeat 0 ended with {first.outcome}: {error.message}", error.phase)


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
    if found is None:
        return "setup"
    record = found.record
    if not is_unfinished(found) and record.error is not None and record.error.phase:
        return record.error.phase
    if record.environment is None:
        return "setup"
    return (found.steps[-1].stage if found.steps else None) or "warmup"


def _ending(
    outcome: str, code: int | None, kind: str, message: str, phase: str | None, where: str | None = None
) -> Ending:
    return Ending(outcome, RunError(kind, " ".join(message.split())[:2000], phase, where=where), code)


# what it cost


def cost_of(record: RunRecord, end: End) -> Cost:
    """Where the time of a run went, from the milestones that its process recorded and the sweep's own clock; None for
    what was not reached."""
    at, step = record.milestones, record.phases.step
    total_s = end.ended_s - end.launched_s
    # The process began after it was launched, by what the kernel dates it.
    offset_s = None if record.process_start_s is None else record.process_start_s - end.launched_s
    closed_s = _sum(offset_s, at.closed_s)
    cost = Cost(
        total_s=total_s,
        start_s=_sum(offset_s, at.started_s),
        import_s=_difference(at.imported_s, at.started_s),
        parse_s=_difference(at.parsed_s, at.imported_s),
        device_s=_difference(at.device_ready_s, at.parsed_s),
        build_s=_difference(at.built_s, at.device_ready_s),
        capture_s=_difference(at.ready_s, at.built_s),
        first_step_s=_difference(at.first_step_s, at.ready_s),
        compile_s=_difference(record.compile.first_step_s, None if step is None else step.median_s),
        warmup_s=_difference(at.window_opened_s, at.first_step_s),
        window_s=_difference(at.window_closed_s, at.window_opened_s),
        probe_s=_difference(at.stepped_s, at.window_closed_s),
        close_s=_difference(at.closed_s, at.stepped_s),
        exit_s=_difference(total_s, closed_s),
    )
    if not record.window.warmup_steps:
        # The window opened before step 0, which is a part of it.
        cost.first_step_s = None
        cost.warmup_s = _difference(at.window_opened_s, at.ready_s)
    if cost.compile_s is not None:
        cost.compile_s = max(0.0, cost.compile_s)
    steps_s = _difference(at.window_closed_s, at.ready_s)
    cost.overhead_s = None if steps_s is None else total_s - steps_s + (cost.compile_s or 0.0)
    return cost


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
