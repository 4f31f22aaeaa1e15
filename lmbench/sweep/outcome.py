"""What only the sweep can say in a run's record: how its process ended where that could not record it, and its cost."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lmbench.errors import ExitCode
from lmbench.masking import masked_words
from lmbench.records.load import Run
from lmbench.records.measured import RunError
from lmbench.records.run import SCHEMA_VERSION, Cost, Milestones, RunRecord
from lmbench.records.vocabulary import DAMAGED, KILLED, OUTCOMES, RUNNING
from lmbench.sweep.executor import End

_MOST_MESSAGE = 2000
_PREFIX = "lmbench: "
# Colours and cursor movements.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# From here on an exit code tells of a signal.
_SIGNALLED = 128


@dataclass(frozen=True)
class Ending:
    """How a run ended, as its record says it."""

    outcome: str
    error: RunError | None = None
    exit_code: int | None = None

    @property
    def is_hopeless(self) -> bool:
        """Whether other repeats of the same cell would end in the same way."""
        return self.outcome in ("oom", "timeout") or (self.outcome == "error" and self.exit_code == ExitCode.USAGE)


def ending_of(record: RunRecord) -> Ending:
    """How a run ended, by its record."""
    return Ending(record.outcome, record.error, record.exit_code)


def new_record(run_id: str, words: Sequence[str]) -> RunRecord:
    """The record of a run whose process left none."""
    argv = masked_words(words)
    replay = shlex.join(["lmbench", *argv])
    return RunRecord(SCHEMA_VERSION, RUNNING, run_id=run_id, command=words[0], argv=argv, replay_command=replay)


def is_unfinished(run: Run) -> bool:
    """Whether a record does not tell how its run ended."""
    return run.outcome in (RUNNING, KILLED, DAMAGED)


#: How a process ended that left no record, by its exit code: outcome, the error's kind, and what to say; where that is
#: empty, lmbench's own last line says it all.
_BY_CODE: dict[int, tuple[str, str, str]] = {
    ExitCode.OK: ("error", "NoResult", "it ended well and left no result"),
    ExitCode.USAGE: ("error", "UsageError", ""),
    ExitCode.OUT_OF_MEMORY: ("oom", "OutOfMemory", ""),
    ExitCode.USER_CODE: ("error", "UserCode", ""),
    ExitCode.INTERRUPTED: ("interrupted", "Interrupted", "somebody stopped its process"),
    ExitCode.TERMINATED: ("interrupted", "Interrupted", "somebody stopped its process"),
}


def judge(run: Run | None, end: End, timeout_s: float, log: Path) -> Ending:
    """How a run ended, from what its process wrote (None: nothing) and how that ended.

    What the process recorded itself stands, unless the sweep ended it at its time limit, or the kernel ended a part of
    it for lack of memory.
    """
    recorded = ending_of(run.record) if run is not None and run.outcome in OUTCOMES else None
    outcome = None if recorded is None else recorded.outcome
    code = end.code if end.code >= 0 else None
    lines = last_lines(log)
    last = f"; its last words: {' | '.join(lines)}" if lines else "; it said nothing"
    memory = end.oom_evidence
    by_code = _BY_CODE.get(end.code, ("error", "ExitCode", f"ended with exit code {code}"))
    own_lines = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    # The first row whose condition holds: outcome, the error's kind, its message.
    table: tuple[tuple[bool, str, str, str], ...] = (
        (end.by == "timeout" and outcome in (None, "interrupted"),
         "timeout", "Timeout", f"no end within {timeout_s:g} s; it was stopped"),
        # A loader's process, say, whose end the main one could not explain.
        (memory is not None and outcome == "error",
         "oom", "OutOfMemoryKill", f"{memory}; {recorded and recorded.error and recorded.error.message}"),
        (recorded is not None, "", "", ""),
        (end.by == "interruption", "interrupted", "Interrupted", "the sweep was stopped"),
        (memory is not None and (code is None or code >= _SIGNALLED),
         "oom", "OutOfMemoryKill", f"the kernel ended it for lack of memory ({memory}){last}"),
        (end.lost is not None, "error", "ServerLost", str(end.lost)),
        (code is None, "error", str(end.signal_name), f"ended by {end.signal_name}{last}"),
        (not by_code[2] and bool(own_lines), *by_code[:2], own_lines[-1] if own_lines else ""),
        (True, *by_code[:2], f"{by_code[2] or f'exit code {code}'}{last}"),
    )  # fmt: skip
    outcome, kind, message = next(row[1:] for row in table if row[0])
    if recorded is not None and not outcome:
        return recorded
    where = "host" if kind == "OutOfMemoryKill" else None
    return Ending(outcome, RunError(kind, " ".join(message.split())[:_MOST_MESSAGE], _phase(run), where=where), code)


def skipped(first: Ending) -> Ending:
    """The ending of a repeat that would only do again what the first repeat failed at."""
    error = first.error or RunError()
    return Ending("skipped", RunError("Skipped", f"repeat 0 ended with {first.outcome}: {error.message}", error.phase))


def last_lines(log: Path, count: int = 3) -> list[str]:
    """The last lines of a process's output that are not empty."""
    with suppress(OSError), log.open(errors="replace") as file:
        return list(deque(filter(None, (_ESCAPES.sub("", line).strip() for line in file)), count))
    return []


def _phase(run: Run | None) -> str:
    """The phase that a run ended in, as far as its record and its steps tell."""
    if run is None:
        return "setup"
    error = run.record.error
    if not is_unfinished(run) and error is not None and error.phase:
        return error.phase
    if run.record.environment is None:
        return "setup"
    return (run.steps[-1].stage if run.steps else None) or "warmup"


#: Parts of a run's cost: from the launch to the first milestone, between milestones, from the last one to the end.
_PARTS = (
    "start_s", "import_s", "parse_s", "device_s", "build_s", "capture_s", "first_step_s", "warmup_s", "window_s",
    "probe_s", "close_s", "exit_s",
)  # fmt: skip


def cost_of(record: RunRecord, end: End) -> Cost:
    """Where the time of a run went, in seconds, from the milestones that its process recorded and the sweep's own
    clock; None for what was not reached."""
    total_s = end.ended_s - end.launched_s
    # Without warm-up the window opened before step 0, which is a part of it.
    left_out = () if record.window.warmup_steps else ("first_step_s",)
    parts, names = ([name for name in row if name not in left_out] for row in (_PARTS, Milestones.__struct_fields__))
    # The process began after it was launched, by what the kernel dates it.
    began_s = None if record.process_start_s is None else record.process_start_s - end.launched_s
    reached_s = {name: _sum(began_s, getattr(record.milestones, name)) for name in names}
    borders = (0.0, *reached_s.values(), total_s)
    cost = Cost(total_s)
    for name, (start_s, end_s) in zip(parts, pairwise(borders), strict=True):
        setattr(cost, name, None if start_s is None or end_s is None else end_s - start_s)
    first_step_s, step = record.compile.first_step_s, record.phases.step
    if first_step_s is not None and step is not None and step.median_s is not None:
        cost.compile_s = max(0.0, first_step_s - step.median_s)
    ready_s, closed_s = reached_s["ready_s"], reached_s["window_closed_s"]
    if ready_s is not None and closed_s is not None:
        cost.overhead_s = total_s - (closed_s - ready_s) + (cost.compile_s or 0.0)
    return cost


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
