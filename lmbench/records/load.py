"""Reading results. A damaged or killed run is loaded as far as it can be read, and says so."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from lmbench.errors import UsageError, suggest
from lmbench.files import Unreadable, open_file, read_file
from lmbench.records.codec import DamagedRecord, OtherSchema, decode_run, decode_step
from lmbench.records.measured import Guard, Status
from lmbench.records.process import is_running
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RESULTS, RUN_FILE, STEPS_FILE
from lmbench.records.vocabulary import DAMAGED, KILLED, OUTCOMES, RUNNING

#: A usual run.json has 20 kB; its content takes up to twenty times as much memory.
MAX_RUN_BYTES = 8 * 2**20
#: A step takes 1 kB, both in steps.jsonl and in memory.
MAX_STEPS = 1_000_000
MAX_STEPS_BYTES = 2 * 2**30
MAX_LINE_BYTES = 64 * 2**10


@dataclass(frozen=True)
class StoredRun:
    """A run's result as it was read.

    `outcome` is one of OUTCOMES or of three other words. A run that is `running` still has its process; one that was
    `killed` says that it is running, but its process is gone. For a `damaged` one run.json could not be read, and all
    other fields of `record` are empty. `damage` describes in one line what could not be read; None if nothing.
    """

    path: Path
    record: RunRecord
    steps: list[StepRecord]
    outcome: str
    damage: str | None = None

    @property
    def run_id(self) -> str:
        return self.path.name


def load_run(path: str | Path, with_steps: bool = True) -> StoredRun:
    """Read a run's folder, or the folder of a run.json.

    A kill can leave a torn last line in steps.jsonl, which is ignored. Any other unreadable line counts as damage, and
    all other lines are kept.

    Args:
        with_steps: read the step records too, which the summary does not need.

    Raises:
        UsageError: the folder holds no result, or one of another schema version.
    """
    folder = _folder_of(Path(path))
    if not is_run_folder(folder):
        raise UsageError(
            f"{str(path)!r} is no lmbench result: it has no {RUN_FILE}; give a run's folder; `lmbench list SWEEP` "
            "shows those of a sweep"
        )
    record, run_damage = _read_run(folder)
    steps, steps_damage = _read_steps(folder / STEPS_FILE) if with_steps else ([], None)
    count, written = sum(step.stage == "window" for step in steps), record.window.steps or 0
    written -= record.unwritten_step_count or 0
    if with_steps and not steps_damage and count < written:
        steps_damage = f"{STEPS_FILE} has {count} steps of the window, {written} were written"
    damage = "; ".join(filter(None, (run_damage, steps_damage)))
    outcome = record.outcome if record.outcome in OUTCOMES else DAMAGED
    if record.outcome == RUNNING:
        is_alive = record.pid is not None and is_running(record.pid, record.boot_id, record.process_start_s)
        outcome = RUNNING if is_alive else KILLED
    return StoredRun(folder, record, steps, outcome, damage or None)


def load_known(folder: Path) -> StoredRun:
    """A run without its steps; `damage` says where another version of lmbench wrote it."""
    try:
        return load_run(folder, with_steps=False)
    except UsageError as error:
        # Messages about damage stand beside their run, and so do not repeat its path.
        damage = str(error).replace(repr(str(folder / RUN_FILE)), RUN_FILE)
        return StoredRun(folder, RunRecord(SCHEMA_VERSION, DAMAGED), [], DAMAGED, damage)


def process_of(run: StoredRun) -> tuple[object, ...]:
    """The identity of the process that measured a run; a copy of a result has the same identity.

    A run that never began has none but its folder: a sweep gives such runs to the same cells of several folders.
    """
    record = run.record
    process = (record.boot_id, record.pid, record.process_start_s)
    return process if None not in process else (record.run_id, record.started_at or run.path, *process)


def guards_by_name(runs: Iterable[StoredRun], status: Status) -> dict[str, list[Guard]]:
    """The guards of runs that have this status, by name; names and guards are in the order of the runs."""
    guards = defaultdict[str, list[Guard]](list)
    for guard in (guard for run in runs for guard in run.record.guards if guard.status == status):
        guards[guard.name].append(guard)
    return guards


def is_run_folder(path: Path) -> bool:
    """Whether the folder holds a run's files, readable or not."""
    return any(os.path.lexists(path / name) for name in (RUN_FILE, STEPS_FILE))


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Every run's folder at or below the paths, each once, sorted.

    Raises:
        UsageError: there is no path, or one does not exist or has no result at or below it.
    """
    if not (paths := list(paths)):
        raise UsageError("no result was named; name result folders, such as results")
    folders = set()
    for path in paths:
        root = _folder_of(Path(path))
        if not os.path.isdir(root):  # noqa: PTH112 (Path.is_dir raises on a name that is too long)
            hint = suggest(root.name, (result.name for result in RESULTS.glob("*")), f"{RESULTS}/{{}}")
            problem = "is no folder" if os.path.lexists(root) else "does not exist"
            raise UsageError(f"{str(path)!r} {problem}; give a run's folder or a folder of runs{hint}")
        below = set()
        # Links to folders are not followed, since a link to a parent folder would never end.
        for folder, subfolders, files in os.walk(root):
            if {RUN_FILE, STEPS_FILE} & {*files, *subfolders}:
                subfolders.clear()
                below.add(Path(folder).resolve())
            # A hidden folder holds runs that are being copied.
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        if not below:
            raise UsageError(f"{str(path)!r} holds no lmbench result; give a run's folder or a folder of runs")
        folders |= below
    return sorted(folders)


def _folder_of(path: Path) -> Path:
    """The folder of a run.json; any other path itself."""
    return path.parent if path.name == RUN_FILE and not path.is_dir() else path


def _read_run(folder: Path) -> tuple[RunRecord, str | None]:
    path = folder / RUN_FILE
    try:
        return decode_run(read_file(path, MAX_RUN_BYTES)), None
    except OtherSchema as other:
        raise UsageError(f"{str(path)!r} {other}") from None
    except Unreadable as error:
        problem = "is missing" if error.is_missing else f"is not read: {error}"
    except DamagedRecord as error:
        problem = f"is damaged: {error}"
    return RunRecord(SCHEMA_VERSION, DAMAGED), f"{RUN_FILE} {problem}"


def _read_steps(path: Path) -> tuple[list[StepRecord], str | None]:
    steps: list[StepRecord] = []
    # Counted, not collected: a file may have a billion bad lines.
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
        return steps, None if error.is_missing else f"{STEPS_FILE} is not read: {error}"
    except OSError as error:
        return steps, f"{STEPS_FILE} is not read to its end: {error.strerror}"
    if not bad_count:
        return steps, None
    return steps, f"{STEPS_FILE}: unreadable lines: {bad_count}, the first is line {first_bad}"


def read_steps(path: Path) -> Iterator[tuple[int, StepRecord | None]]:
    """Line numbers of a steps.jsonl with their records, None for an unreadable line.

    The file is read lazily. Empty lines and a torn last line are left out.

    Raises:
        Unreadable: the file is missing, not a regular file, or too large.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_STEPS_BYTES:
            raise Unreadable(f"it holds more than {MAX_STEPS_BYTES / 2**30:g} GiB")
        # A line longer than MAX_LINE_BYTES comes in several pieces; only the first is looked at.
        number, ends_line = 0, True
        for piece in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            starts_line = ends_line
            ends_line = piece.endswith(b"\n")
            if not starts_line:
                continue
            number += 1
            if piece == b"\n":
                continue
            try:
                yield number, decode_step(piece)
            except DamagedRecord:
                if ends_line or len(piece) == MAX_LINE_BYTES:
                    yield number, None


def first_steps(path: Path, count: int) -> Iterator[StepRecord]:
    """The first `count` step records of a run's folder, warm-up included; of a torn file those before the tear, of a
    missing one none."""
    with suppress(Unreadable):
        for _, step in islice(read_steps(path / STEPS_FILE), count):
            if step is None:
                return
            yield step
