"""A sweep on other machines: an engine runs each round of repeats as a task.

A task is `lmbench sweep FOLDER --rounds N` on a machine that sees the sweep's folder, so that all runs of a round share
a host. The engine only starts tasks and knows which are over. Results come from the folder alone. So rows are complete
even if a task ends without a word, and a sweep that is started again on any machine goes on.

Run as a program, this module is a task. Its arguments are the folder, the round, and the submission's probe: a random
text in the folder that proves that the task sees the same folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from msgspec import Struct, to_builtins

from lmbench.code_owners import own_folders
from lmbench.errors import ExitCode, UsageError, check_one_line, find_modules_in_current_folder, import_named, tell
from lmbench.masking import secrets_of
from lmbench.records.codec import find_packed, indented_json
from lmbench.records.load import is_run_folder
from lmbench.records.run import RunRecord
from lmbench.records.store import write_whole
from lmbench.report.units import duration, tally
from lmbench.sweep.engine import Engine, Needs, OnInterrupt, TaskState
from lmbench.sweep.file import Options
from lmbench.sweep.folder import FolderTaken
from lmbench.sweep.outcome import End, last_lines
from lmbench.sweep.plan import Job
from lmbench.sweep.rows import Rows
from lmbench.sweep.slurm import Slurm
from lmbench.version import __version__

#: The file in a sweep's folder that lists its tasks.
TASKS_FILE = "tasks.json"
#: The variables of SLURM that a task keeps. From the others Lightning concludes that each cell is one of several ranks.
_SLURM_KEPT = ("SLURM_JOB_ID", "SLURM_CONF")
_POLL_S = 5.0
#: Suffixes of the files that decide what is measured.
_SOURCES = (".py", ".toml", ".csv", ".yaml")
#: Time for imports and for the checks before the first cell.
_START_S = 600.0


class _Submission(Struct):
    """`tasks.json`: the round of each task, and the probe and versions that each task compares with its machine."""

    probe: str
    versions: dict[str, str]
    tasks: dict[str, int]


@dataclass
class TaskExecution:
    """A plan being carried out by tasks of an engine, with its rows.

    `on_interrupt` says whether an interruption leaves the tasks running, cancels them, or asks.
    """

    rows: Rows
    engine: Engine
    on_interrupt: OnInterrupt = "ask"

    def __post_init__(self) -> None:
        self._plan = plan = self.rows.plan
        for name, _ in secrets_of([cell.options for cell in plan.cells]):
            raise UsageError(f"{name} is a secret, and the folder that tasks go by keeps none; export it as a variable")
        self._path = self.rows.path
        check_one_line("the sweep's folder", str(self._path))
        if plan.file.largest is not None:
            raise UsageError(f"--on: this sweep looks for the largest {plan.file.largest.option}, on one machine")
        runs = max(len(plan.round(repeat)) for repeat in plan.chosen)
        nodes, devices = map(max, zip(*map(plan.ranks, plan.cells), strict=True))
        on_cpu = all(plan.option(cell, "trainer.accelerator") == "cpu" for cell in plan.cells)
        self._needs = Needs(nodes, devices, 0 if on_cpu else devices, runs * plan.file.timeout_s + _START_S)
        # Jobs without a closed run, by name.
        self._open: dict[str, Job] = {}

    def describe(self) -> str:
        """Describe the tasks that `run` would submit."""
        needs, count = self._needs, len(self._plan.chosen)
        hours = count * needs.nodes * needs.gpus_per_node * needs.time_s / 3600
        return (
            f"tasks: {count}, each a round of {len(self._plan.cells)} cells on {needs.nodes} x {needs.gpus_per_node} "
            f"GPUs, in at most {duration(needs.time_s)}; at most {hours:.3g} GPU hours in all (time limits)\n"
            + self.engine.describe(self._commands(self._plan.chosen, "PROBE"), needs, self._path)
        )

    def run(self, is_enough: Callable[[int], bool]) -> None:
        """Submit the rounds that no task measures, and watch the folder until they are complete.

        `is_enough` is called with the number of tasks that are over, and ends the others by True.

        Raises:
            UsageError: the engine refuses.
            OSError: the disk is full.
            KeyboardInterrupt, SystemExit: an interruption, after the tasks were cancelled or left running.
        """
        earlier = find_packed(self._path / TASKS_FILE, _Submission) or _Submission("", {}, {})
        states = self.engine.states([*earlier.tasks], self._path) if earlier.tasks else {}
        alive = {task: repeat for task, repeat in earlier.tasks.items() if task in states and not states[task].is_over}
        running_rounds = {*alive.values()}
        self.rows.open([repeat for repeat in self._plan.chosen if repeat not in running_rounds])
        for job in self._plan.jobs():
            if self.rows.earlier_record(job, job.repeat in running_rounds) is None:
                self._open[job.name] = job
        self.rows.close()
        if missing := sorted({job.repeat for job in self._open.values()} - running_rounds):
            # An earlier task that has not begun yet still compares the earlier probe.
            probe = earlier.probe if alive else secrets.token_hex(8)
            submission = _Submission(probe, versions(), alive)
            self._write(submission)
            names = self.engine.submit(self._commands(missing, probe), self._needs, self._path)
            alive |= dict(zip(names, missing, strict=True))
            self._write(submission)
        try:
            self._watch(alive, is_enough)
        except (KeyboardInterrupt, SystemExit):
            self._leave_or_cancel([*alive])
            raise

    def _watch(self, alive: dict[str, int], is_enough: Callable[[int], bool]) -> None:
        """Wait until all tasks are over, or enough of them. Tasks that are over are removed from `alive`."""
        progress, states = self.rows.progress, dict[str, TaskState]()
        if alive:
            progress.keep(f"tasks: {', '.join(alive)}")
            progress.begin("")
        while alive:
            time.sleep(_POLL_S)
            self._close_finished()
            # A task whose runs are all closed is over, whatever the engine says.
            open_rounds = {job.repeat for job in self._open.values()}
            for task, repeat in [*alive.items()]:
                if repeat not in open_rounds or self._is_settled(task, repeat, states.get(task)):
                    del alive[task]
                    if is_enough(len(self._plan.chosen) - len(alive)):
                        self.engine.cancel([*alive], self._path)
                        return
            states = dict(self.engine.states([*alive], self._path))
            progress.note(tally(state.word for state in states.values()))
            progress.show()

    def _close_finished(self) -> None:
        """Close and report every run that ended. Interrupted runs stay open: the engine may requeue their task."""
        for job in [*self._open.values()]:
            if (record := self.rows.final_record(job)) is not None and record.sweep is not None:
                self._close(job, record)

    def _close(self, job: Job, record: RunRecord) -> None:
        del self._open[job.name]
        self.rows.count_measured(job, record)
        self.rows.progress.begin("")

    def _is_settled(self, task: str, repeat: int, state: TaskState | None) -> bool:
        """Whether a task is over, by the state seen last, and none of its processes holds the folder's lock.

        If so, every run of the task without a row gets one: the run that the task was in, and those that it did not
        begin.
        """
        if state is None or not state.is_over:
            return False
        try:
            self.rows.open([repeat])
        except FolderTaken:
            return False
        lines = last_lines(state.log, 1) if state.log is not None else []
        last_words = f"its last words: {lines[0]}" if lines else "it said nothing"
        reason = f"task {task} ended: {state.word}; {last_words}"
        self._close_finished()
        for job in self._plan.round(repeat):
            if job.name in self._open:
                is_killed = state.word == "OUT_OF_MEMORY" and is_run_folder(self.rows.runs / job.name)
                evidence = reason if is_killed else None
                end = End(-signal.SIGKILL, "itself" if is_killed else "task", oom_evidence=evidence, lost=reason)
                self._close(job, self.rows.close_run(job, self.rows.words(job.cell), end))
        self.rows.close()
        return True

    def _leave_or_cancel(self, tasks: Sequence[str]) -> None:
        choice = self.on_interrupt
        if choice == "ask" and sys.stdin.isatty():
            self.rows.progress.line.clear()
            answer = input(f"lmbench: sweep: end the {len(tasks)} tasks that are not over? [y/N] ")
            choice = "cancel" if answer.strip().lower().startswith("y") else "leave"
        if choice == "cancel":
            self.engine.cancel(tasks, self._path)
        deed = "ended" if choice == "cancel" else "go on"
        self.rows.progress.keep(f"tasks {deed}: {', '.join(tasks)}; the next start in {self._path} continues")

    def _commands(self, rounds: Sequence[int], probe: str) -> list[list[str]]:
        head = [sys.executable, "-P", "-m", "lmbench.sweep.tasks", str(self._path)]
        return [[*head, str(repeat), probe] for repeat in rounds]

    def _write(self, submission: _Submission) -> None:
        write_whole(self._path / TASKS_FILE, indented_json(to_builtins(submission)))


def make_engine(on: str, options: Options) -> Engine | None:
    """The engine that `--on` names, None for this machine. Its options (`slurm.partition`) are removed from `options`.

    Raises:
        UsageError: there is no such engine, it does not work here, or it does not take these options.
    """
    slurm_options = {name.removeprefix("slurm."): options.pop(name) for name in [*options] if name.startswith("slurm.")}
    if on == "slurm":
        return Slurm(slurm_options)
    if slurm_options:
        raise UsageError(f"--slurm.{next(iter(slurm_options))} belongs to --on slurm")
    if on == "local":
        return None
    find_modules_in_current_folder()
    engine_class = import_named(f"--on {on} is neither local nor slurm", on)
    if not isinstance(engine_class, type):
        raise UsageError(f"--on {on} is no class of an engine")
    engine: Engine = engine_class()
    return engine


def versions() -> dict[str, str]:
    """Versions that must be equal on the machine that plans a sweep and on those that measure it."""
    files = {file for folder in own_folders() for file in folder.rglob("*") if file.suffix in _SOURCES}
    # Sorted by content, since a checkout has folders beside the package that a wheel has inside it.
    source = hashlib.sha256(b"".join(sorted(file.read_bytes() for file in files)))
    return {
        "Python": platform.python_version(),
        "torch": metadata.version("torch"),
        "lightning": metadata.version("lightning"),
        "lmbench": f"{__version__} ({source.hexdigest()[:12]})",
    }


def become_task(folder: str, repeat: str, probe: str) -> ExitCode:
    """Measure a round of a sweep in this process.

    Returns only, with exit code 2, if this machine does not see the folder or has other versions than the submission.
    """
    host = platform.node()
    submission = find_packed(Path(folder, TASKS_FILE), _Submission)
    if submission is None or submission.probe != probe:
        tell(f"{host} does not see {folder} as the machine that submitted does; give a --results_dir that nodes share")
        return ExitCode.USAGE
    here = versions()
    for name, version in submission.versions.items():
        if here.get(name) != version:
            tell(f"{host} has {name} {here.get(name)}, the machine that submitted {version}; use one installation")
            return ExitCode.USAGE
    for name in [name for name in os.environ if name.startswith("SLURM_") and name not in _SLURM_KEPT]:
        del os.environ[name]
    words = ["-P", "-m", "lmbench", "sweep", folder, "--rounds", repeat, "--trust"]
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    sys.exit(become_task(*sys.argv[1:]))
