"""The passes over a cell: the measurement itself, and further runs of the same cell under other observers."""

from __future__ import annotations

from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import Values
from lmbench.rooms import ROOMS, Room

#: The measurement itself. A report joins the results of a cell's other passes to it.
TIMING = "timing"
#: The passes by name, the measurement itself first.
PASS = {room.name: room for room in ROOMS if room.options or room.evidence}


def recording_of(run: RunRecord, room: Room) -> str | None:
    """Name of the room's recording in the run's folder; None where there is none."""
    name: str | None = value_at(run, room.recording) if room.recording else None
    return name


def pass_of(run: RunRecord, axes: Values | None = None) -> Room:
    """The pass of a run: the one that its sweep's axes name, else the last one whose evidence its record has."""
    planned = PASS.get(str((axes or {}).get("pass", TIMING)), PASS[TIMING])
    if planned.name != TIMING:
        return planned
    for room in reversed(PASS.values()):
        name, _, value = room.evidence.partition("=")
        recorded = value_at(run, name) if name else None
        if recorded and value in ("", recorded):
            return room
    return PASS[TIMING]
