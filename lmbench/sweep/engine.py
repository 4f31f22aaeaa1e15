"""What a sweep asks of an engine, which starts its tasks on other machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

#: What an interruption does to tasks that are not over.
OnInterrupt = Literal["ask", "leave", "cancel"]


@dataclass(frozen=True)
class Needs:
    """Resources of a task, enough for the largest of its cells. `time_s` is its time limit."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time_s: float


@dataclass(frozen=True)
class TaskState:
    """The state of a task. `word` is the engine's name for it (`PENDING`, `TIMEOUT`), `log` the file of its output."""

    word: str
    is_over: bool
    log: Path | None = None


class Engine(Protocol):
    """Starts tasks on machines that see the sweep's folder.

    `--on my_module.MyEngine` makes an engine of the user's class, without arguments.
    """

    def describe(self, commands: Sequence[Sequence[str]], needs: Needs, folder: Path) -> str:
        """Describe what `submit` would start. Called before it, to raise UsageError for what cannot be started."""

    def submit(self, commands: Sequence[Sequence[str]], needs: Needs, folder: Path) -> list[str]:
        """Start each command as a task, and return the names of the tasks."""

    def states(self, tasks: Sequence[str], folder: Path) -> Mapping[str, TaskState]:
        """The states of tasks. A task whose state is unknown at the moment is left out, and is not taken as over."""

    def cancel(self, tasks: Sequence[str], folder: Path) -> None:
        """End tasks, whether they have begun or not."""
