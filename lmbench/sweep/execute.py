"""Runs a plan: round after round of repeats, each run to a complete row, whatever happens to its process.

`local.py` starts the processes; here is what a run's end means for its row and for the runs after it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from lmbench.errors import ExitCode, Failure, UsageError
from lmbench.files import ScratchFolder
from lmbench.interruption import held
from lmbench.masking import masked_message
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.measured import RunError
from lmbench.records.process import load_per_core
from lmbench.records.run import Cost, RunRecord, SweepPlace, WandbFiling
from lmbench.records.store import RUN_FILE, RunFolder
from lmbench.records.vocabulary import DAMAGED
from lmbench.sweep.environments import ServerLost
from lmbench.sweep.executor import End, Launch
from lmbench.sweep.file import LargestSpec
from lmbench.sweep.folder import CHILD_LOG, COMPILE_CACHE, SweepFolder
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.outcome import is_hopeless, judge, last_lines, new_record
from lmbench.sweep.plan import GridCell, Job, Plan, as_json
from lmbench.sweep.progress import Progress

# With less a run cannot be recorded.
_LEAST_FREE_BYTES = 2**20
#: Exit codes that tell what a run failed at; that of a signal, say, is the run's and not the sweep's.
_FAILURES = {ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.USER_CODE}
_FOREIGN_FILE = "run.foreign.json"
_CHECK_TIMEOUT_S = 300.0
#: How far from the first value the next one is tried, as a part of it; twice as far each time until the border is met.
_FIRST_STRIDE = 1 / 16
#: Rounds of two sides that a server's forks make: imports take longer than a round. What a hash seed or an address
#: layout does to one side persists over these rounds, which the rule of `compare.rounds` allows for.
ROUNDS_PER_SERVER = 4


class SweepHalted(Failure):
    """The sweep cannot go on; one line. Nothing that was measured is lost, and a restart goes on from here."""


@dataclass
class Execution:
    """A plan being carried out in its folder, which is open.

    `predict` guesses the largest value of an option that a cell has room for. `filings` are those of the runs that were
    measured now. `window_options` are the window's settings of the rounds to come, where two sides are measured.
    """

    plan: Plan
    folder: SweepFolder
    executor: LocalExecutor
    progress: Progress
    predict: Callable[[GridCell, str], int | None]
    window_options: list[str] = field(default_factory=list)
    filings: list[WandbFiling] = field(default_factory=list)
    # By cell: the trial that found the largest value, and the record of the first repeat.
    _largest: dict[str, GridCell] = field(default_factory=dict)
    _first: dict[str, RunRecord] = field(default_factory=dict)
    # What has been compiled into the sweep's own cache.
    _compiled: set[str] = field(default_factory=set)
    _ends: set[tuple[str, int | None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.executor.begin_round(self.plan.file.repeats - 1)

    @property
    def exit_code(self) -> ExitCode:
        """That of the runs that failed, 1 where they failed in different ways. What ran out of memory is a finding,
        unless nothing else was found."""
        outcomes, codes = {outcome for outcome, _ in self._ends}, {code for _, code in self._ends}
        if failures := {code for outcome, code in self._ends if outcome not in ("ok", "oom", "skipped")}:
            return next((code for code in _FAILURES if failures == {code}), ExitCode.INTERNAL)
        if ExitCode.GUARD_FAILED in codes:
            return ExitCode.GUARD_FAILED
        return ExitCode.OUT_OF_MEMORY if "oom" in outcomes and "ok" not in outcomes else ExitCode.OK

    def run(self, is_enough: Callable[[int], bool] = lambda rounds: False) -> None:
        """Bring every job to its end, or as many rounds of them as are enough; that is asked after each round.

        Raises:
            SweepHalted: the disk is full, or a process cannot be started.
            KeyboardInterrupt, SystemExit: an interruption; the run that it met is recorded as interrupted.
        """
        spec = self.plan.file.largest
        for repeat, jobs in enumerate(self.plan.rounds()):
            if repeat and not (self.plan.file.sides and repeat % ROUNDS_PER_SERVER):
                self.executor.begin_round(self.plan.file.repeats - repeat - 1)
            missing = [job.cell for job in jobs if not is_run_folder(self.folder.runs / job.name)]
            # Start the servers of all environments first, so that start-up load does not bias one of them. A run whose
            # server is lost says so itself.
            with suppress(ServerLost):
                self.executor.await_ready(cell.environment for cell in missing)
            for job in jobs:
                if spec is None:
                    self._bring_to_end(job)
                elif repeat == 0:
                    self._search(job.cell, spec)
                elif job.cell.id in self._largest:
                    self._bring_to_end(Job(self._largest[job.cell.id], repeat))
            if is_enough(repeat + 1):
                break
        self.folder.remove_compile_cache()

    def _search(self, cell: GridCell, spec: LargestSpec) -> None:
        """Try values, each in a process of its own, until the largest that fits is known.

        A value fits if its run ended well, and the allocator never had to give back what it held to go on.
        """
        tried: dict[int, tuple[Job, RunRecord]] = {}

        def fits(value: int) -> bool | None:
            trial = replace(
                cell,
                id=f"{cell.id}-{spec.option.rpartition('.')[2]}-{value}",
                axes={**cell.axes, spec.option: value},
                options={**cell.options, spec.option: value},
            )
            job = Job(trial, 0, searched=cell.id)
            record = self._bring_to_end(job)
            tried[value] = job, record
            if record.outcome not in ("ok", "oom"):
                return None
            return record.outcome == "ok" and not record.memory.run_alloc_retry_count

        first = self.predict(cell, spec.option) or int(cell.options.get(spec.option, spec.unit))
        # Where a run failed for another reason, that run tells it; where nothing fits, the smallest value does.
        job, record = tried[seek(first, spec, fits)]
        if record.sweep is not None and record.sweep.search != "largest":
            record.sweep.search = "largest"
            RunFolder(self.folder.runs / job.name).write_run(record)
        if record.outcome == "ok":
            self._largest[cell.id] = job.cell

    def _bring_to_end(self, job: Job) -> RunRecord:
        try:
            record = self.folder.finished(job, self.progress.keep)
            if record is None:
                record = self._measure(job)
                self.progress.ended(job, record)
                self.filings += [record.wandb] if record.wandb is not None else []
            else:
                if record.sweep is None:
                    # The sweep was killed before it could say in the record that the run is done.
                    self._write(job, record)
                self.progress.kept(record)
        except OSError as error:
            raise SweepHalted(f"{job.name} cannot be run: {error}; mend that, and start the sweep again") from error
        if job.repeat == 0:
            self._first[job.cell.id] = record
        if record.compile.cache == "private":
            self._compiled.add(job.cell.compiled_as)
        self._ends.add((record.outcome, record.exit_code))
        return record

    def _measure(self, job: Job) -> RunRecord:
        cell, first = job.cell, self._first.get(job.cell.id)
        words = self._words(job)
        record = new_record(job.name, words)
        if first is not None and is_hopeless(first):
            error = first.error or RunError()
            message = f"repeat 0 ended with {first.outcome}: {error.message}"
            record.outcome, record.error = "skipped", RunError("Skipped", message, error.phase)
            return self._write(job, record)
        self._check_disk()
        cache = self.folder.path / COMPILE_CACHE / cell.compiled_as
        log = self.folder.log_path(job)
        log.unlink(missing_ok=True)
        started_at = _now()
        # Whatever its process leaves in the temporary folder goes with it, also when it was killed.
        with ScratchFolder("cell") as scratch:
            variables = {
                "TMPDIR": scratch,
                "TORCHINDUCTOR_CACHE_DIR": str(cache),
                "TRITON_CACHE_DIR": str(cache / "triton"),
                **cell.environment.spec.variables,
            }
            self.folder.begin(job)
            self.progress.begin(job.name)
            launch = Launch(words, log, cell.environment, variables)
            end = self.executor.run(launch, self.plan.file.timeout_s, self.progress.show)
        with held():
            try:
                path, steps = self.folder.runs / job.name, []
                try:
                    run = load_run(path) if is_run_folder(path) else None
                    if run is not None and run.outcome != DAMAGED:
                        record, steps = run.record, run.steps
                except UsageError:
                    # Written by another version of lmbench (a revision of it, say): kept, beside what is known here.
                    (path / RUN_FILE).replace(path / _FOREIGN_FILE)
                record.started_at = record.started_at or started_at
                judge(record, steps, end, self.plan.file.timeout_s, log)
                if record.outcome not in ("ok", "oom"):
                    # What failed for a full disk is done again on a restart.
                    self._check_disk()
                return self._write(job, record, end)
            finally:
                if end.cause is not None:
                    raise end.cause

    def _words(self, job: Job) -> list[str]:
        words = job.cell.words(self.folder.config_path(job.cell))
        # The cold time is that of repeat 0, whose cache the others, and other passes, take over.
        if job.cell.compiled_as in self._compiled:
            words.append("--trainer.compile.cache=shared")
        if self.plan.file.sides:
            # What the probes show is known from the first round.
            words += [*self.window_options, *(["--measure.probe_steps=0"] if job.repeat else [])]
        return [*words, f"--measure.results_dir={self.folder.runs}", f"--measure.run_id={job.name}"]

    def _write(self, job: Job, record: RunRecord, end: End | None = None) -> RunRecord:
        """Write which run of the sweep it is, and where its process ran now (`end`) its cost."""
        folder = RunFolder(self.folder.runs / job.name)
        folder.path.mkdir(exist_ok=True)
        folder.release()
        record.ended_at = record.ended_at or _now()
        record.sweep = SweepPlace(
            name=self.plan.name,
            study=self.plan.file.study,
            cell=job.cell.id,
            axes=job.cell.axes,
            repeat=job.repeat,
            attempt=self.folder.attempt(job),
            environment=job.cell.environment.name,
            search=None if job.searched is None else "trial",
            searched_cell=job.searched,
            cost=None if end is None else Cost(end.ended_s - end.launched_s),
            load_per_core=None if end is None else load_per_core(),
        )
        log = self.folder.log_path(job)
        with suppress(FileNotFoundError), log.open(errors="replace") as lines:
            (folder.path / CHILD_LOG).write_text("".join(map(masked_message, lines)))
            log.unlink()
        folder.write_run(record)
        return record

    def _check_disk(self) -> None:
        """Raises OSError where the disk is full."""
        if shutil.disk_usage(self.folder.path).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder.path))


def check_cells(plan: Plan, folder: SweepFolder, executor: LocalExecutor, say: Callable[[str], None]) -> None:
    """Let the command line parse cells without a run (`--print_config`), as few as have each option with each of its
    values. What a cell's parts refuse when they are built is not noticed: that becomes the cell's own outcome.

    Raises:
        UsageError: a cell's options are not understood, or an environment does not work.
    """
    seen: set[str] = set()
    asked = []
    for cell in plan.cells:
        options = {**cell.options, "command": cell.command, "environment": cell.environment.name, "": cell.config}
        parts = set(map(as_json, options.items()))
        if not parts <= seen and not is_run_folder(folder.runs / Job(cell, 0).name):
            seen |= parts
            asked.append(cell)
    if not asked:
        return
    say(f"asking the command line whether it takes the options ({len(asked)} of the cells have them all)")
    try:
        executor.await_ready(cell.environment for cell in asked)
        with ScratchFolder("check") as scratch:
            config, log = Path(scratch) / "config.yaml", Path(scratch) / "log"
            for cell in asked:
                if cell.config is not None:
                    config.write_text(plan.configs[cell.config], encoding="utf-8")
                words = cell.words(None if cell.config is None else config)
                launch = Launch([*words, "--print_config"], log, cell.environment, {})
                end = executor.run(launch, _CHECK_TIMEOUT_S, lambda: None)
                if end.cause is not None:
                    raise end.cause
                if end.code != ExitCode.OK:
                    line = end.lost or [f"exit code {end.code}", *last_lines(log)][-1].removeprefix("lmbench: ")
                    raise UsageError(f"cell {cell.id}: {line}")
    except ServerLost as lost:
        raise UsageError(str(lost)) from None


def seek(value: int, spec: LargestSpec, try_value: Callable[[int], bool | None]) -> int:
    """The largest value that fits, the smallest where none does; the value of which `try_value` cannot tell (None).

    Starts at `value`, strides away from it, each time twice as far, until one value fits and a larger one does not,
    and halves what lies between. All values are multiples of `spec.unit`, from it to `spec.most`.
    """
    unit, most = spec.unit, spec.most // spec.unit * spec.unit
    stride = max(1, round(value * _FIRST_STRIDE / unit)) * unit
    value = min(max(value // unit * unit, unit), most)
    # The largest value that is known to fit, and the smallest that is known not to.
    fits, fails = 0, most + unit
    while fails - fits > unit:
        does_fit = try_value(value)
        if does_fit is None:
            return value
        fits, fails = (value, fails) if does_fit else (fits, value)
        if fails > most:
            value = min(fits + stride, most)
        elif not fits:
            value = max(fails - stride, unit)
        else:
            value = (fits + fails) // 2 // unit * unit
        stride *= 2
    return fits or unit


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
