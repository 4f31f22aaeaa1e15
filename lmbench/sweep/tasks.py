"""A sweep on other machines: rounds of repeats as tasks of an engine, the sweep's folder as the truth.

A task is `lmbench sweep FOLDER --rounds N`, started on a machine that sees the folder: what is compared within a round
ran on one host. The engine only starts tasks, and knows which are over; what they measured stands in the folder. So a
task that ends without a word has its rows, too, and another start of the sweep, here or there, goes on from the folder.

Run as a program, with the folder, a round and a text that only this submission's folder holds, this is a task.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct, to_builtins

import lmbench
from lmbench.errors import ExitCode, UsageError, find_modules_in_current_folder, import_named, tell
from lmbench.files import Unreadable, read_file
from lmbench.masking import secrets_of
from lmbench.records.codec import DamagedRecord, decode, indented_json
from lmbench.records.load import is_run_folder
from lmbench.records.run import RunRecord
from lmbench.records.store import MAX_SWEEP_BYTES, RUNS_FOLDER, write_whole
from lmbench.report.units import duration
from lmbench.sweep.file import Options
from lmbench.sweep.folder import FolderTaken
from lmbench.sweep.outcome import End, last_lines
from lmbench.sweep.plan import Job, Plan
from lmbench.sweep.rows import Rows

#: What a folder keeps of its tasks.
TASKS_FILE = "tasks.json"
#: What remains of SLURM's variables in a task: by the others Lightning would take each cell for one of several ranks.
_SLURM_KEPT = ("SLURM_JOB_ID", "SLURM_CONF")
_POLL_S = 5.0
#: Imports, and the checks before the first cell.
_START_S = 600.0


@dataclass(frozen=True)
class Needs:
    """What a task is to be given, for the largest of its cells: nodes, ranks and GPUs of a node, the time at most."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time_s: float


@dataclass(frozen=True)
class TaskState:
    """Where a task stands, in the engine's word for it (`PENDING`, `TIMEOUT`); `log` is where its output went."""

    word: str
    is_over: bool
    log: Path | None = None


class Engine(Protocol):
    """Starts tasks on machines that see the sweep's folder. A class of the user's is named by its path
    (`--on my_module.MyEngine`), and made without arguments."""

    def describe(self, commands: Sequence[Sequence[str]], needs: Needs, folder: Path) -> str:
        """What `submit` would start; asked for first, so that it refuses what cannot be (UsageError)."""

    def submit(self, commands: Sequence[Sequence[str]], needs: Needs, folder: Path) -> list[str]:
        """Start each command once, as a task; returns their names."""

    def states(self, tasks: Sequence[str], folder: Path) -> Mapping[str, TaskState]:
        """Where tasks stand. One that is left out is not known (now): a moment's silence is no end."""

    def cancel(self, tasks: Sequence[str], folder: Path) -> None:
        """End tasks, whether they have begun or not."""


class _Submission(Struct):
    """`tasks.json`: the round of each task; and what every task compares with its own machine."""

    probe: str
    versions: dict[str, str]
    tasks: dict[str, int]


@dataclass
class TaskExecution:
    """A plan being carried out by tasks of an engine, with its rows."""

    rows: Rows
    engine: Engine
    on_interrupt: Literal["ask", "leave", "cancel"] = "ask"

    def __post_init__(self) -> None:
        self._plan = plan = self.rows.plan
        for name, _ in secrets_of([cell.options for cell in plan.cells]):
            raise UsageError(f"{name} is a secret, and the folder that tasks go by keeps none; export it as a variable")
        self._folder, self._path = self.rows.folder, self.rows.folder.path
        if plan.file.largest is not None:
            raise UsageError(f"--on: this sweep looks for the largest {plan.file.largest.option}, on one machine")
        runs = max(len(plan.round(repeat)) for repeat in plan.chosen)
        nodes, devices = map(max, zip(*map(plan.ranks, plan.cells), strict=True))
        on_cpu = all(plan.option(cell, "trainer.accelerator") == "cpu" for cell in plan.cells)
        self._needs = Needs(nodes, devices, 0 if on_cpu else devices, runs * plan.file.timeout_s + _START_S)
        # Runs that nobody has closed, by name.
        self._open: dict[str, Job] = {}

    def describe(self) -> str:
        """What would be submitted."""
        needs, count = self._needs, len(self._plan.chosen)
        hours = count * needs.nodes * needs.gpus_per_node * needs.time_s / 3600
        return (
            f"tasks: {count}, each a round of {len(self._plan.cells)} cells on {needs.nodes} x {needs.gpus_per_node} "
            f"GPUs, in at most {duration(needs.time_s)}; at most {hours:.3g} GPU hours in all (time limits)\n"
            + self.engine.describe(self._commands(self._plan.chosen, "PROBE"), needs, self._path)
        )

    def run(self, is_enough: Callable[[int], bool] = lambda rounds: False) -> None:
        """Submit what nobody measures, and watch the folder until all of it is there, or as much as is enough.

        Raises:
            UsageError: the engine refuses.
            KeyboardInterrupt, SystemExit: an interruption; the tasks were left or ended.
        """
        # None where there is no file, or one that is not lmbench's.
        before = _Submission("", {}, {})
        with suppress(Unreadable, DamagedRecord):
            before = decode(read_file(self._path / TASKS_FILE, MAX_SWEEP_BYTES), _Submission)
        states = self.engine.states([*before.tasks], self._path) if before.tasks else {}
        alive = {task: repeat for task, repeat in before.tasks.items() if task in states and not states[task].is_over}
        taken = {*alive.values()}
        self._folder.open(self._plan, [repeat for repeat in self._plan.chosen if repeat not in taken])
        for job in self._plan.jobs():
            if job.repeat not in taken:
                record = self.rows.kept(job)
            elif (record := self._folder.final(job)) is not None:
                self.rows.keep(job, record)
            if record is None:
                self._open[job.name] = job
        self._folder.close()
        if wanted := sorted({job.repeat for job in self._open.values()} - taken):
            submission = _Submission(secrets.token_hex(8), versions(), alive)
            self._write(submission)
            names = self.engine.submit(self._commands(wanted, submission.probe), self._needs, self._path)
            alive |= dict(zip(names, wanted, strict=True))
            self._write(submission)
        try:
            self._watch(alive, is_enough)
        except (KeyboardInterrupt, SystemExit):
            self._leave_or_cancel([*alive])
            raise

    def _watch(self, alive: dict[str, int], is_enough: Callable[[int], bool]) -> None:
        """Until all tasks are over, or enough of them; those that are over leave `alive`."""
        progress, submitted, states = self.rows.progress, len(alive), dict[str, TaskState]()
        if alive:
            progress.keep(f"tasks: {', '.join(alive)}")
            progress.begin("")
        while alive:
            time.sleep(_POLL_S)
            self._look()
            # Whatever the engine says: what a task measures is there or it is not.
            left = {job.repeat for job in self._open.values()}
            for task, repeat in [*alive.items()]:
                if repeat not in left or self._is_settled(task, repeat, states.get(task)):
                    del alive[task]
                    if is_enough(submitted - len(alive)):
                        self.engine.cancel([*alive], self._path)
                        return
            states = dict(self.engine.states([*alive], self._path))
            words = [state.word for state in states.values()]
            progress.note(", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words)))
            progress.show()

    def _look(self) -> None:
        """Tell of every run that came to its end since the last look. One that was interrupted did not: the engine may
        put its task back into the queue."""
        for job in [*self._open.values()]:
            if (record := self._folder.final(job)) is not None and record.sweep is not None:
                self._close(job, record)

    def _close(self, job: Job, record: RunRecord) -> None:
        del self._open[job.name]
        self.rows.ended(job, record)
        self.rows.progress.begin("")

    def _is_settled(self, task: str, repeat: int, state: TaskState | None) -> bool:
        """Give every run of a task that was over at the last look its row: also the one that it was in, and those not
        begun. False while it is not over, or a process of it closes its record."""
        if state is None or not state.is_over:
            return False
        try:
            self._folder.open(self._plan, [repeat])
        except FolderTaken:
            return False
        said = last_lines(state.log, 1) if state.log is not None else []
        last = f"its last words: {said[0]}" if said else "it said nothing"
        cause = f"task {task} ended: {state.word}; {last}"
        self._look()
        for job in self._plan.round(repeat):
            if job.name in self._open:
                is_killed = state.word == "OUT_OF_MEMORY" and is_run_folder(self._folder.runs / job.name)
                evidence = cause if is_killed else None
                end = End(-signal.SIGKILL, "itself" if is_killed else "task", 0.0, 0.0, evidence, cause)
                self._close(job, self.rows.close(job, job.cell.words(self._folder.config_path(job.cell)), end))
        self._folder.close()
        return True

    def _leave_or_cancel(self, tasks: Sequence[str]) -> None:
        choice = self.on_interrupt
        if choice == "ask" and sys.stdin.isatty():
            self.rows.progress.line.clear()
            answer = input(f"lmbench: sweep: end the {len(tasks)} tasks that are not over? [y/N] ")
            choice = "cancel" if answer.strip().lower().startswith("y") else "leave"
        if choice == "cancel":
            self.engine.cancel(tasks, self._path)
        self.rows.progress.keep(f"tasks {'ended' if choice == 'cancel' else 'go on'}: {', '.join(tasks)}")

    def _commands(self, rounds: Sequence[int], probe: str) -> list[list[str]]:
        head = [sys.executable, "-P", "-m", "lmbench.sweep.tasks", str(self._path)]
        return [[*head, str(repeat), probe] for repeat in rounds]

    def _write(self, submission: _Submission) -> None:
        write_whole(self._path / TASKS_FILE, indented_json(to_builtins(submission)))


def make_engine(on: str, options: Options) -> Engine | None:
    """What `--on` names, None for this machine; takes its options (`slurm.partition`) out of the others.

    Raises:
        UsageError: there is no such engine, it does not work here, or it does not take these options.
    """
    own = {name.removeprefix("slurm."): options.pop(name) for name in [*options] if name.startswith("slurm.")}
    if on == "slurm":
        from lmbench.sweep.slurm import Slurm

        return Slurm(own)
    if own:
        raise UsageError(f"--slurm.{next(iter(own))} belongs to --on slurm")
    if on == "local":
        return None
    find_modules_in_current_folder()
    named = import_named(f"--on {on} is neither local nor slurm", on)
    if not isinstance(named, type):
        raise UsageError(f"--on {on} is no class of an engine")
    engine: Engine = named()
    return engine


def merge(plan: Plan, path: Path, other: Path, is_dry: bool) -> None:
    """Copy the runs of another folder of the same sweep, measured elsewhere, into its folder; with `is_dry` only look
    whether that can be done.

    Raises:
        UsageError: it is another sweep's, or both have a run of the same cell and repeat.
    """
    named = {job.name for job in plan.jobs()}
    runs = [run for run in sorted((other / RUNS_FOLDER).glob("*")) if is_run_folder(run)]
    if not runs:
        raise UsageError(f"--merge {other}: there are no runs in {other / RUNS_FOLDER}")
    for run in runs:
        if run.name not in named:
            raise UsageError(f"--merge {other}: {run.name} is no run of this sweep; merge folders of one study")
        if (path / RUNS_FOLDER / run.name).exists():
            raise UsageError(f"--merge {other}: {run.name} is here already; one would hide the other: remove one")
    for run in () if is_dry else runs:
        shutil.copytree(run, path / RUNS_FOLDER / run.name, symlinks=True)


def versions() -> dict[str, str]:
    """What has to be the same where a sweep is planned and where it is measured."""
    source = hashlib.sha256()
    for path in sorted(Path(lmbench.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return {
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "lightning": metadata.version("lightning"),
        "lmbench": f"{lmbench.__version__} ({source.hexdigest()[:12]})",
    }


def become_task(folder: str, repeat: str, probe: str) -> ExitCode:
    """Measure a round of a sweep in this process, where its machine sees the folder and has what the sweep was planned
    with; else the exit code."""
    host = platform.node()
    try:
        submission = decode(read_file(Path(folder, TASKS_FILE), MAX_SWEEP_BYTES), _Submission)
    except (Unreadable, DamagedRecord):
        submission = None
    if submission is None or submission.probe != probe:
        tell(f"{host} does not see {folder} as the machine that submitted does; give a --results_dir that nodes share")
        return ExitCode.USAGE
    here = versions()
    for name, version in submission.versions.items():
        if here.get(name) != version:
            tell(f"{host} has {name} {here.get(name)}, the machine that submitted {version}; use one installation")
            return ExitCode.USAGE
    # By these Lightning would take each cell for one of several ranks.
    for name in [name for name in os.environ if name.startswith("SLURM_") and name not in _SLURM_KEPT]:
        del os.environ[name]
    words = ["-P", "-m", "lmbench", "sweep", folder, "--rounds", repeat, "--trust"]
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    sys.exit(become_task(*sys.argv[1:]))
