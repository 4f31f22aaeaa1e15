"""Reading results: what is damaged or was killed is said, and never fatal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.records.codec import DamagedRecord, decode_run, decode_step
from lmbench.records.encoding import decode, encode
from lmbench.records.fields import SCHEMA_VERSION
from lmbench.records.process import is_running
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RUN_FILE, STEPS_FILE
from lmbench.records.vocabulary import DAMAGED, KILLED, OUTCOMES, RUNNING, Record


@dataclass(frozen=True)
class Run:
    """A result as it was read.

    `outcome` is one of OUTCOMES, or `running`, `killed` (it says running, and its process is gone), `damaged`
    (run.json cannot be read; `run` is empty then). `damage` says in one line what could not be read, None if
    all could.
    """

    path: Path
    run: Record
    steps: list[Record]
    outcome: str
    damage: str | None
    #: What was read, typed; every field None where run.json is damaged. (`run`, `steps` go with their last user.)
    record: RunRecord = field(default_factory=lambda: RunRecord(SCHEMA_VERSION, DAMAGED))
    step_records: list[StepRecord] = field(default_factory=list)

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
    run, run_damage = _read_run(folder)
    steps, steps_damage = _read_steps(folder / STEPS_FILE) if with_steps else ([], None)
    record, typed = RunRecord(SCHEMA_VERSION, DAMAGED), []
    if run_damage is None:
        try:
            record = decode_run((folder / RUN_FILE).read_bytes())
            typed = [decode_step(encode(step).encode()) for step in steps]
        except DamagedRecord as error:
            run, steps, run_damage = {}, [], f"{RUN_FILE} is damaged: {error}"
    damage = "; ".join(filter(None, (run_damage, steps_damage)))
    return Run(folder, run, steps, _outcome(run), damage or None, record, typed)


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


def _read_run(folder: Path) -> tuple[Record, str | None]:
    path = folder / RUN_FILE
    try:
        run = decode(path.read_bytes())
    except FileNotFoundError:
        return {}, f"{RUN_FILE} is missing"
    except ValueError as exc:
        return {}, f"{RUN_FILE} cannot be read: {exc}"
    if "schema_version" not in run:
        raise UsageError(f"{str(path)!r} is no lmbench result: it has no schema_version; give a run's folder")
    if run["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{str(path)!r} has schema version {run['schema_version']}, this lmbench reads {SCHEMA_VERSION}; "
            "use the lmbench that wrote it"
        )
    return run, None


def _read_steps(path: Path) -> tuple[list[Record], str | None]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], None
    steps, bad = [], []
    for line_number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            steps.append(decode(line))
        except ValueError:
            if line_number < len(lines):
                bad.append(line_number)
    if not bad:
        return steps, None
    return steps, f"{STEPS_FILE}: {len(bad)} unreadable line{'s' * (len(bad) > 1)}, the first is line {bad[0]}"


def _outcome(run: Record) -> str:
    outcome = run.get("outcome")
    if outcome in OUTCOMES:
        return str(outcome)
    if outcome != RUNNING:
        return DAMAGED
    pid = run.get("pid")
    alive = isinstance(pid, int) and is_running(pid, run.get("boot_id"), run.get("process_start_s"))
    return RUNNING if alive else KILLED
