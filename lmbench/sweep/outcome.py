"""What only the sweep can say in a run's record: how its process ended where that could not record it, and its cost."""

from __future__ import annotations

import math
import re
import shlex
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from msgspec import structs

from lmbench.errors import ExitCode
from lmbench.masking import masked_words
from lmbench.records.load import Run
from lmbench.records.measured import RunError
from lmbench.records.run import SCHEMA_VERSION, Cost, RunRecord
from lmbench.records.vocabulary import OUTCOMES, RUNNING
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

    @staticmethod
    def of(record: RunRecord) -> Ending:
        return Ending(record.outcome, record.error, record.exit_code)

    @property
    def is_hopeless(self) -> bool:
        """Whether other repeats of the same cell would end in the same way."""
        return self.outcome in ("oom", "timeout") or (self.outcome == "error" and self.exit_code == ExitCode.USAGE)

    def skipping(self) -> Ending:
        """The ending of a repeat that would only do again what this first repeat failed at."""
        error = self.error or RunError()
        message = f"repeat 0 ended with {self.outcome}: {error.message}"
        return Ending("skipped", RunError("Skipped", message, error.phase))


def new_record(run_id: str, words: Sequence[str]) -> RunRecord:
    """The record of a run whose process left none."""
    argv = masked_words(words)
    replay = shlex.join(["lmbench", *argv])
    return RunRecord(SCHEMA_VERSION, RUNNING, run_id=run_id, command=words[0], argv=argv, replay_command=replay)


#: How a process ended that left no record, by its exit code: the outcome and the error's kind.
_BY_CODE: dict[int, tuple[str, str]] = {
    ExitCode.OK: ("error", "NoResult"),
    ExitCode.USAGE: ("error", "UsageError"),
    ExitCode.OUT_OF_MEMORY: ("oom", "OutOfMemory"),
    ExitCode.USER_CODE: ("error", "UserCode"),
    ExitCode.INTERRUPTED: ("interrupted", "Interrupted"),
    ExitCode.TERMINATED: ("interrupted", "Interrupted"),
}


def judge(run: Run | None, end: End, timeout_s: float, log: Path) -> Ending:
    """How a run ended, from what its process wrote (None: nothing) and how that ended.

    What the process recorded itself stands, unless the sweep ended it at its time limit, or the kernel ended a part of
    it for lack of memory.
    """
    recorded = Ending.of(run.record) if run is not None and run.outcome in OUTCOMES else Ending("")
    lines, memory, signal_name = last_lines(log), end.oom_evidence, end.signal_name
    last = f"; its last words: {' | '.join(lines)}" if lines else "; it said nothing"
    outcome, kind = _BY_CODE.get(end.code, ("error", "ExitCode"))
    # lmbench's own last line says all that its exit code means.
    own_lines = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    message = (
        own_lines[-1]
        if own_lines and end.code in _BY_CODE
        else f"left no result and ended with exit code {end.code}{last}"
    )
    # The first row whose condition holds: outcome, the error's kind, its message.
    table = (
        (end.by == "timeout" and recorded.outcome in ("", "interrupted"),
         "timeout", "Timeout", f"no end within {timeout_s:g} s; it was stopped"),
        # A loader's process, say, whose end the main one could not explain.
        (memory and recorded.outcome == "error",
         "oom", "OutOfMemoryKill", f"{memory}; {recorded.error and recorded.error.message}"),
        (recorded.outcome, "", "", ""),
        (end.by == "interruption", "interrupted", "Interrupted", "the sweep was stopped"),
        (memory and (signal_name or end.code >= _SIGNALLED),
         "oom", "OutOfMemoryKill", f"the kernel ended it for lack of memory ({memory}){last}"),
        (end.lost, "error", "ServerLost", str(end.lost)),
        (signal_name, "error", str(signal_name), f"ended by {signal_name}{last}"),
        (True, outcome, kind, message),
    )  # fmt: skip
    outcome, kind, message = next(row[1:] for row in table if row[0])
    if not outcome:
        return recorded
    phase = "setup"
    if run is not None and run.outcome in OUTCOMES and run.record.error is not None and run.record.error.phase:
        phase = run.record.error.phase
    elif run is not None and run.record.environment is not None:
        phase = (run.steps[-1].stage if run.steps else None) or "warmup"
    error = RunError(
        kind, " ".join(message.split())[:_MOST_MESSAGE], phase, where="host" if kind == "OutOfMemoryKill" else None
    )
    return Ending(outcome, error, None if signal_name else end.code)


def last_lines(log: Path, count: int = 3) -> list[str]:
    """The last lines of a process's output that are not empty."""
    with suppress(OSError), log.open(errors="replace") as file:
        return list(deque(filter(None, (_ESCAPES.sub("", line).strip() for line in file)), count))
    return []


def cost_of(record: RunRecord, end: End) -> Cost:
    """Where the time of a run went, in seconds, from the milestones that its process recorded and the sweep's own
    clock; None for what was not reached.

    The parts lie from the launch to the first milestone, between milestones, and from the last one to the end.
    """
    total_s = end.ended_s - end.launched_s
    # Without warm-up the window opened before step 0, which is a part of it.
    left_out = () if record.window.warmup_steps else ("first_step_s",)
    parts = [name for name in Cost.__struct_fields__ if name not in ("total_s", "overhead_s", "compile_s", *left_out)]
    # The process began after it was launched, by what the kernel dates it.
    began_s = math.nan if record.process_start_s is None else record.process_start_s - end.launched_s
    reached_s = {
        name: began_s + (math.nan if value is None else value)
        for name, value in structs.asdict(record.milestones).items()
        if name not in left_out
    }
    borders = pairwise((0.0, *reached_s.values(), total_s))
    cost_s = {name: end_s - start_s for name, (start_s, end_s) in zip(parts, borders, strict=True)}
    first_step_s, step = record.compile.first_step_s, record.phases.step
    if first_step_s is not None and step is not None and step.median_s is not None:
        cost_s["compile_s"] = max(0.0, first_step_s - step.median_s)
    measured_s = reached_s["window_closed_s"] - reached_s["ready_s"]
    cost_s["overhead_s"] = total_s - measured_s + cost_s.get("compile_s", 0.0)
    return Cost(total_s, **{name: value for name, value in cost_s.items() if not math.isnan(value)})
