"""A run's record while it is written: its folder, its ending, and what a full disk does to both."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lmbench.errors import ExitCode, UsageError, tell
from lmbench.instruments.ending import COMPLETE, Ending, failed, interrupted
from lmbench.interruption import held, received
from lmbench.masking import MASK, to_fill_in
from lmbench.records.load import load_run
from lmbench.records.measured import Guard
from lmbench.records.process import milestones, now, process_identity, reach
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder
from lmbench.records.summary import complete_run
from lmbench.records.vocabulary import RUNNING, Values


@dataclass(eq=False, repr=False)
class OpenRun:
    """A run's record and its folder `results_dir/<run_id>/`, from before there is a folder until the run is closed.

    `open` makes the folder, `close` gives the run its ending, and `complete` adds to a closed record. A full disk does
    not end the run: writing is tried again, and records that are lost in the end make the outcome `error`.

    Attributes:
        run: the record as last written.
        folder: the result folder; None while there is none.

    Args:
        results_dir: folder of result folders.
        caller_fields: fields of the record that only the caller knows (command line, resolved config, mode), by name.
        config_yaml: a configuration file that repeats the run; stored beside it as config.yaml.
        run_id: name of the result folder, for a single run; None makes up a new one for every run.
    """

    results_dir: str = "results"
    caller_fields: Values = field(default_factory=dict)
    config_yaml: str | None = None
    run_id: str | None = None
    run: RunRecord = field(init=False)
    folder: RunFolder | None = field(default=None, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.run = RunRecord(SCHEMA_VERSION, RUNNING)

    @property
    def result(self) -> RunFolder:
        """The result folder, once there is one."""
        assert self.folder is not None
        return self.folder

    @property
    def exit_code(self) -> ExitCode | None:
        """The exit code of the run; None while it goes on."""
        return None if self.run.exit_code is None else ExitCode(self.run.exit_code)

    def open(self, share: Callable[[str], str] | None = None) -> None:
        """Make the result folder and write the first record, so that the run has one however it ends.

        Rank 0 makes the result folder, and every further rank a folder `rank<n>` in it.

        Args:
            share: gives every rank what it gets on rank 0; None for one rank.

        Raises:
            UsageError: the folder cannot be written.
        """
        run = self.run
        if not run.rank:
            self.folder = RunFolder.create(self.results_dir, self.run_id)
        if share is not None:
            parent = share(str(self.folder.path) if self.folder is not None else "")
            self.folder = self.folder or RunFolder.create(parent, f"rank{run.rank}")
        path = self.result.path
        run.run_id, run.started_at = path.name, now()
        run.pid, run.boot_id, run.process_start_s = process_identity()
        for name, value in self.caller_fields.items():
            setattr(run, name, value)
        try:
            if self.config_yaml is not None:
                config = path / "config.yaml"
                config.write_text(self.config_yaml)
                # Masked values appear as `***`, which is refused until somebody fills them in.
                masked = [f"--{name}={MASK}" for name in to_fill_in(run.config)]
                run.replay_command = shlex.join(["lmbench", run.command or "fit", "--config", str(config), *masked])
            self.result.write_run(run)
        except OSError as error:
            self.discard()
            reason = error.strerror or error
            message = f"results folder {self.results_dir!r} cannot be written: {reason}; choose another"
            raise UsageError(message) from error
        self.result.reserve()

    def discard(self) -> None:
        """Remove the result folder, if there is one."""
        if self.folder is not None:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            self.folder = None

    def steps_recorded(self, records: list[StepRecord]) -> None:
        """Write the records of finished steps."""
        self.result.append_steps(records)
        if self.result.error is not None:
            self._warn(self.result.error)

    def write(self) -> bool:
        """Write the record as it is; returns whether that succeeded."""
        if self.run.pid == os.getpid():
            # A process that takes over a record keeps those of the process that measured.
            self.run.milestones = milestones()
        try:
            self.result.write_run(self.run)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        """Print once that the result cannot be written."""
        if self._has_warned:
            return
        self._has_warned = True
        with suppress(OSError):
            tell(f"{self.result.path}: {error.strerror or error}; measuring goes on, records wait in memory")

    def summarize(self) -> Ending | None:
        """Complete the record by its steps; returns the ending if that fails."""
        return None

    def first_failure(self) -> Ending:
        """The ending of a run that measured to its end and has a summary, by the first failure after that."""
        if (signum := received()) is not None:
            return interrupted(signum, "summary")
        count, error, profile = self.result.unwritten_count, self.result.error, self.run.profile
        if count or error is not None:
            reason = (error and error.strerror) or "memory for records that wait was used up"
            message = f"{reason}: {count} steps are not in steps.jsonl; the summary has them"
            return failed("OSError", message, "recording")
        if profile is not None and profile.trace_error:
            return failed("OSError", f"{profile.trace_error}: the trace is lost, the steps are there", "recording")
        return self._complete_ending()

    def _complete_ending(self) -> Ending:
        """The ending of a run in which nothing failed but, under `strict`, a guard."""
        has_failed_guard = self.run.strict and any(guard.status == "fail" for guard in self.run.guards)
        return Ending("ok", ExitCode.GUARD_FAILED) if has_failed_guard else COMPLETE

    def close(self, ending: Ending) -> None:
        """Close the record, or change its ending where something failed after it was closed."""
        with held():
            if self.exit_code is None:
                self._note(ending)
                if ending is not COMPLETE:
                    # Summarizing takes time, and a kill meanwhile must not lose the outcome.
                    self.write()
                self.result.close()
                self.run.unwritten_step_count = self.result.unwritten_count
                failure = self.summarize()
                if ending.outcome == "ok":
                    ending = failure or self.first_failure()
            self._note(ending)
            reach("closed")
            # Frees the disk space that was reserved for the last record.
            self.result.release()
            if not self.write() and getattr(self.run.error, "phase", "recording") == "recording":
                message = "run.json could not be written, and this summary is from memory"
                self._note(failed("OSError", message, "recording"))

    def _note(self, ending: Ending) -> None:
        self.run.outcome, self.run.error = ending.outcome, ending.error
        self.run.exit_code, self.run.ended_at = int(ending.exit_code), now()

    def take_over(self, path: Path, ending: Ending | None) -> None:
        """Take over the record of a run that other processes measured.

        Args:
            path: the run's result folder.
            ending: how the run ended, where its processes could not record it; None keeps their ending.
        """
        run = load_run(path)
        self.folder, self.run = RunFolder(path), run.record
        if ending is None:
            return
        if self.exit_code is None:
            # Its process was ended before it could summarize the steps.
            complete_run(self.run, run.steps)
        self.close(ending)

    def complete(self, field: str, part: object, guards: list[Guard]) -> None:
        """Add to the closed record what a pass's reader found in the trace, the history or a prediction.

        Args:
            field: name of the record's field; `rooms.NAME` is a key of its open mapping.
            part: value of the field.
            guards: further guards; under `strict` one that fails changes the exit code.

        Raises:
            OSError: the record cannot be written.
        """
        with held():
            name, _, room = field.partition(".")
            if room:
                getattr(self.run, name)[room] = part
            else:
                setattr(self.run, name, part)
            self.run.guards += guards
            if self.exit_code is ExitCode.OK:
                self._note(self._complete_ending())
            self.result.write_run(self.run)
