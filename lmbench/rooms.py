"""The rooms: every feature that is recorded beside a run's times, each declared once.

A room with a pass is a way to look at a cell: a sweep sets its options, `lmbench fit` and `lmbench.measure` attach its
observer and complete the record with its reader. Classes and functions are names (`module:name`), so that rooms are
known without PyTorch. An installed package adds a room by an entry point of the group `lmbench.rooms`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from msgspec import Struct

from lmbench.errors import UsageError, error_line, suggest

#: The group of entry points by which installed packages bring rooms.
GROUP = "lmbench.rooms"


class Room(Struct, frozen=True, forbid_unknown_fields=True):
    """One feature.

    A room of an installed package has its part of the record in `RunRecord.rooms`, under its name: `rooms.NAME`.

    Attributes:
        name: name of the room, of the group of its settings (`--NAME.*`), and in a sweep's `passes`.
        settings: class of its settings, a dataclass; empty without settings.
        switch: the setting that attaches the observer.
        observer: class of the callback that records.
        arguments: names of the observer's arguments; each is a setting too. An observer that takes `steps` looks at
            these alone: they are the run's window.
        options: options that the pass sets, by dotted names.
        label: words that follow "3 runs" in a sentence: `under a profiler`.
        has_timing: whether the run's step times are undisturbed by the observer.
        evidence: field of a run's record that is set if the run was of this pass, or the field and its value
            (`clock=sync`); empty where no field shows it.
        recording: field of the record with the name of the file that the run leaves in its folder.
        command: lmbench's command that shows the recording; empty where there is none. A package brings no command.
        reader: function that completes the record from the recording. It takes the run's folder and returns the value
            of the record's `field`, and guards.
        field: field of the record that the reader fills, of an installed package `rooms.NAME`.
        record: class of that field: a dataclass of `lmbench.records.field`, whose fields `lmbench fields` and the
            columns of reports then know. Without one the field is a mapping.
        scalars: class of the scalars that the observer logs, described in the same way.
        outcomes: outcomes of runs whose recording is read when they end.
        noun: word for the recording in the message that it cannot be read.
        columns: the `lmbench.report.view.Feature` that the room adds to reports.
        guide: text of the room's page in the guide, Markdown: `loss_spread:__doc__`.
    """

    name: str
    settings: str = ""
    switch: str = ""
    observer: str = ""
    arguments: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    label: str = ""
    has_timing: bool = False
    evidence: str = ""
    recording: str = ""
    command: str = ""
    reader: str = ""
    field: str = ""
    record: str = ""
    outcomes: tuple[str, ...] = ("ok",)
    noun: str = "recording"
    columns: str = ""
    scalars: str = ""
    guide: str = ""

    def load(self, key: str) -> Any:
        """The class, function or text that a key names.

        Raises:
            UsageError: there is none, a class is no dataclass, or the settings lack the switch or an argument.
        """
        name = getattr(self, key)
        try:
            loaded = resolve_name(name)
            known = [field.name for field in fields(loaded)] if key in ("settings", "record", "scalars") else []
        except Exception as error:
            raise UsageError(f"the room {self.name}: {key} {name!r} cannot be loaded ({error})") from error
        for setting in filter(None, (self.switch, *self.arguments)) if key == "settings" else ():
            if setting not in known:
                raise UsageError(f"the room {self.name}: {name} has no setting {setting!r}{suggest(setting, known)}")
        return loaded


_OWN = (
    Room("attention", columns="lmbench.attention:ATTENTION"),
    Room("convergence", columns="lmbench.convergence.in_report:CONVERGENCE"),
    # The measurement itself, which every run is. A run belongs to the last pass whose evidence it has.
    Room("timing", has_timing=True, evidence="schema_version"),
    Room(
        "sync",
        options={"timer.clock": "sync"},
        label="with clock sync (synchronized at every phase)",
        evidence="clock=sync",
    ),
    Room(
        "kernels",
        options={"trainer.profiler": "kernels"},
        label="under a profiler",
        evidence="is_profiled",
        recording="profile.trace_file",
        command="kernels",
        reader="lmbench.kernels.findings:examine_run",
        field="kernels",
        record="lmbench.records.examined:KernelSummary",
        noun="trace",
        columns="lmbench.kernels.in_report:KERNELS",
    ),
    Room(
        "memory",
        settings="lmbench.memory:MemorySettings",
        switch="history",
        observer="lmbench.callbacks:MemoryHistory",
        arguments=("steps", "max_entries"),
        # The timing pass predicts the memory already.
        options={"memory.history": True, "memory.predict": False},
        label="with the allocator's history",
        evidence="memory_history",
        recording="memory_history.snapshot_file",
        command="memory",
        reader="lmbench.memory.findings:examine_run",
        field="memory_history",
        record="lmbench.records.examined:MemoryHistoryRecord",
        outcomes=("ok", "oom"),
        noun="snapshot",
        columns="lmbench.memory.timeline:MEMORY",
    ),
    Room(
        "dtypes",
        settings="lmbench.dtypes:DtypeSettings",
        switch="record",
        observer="lmbench.callbacks:DtypeRecorder",
        options={"dtypes.record": True},
        label="with dtypes noted",
        # Dtypes are recorded in a probe step, so the window's steps run at their own speed.
        has_timing=True,
        recording="dtypes.notes_file",
        command="dtypes",
    ),
)


def _installed() -> Iterator[Room]:
    """The rooms of installed packages.

    Raises:
        UsageError: one cannot be loaded, is no Room, has a command, or has the name of another.
    """
    names = {room.name for room in _OWN}
    for entry in sorted(entry_points(group=GROUP)):
        origin = f"the room {entry.value} of {entry.dist.name if entry.dist else 'a package'}"
        try:
            room = entry.load()
        except Exception as error:
            reason = f"cannot be loaded ({error_line(error)}); repair or uninstall the package"
            raise UsageError(f"{origin} {reason}") from error
        if not isinstance(room, Room):
            raise UsageError(f"{origin} is {type(room).__name__}; it must be a lmbench.rooms.Room")
        if room.command:
            raise UsageError(f"{origin} has the command {room.command!r}; commands are lmbench's own: leave it out")
        if room.name in names:
            raise UsageError(f"{origin} is called {room.name!r} as another one; rename or uninstall it")
        names.add(room.name)
        yield room


INSTALLED = (*_installed(),)
ROOMS = (*_OWN, *INSTALLED)
