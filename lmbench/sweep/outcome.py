"""A process of a sweep: what starts it, how it ends, and what of that only the sweep can say in the run's record.

A plan knows jobs, an execution makes a launch of each and a row of its end; forks of this machine run it in between
(`local.py`)."""

from __future__ import annotations

import re
import shlex
import signal
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmbench.errors import ExitCode
from lmbench.masking import masked_words
from lmbench.records.measured import RunError
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import OUTCOMES, RUNNING
from lmbench.sweep.environments import Environment

_MOST_MESSAGE = 2000
_PREFIX = "lmbench: "
# Colours and cursor movements.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# From here on an exit code tells of a signal.
_SIGNALLED = 128


@dataclass(frozen=True)
class Launch:
    """A process to start: `lmbench WORDS` in an environment, with further variables; its output goes to `log`, an
    absolute path. `launcher` are words that start it on several nodes, a process a rank."""

    words: list[str]
    log: Path
    environment: Environment
    variables: dict[str, str]
    launcher: Sequence[str] = ()


@dataclass(frozen=True)
class End:
    """How a process ended.

    `code` is its exit code, or minus the number of the signal that ended it. `by` says whether it ended by itself, or
    was stopped by the sweep: at its time limit, or because the sweep itself is stopped. Times are on `clock_s`.
    `lost` says why nobody knows how it ended: what was to start it, or to wait for it, was gone first, the sweep's task
    on another machine (`by` it), say. `cause` is the
    exception of an interruption, which is to be raised when the process's end is recorded.
    """

    code: int
    by: Literal["itself", "timeout", "interruption", "task"]
    launched_s: float
    ended_s: float
    oom_evidence: str | None = None
    lost: str | None = None
    cause: BaseException | None = None

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, None if none did."""
        names = {-number: number.name for number in signal.Signals}
        return None if self.code >= 0 else names.get(self.code, f"signal {-self.code}")


def oom_kill_count() -> int:
    """How many processes the kernel's out-of-memory killer has ended so far: of this process's control group (version
    2), else of the machine, neighbours included."""
    group = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    for path in (Path("/sys/fs/cgroup", group, "memory.events"), Path("/proc/vmstat")):
        with suppress(OSError):
            if count := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(count[1])
    return 0


def new_record(run_id: str, words: Sequence[str]) -> RunRecord:
    """The record of a run whose process left none."""
    argv = masked_words(words)
    replay = shlex.join(["lmbench", *argv])
    return RunRecord(SCHEMA_VERSION, RUNNING, run_id=run_id, command=words[0], argv=argv, replay_command=replay)


def is_hopeless(record: RunRecord) -> bool:
    """Whether other repeats of the same cell would end in the same way."""
    is_refused = record.outcome == "error" and record.exit_code == ExitCode.USAGE
    return is_refused or record.outcome in ("oom", "timeout")


#: How a process ended that left no record, by its exit code: the outcome and the error's kind.
_BY_CODE: dict[int, tuple[str, str]] = {
    ExitCode.OK: ("error", "NoResult"),
    ExitCode.USAGE: ("error", "UsageError"),
    ExitCode.OUT_OF_MEMORY: ("oom", "OutOfMemory"),
    ExitCode.USER_CODE: ("error", "UserCode"),
    ExitCode.INTERRUPTED: ("interrupted", "Interrupted"),
    ExitCode.TERMINATED: ("interrupted", "Interrupted"),
}


def judge(record: RunRecord, steps: Sequence[StepRecord], end: End, log: Path) -> None:
    """Write into a record how its run ended, from what its process recorded and how that ended.

    What the process recorded itself stands, unless the sweep ended it at its time limit, or the kernel ended a part of
    it for lack of memory.
    """
    outcome = record.outcome if record.outcome in OUTCOMES else ""
    lines, memory, signal_name = last_lines(log), end.oom_evidence, end.signal_name
    last = f"; its last words: {' | '.join(lines)}" if lines else "; it said nothing"
    error = record.error or RunError()
    if end.by == "timeout" and outcome in ("", "interrupted"):
        ending = "timeout", "Timeout", str(end.lost)
    elif end.by == "task" and outcome in ("", "interrupted"):
        ending = "interrupted", "TaskEnded", str(end.lost)
    elif memory and outcome == "error":
        # A loader's process, say, whose end the main one could not explain.
        ending = "oom", "OutOfMemoryKill", f"{memory}; {error.message}"
    elif outcome:
        return
    elif end.by == "interruption":
        ending = "interrupted", "Interrupted", "the sweep was stopped"
    elif memory and (signal_name or end.code >= _SIGNALLED):
        ending = "oom", "OutOfMemoryKill", f"the kernel ended it for lack of memory ({memory}){last}"
    elif end.lost:
        ending = "error", "ServerLost", end.lost
    elif signal_name:
        ending = "error", signal_name, f"ended by {signal_name}{last}"
    else:
        # lmbench's own last line says all that its exit code means.
        own = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX) and end.code in _BY_CODE]
        said = [f"left no result and ended with exit code {end.code}{last}", *own][-1]
        ending = *_BY_CODE.get(end.code, ("error", "ExitCode")), said
    record.outcome, kind, message = ending
    stage = (steps[-1].stage if steps else None) or "warmup"
    phase = error.phase or ("setup" if record.environment is None else stage)
    where = "host" if kind == "OutOfMemoryKill" else None
    record.error = RunError(kind, " ".join(message.split())[:_MOST_MESSAGE], phase, where=where)
    record.exit_code = None if signal_name else end.code


def last_lines(log: Path, count: int = 3) -> list[str]:
    """The last lines of a process's output that are not empty."""
    with suppress(OSError), log.open(errors="replace") as file:
        return list(deque(filter(None, (_ESCAPES.sub("", line).strip() for line in file)), count))
    return []
