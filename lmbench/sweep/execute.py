"""Runs a plan on this machine, one round of repeats after the other, and leaves a complete row for each run.

`local.py` starts the processes. This module decides what the end of a run means for later runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from lmbench.configs import placed
from lmbench.errors import ExitCode, UsageError
from lmbench.files import ScratchFolder
from lmbench.interruption import held
from lmbench.python_process import PAIR, TURNS
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.measured import RunError
from lmbench.records.process import clock_s
from lmbench.records.run import RunRecord
from lmbench.records.settings import as_text
from lmbench.records.store import RunFolder
from lmbench.sweep.environments import ServerLost
from lmbench.sweep.file import LargestSpec
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.outcome import Launch, last_lines, new_record
from lmbench.sweep.plan import GridCell, Job
from lmbench.sweep.rows import Rows

_CHECK_TIMEOUT_S = 300.0
#: The first stride of a search, as a share of its first value: predictions are about as good. Each further one is twice
#: as long.
_FIRST_STRIDE = 1 / 128


class CompileCache(ScratchFolder):
    """Compiled code of a sweep's runs, for later runs that compile the same.

    It lies in the temporary folder, since a sweep's folder may be on a disk that other machines share. It begins empty,
    since compiled code is executed, and another process may have left anything.
    """

    def __init__(self) -> None:
        super().__init__("compiled")
        #: The keys of compiled code in the cache (`GridCell.compiled_as`).
        self.done = set[str]()


@dataclass
class Pace:
    """Limits of measuring a plan, and the cache and servers for it.

    Attributes:
        is_enough: called after each round with the number of rounds that ended; True ends the plan.
        left_s: called before each run for the seconds that it may take; at 0 no run begins.
        window_options: called before each run, where two sides are compared, with its round, for options of its own.
        cache: compiled code, which several plans may share.
        executor: servers that several plans share; None for servers of this plan alone.
    """

    is_enough: Callable[[int], bool] = lambda rounds: False
    left_s: Callable[[], float] = lambda: math.inf
    window_options: Callable[[int], Sequence[str]] = lambda repeat: ()
    cache: CompileCache = field(default_factory=CompileCache)
    executor: LocalExecutor | None = None


@dataclass
class Execution:
    """A plan being carried out on this machine, with its rows.

    `predict` gives the largest value of an option that a cell presumably has room for, None without a prediction.
    """

    rows: Rows
    executor: LocalExecutor
    predict: Callable[[GridCell, str], int | None]
    pace: Pace = field(default_factory=Pace)
    # The trial with the largest value that fits, by the id of its cell.
    _largest: dict[str, GridCell] = field(default_factory=dict)
    # Whether both sides of a comparison fit on this machine together, as far as is known.
    _fits_together: bool = True

    def __post_init__(self) -> None:
        self.plan = self.rows.plan
        self.executor.begin_round(len(self.plan.chosen) - 1)

    def check(self, places: Mapping[str, str]) -> None:
        """Let the command line parse cells without running them (`--print_config`).

        Only cells without a run are checked, and only as many as cover every value of every option. An error from
        building a cell's model or data is not noticed here: it becomes the outcome of the cell's run.

        Raises:
            UsageError: options are not understood, each with its place in the sweep's file, or an environment does not
                work.
        """
        seen: set[str] = set()
        problems = dict[str, str]()
        checked = []
        for cell in self.plan.cells:
            options = {**cell.options, "command": cell.command, "environment": cell.environment.name, "": cell.config}
            settings = set(map(as_text, options.items()))
            if not settings <= seen and not is_run_folder(self.rows.runs / Job(cell, 0).name):
                seen |= settings
                checked.append(cell)
        if not checked:
            return
        self.rows.progress.announce("checking the options of the cells")
        try:
            self.executor.await_ready(cell.environment for cell in checked)
            with ScratchFolder("check") as scratch:
                config, log = Path(scratch) / "config.yaml", Path(scratch) / "log"
                for cell in checked:
                    if cell.config is not None:
                        config.write_text(self.plan.configs[cell.config][0], encoding="utf-8")
                    log.unlink(missing_ok=True)
                    launch = Launch([*cell.words(config), "--print_config"], log, cell.environment, {})
                    (end,) = self.executor.run([launch], _CHECK_TIMEOUT_S, lambda: None)
                    if end.cause is not None:
                        raise end.cause
                    if end.code != ExitCode.OK:
                        line = end.lost or [f"exit code {end.code}", *last_lines(log)][-1].removeprefix("lmbench: ")
                        line = line.replace(str(config), str(cell.config))
                        problems.setdefault(line, placed(f"cell {cell.id}: {line}", places))
        except ServerLost as error:
            raise UsageError(str(error)) from None
        if problems:
            raise UsageError("; ".join(problems.values()))

    def run(self) -> None:
        """Measure every job, round by round, as far as the pace says.

        Raises:
            OSError: the disk is full, or a process cannot be started.
            KeyboardInterrupt, SystemExit: an interruption, after the current run was recorded as interrupted.
        """
        spec, began_s = self.plan.file.largest, clock_s()
        for ended, repeat in enumerate(self.plan.chosen):
            jobs = self.plan.round(repeat)
            if ended:
                self.executor.begin_round(len(self.plan.chosen) - ended - 1, clock_s() - began_s)
                began_s = clock_s()
            missing = [job.cell for job in jobs if not is_run_folder(self.rows.runs / job.name)]
            # Start the servers of all environments first, so that start-up load does not bias one of them. Where a
            # server is lost, each of its runs records that.
            with suppress(ServerLost):
                self.executor.await_ready(cell.environment for cell in missing)
            for group in [jobs] if self._can_take_turns(jobs) else [[job] for job in jobs]:
                if not self.pace.left_s():
                    return
                (job, *_) = group
                if spec is None:
                    self._bring_to_end(*group)
                elif repeat == 0:
                    self._search(job.cell, spec)
                elif job.cell.id in self._largest:
                    self._bring_to_end(Job(self._largest[job.cell.id], repeat))
            if self.pace.is_enough(ended + 1):
                break

    def _search(self, cell: GridCell, spec: LargestSpec) -> None:
        """Try values of the option, each in a fresh process, until the largest one that fits is known.

        A value fits if its run ends well without a retry of the allocator, which empties its cache to find room.
        """
        tried = {}

        def fits(value: int) -> bool | None:
            trial = replace(
                cell,
                id=f"{cell.id}-{spec.option.rpartition('.')[2]}-{value}",
                axes={**cell.axes, spec.option: value},
                options={**cell.options, spec.option: value},
            )
            job = Job(trial, 0)
            record = self._bring_to_end(job)
            tried[value] = job, record
            if record.outcome not in ("ok", "oom"):
                return None
            return record.outcome == "ok" and not record.memory.run_alloc_retry_count

        earlier = [load_run(path, with_steps=False).record for path in self.rows.runs.glob(f"{cell.id}-*")]
        # The answer of an earlier start needs no prediction, which takes a minute.
        found = (record.axes[spec.option] for record in earlier if record.place.search == "largest")
        first = next(found, None) or self.predict(cell, spec.option) or int(cell.options.get(spec.option, 1))
        # The result is a run in any case: one that failed for another reason, or that of value 1 if nothing fits.
        largest = seek(first, spec.most, fits)
        for value, (job, record) in tried.items():
            # With a higher `most`, the largest one of before is a trial.
            if record.sweep is not None and (record.sweep.search == "largest") != (value == largest):
                record.sweep.search = "largest" if value == largest else "trial"
                RunFolder(self.rows.runs / job.name).write_run(record)
        job, record = tried[largest]
        if record.outcome == "ok":
            self._largest[cell.id] = job.cell

    def _can_take_turns(self, jobs: Sequence[Job]) -> bool:
        """Whether these are two sides of which neither was measured, and which fit on this machine together so far."""
        return (
            bool(self.plan.file.sides)
            and self._fits_together
            and all(self.plan.ranks(job.cell) == (1, 1) for job in jobs)
            and not any(self.rows.final_record(job) or self._failure(job) for job in jobs)
        )

    def _bring_to_end(self, *jobs: Job) -> RunRecord:
        """Measure jobs, two of them in turns. Returns the record of the first."""
        for job in jobs:
            # Of two jobs that take turns neither has a record.
            if (record := self.rows.earlier_record(job)) is not None:
                return self._note_cache(job, record)
        records = self._measure(jobs)
        crowded = next((record for record in records if _is_crowded(record, jobs[0].repeat)), None)
        if len(jobs) > 1 and crowded is not None:
            why = (crowded.error and crowded.error.message) or "the allocator had to empty its cache"
            self.rows.progress.keep(f"both sides do not run together ({why}): they are measured one by one")
            self._fits_together = False
            for job in jobs:
                self.rows.clear(job)
            records = [record for job in jobs for record in self._measure([job])]
        elif len(jobs) > 1:
            # Another revision of lmbench may take no turns.
            self._fits_together = all(record.outcome != "ok" or record.window.turn_steps_s for record in records)
        for job, record in zip(jobs, records, strict=True):
            self.rows.count_measured(job, record)
            self._note_cache(job, record)
        return records[0]

    def _note_cache(self, job: Job, record: RunRecord) -> RunRecord:
        if record.compile.cache == "private":
            self.pace.cache.done.add(job.cell.compiled_as)
        return record

    def _failure(self, job: Job) -> RunRecord | None:
        """The record of the cell's first repeat, if it ended in a way that this repeat would end, too."""
        path = self.rows.runs / Job(job.cell, 0).name
        if not job.repeat or not is_run_folder(path):
            return None
        first = load_run(path, with_steps=False).record
        is_refused = first.outcome == "error" and first.exit_code == ExitCode.USAGE
        return first if is_refused or first.outcome in ("oom", "timeout") else None

    def _measure(self, jobs: Sequence[Job]) -> list[RunRecord]:
        """Measure a job, or two jobs in turns."""
        if (first := self._failure(jobs[0])) is not None:
            record, error = new_record(jobs[0].name, self._words(jobs[0])), first.failure
            message = f"repeat 0 ended with {first.outcome}: {error.message}"
            record.outcome, record.error = "skipped", RunError("Skipped", message, error.phase)
            return [self.rows.write(jobs[0], record)]
        self.rows.check_disk()
        pipes = Pipe() if len(jobs) > 1 else (None,)
        with ExitStack() as stack:
            # Each process has a temporary folder of its own, so that even one that was killed leaves nothing behind.
            launches = [
                self._launch(job, stack.enter_context(ScratchFolder("cell")), pipe)
                for job, pipe in zip(jobs, pipes, strict=True)
            ]
            self.rows.progress.begin(" and ".join(job.name for job in jobs))
            timeout_s = min(len(jobs) * self.plan.file.timeout_s, self.pace.left_s())
            ends = self.executor.run(launches, timeout_s, partial(self._relay, launches[0].log))
        with held():
            try:
                return [
                    self.rows.close_run(job, launch.words, end)
                    for job, launch, end in zip(jobs, launches, ends, strict=True)
                ]
            finally:
                if ends[0].cause is not None:
                    raise ends[0].cause

    def _launch(self, job: Job, scratch: str, pipe: Connection | None) -> Launch:
        """Launch a job's process, which takes turns with another one at the other end of the pipe."""
        cache = Path(self.pace.cache.name, job.cell.compiled_as)
        log = self.rows.log_path(job)
        log.unlink(missing_ok=True)
        variables = {
            "TMPDIR": scratch,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            **job.cell.environment.spec.variables,
        }
        if pipe is not None:
            # The coins' seed, and which process this is.
            variables[TURNS] = f"{self.plan.file.coin_seed}-{job.repeat} {self.plan.position(job)}"
            # The sides do not count each other as load of the machine.
            variables[PAIR] = str(os.getpid())
        nodes, devices = self.plan.ranks(job.cell)
        # Ranks on several nodes need srun, in a SLURM job that has these nodes. Ranks of one node are forked here.
        srun = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={devices}", "--kill-on-bad-exit=1"]
        launcher = srun if nodes > 1 and "SLURM_JOB_ID" in os.environ else []
        return Launch(self._words(job), log, job.cell.environment, variables, launcher, pipe)

    def _relay(self, log: Path) -> None:
        """Show the progress of the running process, by the last line in its log that tells it."""
        lines = [line for line in last_lines(log) if line.startswith("lmbench: ")]
        if lines:
            self.rows.progress.note(lines[-1].removeprefix("lmbench: "))
        self.rows.progress.show()

    def _words(self, job: Job) -> list[str]:
        words = self.rows.words(job.cell)
        # Repeat 0 measures cold compilation. Later repeats and other passes reuse its cache.
        if job.cell.compiled_as in self.pace.cache.done:
            words.append("--trainer.compile.cache=shared")
        if self.plan.file.sides:
            words += self.pace.window_options(job.repeat)
        if job.repeat and (self.plan.file.sides or "measure.probe_steps" not in job.cell.options):
            # Probe steps of the first process are enough, unless the file asks for them.
            words.append("--measure.probe_steps=0")
        return [*words, f"--measure.results_dir={self.rows.runs}", f"--measure.run_id={job.name}"]


def _is_crowded(record: RunRecord, repeat: int) -> bool:
    """Whether a run may have failed, or emptied its allocator's cache, because another process held memory or the GPU.

    An error of a later round has another cause, since the first one ran.
    """
    has_failed = record.outcome == "oom" or (record.outcome == "error" and not repeat)
    return has_failed or bool(record.memory.run_alloc_retry_count)


def seek(value: int, most: int, try_value: Callable[[int], bool | None]) -> int:
    """The largest value from 1 to `most` that fits, to 1 % of it, or 1 if none does.

    The search starts at `value` and takes strides, each twice as long as the last, until one value fits and a larger
    one does not. Then it halves the interval between them. Near its limit an allocator is not exact to 1 %: on an H200
    686 sequences fit after a retry where 684 did not. A value for which `try_value` returns None ends the search
    and is returned.
    """
    stride, value = max(1, round(value * _FIRST_STRIDE)), min(value, most)
    # The largest value known to fit, and the smallest known not to.
    fits, fails = 0, most + 1
    while fails - fits > 1 + fits // 100:
        does_fit = try_value(value)
        if does_fit is None:
            return value
        fits, fails = (value, fails) if does_fit else (fits, value)
        if fails > most:
            value = min(fits + stride, most)
        elif not fits:
            value = max(fails - stride, 1)
        else:
            value = (fits + fails) // 2
        stride *= 2
    return fits or 1
