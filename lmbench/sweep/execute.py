"""Runs a plan: round after round of repeats, each run to a complete row, whatever happens to its process.

Who starts the processes is an `Executor`; here is what a run's end means for its row and for the runs after it.
"""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from lmbench.errors import ExitCode, UsageError
from lmbench.instruments.host import load_per_core
from lmbench.interruption import held
from lmbench.records.codec import encode_run
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.run import RunRecord, SweepPlace, WandbFiling
from lmbench.records.store import RUN_FILE, RunFolder, write_whole
from lmbench.records.vocabulary import DAMAGED
from lmbench.sweep.environments import ServerLost
from lmbench.sweep.executor import End, Executor, Launch, Stopped
from lmbench.sweep.file import LargestSpec
from lmbench.sweep.folder import CHILD_LOG, COMPILE_CACHE, SweepFolder
from lmbench.sweep.largest import does_fit, next_value, trial_of
from lmbench.sweep.outcome import (
    Ending,
    cost_of,
    ending_of,
    is_unfinished,
    judge,
    last_lines,
    new_record,
    skipped,
)
from lmbench.sweep.plan import GridCell, Job, Plan
from lmbench.sweep.progress import Progress

_FULL = (errno.ENOSPC, errno.EDQUOT)
# With less a run cannot be recorded.
_LEAST_FREE_BYTES = 2**20
#: Exit codes that tell what a run failed at.
_FAILURES = {code for code in ExitCode if 0 < code < ExitCode.SLOWER} - {ExitCode.OUT_OF_MEMORY, ExitCode.GUARD_FAILED}
_FOREIGN_FILE = "run.foreign.json"
_CHECK_TIMEOUT_S = 300.0


class SweepHalted(Exception):
    """The sweep cannot go on; one line. Nothing that was measured is lost, and a restart goes on from here."""


class Execution:
    """A plan being carried out in its folder, which is open.

    `filings` are those of the runs that were measured now.
    """

    def __init__(
        self,
        plan: Plan,
        folder: SweepFolder,
        executor: Executor,
        progress: Progress,
        predict: Callable[[GridCell, str], int | None] = lambda cell, option: None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._executor = executor
        self._progress = progress
        self._predict = predict
        # By cell: the trial that found the largest value, and the record of the first repeat.
        self._largest: dict[str, GridCell] = {}
        self._first: dict[str, RunRecord] = {}
        # Another pass runs what the measurement has compiled.
        self._measurements = plan.measurements()
        executor.begin_round(self._rounds_to_come(0))
        self._ends: set[tuple[str, int | None]] = set()
        self.filings: list[WandbFiling] = []

    @property
    def exit_code(self) -> ExitCode:
        """That of the runs that failed, 1 where they failed in different ways. What ran out of memory is a finding,
        unless nothing else was found."""
        # The code of a signal, say, or of a time limit, is the run's and not the sweep's.
        failures = {
            ExitCode(code) if code in _FAILURES else ExitCode.INTERNAL
            for outcome, code in self._ends
            if outcome not in ("ok", "oom", "skipped")
        }
        if failures:
            return failures.pop() if len(failures) == 1 else ExitCode.INTERNAL
        if any(code == ExitCode.GUARD_FAILED for _, code in self._ends):
            return ExitCode.GUARD_FAILED
        outcomes = {outcome for outcome, _ in self._ends}
        return ExitCode.OUT_OF_MEMORY if "oom" in outcomes and "ok" not in outcomes else ExitCode.OK

    def run(self, is_enough: Callable[[int], bool] = lambda rounds: False) -> None:
        """Bring every job to its end, or as many rounds of them as are enough; that is asked after each round.

        Raises:
            SweepHalted: the disk is full, or a process cannot be started.
            KeyboardInterrupt, SystemExit: an interruption; the run that it met is recorded as interrupted.
        """
        for repeat, jobs in enumerate(self._plan.rounds()):
            if repeat:
                self._executor.begin_round(self._rounds_to_come(repeat))
            if self._plan.file.sides and self._has_work(jobs):
                # Start both sides' servers first, so that start-up load does not bias one side. A run whose server is
                # lost says so itself.
                with suppress(ServerLost):
                    self._executor.await_ready([self._plan.environment_of(job.cell) for job in jobs])
            for job in jobs:
                if self._plan.file.largest is None:
                    self._bring_to_end(job)
                elif repeat == 0:
                    self._search(job.cell, self._plan.file.largest)
                elif job.cell.id in self._largest:
                    self._bring_to_end(Job(self._largest[job.cell.id], repeat))
            if is_enough(repeat + 1):
                break
        self._folder.remove_compile_cache()

    def _has_work(self, jobs: list[Job]) -> bool:
        return not all(is_run_folder(self._folder.runs / job.name) for job in jobs)

    def _rounds_to_come(self, repeat: int) -> int:
        """Rounds of repeats after this one in which a run is yet to be made."""
        return sum(map(self._has_work, itertools.islice(self._plan.rounds(), repeat + 1, None)))

    def _search(self, cell: GridCell, spec: LargestSpec) -> None:
        """Try values, each in a process of its own, until the largest that fits is known."""
        tried: dict[int, tuple[Job, RunRecord]] = {}
        fits: dict[int, bool] = {}
        first = self._predict(cell, spec.option) or int(cell.options.get(spec.option, spec.unit))
        while (value := next_value(fits, first, spec)) is not None:
            job = Job(trial_of(cell, value, spec), 0)
            record = self._bring_to_end(job)
            tried[value] = job, record
            if (does := does_fit(record)) is None:
                break
            fits[value] = does
        # Where nothing fits, the smallest value tells it; where a run failed for another reason, that run does.
        largest = max((tried_value for tried_value, does in fits.items() if does), default=min(tried))
        largest = largest if value is None else value
        for tried_value, (job, record) in tried.items():
            search: Literal["trial", "largest"] = "largest" if tried_value == largest else "trial"
            if record.sweep is not None and record.sweep.search != search:
                record.sweep.search, record.sweep.searched_cell = search, cell.id
                self._write_record(job, record)
        job, record = tried[largest]
        if record.outcome == "ok":
            self._largest[cell.id] = job.cell

    def _bring_to_end(self, job: Job) -> RunRecord:
        try:
            kept = self._folder.finished(job)
            if kept is None:
                record = self._measure(job)
            elif kept.record.sweep is None:
                # The sweep was killed before it could say in the record that the run is done.
                record = self._write(job, kept.record, ending_of(kept.record))
            else:
                record = kept.record
        except OSError as error:
            if error.errno in _FULL:
                raise self._disk_full() from error
            raise SweepHalted(f"{job.name} cannot be run: {error}") from error
        (self._progress.ended if kept is None else self._progress.kept)(job, record)
        if kept is None and record.wandb is not None:
            self.filings.append(record.wandb)
        if job.repeat == 0:
            self._first[job.cell.id] = record
        self._ends.add((record.outcome, record.exit_code))
        return record

    def _measure(self, job: Job) -> RunRecord:
        first = self._first.get(job.cell.id)
        if first is not None and ending_of(first).is_hopeless:
            self._folder.clear(job)
            return self._write(job, new_record(job.name, self._words(job)), skipped(ending_of(first)))
        if self._is_disk_full():
            raise self._disk_full()
        if (surprise := self._folder.clear(job)) is not None:
            self._progress.said(surprise)
        log = self._folder.log_path(job)
        log.unlink(missing_ok=True)
        started_at = _now()
        # Whatever its process leaves in the temporary folder goes with it, also when it was killed.
        with tempfile.TemporaryDirectory(prefix="lmbench-cell-", ignore_cleanup_errors=True) as scratch:
            try:
                self._folder.begin(job)
                launch = self._launch(job, log, scratch)
                end = self._executor.run(launch, self._plan.file.timeout_s, lambda s: self._progress.running(job, s))
            except Stopped as stopped:
                with held(), suppress(OSError):
                    self._record(job, stopped.end, log, started_at)
                raise stopped.cause from None
        with held():
            return self._record(job, end, log, started_at)

    def _launch(self, job: Job, log: Path, scratch: str) -> Launch:
        environment = self._plan.environment_of(job.cell)
        cache = self._folder.path / COMPILE_CACHE / self._measurements.get(job.cell.id, job.cell.id)
        variables = {
            "TMPDIR": scratch,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            **environment.facts.variables,
        }
        return Launch(self._words(job), log, environment, variables)

    def _words(self, job: Job) -> list[str]:
        command, *options = job.cell.words()
        config = self._folder.config_path(job.cell) if job.cell.config is not None else None
        first = self._first.get(self._measurements.get(job.cell.id, job.cell.id))
        # The cold time is that of repeat 0, whose cache the others take over.
        is_warm = first is not None and first.compile.cache == "private"
        return [
            command,
            *([f"--config={config}"] if config is not None else []),
            *options,
            *(["--trainer.compile.cache=shared"] if is_warm else []),
            f"--measure.results_dir={self._folder.runs}",
            f"--measure.run_id={job.name}",
        ]

    def _record(self, job: Job, end: End, log: Path, started_at: str) -> RunRecord:
        """Complete the record of a run whose process has ended, or make one."""
        run = self._load(job)
        ending = judge(run, end, self._plan.file.timeout_s, log)
        if ending.outcome not in ("ok", "oom") and self._is_disk_full():
            # It failed for that, and is done again on a restart.
            raise self._disk_full()
        is_usable = run is not None and run.outcome != DAMAGED
        record = run.record if run is not None and is_usable else new_record(job.name, self._words(job))
        record.started_at = record.started_at or started_at
        return self._write(job, record, ending, end)

    def _load(self, job: Job) -> Run | None:
        path = self._folder.runs / job.name
        if not is_run_folder(path):
            return None
        try:
            run = load_run(path, with_steps=False)
            return load_run(path) if is_unfinished(run) else run
        except UsageError:
            # Written by another version of lmbench (a revision of it, say): kept, beside what is known here.
            (path / RUN_FILE).replace(path / _FOREIGN_FILE)
            return None

    def _write(self, job: Job, record: RunRecord, ending: Ending, end: End | None = None) -> RunRecord:
        """Write how a run ended, which run of the sweep it is, and where its process ran now (`end`) its cost."""
        path = self._folder.runs / job.name
        path.mkdir(exist_ok=True)
        RunFolder(path).release()
        record.outcome, record.error, record.exit_code = ending.outcome, ending.error, ending.exit_code
        record.ended_at = record.ended_at or _now()
        record.sweep = SweepPlace(
            name=self._plan.name,
            study=self._plan.file.study,
            cell=job.cell.id,
            axes=job.cell.axes,
            repeat=job.repeat,
            attempt=self._folder.attempt(job),
            environment=job.cell.environment,
            cost=None if end is None else cost_of(record, end),
            load_per_core=None if end is None else load_per_core(),
        )
        with suppress(FileNotFoundError):
            self._folder.log_path(job).replace(path / CHILD_LOG)
        self._write_record(job, record)
        return record

    def _write_record(self, job: Job, record: RunRecord) -> None:
        write_whole(self._folder.runs / job.name / RUN_FILE, encode_run(record).decode())

    def _is_disk_full(self) -> bool:
        return shutil.disk_usage(self._folder.path).free < _LEAST_FREE_BYTES

    def _disk_full(self) -> SweepHalted:
        return SweepHalted(f"the disk of {self._folder.path} is full; make room and start the sweep again")


def check_cells(plan: Plan, cells: Iterable[GridCell], executor: Executor, say: Callable[[str], None]) -> None:
    """Let the command line parse cells (`--print_config`), so that each option is seen with each of its values once.

    As few cells as show it. What a cell's parts refuse when they are built is not noticed: that becomes the cell's own
    outcome.

    Raises:
        UsageError: a cell's options are not understood, or an environment does not work.
    """
    asked = list(_covering(cells))
    try:
        executor.await_ready(map(plan.environment_of, asked))
        say(f"asking the command line whether it takes the options ({len(asked)} of the cells have them all)")
        with tempfile.TemporaryDirectory(prefix="lmbench-check-") as folder:
            config = Path(folder) / "config.yaml"
            for cell in asked:
                command, *options = cell.words()
                if cell.config is not None:
                    config.write_text(plan.configs[cell.config], encoding="utf-8")
                    options.insert(0, f"--config={config}")
                log = Path(folder) / f"{cell.id}.log"
                launch = Launch([command, *options, "--print_config"], log, plan.environment_of(cell), {})
                end = executor.run(launch, _CHECK_TIMEOUT_S, lambda elapsed_s: None)
                if end.code != ExitCode.OK:
                    line = end.lost or (last_lines(log) or [f"exit code {end.code}"])[-1].removeprefix("lmbench: ")
                    raise UsageError(f"cell {cell.id}: {line}")
    except ServerLost as lost:
        raise UsageError(str(lost)) from None
    except Stopped as stopped:
        raise stopped.cause from None


def _covering(cells: Iterable[GridCell]) -> Iterator[GridCell]:
    """Cells, as few as come along, in which every command, environment and option with each value occurs."""
    seen: set[tuple[str, str | None]] = set()
    for cell in cells:
        parts = {("command", cell.command), ("environment", cell.environment), ("config", cell.config)}
        parts |= {(option, json.dumps(value, sort_keys=True, default=str)) for option, value in cell.options.items()}
        if not parts <= seen:
            seen |= parts
            yield cell


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
