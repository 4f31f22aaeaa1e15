"""Runs a plan: job after job, each to a complete row, whatever happens to its process."""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from lmbench.errors import ExitCode, UsageError
from lmbench.interruption import held
from lmbench.records.load import Run, is_run_folder, load_run
from lmbench.records.paths import lookup
from lmbench.records.store import RUN_FILE, RunFolder
from lmbench.records.vocabulary import Record
from lmbench.sweep.cost import cost_of
from lmbench.sweep.engine import Engine, Launch, prepare
from lmbench.sweep.folder import CHILD_LOG, COMPILE_CACHE, SweepFolder
from lmbench.sweep.outcome import is_hopeless, is_unfinished, judge, new_record, skipped
from lmbench.sweep.plan import Job, Plan
from lmbench.sweep.progress import Progress
from lmbench.sweep.supervise import End, Stopped, run_to_end

_FULL = (errno.ENOSPC, errno.EDQUOT)
# With less a run cannot be recorded.
_LEAST_FREE_BYTES = 2**20
_FOREIGN_FILE = "run.foreign.json"


class SweepHalted(Exception):
    """The sweep cannot go on; one line. Nothing that was measured is lost, and a restart goes on from here."""


class Execution:
    """A plan being carried out in its folder, which is open."""

    def __init__(self, plan: Plan, folder: SweepFolder, engine: Engine, progress: Progress) -> None:
        self._plan = plan
        self._folder = folder
        self._engine = engine
        self._progress = progress
        # How the first repeats ended: it decides what becomes of the others.
        self._first: dict[str, Record] = {}
        self.exit_code = ExitCode.OK

    def run(self) -> None:
        """Bring every job to its end.

        Raises:
            SweepHalted: the disk is full, or a process cannot be started.
            KeyboardInterrupt, SystemExit: an interruption; the run that it met is recorded as interrupted.
        """
        for job in self._plan.jobs():
            try:
                kept = self._folder.finished(job)
                run = self._adopt(job, kept) if kept is not None else self._measure(job)
            except OSError as error:
                if error.errno in _FULL:
                    raise self._disk_full() from error
                raise SweepHalted(f"{job.name} cannot be run: {error}") from error
            self._note(job, run, is_kept=kept is not None)
        self._folder.remove_compile_cache()

    def _note(self, job: Job, run: Record, is_kept: bool) -> None:
        (self._progress.kept if is_kept else self._progress.ended)(job, run)
        if job.repeat == 0:
            self._first[job.cell.id] = {
                "outcome": run.get("outcome"),
                "error": run.get("error"),
                "exit_code": run.get("exit_code"),
                "has_private_cache": lookup(run, "compile.cache") == "private",
            }
        if run.get("exit_code") == ExitCode.GUARD_FAILED:
            self.exit_code = ExitCode.GUARD_FAILED

    # a run of an earlier start

    def _adopt(self, job: Job, found: Run) -> Record:
        """A run that is done; where the sweep was killed before it could say so in the record, that is made up for."""
        if "sweep" not in found.run:
            self._put_in_place(found.run, job)
            self._keep_log(job)
            RunFolder(found.path).write_run(found.run)
        return found.run

    # a run of its own

    def _measure(self, job: Job) -> Record:
        first = self._first.get(job.cell.id)
        if first is not None and is_hopeless(first):
            self._folder.clear(job)
            run = {**new_record(job.name, self._words(job)), **skipped(first), "ended_at": _now()}
            return self._write(job, run, None)
        if shutil.disk_usage(self._folder.path).free < _LEAST_FREE_BYTES:
            raise self._disk_full()
        if (told := self._folder.clear(job)) is not None:
            self._progress.said(told)
        prepare(self._engine, self._progress.said)
        self._folder.begin(job)
        log = self._folder.log_path(job)
        log.unlink(missing_ok=True)
        started_at = _now()
        # Whatever its process leaves in the temporary folder goes with it, also when it was killed.
        with tempfile.TemporaryDirectory(prefix="lmbench-cell-", ignore_cleanup_errors=True) as scratch:
            try:
                end = self._run_process(job, log, scratch)
            except Stopped as stopped:
                with held(), suppress(OSError):
                    self._record(job, stopped.end, log, started_at)
                raise stopped.cause from None
        with held():
            return self._record(job, end, log, started_at)

    def _run_process(self, job: Job, log: Path, scratch: str) -> End:
        environment = self._plan.environment_of(job.cell)
        cache = self._folder.path / COMPILE_CACHE / job.cell.id
        variables = {
            "TMPDIR": scratch,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            **environment.variables,
        }
        launch = Launch(self._words(job), log, environment, variables)
        return run_to_end(
            self._engine, launch, self._plan.file.timeout_s, lambda elapsed_s: self._progress.running(job, elapsed_s)
        )

    def _words(self, job: Job) -> list[str]:
        command, *options = job.cell.words()
        config = self._folder.config_path()
        first = self._first.get(job.cell.id)
        # The cold time is that of repeat 0, whose cache the others take over.
        warm = ["--trainer.compile.cache=shared"] if first is not None and first["has_private_cache"] else []
        return [
            command,
            *([f"--config={config}"] if config is not None else []),
            *options,
            *warm,
            f"--measure.results_dir={self._folder.runs}",
            f"--measure.run_id={job.name}",
        ]

    def _record(self, job: Job, end: End, log: Path, started_at: str) -> Record:
        """Complete the record of a run whose process has ended, or make one."""
        found = self._load(job)
        told = judge(found, end, self._plan.file.timeout_s, log)
        if told["outcome"] not in ("ok", "oom") and shutil.disk_usage(self._folder.path).free < _LEAST_FREE_BYTES:
            # It failed for that, and is done again on a restart.
            raise self._disk_full()
        run = {**new_record(job.name, self._words(job)), "started_at": started_at}
        if found is not None:
            run.update(found.run)
        run.update(told)
        run["ended_at"] = run.get("ended_at") or _now()
        return self._write(job, run, end)

    def _load(self, job: Job) -> Run | None:
        path = self._folder.runs / job.name
        if not is_run_folder(path):
            return None
        try:
            found = load_run(path, with_steps=False)
            return load_run(path) if is_unfinished(found.outcome) else found
        except UsageError:
            # Written by another version of lmbench (a revision of it, say): kept, beside what is known here.
            (path / RUN_FILE).replace(path / _FOREIGN_FILE)
            return None

    def _write(self, job: Job, run: Record, end: End | None) -> Record:
        path = self._folder.runs / job.name
        folder = RunFolder(path) if path.is_dir() else RunFolder.create(self._folder.runs, job.name)
        folder.release()
        self._put_in_place(run, job)
        if end is not None:
            run["sweep"]["cost"] = cost_of(run, end)
            self._keep_log(job)
        folder.write_run(run)
        return run

    def _keep_log(self, job: Job) -> None:
        with suppress(FileNotFoundError):
            self._folder.log_path(job).replace(self._folder.runs / job.name / CHILD_LOG)

    def _put_in_place(self, run: Record, job: Job) -> None:
        """Say in a record which run of the sweep it is."""
        run["sweep"] = {
            "name": self._plan.name,
            "cell": job.cell.id,
            "axes": job.cell.axes,
            "repeat": job.repeat,
            "attempt": self._folder.attempt(job),
            "environment": job.cell.environment,
            "engine": self._engine.name,
        }

    def _disk_full(self) -> SweepHalted:
        return SweepHalted(f"the disk of {self._folder.path} is full; make room and start the sweep again")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
