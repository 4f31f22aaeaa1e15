"""The passes over a cell: the measurement itself, and the same cell under another instrument.

A pass is a table of passes.toml. A sweep sets its options, `lmbench fit` and `lmbench.measure` attach its callback and
complete the record by its reader, and the report, the comparison and W&B ask it whether its step times count and how
its runs are named. Callback and reader stand there by their names, since this module works without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lmbench.records.measured import KernelSummary, MemoryHistoryRecord
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at

#: The pass that every other pass of a cell is joined to.
TIMING = "timing"


class Pass(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to look at a cell.

    Attributes:
        name: what a sweep's `passes` and the axis `pass` call it.
        options: what it sets, by dotted names.
        label: follows "3 runs" in a sentence: `under a profiler`.
        has_timing: whether the run's step times are the step's own speed.
        includes: the field of a run's record that shows that the run was of this pass, with its value (`clock=sync`)
            where it is not enough that it is there; empty where nothing shows it.
        switch: the option that attaches the callback, empty where the pass has none.
        callback: its class, as `module:name`.
        arguments: names of the callback's arguments, which are settings beside the switch (`memory.steps`).
        recording: field of the record with the name of the file that the run left in its folder.
        command: the command that shows the recording, empty where no command does.
        reader: completes the record from the recording, as `module:name`: takes the run's folder, returns what goes
            into the record's `field`, and guards.
        field: the field of the record that the reader fills.
        outcomes: outcomes of runs whose recording is read at their end.
        noun: what the recording is called where it cannot be read.
    """

    name: str
    options: dict[str, Any] = {}
    label: str = ""
    has_timing: bool = False
    includes: str = ""
    switch: str = ""
    callback: str = ""
    arguments: tuple[str, ...] = ()
    recording: str = ""
    command: str = ""
    reader: str = ""
    field: str = ""
    outcomes: tuple[str, ...] = ("ok",)
    noun: str = ""

    def content(self) -> KernelSummary | MemoryHistoryRecord:
        """What the record has in `field` before the reader fills it."""
        return KernelSummary() if self.field == "kernels" else MemoryHistoryRecord()

    def recorded(self, run: RunRecord) -> str | None:
        """Name of the file that the run left in its folder, None where there is none."""
        name: str | None = value_at(run, self.recording) if self.recording else None
        return name

    def is_of(self, run: RunRecord) -> bool:
        """Whether the run's record shows that it was of this pass."""
        name, _, value = self.includes.partition("=")
        recorded = value_at(run, name) if name else None
        return recorded == value if value else bool(recorded)


#: By name, the measurement itself first. A run belongs to the last one that includes it.
PASS: Mapping[str, Pass] = {
    name: msgspec.convert({"name": name, **content}, Pass)
    for name, content in msgspec.toml.decode(Path(__file__).with_name("passes.toml").read_bytes()).items()
}
PASSES = tuple(PASS.values())


def pass_of(run: RunRecord, axes: Mapping[str, Any] | None = None) -> Pass:
    """The pass of a run: what its sweep's axes say, else what its record shows."""
    planned = PASS.get(str((axes or {}).get("pass", TIMING)), PASS[TIMING])
    return planned if planned.name != TIMING else next(each for each in reversed(PASSES) if each.is_of(run))
