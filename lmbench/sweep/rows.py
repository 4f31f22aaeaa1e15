"""The rows of a sweep: a complete one for every run, whatever happened to its process and wherever that was started."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field

from lmbench.errors import ExitCode, Failure, UsageError
from lmbench.masking import masked_message
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.process import load_per_core, now
from lmbench.records.run import Cost, RunRecord, SweepPlace, WandbFiling
from lmbench.records.store import RunFolder, write_whole
from lmbench.records.vocabulary import DAMAGED
from lmbench.sweep.folder import CHILD_LOG, SweepFolder
from lmbench.sweep.outcome import End, judge, new_record
from lmbench.sweep.plan import Job, Plan
from lmbench.sweep.progress import Progress

# With less a run cannot be recorded.
_LEAST_FREE_BYTES = 2**20
#: Exit codes that tell what a run failed at; that of a signal, say, is the run's and not the sweep's.
_FAILURES = {ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.USER_CODE}


class SweepHalted(Failure):
    """The sweep cannot go on; one line. Nothing that was measured is lost, and a restart goes on from here."""


@dataclass
class Rows:
    """The rows of a plan in its folder, which is open; `filings` are those at W&B of what was measured now."""

    plan: Plan
    folder: SweepFolder
    progress: Progress
    filings: list[WandbFiling] = field(default_factory=list)
    _ends: set[tuple[str, int | None]] = field(default_factory=set)

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

    def ended(self, job: Job, record: RunRecord) -> None:
        """A run was measured now."""
        self.progress.ended(job, record)
        self.filings += [record.wandb] if record.wandb is not None else []
        self._ends.add((record.outcome, record.exit_code))

    def kept(self, job: Job) -> RunRecord | None:
        """The run of an earlier start, where there is one that is not to be tried again; else leftovers go."""
        if (record := self.folder.final(job)) is None:
            self.folder.clear(job, self.progress.keep)
        else:
            self.keep(job, record)
        return record

    def keep(self, job: Job, record: RunRecord) -> None:
        """Count the run of an earlier start."""
        if record.sweep is None:
            # The sweep was killed before it could say in the record that the run is done.
            self.write(job, record)
        self.progress.kept(record)
        self._ends.add((record.outcome, record.exit_code))

    def close(self, job: Job, words: list[str], end: End, started_at: str | None = None) -> RunRecord:
        """Write how a run ended whose process is gone, or was never there."""
        path = self.folder.runs / job.name
        log = self.folder.log_path(job)
        record, steps = new_record(job.name, words), []
        # Another version of lmbench (a revision of it, say) may have written it.
        with suppress(UsageError):
            run = load_run(path) if is_run_folder(path) else None
            if run is not None and run.outcome != DAMAGED:
                record, steps = run.record, run.steps
        record.started_at = record.started_at or started_at
        judge(record, steps, end, log)
        if record.outcome not in ("ok", "oom"):
            # What failed for a full disk is done again on a restart.
            self.check_disk()
        return self.write(job, record, end)

    def write(self, job: Job, record: RunRecord, end: End | None = None) -> RunRecord:
        """Write which run of the sweep it is, and where its process ran now (`end`) its cost."""
        folder = RunFolder(self.folder.runs / job.name)
        folder.path.mkdir(exist_ok=True)
        folder.release()
        record.ended_at = record.ended_at or now()
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
            write_whole(folder.path / CHILD_LOG, "".join(map(masked_message, lines)))
            log.unlink()
        folder.write_run(record)
        return record

    def check_disk(self) -> None:
        """Raises OSError where the disk is full."""
        if shutil.disk_usage(self.folder.path).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder.path))
