"""Writes the result folder: step records while the run goes on, the run's record at its start and end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import traceback
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from torch.distributed import DistStoreError, all_gather_object, distributed_c10d

from lmbench.callbacks.checkpoint_recorder import CheckpointRecorder
from lmbench.callbacks.communication_probe import CommunicationProbe
from lmbench.callbacks.host_owners import HostOwners
from lmbench.callbacks.learning_rate import LearningRate
from lmbench.callbacks.observer import Observer
from lmbench.callbacks.phase_timer import PhaseTimer
from lmbench.code_owners import is_own_object
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.instruments.ending import (
    COMPLETE,
    Ending,
    definition_of_step,
    failed,
    frame_location,
    interrupted,
    is_usage_error,
    judge,
)
from lmbench.instruments.environment import capture_environment, refuse_unlike, torch_flags
from lmbench.instruments.flight_recorder import failed_collective
from lmbench.instruments.subject import describe_data, describe_flops, describe_model, note_peak
from lmbench.interruption import held, interrupt, received
from lmbench.masking import MASK, masked_message, to_fill_in
from lmbench.records.load import load_run
from lmbench.records.measured import Guard
from lmbench.records.process import milestones, now, process_identity, reach
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import TRACEBACK_FILE, RunFolder
from lmbench.records.summary import complete_run, join_ranks, rank_record
from lmbench.records.vocabulary import RUNNING, Stage, Values


class RunRecorder(Observer):
    """Writes a run to the folder `results_dir/<run_id>/`: `run.json` and `steps.jsonl`.

    It adds a PhaseTimer, HostOwners, a CheckpointRecorder and a CommunicationProbe, if the Trainer has none, and a
    LearningRate if a scheduler changes the rate. A full disk does not end the run: writing is tried again, and records
    that are lost in the end make the outcome `error`.

    Recorded beside the fields of all other callbacks:

    - `run_id`, `outcome`, `exit_code`, `error`, `started_at`, `ended_at`, `milestones`: how the run went.
    - `environment`, `model`, `data`, `flops`, `precision`, `matmul_precision`: what was measured, and where.
    - `rank`, `world_size`, `data_parallel_size`, `per_rank`: the ranks; the record of rank 0 stands for all.
    - `phases`, `throughput`, `loss`, `scalars`, `guards`: the summary of the window, made at the end.

    Attributes:
        run: the record as last written.
        folder: the result folder; None while there is none.

    Args:
        results_dir: folder of result folders.
        caller_fields: fields of the record that only the caller knows (command line, resolved config, mode), by name.
        config_yaml: a configuration file that repeats the run; stored beside it as config.yaml.
        run_id: name of the result folder, for a single run; None makes up a new one for every run.

    Raises:
        UsageError: the result folder cannot be written, or the ranks differ in code, settings or device.
    """

    def __init__(
        self,
        results_dir: str = "results",
        caller_fields: Values | None = None,
        config_yaml: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.results_dir = results_dir
        self.run_id = run_id
        self.caller_fields = caller_fields or {}
        self.config_yaml = config_yaml
        self.run = RunRecord(SCHEMA_VERSION, RUNNING)
        self.folder: RunFolder | None = None
        self._has_warned = False

    @property
    def result(self) -> RunFolder:
        """The result folder, once there is one."""
        assert self.folder is not None
        return self.folder

    @property
    def exit_code(self) -> ExitCode | None:
        """The exit code of the run; None while it goes on."""
        return None if self.run.exit_code is None else ExitCode(self.run.exit_code)

    def prepare(self) -> None:
        trainer, run = self.trainer, self.run
        for kind in (PhaseTimer, HostOwners, CheckpointRecorder, CommunicationProbe):
            if not any(isinstance(callback, kind) for callback in trainer.callbacks):  # type: ignore[attr-defined]
                self.session.attach(kind())
        run.rank, run.world_size = trainer.global_rank, trainer.world_size
        run.data_parallel_size = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        run.precision, run.device_type = str(trainer.precision), self.session.device.type
        run.is_profiled = type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]
        run.repairs = list(getattr(trainer, "repairs", []))
        with held():
            self._open(trainer.strategy)

    def on_train_start(self, *_: Any) -> None:
        # The schedulers exist from now on.
        if self.trainer.lr_scheduler_configs:
            self.session.attach(LearningRate())

    def run_started(self) -> None:
        run = self.run
        run.environment = capture_environment(self.session.device, type(self.module))
        if self.session.ranks_agree:
            environment = run.environment
            facts = {"device": environment.gpu.name, **asdict(environment.versions)}
            refuse_unlike(facts | {"commit": environment.code.project.commit} | (run.config or {}))
        run.matmul_precision = torch.get_float32_matmul_precision()
        run.zero_grad = run.zero_grad or "native"
        run.model = describe_model(self.module, self.trainer.optimizers, str(run.precision))
        if self.trainer.ckpt_path:
            run.model.is_fresh = False
        run.model.fp8 = getattr(self.trainer.precision_plugin, "layers", None)
        run.flops = describe_flops(self.module, str(run.mode))
        note_peak(run)
        run.data = describe_data(self.trainer)
        self._write()

    def before_window(self) -> None:
        # The module's own hooks and steps may have changed these since the start.
        self.run.environment.flags = torch_flags()

    def window_closed(self) -> None:
        run, environment = self.run, self.run.environment
        flags = torch_flags()
        before, after = asdict(environment.flags), asdict(flags)
        changed = [name for name in after if after[name] != before[name]]
        run.window.changed_flags = [f"{name} {before[name]} -> {after[name]}" for name in changed]
        environment.flags, run.matmul_precision = flags, torch.get_float32_matmul_precision()
        run.model.trainable_parameter_count = sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def between_steps(self) -> None:
        # Raise once more: a bare `except` or a destructor can swallow the exception that the signal raised.
        if (signum := received()) is not None:
            interrupt(signum)

    def run_closing(self, exception: BaseException | None) -> None:
        # The precision of products may have changed, and FLOPs may have been counted.
        note_peak(self.run)
        check_again = getattr(self.module, "check_again", None)
        if exception is None and callable(check_again):
            refused = self.run.memory.refused
            check_again()
            # If only this check ran out of memory, the run did not.
            self.run.memory.refused = refused

    def run_ended(self, exception: BaseException | None) -> None:
        session = self.session
        if exception is not None:
            self._fail(exception)
        elif session.window_steps:
            if self.trainer.world_size > 1:
                self._await_ranks()
                self._summarize()
                # Gather on every rank, but join only in the record of rank 0, which stands for all.
                ranks: list[Any] = [None] * self.trainer.world_size
                all_gather_object(ranks, rank_record(self.run))
                if self.trainer.is_global_zero:
                    join_ranks(self.run, ranks)
            self.close(COMPLETE)
        else:
            what, limits = "training", "give more batches, lift max_steps, max_epochs or max_time"
            if self.run.mode == "inference":
                what, limits = "the validation data", "give more batches"
            message = (
                f"nothing was measured: {what} ended at step {session.steps_done}, the window begins after "
                f"{session.schedule.warmup_steps}; {limits}, or lower warmup_steps"
            )
            self.close(failed("EmptyWindow", message, None, ExitCode.USAGE))

    def _await_ranks(self) -> None:
        """If training ended early, wait for its end on all ranks.

        Raises:
            UsageError: another rank goes on, and would wait for this one in the collectives of its next step.
        """
        session, store = self.session, distributed_c10d._get_default_store()
        store.set(f"lmbench {self.trainer.global_rank}", "ended")
        if session.ended_early:
            # The other rank waits, too, and for longer: this one tells the reason.
            patience = timedelta(seconds=session.schedule.collective_timeout_s / 2)
            try:
                store.wait([f"lmbench {rank}" for rank in range(self.trainer.world_size)], patience)
            except DistStoreError as error:
                raise UsageError(
                    f"training ended after {session.steps_done} steps, and other ranks go on: give every rank as many "
                    "batches"
                ) from error

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

    def end_by(self, exception: BaseException) -> None:
        """Record the exception that ended the run, also where Lightning reported none; the first one recorded stays.

        A usage error before the window removes the result folder.

        Raises:
            UsageError: there is no result folder yet, and none can be made.
        """
        if self.session is not None:
            self.session.fail(exception)
        self._fail(exception)

    def teardown(self, *_: Any, **__: Any) -> None:
        # Nothing was measured in a loop without a batch, of which Lightning calls no hook.
        if self.exit_code is None:
            self._discard()

    def _fail(self, exception: BaseException) -> None:
        if self.exit_code not in (None, ExitCode.OK, ExitCode.GUARD_FAILED):
            return
        session = self.session
        if is_usage_error(exception) and received() is None and not (session and session.window_steps):
            self._discard()
            return
        with held():
            if self.folder is None:
                if _get_rank():
                    # Only rank 0 makes a folder for a failure before `setup`.
                    return
                self._open()
            ending = self._judge(exception)
            if ending.outcome == "oom" and session is not None and session.stage is Stage.PROBE:
                # Probe steps take more memory than the window, which was complete before them.
                self.run.probe.error = ending.error
                ending = COMPLETE
            self.close(ending)

    def _judge(self, exception: BaseException) -> Ending:
        """The ending of a run that an exception ended; writes the traceback file if code failed."""
        phase, is_lmbench_subject = "setup", True
        if self.session is not None:
            if self.run.is_set_up:
                phase = str(getattr(exception, "lmbench_phase", self.session.track.current))
            subjects = (self.module, self.trainer.datamodule or self.module)  # type: ignore[attr-defined]
            is_lmbench_subject = all(map(is_own_object, subjects))
            # Only an attention function of the user is checked.
            is_lmbench_subject &= self.run.model.attention_check is None
        ending = judge(exception, phase, is_lmbench_subject)
        assert ending.error is not None
        if collective := failed_collective(exception):
            ending.error.collective = collective
            # Gloo's message begins with a place in its source.
            ending.error.message = re.sub(r"^\[\S+:\d+\] ", "", f"{ending.error.message} (in {collective})")
        if ending.exit_code in (ExitCode.INTERNAL, ExitCode.USER_CODE):
            with suppress(OSError):
                text = masked_message("".join(traceback.format_exception(exception)))
                (self.result.path / TRACEBACK_FILE).write_text(text, encoding="utf-8", errors="replace")
                ending.error.traceback_file = TRACEBACK_FILE
        return ending

    def _open(self, strategy: Strategy | None = None) -> None:
        """Make the result folder and write the first record, so that the run has one however it ends.

        Rank 0 makes the result folder, and every further rank a folder `rank<n>` in it.

        Raises:
            UsageError: the folder cannot be written.
        """
        run = self.run
        if not run.rank:
            self.folder = RunFolder.create(self.results_dir, self.run_id)
        if strategy is not None and run.world_size != 1:
            parent = strategy.broadcast(str(self.folder.path) if self.folder is not None else "")
            self.folder = self.folder or RunFolder.create(parent, f"rank{run.rank}")
        assert self.folder is not None
        if self.session is not None:
            self.session.folder = self.folder.path
        run.run_id, run.started_at = self.folder.path.name, now()
        run.pid, run.boot_id, run.process_start_s = process_identity()
        for name, value in self.caller_fields.items():
            setattr(run, name, value)
        try:
            if self.config_yaml is not None:
                path = self.folder.path / "config.yaml"
                path.write_text(self.config_yaml)
                # Masked values appear as `***`, which is refused until somebody fills them in.
                masked = [f"--{name}={MASK}" for name in to_fill_in(run.config)]
                run.replay_command = shlex.join(["lmbench", run.command or "fit", "--config", str(path), *masked])
            self.folder.write_run(run)
        except OSError as error:
            self._discard()
            reason = error.strerror or error
            message = f"results folder {self.results_dir!r} cannot be written: {reason}; choose another"
            raise UsageError(message) from error
        self.folder.reserve()

    def _discard(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            self.folder = None

    def steps_recorded(self, records: list[StepRecord]) -> None:
        self.result.append_steps(records)
        if self.result.error is not None:
            self._warn(self.result.error)

    def _write(self) -> bool:
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

    def close(self, ending: Ending) -> None:
        """Close the record, or change its ending where something failed after it was closed."""
        with held():
            if self.exit_code is None:
                self._note(ending)
                if ending is not COMPLETE:
                    # Summarizing takes time, and a kill meanwhile must not lose the outcome.
                    self._write()
                self.result.close()
                self.run.unwritten_step_count = self.result.unwritten_count
                failure = self._summarize() if self.session is not None else None
                if ending.outcome == "ok":
                    ending = failure or self._first_failure()
            self._note(ending)
            reach("closed")
            # Frees the disk space that was reserved for the last record.
            self.result.release()
            if not self._write() and getattr(self.run.error, "phase", "recording") == "recording":
                message = "run.json could not be written, and this summary is from memory"
                self._note(failed("OSError", message, "recording"))

    def _note(self, ending: Ending) -> None:
        self.run.outcome, self.run.error = ending.outcome, ending.error
        self.run.exit_code, self.run.ended_at = int(ending.exit_code), now()

    def _complete_ending(self) -> Ending:
        """The ending of a run in which nothing failed but, under `strict`, a guard."""
        has_failed_guard = self.run.strict and any(guard.status == "fail" for guard in self.run.guards)
        return Ending("ok", ExitCode.GUARD_FAILED) if has_failed_guard else COMPLETE

    def _first_failure(self) -> Ending:
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
        window = self.run.window
        if not window.steps or window.skipped_count != window.steps:
            return self._complete_ending()
        # Each step of the window was skipped, so that it has no step time.
        if self.session is None or self.session.track.has_scaler:
            return Ending("ok", ExitCode.GUARD_FAILED)
        message = "training_step returned no loss in any step of the window: nothing was trained or timed"
        ending = failed("NoLoss", message, "forward", ExitCode.USER_CODE)
        assert ending.error is not None
        ending.error.location = frame_location(definition_of_step(self.module))
        return ending

    def _summarize(self) -> Ending | None:
        """Summarize the steps in the record; returns the ending if that fails, after printing the traceback."""
        try:
            complete_run(self.run, self._steps(), self.session.raw_wall_s)
        except Exception as fault:
            traceback.print_exc()
            return failed(type(fault).__name__, f"lmbench's own summary failed: {fault}", "summary")
        return None

    def _steps(self) -> list[StepRecord]:
        """The steps in the folder and those that wait; the session's latest where somebody removed the folder."""
        try:
            return load_run(self.result.path).steps + self.result.waiting_steps()
        except (OSError, UsageError):
            return list(self.session.records)
