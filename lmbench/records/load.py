"""Reading results: what is damaged or was killed is said, and never fatal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.records.codec import DamagedRecord, OtherSchema, decode_run, decode_step
from lmbench.records.process import is_running
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RUN_FILE, STEPS_FILE
from lmbench.records.vocabulary import DAMAGED, KILLED, OUTCOMES, RUNNING


@dataclass(frozen=True)
class Run:
    """A result as it was read.

    `outcome` is one of OUTCOMES, or `running`, `killed` (it says running, and its process is gone), `damaged` (run.json
    does not fit; every field of `record` is None then). `damage` says in one line what could not be read, None if all
    could.
    """

    path: Path
    record: RunRecord
    steps: list[StepRecord]
    outcome: str
    damage: str | None = None

    @property
    def run_id(self) -> str:
        return self.path.name


def load_run(path: str | Path, with_steps: bool = True) -> Run:
    """Read a run's folder (or the run.json in it), without its steps where the summary is enough.

    A torn last line of steps.jsonl is what a kill leaves and is ignored; any other unreadable line is damage,
    and the rest is kept. Raises UsageError for a folder that is no result and for a result of another schema
    version.
    """
    folder = Path(path)
    if folder.name == RUN_FILE and folder.is_file():
        folder = folder.parent
    if not is_run_folder(folder):
        raise UsageError(f"{str(path)!r} is no lmbench result: it has no {RUN_FILE}; give a run's folder")
    record, run_damage = _read_run(folder)
    steps, steps_damage = _read_steps(folder / STEPS_FILE) if with_steps else ([], None)
    damage = "; ".join(filter(None, (run_damage, steps_damage)))
    return Run(folder, record, steps, _outcome(record), damage or None)


def is_run_folder(path: Path) -> bool:
    """Whether the folder holds a result's files, readable or not."""
    return (path / RUN_FILE).is_file() or (path / STEPS_FILE).is_file()


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Every run's folder at or below the paths, each once, sorted.

    Raises UsageError for a path that does not exist or has no result at or below it.
    """
    found: set[Path] = set()
    for path in paths:
        root = Path(path)
        if root.name == RUN_FILE and root.is_file():
            root = root.parent
        if not root.is_dir():
            raise UsageError(f"{str(path)!r} does not exist; give a run's folder or a folder of runs")
        below = [folder.resolve() for folder in _walk(root)]
        if not below:
            raise UsageError(f"{str(path)!r} holds no lmbench result; give a run's folder or a folder of runs")
        found.update(below)
    return sorted(found)


def _walk(root: Path) -> Iterable[Path]:
    for folder, subfolders, files in os.walk(root):
        if RUN_FILE in files or STEPS_FILE in files:
            subfolders.clear()
            yield Path(folder)


def _read_run(folder: Path) -> tuple[RunRecord, str | None]:
    path = folder / RUN_FILE
    try:
        return decode_run(path.read_bytes()), None
    except FileNotFoundError:
        return RunRecord(SCHEMA_VERSION, DAMAGED), f"{RUN_FILE} is missing"
    except OtherSchema as other:
        if other.version is None:
            raise UsageError(
                f"{str(path)!r} is no lmbench result: it has no schema_version; give a run's folder"
            ) from None
        raise UsageError(
            f"{str(path)!r} has schema version {other.version}, this lmbench reads {SCHEMA_VERSION}; "
            "use the lmbench that wrote it"
        ) from None
    except DamagedRecord as error:
        return RunRecord(SCHEMA_VERSION, DAMAGED), f"{RUN_FILE} is damaged: {error}"


def _read_steps(path: Path) -> tuple[list[StepRecord], str | None]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], None
    steps, bad = [], []
    for line_number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            steps.append(decode_step(line))
        except DamagedRecord:
            if line_number < len(lines):
                bad.append(line_number)
    if not bad:
        return steps, None
    return steps, f"{STEPS_FILE}: {len(bad)} unreadable line{'s' * (len(bad) > 1)}, the first is line {bad[0]}"


def _outcome(record: RunRecord) -> str:
    if record.outcome in OUTCOMES:
        return record.outcome
    if record.outcome != RUNNING:
        return DAMAGED
    alive = record.pid is not None and is_running(record.pid, record.boot_id, record.process_start_s)
    return RUNNING if alive else KILLED
