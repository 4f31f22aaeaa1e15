"""The passes over a cell: the measurement itself, and the same cell under another instrument.

A pass is one entry of `PASSES`. A sweep sets its options, `lmbench fit` and `lmbench.measure` attach its callback and
complete the record by its reader, and the report, the comparison and W&B ask it whether its step times count and how
its runs are named. Callback and reader stand here by their names, since this module works without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from lmbench.records.instruments import KernelSummary, MemoryHistoryRecord
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at

#: The pass that every other pass of a cell is joined to.
TIMING = "timing"


@dataclass(frozen=True)
class Pass:
    """One way to look at a cell.

    Attributes:
        name: what a sweep's `passes` and the axis `pass` call it.
        options: what it sets, by dotted names.
        label: follows "3 runs" in a sentence: `under a profiler`.
        has_timing: whether the run's step times are the step's own speed.
        includes: whether a run's record shows that the run was of this pass.
        switch: the option that attaches the callback, empty where the pass has none.
        callback: its class, as `module:name`.
        arguments: names of the callback's arguments, which are settings beside the switch (`memory.steps`).
        recording: field of the record with the name of the file that the run left in its folder.
        command: the command that shows the recording, empty where no command does.
        reader: completes the record from the recording, as `module:name`: takes the run's folder, returns what goes
            into the record's `field`, and guards.
        field: the field of the record that the reader fills, `content` its type.
        outcomes: outcomes of runs whose recording is read at their end.
        noun: what the recording is called where it cannot be read.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    has_timing: bool = False
    includes: Callable[[RunRecord], bool] = lambda run: False
    switch: str = ""
    callback: str = ""
    arguments: tuple[str, ...] = ()
    recording: str = ""
    command: str = ""
    reader: str = ""
    field: str = ""
    content: type[Struct] = Struct
    outcomes: tuple[str, ...] = ("ok",)
    noun: str = ""

    def recorded(self, run: RunRecord) -> str | None:
        """Name of the file that the run left in its folder, None where there is none."""
        name: str | None = value_at(run, self.recording) if self.recording else None
        return name


#: All passes, the measurement itself first. A run belongs to the last one that includes it.
PASSES = (
    Pass(TIMING, has_timing=True, includes=lambda run: True),
    Pass(
        "sync",
        {"timer.clock": "sync"},
        label="with clock sync (synchronized at every phase)",
        includes=lambda run: run.clock == "sync",
    ),
    Pass(
        "kernels",
        {"trainer.profiler": "kernels"},
        label="under a profiler",
        includes=lambda run: bool(run.is_profiled),
        recording="profile.trace_file",
        command="kernels",
        reader="lmbench.kernels.findings:examine_run",
        field="kernels",
        content=KernelSummary,
        noun="trace",
    ),
    Pass(
        "memory",
        # The timing pass has the prediction already.
        {"memory.history": True, "memory.predict": False},
        label="with the allocator's history",
        includes=lambda run: run.memory_history is not None,
        switch="memory.history",
        callback="lmbench.callbacks:MemoryHistory",
        arguments=("steps", "max_entries"),
        recording="memory_history.snapshot_file",
        command="memory",
        reader="lmbench.memory.timeline:examine_run",
        field="memory_history",
        content=MemoryHistoryRecord,
        outcomes=("ok", "oom"),
        noun="snapshot",
    ),
    Pass(
        "dtypes",
        {"dtypes.record": True},
        label="with dtypes noted",
        # They are noted on a probe step.
        has_timing=True,
        switch="dtypes.record",
        callback="lmbench.callbacks:DtypeRecorder",
        recording="dtypes.notes_file",
        command="dtypes",
    ),
)

#: By name.
PASS: Mapping[str, Pass] = {each.name: each for each in PASSES}


def pass_of(run: RunRecord, axes: Mapping[str, Any] | None = None) -> Pass:
    """The pass of a run: what its sweep's axes say, else what its record shows."""
    planned = PASS.get(str((axes or {}).get("pass", TIMING)), PASS[TIMING])
    return planned if planned.name != TIMING else next(each for each in reversed(PASSES) if each.includes(run))
