"""A process of a sweep: its launch, its end, and the outcome that the sweep writes into the run's record.

`execute.py` makes a launch of each job of a plan, `local.py` runs it and returns its end, `rows.py` writes the row.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
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
# The end of a log that is read.
_TAIL_BYTES = 2**14
# Colours and cursor movements.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# Exit codes from here on stand for a signal.
_SIGNALLED = 128


@dataclass(frozen=True)
class Launch:
    """A process to start: `lmbench WORDS` in an environment.

    Attributes:
        log: absolute path of the file for its output.
        variables: environment variables beside those of the environment.
        launcher: words in front of the command, which start it on several nodes, once for each rank.
        pipe: its end of a pipe to another process, with which it takes turns. Starting it closes this end here.
    """

    words: list[str]
    log: Path
    environment: Environment
    variables: dict[str, str]
    launcher: Sequence[str] = ()
    pipe: Connection | None = None


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        code: its exit code, or minus the number of the signal that ended it.
        by: the cause of the end: the process itself, the time limit, or the end of its task on another machine.
        cost_s: the time that it took; processes that ran together share theirs.
        launched_at: when it was launched, UTC.
        oom_evidence: a sign that the kernel ended a process for lack of memory.
        lost: a reason that the process itself could not report: the time limit, or the loss of its server or task.
        cause: the exception of an interruption, to be raised after the end is recorded.
        server_pid: the process that forked it.
    """

    code: int
    by: Literal["itself", "timeout", "task"]
    cost_s: float = 0.0
    launched_at: str | None = None
    oom_evidence: str | None = None
    lost: str | None = None
    cause: BaseException | None = None
    server_pid: int | None = None

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the process, None if it exited."""
        names = {-number: number.name for number in signal.Signals}
        return None if self.code >= 0 else names.get(self.code, f"signal {-self.code}")


def oom_kill_count() -> int:
    """How many processes the kernel's out-of-memory killer has ended so far.

    The count is that of this process's control group (version 2), or else of the whole machine.
    """
    group = ""
    with suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    for path in (Path("/sys/fs/cgroup", group, "memory.events"), Path("/proc/vmstat")):
        with suppress(OSError):
            if count := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(count[1])
    return 0


#: The options that name a run of a sweep and its folder.
_PLACE = ("--measure.results_dir=", "--measure.run_id=")


def new_record(run_id: str, words: Sequence[str]) -> RunRecord:
    """The record of a run whose process wrote none; its command makes a run outside of the sweep's folder."""
    argv = masked_words(words)
    replay = shlex.join(["lmbench", *(word for word in argv if not word.startswith(_PLACE))])
    return RunRecord(SCHEMA_VERSION, RUNNING, run_id=run_id, command=words[0], argv=argv, replay_command=replay)


#: The outcome and the kind of error of a process that left no record, by its exit code.
_BY_CODE: dict[int, tuple[str, str]] = {
    ExitCode.OK: ("error", "NoResult"),
    ExitCode.USAGE: ("error", "UsageError"),
    ExitCode.OUT_OF_MEMORY: ("oom", "OutOfMemory"),
    ExitCode.USER_CODE: ("error", "UserCode"),
    ExitCode.INTERRUPTED: ("interrupted", "Interrupted"),
    ExitCode.TERMINATED: ("interrupted", "Interrupted"),
}


def judge(record: RunRecord, steps: Sequence[StepRecord], end: End, log: Path) -> None:
    """Write into a record how its run ended, from the record itself and from the end of its process.

    An outcome that the process recorded stays. Exceptions are processes that the sweep ended at their time limit, and
    those of which the kernel ended a part for lack of memory.
    """
    outcome = record.outcome if record.outcome in OUTCOMES else ""
    lines, memory, signal_name = last_lines(log), end.oom_evidence, end.signal_name
    last_words = f"; its last words: {' | '.join(lines)}" if lines else "; it said nothing"
    error = record.failure
    if end.by == "timeout" and outcome in ("", "interrupted"):
        ending = "timeout", "Timeout", str(end.lost)
    elif end.by == "task" and outcome in ("", "interrupted"):
        ending = "interrupted", "TaskEnded", str(end.lost)
    elif memory and outcome == "error" and "worker" in (error.message or ""):
        # The kernel may have killed a loader's process, which the main process could not know.
        ending = "oom", "OutOfMemoryKill", f"{memory}; {error.message}"
    elif outcome:
        return
    elif end.cause is not None:
        ending = "interrupted", "Interrupted", "the sweep was stopped"
    elif memory and (signal_name or end.code >= _SIGNALLED):
        ending = "oom", "OutOfMemoryKill", f"the kernel ended it for lack of memory ({memory}){last_words}"
    elif end.lost:
        ending = "error", "ServerLost", end.lost
    elif signal_name:
        ending = "error", signal_name, f"ended by {signal_name}{last_words}"
    else:
        # For these exit codes lmbench's last line is the whole message.
        messages = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX) and end.code in _BY_CODE]
        message = [f"left no result and ended with exit code {end.code}{last_words}", *messages][-1]
        ending = *_BY_CODE.get(end.code, ("error", "ExitCode")), message
    record.outcome, kind, message = ending
    stage = (steps[-1].stage if steps else None) or "warmup"
    phase = error.phase or (stage if record.is_set_up else "setup")
    where = "host" if kind == "OutOfMemoryKill" else None
    record.error = RunError(kind, " ".join(message.split())[:_MOST_MESSAGE], phase, where=where)
    record.exit_code = None if signal_name else end.code


def last_lines(log: Path, count: int = 3) -> list[str]:
    """The last lines of a process's output, without empty ones, colours and cursor movements."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return [*filter(None, (_ESCAPES.sub("", line).strip() for line in lines))][-count:]
    return []
