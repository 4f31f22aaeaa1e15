"""The passes over a cell: the measurement itself, and further runs of the same cell under other instruments.

A pass is a table of passes.toml. A sweep sets its options; `lmbench fit` and `lmbench.measure` attach its callback and
complete the record with its reader. The report, the comparison and W&B look up whether its step times count, and what
its runs are called. The table has the names of callback and reader, since this module works without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from lmbench.records.measured import KernelSummary, MemoryHistoryRecord
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import Values

#: The measurement itself. A report joins the results of a cell's other passes to it.
TIMING = "timing"


class Pass(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to look at a cell.

    Attributes:
        name: name of the pass in a sweep's `passes` and on the axis `pass`.
        options: options that the pass sets, by dotted names.
        label: words that follow "3 runs" in a sentence: `under a profiler`.
        has_timing: whether the run's step times are undisturbed by the instrument.
        evidence: field of a run's record that is set if the run was of this pass, or the field and its value
            (`clock=sync`); empty where no field shows it.
        switch: option that attaches the callback; empty where the pass has none.
        callback: class of the callback, as `module:name`.
        arguments: names of the callback's arguments. Each is a setting beside the switch (`memory.steps`).
        recording: field of the record with the name of the file that the run leaves in its folder.
        command: command that shows the recording; empty where there is none.
        reader: function that completes the record from the recording, as `module:name`. It takes the run's folder and
            returns the value of the record's `field`, and guards.
        field: field of the record that the reader fills.
        outcomes: outcomes of runs whose recording is read when they end.
        noun: word for the recording in the message that it cannot be read.
    """

    name: str
    options: Values = {}
    label: str = ""
    has_timing: bool = False
    evidence: str = ""
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
        """An empty value for the record's `field`, until the reader fills it."""
        return KernelSummary() if self.field == "kernels" else MemoryHistoryRecord()

    def recorded(self, run: RunRecord) -> str | None:
        """Name of the recording in the run's folder; None where there is none."""
        name: str | None = value_at(run, self.recording) if self.recording else None
        return name

    def is_of(self, run: RunRecord) -> bool:
        """Whether the run's record has the evidence of this pass."""
        name, _, value = self.evidence.partition("=")
        recorded = value_at(run, name) if name else None
        return recorded == value if value else bool(recorded)


#: The passes by name, the measurement itself first. A run belongs to the last pass whose evidence it has.
PASS: Mapping[str, Pass] = {
    name: msgspec.convert({"name": name, **content}, Pass)
    for name, content in msgspec.toml.decode(Path(__file__).with_name("passes.toml").read_bytes()).items()
}
PASSES = tuple(PASS.values())


def pass_of(run: RunRecord, axes: Values | None = None) -> Pass:
    """The pass of a run: the one that its sweep's axes name, else the last one whose evidence its record has."""
    planned = PASS.get(str((axes or {}).get("pass", TIMING)), PASS[TIMING])
    if planned.name != TIMING:
        return planned
    return next(candidate for candidate in reversed(PASSES) if candidate.is_of(run))
