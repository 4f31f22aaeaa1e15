"""Records what is measured, and how the run ends; the OpenRun below it writes that to the result folder."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.profilers import PassThroughProfiler
from torch.distributed import DistStoreError, all_gather_object, distributed_c10d

from lmbench.callbacks.checkpoint_recorder import CheckpointRecorder
from lmbench.callbacks.communication_probe import CommunicationProbe
from lmbench.callbacks.host_owners import HostOwners
from lmbench.callbacks.learning_rate import LearningRate
from lmbench.callbacks.observer import Observer
from lmbench.callbacks.phase_timer import PhaseTimer
from lmbench.code_owners import is_own_object
from lmbench.errors import ExitCode, UsageError
from lmbench.instruments.ending import (
    COMPLETE,
    Ending,
    definition_of_step,
    failed,
    frame_location,
    is_usage_error,
    judge,
)
from lmbench.instruments.environment import capture_environment, refuse_unlike, torch_flags
from lmbench.instruments.flight_recorder import failed_collective
from lmbench.instruments.open_run import OpenRun
from lmbench.instruments.subject import describe_data, describe_flops, describe_model, note_peak
from lmbench.interruption import held, interrupt, received
from lmbench.masking import masked_message
from lmbench.records.load import load_run
from lmbench.records.step import StepRecord
from lmbench.records.store import TRACEBACK_FILE
from lmbench.records.summary import complete_run, join_ranks, rank_record
from lmbench.records.vocabulary import Stage


class RunRecorder(OpenRun, Observer):
    """Writes a run to the folder `results_dir/<run_id>/`: `run.json` and `steps.jsonl`.

    The OpenRun writes; this observer tells it what is measured, and how the run ends. It adds a PhaseTimer, HostOwners,
    a CheckpointRecorder and a CommunicationProbe, if the Trainer has none, and a LearningRate if a scheduler changes
    the rate.

    Recorded beside the fields of all other callbacks:

    - `run_id`, `outcome`, `exit_code`, `error`, `started_at`, `ended_at`, `milestones`: how the run went.
    - `environment`, `model`, `data`, `flops`, `precision`, `matmul_precision`: what was measured, and where.
    - `rank`, `world_size`, `data_parallel_size`, `per_rank`: the ranks; the record of rank 0 stands for all.
    - `phases`, `throughput`, `loss`, `scalars`, `guards`: the summary of the window, made at the end.

    Raises:
        UsageError: the result folder cannot be written, or the ranks differ in code, settings or device.
    """

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
            self.open(trainer.strategy.broadcast if run.world_size != 1 else None)
        self.session.folder = self.result.path

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
        self.write()

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
                self.summarize()
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
            self.discard()

    def _fail(self, exception: BaseException) -> None:
        if self.exit_code not in (None, ExitCode.OK, ExitCode.GUARD_FAILED):
            return
        session = self.session
        if is_usage_error(exception) and received() is None and not (session and session.window_steps):
            self.discard()
            return
        with held():
            if self.folder is None:
                if _get_rank():
                    # Only rank 0 makes a folder for a failure before `setup`.
                    return
                self.open()
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

    def first_failure(self) -> Ending:
        ending, window = super().first_failure(), self.run.window
        if ending.outcome != "ok" or not window.steps or window.skipped_count != window.steps:
            return ending
        # Each step of the window was skipped, so that it has no step time.
        if self.session is None or self.session.track.has_scaler:
            return Ending("ok", ExitCode.GUARD_FAILED)
        message = "training_step returned no loss in any step of the window: nothing was trained or timed"
        ending = failed("NoLoss", message, "forward", ExitCode.USER_CODE)
        assert ending.error is not None
        ending.error.location = frame_location(definition_of_step(self.module))
        return ending

    def summarize(self) -> Ending | None:
        """Complete the record by its steps; returns the ending if that fails, after printing the traceback."""
        if self.session is None:
            return None
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
