"""Runs a plan: round after round of repeats, each run to a complete row, whatever happens to its process."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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
    no_server,
    skipped,
)
from lmbench.sweep.plan import GridCell, Job, Plan
from lmbench.sweep.process import End, Stopped, run_to_end
from lmbench.sweep.progress import Progress
from lmbench.sweep.servers import Launch, Servers

_FULL = (errno.ENOSPC, errno.EDQUOT)
# With less a run cannot be recorded.
_LEAST_FREE_BYTES = 2**20
#: Exit codes that tell what a run failed at.
_FAILURES = {code for code in ExitCode if 0 < code < ExitCode.SLOWER} - {ExitCode.OUT_OF_MEMORY, ExitCode.GUARD_FAILED}
_FOREIGN_FILE = "run.foreign.json"
_CHECK_TIMEOUT_S = 300.0


class SweepHalted(Exception):
    """The sweep cannot go on; one line. Nothing that was measured is lost, and a restart goes on from here."""


@dataclass(frozen=True)
class _FirstRepeat:
    """What decides over the other repeats of a cell."""

    ending: Ending
    has_private_cache: bool


class Execution:
    """A plan being carried out in its folder, which is open."""

    def __init__(
        self,
        plan: Plan,
        folder: SweepFolder,
        servers: Servers,
        progress: Progress,
        predict: Callable[[GridCell, str], int | None] = lambda cell, option: None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._servers = servers
        self._progress = progress
        self._predict = predict
        self._found: dict[str, GridCell] = {}
        self._first: dict[str, _FirstRepeat] = {}
        # Another pass runs what the measurement has compiled.
        self._measurements = plan.measurements()
        servers.begin_round(self._rounds_to_come(0))
        self._outcomes: Counter[str] = Counter()
        self._failed: set[ExitCode] = set()
        self._has_failed_guard = False
        #: How the runs that were measured now are filed with W&B.
        self.filings: list[WandbFiling] = []

    @property
    def exit_code(self) -> ExitCode:
        """That of the runs that failed, 1 where they failed in different ways. What ran out of memory is a finding,
        unless nothing else was found."""
        if self._failed:
            return next(iter(self._failed)) if len(self._failed) == 1 else ExitCode.INTERNAL
        if self._has_failed_guard:
            return ExitCode.GUARD_FAILED
        return ExitCode.OUT_OF_MEMORY if self._outcomes["oom"] and not self._outcomes["ok"] else ExitCode.OK

    def run(self, is_enough: Callable[[int], bool] = lambda rounds: False) -> None:
        """Bring every job to its end, or as many rounds of them as are enough; that is asked after each round.

        Raises:
            SweepHalted: the disk is full, or a process cannot be started.
            KeyboardInterrupt, SystemExit: an interruption; the run that it met is recorded as interrupted.
        """
        for repeat, group in itertools.groupby(self._plan.jobs(), lambda job: job.repeat):
            jobs = list(group)
            if repeat:
                self._servers.begin_round(self._rounds_to_come(repeat))
            self._bring_sides_together(jobs)
            for job in jobs:
                if self._plan.file.largest is None:
                    self._bring_to_end(job)
                elif job.repeat == 0:
                    self._search(job.cell, self._plan.file.largest)
                elif job.cell.id in self._found:
                    self._bring_to_end(Job(self._found[job.cell.id], job.repeat))
            if is_enough(repeat + 1):
                break
        self._folder.remove_compile_cache()

    def _bring_sides_together(self, jobs: list[Job]) -> None:
        """Have the servers of both sides before either is measured: what the machine does meanwhile is no difference
        of a pair then."""
        if self._plan.file.sides and not all(is_run_folder(self._folder.runs / job.name) for job in jobs):
            # One that is lost is told of by its own run.
            with suppress(ServerLost):
                self._servers.await_ready([self._plan.environment_of(job.cell) for job in jobs])

    def _search(self, cell: GridCell, spec: LargestSpec) -> None:
        """Try values, each in a process of its own, until the largest that fits is known."""
        tried: dict[int, tuple[Job, RunRecord]] = {}
        fits: dict[int, bool] = {}
        first = self._predict(cell, spec.option) or int(cell.options.get(spec.option, spec.unit))
        while (value := next_value(fits, first, spec)) is not None:
            job = Job(trial_of(cell, value, spec), 0)
            record = self._bring_to_end(job)
            tried[value] = job, record
            does = does_fit(record)
            if does is None:
                break
            fits[value] = does
        # Where nothing fits, the smallest value tells it; where a run failed for another reason, that run does.
        largest = max((each for each, does in fits.items() if does), default=min(tried)) if value is None else value
        for each, (job, record) in tried.items():
            self._mark(job, record, "largest" if each == largest else "trial", cell.id)
        job, record = tried[largest]
        if record.outcome == "ok":
            self._found[cell.id] = job.cell

    def _mark(self, job: Job, record: RunRecord, search: Literal["trial", "largest"], cell: str) -> None:
        if record.sweep is not None and record.sweep.search != search:
            record.sweep.search, record.sweep.searched_cell = search, cell
            write_whole(self._folder.runs / job.name / RUN_FILE, encode_run(record).decode())

    def _bring_to_end(self, job: Job) -> RunRecord:
        try:
            kept = self._folder.finished(job)
            record = self._adopt(job, kept) if kept is not None else self._measure(job)
        except OSError as error:
            if error.errno in _FULL:
                raise self._disk_full() from error
            raise SweepHalted(f"{job.name} cannot be run: {error}") from error
        (self._progress.ended if kept is None else self._progress.kept)(job, record)
        if kept is None and record.wandb is not None:
            self.filings.append(record.wandb)
        if job.repeat == 0:
            self._first[job.cell.id] = _FirstRepeat(ending_of(record), record.compile.cache == "private")
        self._outcomes[record.outcome] += 1
        if record.outcome not in ("ok", "oom", "skipped"):
            # That of a signal, say, or of a time limit, is the run's and not the sweep's.
            is_told = record.exit_code in _FAILURES
            self._failed.add(ExitCode(record.exit_code) if is_told and record.exit_code else ExitCode.INTERNAL)
        self._has_failed_guard |= record.exit_code == ExitCode.GUARD_FAILED
        return record

    # a run of an earlier start

    def _adopt(self, job: Job, found: Run) -> RunRecord:
        """A run that is done; where the sweep was killed before it could say so in the record, that is made up for."""
        record = found.record
        if record.sweep is None:
            self._put_in_place(record, job)
            self._keep_log(job)
            write_whole(found.path / RUN_FILE, encode_run(record).decode())
        return record

    # a run of its own

    def _measure(self, job: Job) -> RunRecord:
        first = self._first.get(job.cell.id)
        if first is not None and first.ending.is_hopeless:
            self._folder.clear(job)
            return self._write(job, new_record(job.name, self._words(job)), skipped(first.ending), None)
        if shutil.disk_usage(self._folder.path).free < _LEAST_FREE_BYTES:
            raise self._disk_full()
        if (told := self._folder.clear(job)) is not None:
            self._progress.said(told)
        log = self._folder.log_path(job)
        log.unlink(missing_ok=True)
        started_at = _now()
        # Whatever its process leaves in the temporary folder goes with it, also when it was killed.
        with tempfile.TemporaryDirectory(prefix="lmbench-cell-", ignore_cleanup_errors=True) as scratch:
            try:
                self._servers.await_ready([self._plan.environment_of(job.cell)])
                self._folder.begin(job)
                end = self._run_process(job, log, scratch)
            except ServerLost as lost:
                record = new_record(job.name, self._words(job))
                record.started_at = started_at
                return self._write(job, record, no_server(str(lost)), None)
            except Stopped as stopped:
                with held(), suppress(OSError):
                    self._record(job, stopped.end, log, started_at)
                raise stopped.cause from None
        with held():
            return self._record(job, end, log, started_at)

    def _run_process(self, job: Job, log: Path, scratch: str) -> End:
        environment = self._plan.environment_of(job.cell)
        cache = self._folder.path / COMPILE_CACHE / self._measurements.get(job.cell.id, job.cell.id)
        variables = {
            "TMPDIR": scratch,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            **environment.facts.variables,
        }
        launch = Launch(self._words(job), log, environment, variables)
        return run_to_end(
            self._servers, launch, self._plan.file.timeout_s, lambda elapsed_s: self._progress.running(job, elapsed_s)
        )

    def _words(self, job: Job) -> list[str]:
        command, *options = job.cell.words()
        config = self._folder.config_path(job.cell) if job.cell.config is not None else None
        first = self._first.get(self._measurements.get(job.cell.id, job.cell.id))
        # The cold time is that of repeat 0, whose cache the others take over.
        warm = ["--trainer.compile.cache=shared"] if first is not None and first.has_private_cache else []
        return [
            command,
            *([f"--config={config}"] if config is not None else []),
            *options,
            *warm,
            f"--measure.results_dir={self._folder.runs}",
            f"--measure.run_id={job.name}",
        ]

    def _rounds_to_come(self, repeat: int) -> int:
        """Rounds of repeats after this one in which a run is yet to be made."""
        later = itertools.groupby((job for job in self._plan.jobs() if job.repeat > repeat), lambda job: job.repeat)
        return sum(any(not is_run_folder(self._folder.runs / job.name) for job in jobs) for _, jobs in later)

    def _record(self, job: Job, end: End, log: Path, started_at: str) -> RunRecord:
        """Complete the record of a run whose process has ended, or make one."""
        found = self._load(job)
        ending = judge(found, end, self._plan.file.timeout_s, log)
        if ending.outcome not in ("ok", "oom") and shutil.disk_usage(self._folder.path).free < _LEAST_FREE_BYTES:
            # It failed for that, and is done again on a restart.
            raise self._disk_full()
        if found is not None and found.outcome == DAMAGED:
            found = None
        record = new_record(job.name, self._words(job)) if found is None else found.record
        record.started_at = record.started_at or started_at
        return self._write(job, record, ending, end)

    def _load(self, job: Job) -> Run | None:
        path = self._folder.runs / job.name
        if not is_run_folder(path):
            return None
        try:
            found = load_run(path, with_steps=False)
            return load_run(path) if is_unfinished(found) else found
        except UsageError:
            # Written by another version of lmbench (a revision of it, say): kept, beside what is known here.
            (path / RUN_FILE).replace(path / _FOREIGN_FILE)
            return None

    def _write(self, job: Job, record: RunRecord, ending: Ending, end: End | None) -> RunRecord:
        path = self._folder.runs / job.name
        path.mkdir(exist_ok=True)
        RunFolder(path).release()
        record.outcome, record.error, record.exit_code = ending.outcome, ending.error, ending.exit_code
        record.ended_at = record.ended_at or _now()
        place = self._put_in_place(record, job)
        if end is not None:
            place.cost = cost_of(record, end)
            place.load_per_core = load_per_core()
            self._keep_log(job)
        write_whole(path / RUN_FILE, encode_run(record).decode())
        return record

    def _keep_log(self, job: Job) -> None:
        with suppress(FileNotFoundError):
            self._folder.log_path(job).replace(self._folder.runs / job.name / CHILD_LOG)

    def _put_in_place(self, record: RunRecord, job: Job) -> SweepPlace:
        """Say in a record which run of the sweep it is."""
        record.sweep = SweepPlace(
            name=self._plan.name,
            study=self._plan.file.study,
            cell=job.cell.id,
            axes=job.cell.axes,
            repeat=job.repeat,
            attempt=self._folder.attempt(job),
            environment=job.cell.environment,
        )
        return record.sweep

    def _disk_full(self) -> SweepHalted:
        return SweepHalted(f"the disk of {self._folder.path} is full; make room and start the sweep again")


def check_cells(plan: Plan, cells: Iterable[GridCell], servers: Servers, say: Callable[[str], None]) -> None:
    """Let the command line parse cells (`--print_config`), so that each option is seen with each of its values once.

    As few cells as show it. What a cell's parts refuse when they are built is not found: that becomes the cell's own
    outcome.

    Raises:
        UsageError: a cell's options are not understood, or an environment does not work.
    """
    asked = list(_covering(cells))
    try:
        servers.await_ready(map(plan.environment_of, asked))
    except ServerLost as lost:
        raise UsageError(str(lost)) from None
    say(f"asking the command line whether it takes the options ({len(asked)} of the cells have them all)")
    with tempfile.TemporaryDirectory(prefix="lmbench-check-") as folder:
        config = Path(folder) / "config.yaml"
        for cell in asked:
            command, *options = cell.words()
            if cell.config is not None:
                config.write_text(plan.configs[cell.config], encoding="utf-8")
            given = [f"--config={config}"] if cell.config is not None else []
            log = Path(folder) / f"{cell.id}.log"
            words = [command, *given, *options, "--print_config"]
            launch = Launch(words, log, plan.environment_of(cell), {})
            try:
                end = run_to_end(servers, launch, _CHECK_TIMEOUT_S, lambda _: None)
            except Stopped as stopped:
                raise stopped.cause from None
            if end.code != ExitCode.OK:
                line = (last_lines(log) or [f"exit code {end.code}"])[-1].removeprefix("lmbench: ")
                raise UsageError(f"cell {cell.id}: {line}")


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
