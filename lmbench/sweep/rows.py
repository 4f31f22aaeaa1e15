"""The rows of a sweep: a complete record for every run, whatever happened to its process, on whichever machine."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from lmbench.errors import ExitCode, UsageError
from lmbench.masking import masked_message
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.process import now
from lmbench.records.run import Cost, RunRecord, SweepPlace, WandbFiling
from lmbench.records.store import RunFolder, write_whole
from lmbench.records.vocabulary import DAMAGED
from lmbench.sweep.folder import CHILD_LOG, SweepFolder
from lmbench.sweep.outcome import End, judge, new_record
from lmbench.sweep.plan import Job, Plan
from lmbench.sweep.progress import SweepProgress

# A run's record needs this much space.
_LEAST_FREE_BYTES = 2**20
#: Of a longer log of a process the end is kept.
_MOST_LOG_BYTES = 2**18
#: Exit codes of runs that become the sweep's own. Others, such as those of signals, say nothing about the sweep.
_FAILURES = {ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.USER_CODE}

#: What a revision's run that misses a file is told.
_UNTRACKED = "a revision's checkout has only files that git tracks: give an absolute path"


class Rows(SweepFolder):
    """The rows of a plan in its folder. `filings` say how the runs measured now are filed at W&B."""

    def __init__(self, plan: Plan, path: Path, progress: SweepProgress) -> None:
        super().__init__(plan, path, progress)
        self.filings: list[WandbFiling] = []

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the sweep.

        Failed runs come first: their common code if it is one of `_FAILURES`, else 1. Then comes a failed guard.
        Running out of memory is a result, and decides the code only if no run is ok.
        """
        ends = self.progress.ends
        outcomes, codes = {outcome for outcome, _ in ends}, {code for _, code in ends}
        if failures := {code for outcome, code in ends if outcome not in ("ok", "oom", "skipped")}:
            return next((code for code in _FAILURES if failures == {code}), ExitCode.INTERNAL)
        if ExitCode.GUARD_FAILED in codes:
            return ExitCode.GUARD_FAILED
        return ExitCode.OUT_OF_MEMORY if "oom" in outcomes and "ok" not in outcomes else ExitCode.OK

    def count_measured(self, job: Job, record: RunRecord) -> None:
        """Count a run that was measured now."""
        self.progress.report_end(job, record)
        if record.wandb is not None:
            self.filings.append(record.wandb)

    def earlier_record(self, job: Job, is_running: bool = False) -> RunRecord | None:
        """The record of an earlier start's run, which is counted, or None if the run has to be repeated.

        In that case its remains are removed, unless a task is running that may write them.
        """
        record = self.final_record(job)
        if record is None:
            if not is_running:
                self.clear(job)
            return None
        if record.sweep is None:
            # The sweep was killed before it closed the record.
            self.write(job, record)
        self.progress.count_earlier(record)
        return record

    def close_run(self, job: Job, words: list[str], end: End) -> RunRecord:
        """Write the outcome of a run whose process has ended or never started, and return its record."""
        path, log = self.runs / job.name, self.log_path(job)
        record, steps = new_record(job.name, words), []
        # A cell's environment may run a version of lmbench whose records are not readable here.
        with suppress(UsageError):
            if is_run_folder(path) and (run := load_run(path)).outcome != DAMAGED:
                record, steps = run.record, run.steps
        record.started_at = record.started_at or end.launched_at
        judge(record, steps, end, log)
        if job.cell.environment.folder and record.error and record.error.kind == "FileNotFoundError":
            record.error.message = f"{record.error.message}; {_UNTRACKED}"
        if record.outcome not in ("ok", "oom"):
            # A run that failed because the disk is full stays without a row, so that a restart repeats it.
            self.check_disk()
        return self.write(job, record, end)

    def write(self, job: Job, record: RunRecord, end: End | None = None) -> RunRecord:
        """Write a run's place in the sweep into its record, and its cost if it was measured now (`end`)."""
        folder = RunFolder(self.runs / job.name)
        folder.path.mkdir(exist_ok=True)
        folder.release()
        record.ended_at = record.ended_at or now()
        record.sweep = SweepPlace(
            name=self.plan.name,
            study=self.plan.file.study,
            cell=job.cell.id,
            axes=job.cell.axes,
            repeat=job.repeat,
            position=self.plan.position(job),
            environment=job.cell.environment.name,
            search="trial" if self.plan.file.largest and not job.repeat else None,
            server_pid=None if end is None else end.server_pid,
            cost=None if end is None else Cost(end.cost_s),
        )
        log = self.log_path(job)
        with suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MOST_LOG_BYTES))
            write_whole(folder.path / CHILD_LOG, masked_message(file.read().decode(errors="replace")))
            log.unlink()
        folder.write_run(record)
        return record

    def check_disk(self) -> None:
        """Raises OSError where the disk is full."""
        if shutil.disk_usage(self.path).free < _LEAST_FREE_BYTES:
            problem = f"{os.strerror(errno.ENOSPC)}: a run needs {_LEAST_FREE_BYTES >> 20} MiB"
            raise OSError(errno.ENOSPC, problem, str(self.path))
