"""Reading results: what is damaged or was killed is said, and never fatal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.files import Bounded, Unreadable, open_file, read_file
from lmbench.records.codec import DamagedRecord, OtherSchema, decode_run, decode_step
from lmbench.records.process import is_running
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RUN_FILE, STEPS_FILE
from lmbench.records.vocabulary import DAMAGED, KILLED, OUTCOMES, RUNNING

#: A real run.json has 20 kB; its content takes up to twenty times as much memory.
MAX_RUN_BYTES = 8 * 2**20
#: A step takes 1 kB, in steps.jsonl as well as in memory.
MAX_STEPS = 1_000_000
MAX_STEPS_BYTES = 2 * 2**30
MAX_LINE_BYTES = 64 * 2**10
_CHUNK_BYTES = 2**20


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
    folder = _folder_of(Path(path))
    if not is_run_folder(folder):
        raise UsageError(f"{str(path)!r} is no lmbench result: it has no {RUN_FILE}; give a run's folder")
    record, run_damage = _read_run(folder)
    steps, steps_damage = _read_steps(folder / STEPS_FILE) if with_steps else ([], None)
    damage = "; ".join(filter(None, (run_damage, steps_damage)))
    return Run(folder, record, steps, _outcome(record), damage or None)


def is_run_folder(path: Path) -> bool:
    """Whether the folder holds a result's files, readable or not."""
    return any(os.path.lexists(path / name) for name in (RUN_FILE, STEPS_FILE))


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Every run's folder at or below the paths, each once, sorted.

    Raises UsageError for a path that does not exist or has no result at or below it.
    """
    found: set[Path] = set()
    for path in paths:
        root = _folder_of(Path(path))
        if not os.path.isdir(root):  # noqa: PTH112 (which knows of no name that is too long)
            raise UsageError(f"{str(path)!r} does not exist; give a run's folder or a folder of runs")
        below = [folder.resolve() for folder in _walk(root)]
        if not below:
            raise UsageError(f"{str(path)!r} holds no lmbench result; give a run's folder or a folder of runs")
        found.update(below)
    return sorted(found)


def _folder_of(path: Path) -> Path:
    """The run's folder, where the run.json in it was given."""
    return path.parent if path.name == RUN_FILE and not path.is_dir() else path


def _walk(root: Path) -> Iterable[Path]:
    # Links to folders are not followed, so that one to a folder above does not go round.
    for folder, subfolders, files in os.walk(root):
        if any(name in files or name in subfolders for name in (RUN_FILE, STEPS_FILE)):
            subfolders.clear()
            yield Path(folder)


def _read_run(folder: Path) -> tuple[RunRecord, str | None]:
    path = folder / RUN_FILE
    try:
        return decode_run(read_file(path, MAX_RUN_BYTES)), None
    except Unreadable as error:
        said = f"{RUN_FILE} is missing" if error.is_missing else f"{RUN_FILE} is not read: {error}"
        return RunRecord(SCHEMA_VERSION, DAMAGED), said
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
    steps: list[StepRecord] = []
    bad_count, first_bad = 0, 0
    try:
        for number, step in read_steps(path):
            if step is None:
                bad_count, first_bad = bad_count + 1, first_bad or number
            elif len(steps) < MAX_STEPS:
                steps.append(step)
            else:
                return steps, f"{STEPS_FILE}: more than {MAX_STEPS:,} steps; the others are not read"
    except Unreadable as error:
        return steps, None if error.is_missing else f"{STEPS_FILE} is not read to its end: {error}"
    if not bad_count:
        return steps, None
    return steps, f"{STEPS_FILE}: {bad_count} unreadable line{'s' * (bad_count > 1)}, the first is line {first_bad}"


def read_steps(path: Path) -> Iterator[tuple[int, StepRecord | None]]:
    """Line numbers of a steps.jsonl with their records, None for a line that is none; read as far as is asked.

    Empty lines and a torn last one are left out. Raises Unreadable.
    """
    number, rest, is_too_long = 0, b"", False
    with open_file(path) as file:
        stream = Bounded(file, MAX_STEPS_BYTES)
        while chunk := stream.read(_CHUNK_BYTES):
            if is_too_long:
                if b"\n" not in chunk:
                    continue
                chunk, is_too_long = chunk.partition(b"\n")[2], False
            *lines, rest = (rest + chunk).split(b"\n")
            for index, line in enumerate(lines, start=number + 1):
                if line:
                    yield index, _step(line)
            number += len(lines)
            if len(rest) > MAX_LINE_BYTES:
                number, rest, is_too_long = number + 1, b"", True
                yield number, None
    if rest and (last := _step(rest)) is not None:
        yield number + 1, last


def _step(line: bytes) -> StepRecord | None:
    try:
        return decode_step(line)
    except DamagedRecord:
        return None


def _outcome(record: RunRecord) -> str:
    if record.outcome in OUTCOMES:
        return record.outcome
    if record.outcome != RUNNING:
        return DAMAGED
    alive = record.pid is not None and is_running(record.pid, record.boot_id, record.process_start_s)
    return RUNNING if alive else KILLED
