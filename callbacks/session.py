"""The session of a run: its stage, record and phase borders, which all measuring callbacks share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from numbers import Real
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed import distributed_c10d

from lmbench.callbacks.events import Events, LeanCallback
from lmbench.device import synchronize
from lmbench.errors import UsageError
from lmbench.instruments.originals import replaced_functions
from lmbench.instruments.phases import BorderProfiler, ManualTrack, PhaseTrack, watch_restarts
from lmbench.instruments.training import logged_values, loss_scaler
from lmbench.instruments.window import (
    PACE_STEPS,
    ProbeKind,
    Schedule,
    planned_steps,
    quiet_collector,
)
from lmbench.records.measured import Probe, Window
from lmbench.records.process import reach
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import GRADIENT_NORM, StepRecord
from lmbench.records.vocabulary import RUNNING, Stage

#: Events of each step, of which only observers are notified that define them.
_STEP_EVENTS = ("batch_ended", "step_ended", "between_steps")
#: Lightning's stages that are measured; others leave the facts of the run before them.
RUNS = ("fit", "validate")
#: Step records kept in memory; a training may have millions of steps.
KEPT_RECORDS = 10_000


class MeasurementSession(LeanCallback):
    """Leads a run through warm-up, window and probe steps, and notifies the observers.

    The session is the last callback of the Trainer, so that a step ends when every other callback is done with it.
    Garbage collection is off in a window whose length was asked for, and left alone in one that lasts until training
    ends.

    Recorded:

    - `window.*`: the steps asked for and measured.
    - `probe.requested_steps`, `probe.is_complete`: the probe steps asked for, and whether all were taken.
    - `mode`: train_step or inference, if nobody has said more.
    - `gc_policy`: what garbage collection did in the window.
    - `unseen_phases`: phases that manual optimization hides.

    Attributes:
        run: record of the run, whose fields the observers fill in.
        step: record of the running step, until it is handed over at the step's end.
        records: the last 10 000 step records that were handed over.

    Args:
        schedule: when the window opens and closes. A schedule with `steps` stops training at its end.
    """

    device: torch.device

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule or Schedule()
        self._trainer: Any = None
        self._reset()

    def _reset(self) -> None:
        self.observers = list[Events]()
        self.track = PhaseTrack()
        self.stage = Stage.WARMUP
        self.probe_kind: ProbeKind | None = None
        self.run = RunRecord(SCHEMA_VERSION, RUNNING)
        self.run.window = Window(
            warmup_steps=self.schedule.warmup_steps,
            requested_steps=self.schedule.steps,
            requested_s=self.schedule.min_window_s,
            micro_batches=1,
        )
        self.step = StepRecord(micro_batches=0)
        self.records = deque[StepRecord](maxlen=KEPT_RECORDS)
        #: Wall seconds of the window, exclusions included; None until the window is closed.
        self.raw_wall_s: float | None = None
        self.steps_done = self._steps_before_epoch = 0
        self.window_steps = 0

        #: Folder for files of the run; a RunRecorder replaces it by the result folder.
        self.folder = Path()
        #: The run's PhaseTimer, which puts itself here.
        self.timer: Any = None
        self._has_started = False
        #: Callbacks that are removed from the Trainer when the run is over.
        self._attached = list[Callback]()
        self._bypass, self._collector, self._undo = ExitStack(), ExitStack(), ExitStack()
        self._window_start_ns = 0
        #: Seconds of the window in which another process measured.
        self.paused_s = 0.0

        self._optimizer_steps_seen = 0
        #: By event of each step the methods of the observers that define it.
        self._hearers = dict[str, list[Callable[..., None]]]()
        #: Logged scalars of the running step, by name and source.
        self.scalars = dict[tuple[str, Hashable], torch.Tensor | float]()
        #: The values that `self.log` kept last.
        self._logged = dict[str, torch.Tensor]()
        #: The kinds of the probe steps after the running one.
        self.probes_left = list[ProbeKind]()
        #: Number of window steps that several ranks agreed on; None where they need not.
        self._agreed_steps: int | None = None
        self._last_batch = 0
        #: When rounds of the warm-up began whose pace several ranks watch.
        self._rounds_ns = list[int]()

    @classmethod
    def of(cls, trainer: Trainer) -> MeasurementSession:
        """The trainer's session, as its last callback; a new one where there is none.

        Raises:
            UsageError: the trainer is one of pytorch_lightning, which has all classes twice.
        """
        if not isinstance(trainer, Trainer):
            raise UsageError(
                "the trainer is of pytorch_lightning, and lmbench's callbacks watch one of lightning.pytorch: have all "
                "of your code import lightning.pytorch"
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        own = [c for c in callbacks if isinstance(c, cls)]
        session = own[0] if own else cls()
        if callbacks[-1] is not session:
            # Build a new list, because Lightning may be iterating over the old one.
            trainer.callbacks = [*(c for c in callbacks if c is not session), session]  # type: ignore[attr-defined]
        session._open(trainer)
        if not own:
            session._attached.append(session)
        return session

    @property
    def only_watches(self) -> bool:
        """Whether the window lasts until training ends, as in a user's own Trainer: nothing is changed or stopped."""
        return self.schedule.steps is None

    @property
    def ranks_agree(self) -> bool:
        """Whether ranks agree on the number of steps: a rank that ended by its own clock would leave others waiting."""
        return self._trainer.world_size > 1 and not self.only_watches

    @property
    def ended_early(self) -> bool:
        """Whether training ended before the steps that ranks agreed on, such as without further batches."""
        lacks_probes = self.ranks_agree and self.run.probe.is_complete is False
        return lacks_probes or self.window_steps < (self._agreed_steps or 0)

    def _open(self, trainer: Trainer) -> None:
        """Begin a new run with this trainer, unless an earlier callback of the same run did."""
        if self._trainer is trainer and not self._has_started:
            return
        self._close()
        self._reset()
        self._trainer, self.device = trainer, trainer.strategy.root_device
        self.folder = Path(trainer.default_root_dir, f"rank{trainer.global_rank}" if trainer.global_rank else "")

    def attach(self, observer: Events) -> None:
        """Add an observer for this run only, in front of the session."""
        trainer = self._trainer
        # A user's callback may have added others behind the session.
        trainer.callbacks = [*(c for c in trainer.callbacks if c is not self), observer, self]
        self._attached.append(observer)
        observer.setup(trainer, trainer.lightning_module, trainer.state.fn)

    def _close(self) -> None:
        """Restore the trainer's profiler and callbacks; facts and records stay until the next run."""
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        self._bypass.close()
        self._undo.close()
        trainer.callbacks = [c for c in trainer.callbacks if c not in self._attached]

    def teardown(self, *_: Any, **__: Any) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An exception before `setup` (unreadable data, say) has no session to record it.
        if self._trainer is trainer:
            self.fail(exception)

    def fail(self, exception: BaseException) -> None:
        """End the run by an exception, unless it has ended already."""
        if self._trainer is not None:
            try:
                self._end_run(exception)
            finally:
                self._close()

    def _end_run(self, exception: BaseException | None) -> None:
        self._collector.close()
        self.run.unseen_phases = self.track.unseen_phases()
        for observer in self.observers:
            try:
                with observer.undo:
                    observer.run_closing(exception)
            except Exception as fault:
                if exception is None:
                    raise
                # After a device error nothing can be read from it, but other observers can still record their facts.
                exception.add_note(f"{type(observer).__name__} could not leave its facts: {fault!r}")
        reach("stepped")
        for observer in self.observers:
            observer.run_ended(exception)

    def log_scalar(self, name: str, value: torch.Tensor | float, unit: str = "", source: Hashable = None) -> None:
        """Log a number of the running step to steps.jsonl, the run's summary, every logger, W&B and a table's column.

        Logging does not wait for the device: the timer copies a device scalar behind the step's last kernel, and reads
        the copy when the device has passed the step. The column is `scalars.NAME`, the mean over the window.

        Args:
            name: any name; a dot in it becomes a slash, since dots separate the parts of a record.
            value: a number, or a tensor of one element on any device, which is kept in float32.
            unit: unit of the number, for the heading of a column.
            source: who logs the number. A later value of the same source in a step replaces the earlier one; values of
                several sources become their mean, norms of gradients the norm of all.

        Raises:
            UsageError: the value is no single number.
        """
        is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)
        if not is_number:
            raise UsageError(
                f"log_scalar({name!r}) was given a {type(value).__name__}; give one number, such as a mean"
            )
        name = name.replace(".", "/")
        if unit:
            self.run.scalar_units[name] = unit
        self.scalars[name, source] = value if isinstance(value, torch.Tensor) else float(value)

    @property
    def window_records(self) -> list[StepRecord]:
        """The records of the window, of those that are kept."""
        return [record for record in self.records if record.stage == Stage.WINDOW]

    @property
    def window_elapsed_s(self) -> float:
        """Host seconds since the window opened."""
        return (perf_counter_ns() - self._window_start_ns) * 1e-9

    # Lightning's hooks: training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage in RUNS:
            MeasurementSession.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        has_scaler = loss_scaler(trainer) is not None
        clips = bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", pl_module)
        self.track = PhaseTrack(has_scaler, clips)
        if not pl_module.automatic_optimization:
            self.track = manual = ManualTrack(has_scaler, clips)
            manual.watch_bypasses(self._bypass, pl_module, trainer.optimizers)
        watch_restarts(self._undo, self.track)
        self._optimizer_steps_seen = trainer.global_step
        self.run.window.micro_batches = trainer.accumulate_grad_batches
        self._start(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Manual optimization may step any number of times, so a batch counts as a step.
        steps_seen, self._optimizer_steps_seen = self._optimizer_steps_seen, trainer.global_step
        is_step = not pl_module.automatic_optimization or self._optimizer_steps_seen != steps_seen
        if batch_idx == 0 and self.steps_done:
            self.step.follows_loader_end = True
            self.run.window.loader_batches = self._last_batch + 1
        self._last_batch = batch_idx
        # Lightning takes no step with a batch that is None, such as one whose samples `collate_fn` left out.
        if outputs is not None:
            self._end_batch(outputs, batch, is_step)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self.only_watches and self.steps_done == self._steps_before_epoch:
            # The data is empty, used up or nothing but None, or a hook stops each epoch at its first batch, and
            # Lightning would begin one epoch after the other for ever.
            trainer.should_stop = True
        self._steps_before_epoch = self.steps_done

    def on_train_end(self, *_: Any) -> None:
        self._finish()

    # validation: a run of its own, or within training, where it is excluded from the step

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn != "fit":
            self._start(trainer)
        else:
            self.track.set_validating(True)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn != "fit":
            self._finish()
        else:
            self.track.set_validating(False)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        if trainer.state.fn != "fit":
            self._end_batch(outputs, batch, is_step=True)
            if self.stage is Stage.DONE:
                # Lightning's evaluation loop ends only with its loader, which may be endless.
                raise StopIteration

    def _end_batch(self, outputs: Any, batch: Any, is_step: bool) -> None:
        for name, value in logged_values(self._trainer, self._logged):
            # A name that StepRecord declares belongs to lmbench's own callbacks.
            if name != GRADIENT_NORM:
                self.log_scalar(name, value)
        # Lightning hands on a validation step's return value as it is, and a training step's as a mapping.
        if isinstance(outputs, torch.Tensor):
            outputs = {"loss": outputs}
        elif not isinstance(outputs, Mapping):
            outputs = {}
        for hear_batch in self._hearers["batch_ended"]:
            hear_batch(outputs, batch)
        self.step.micro_batches += 1  # type: ignore[operator]
        if is_step:
            self._end_step()

    # the stages

    def _start(self, trainer: Trainer) -> None:
        self.run.mode = self.run.mode or ("train_step" if trainer.state.fn == "fit" else "inference")
        profiler = BorderProfiler(trainer.profiler, self.track)  # type: ignore[attr-defined]
        self._undo.enter_context(patch.object(trainer, "profiler", profiler))
        for event in _STEP_EVENTS:
            hearers = [o for o in self.observers if getattr(type(o), event) is not getattr(Events, event)]
            self._hearers[event] = [getattr(observer, event) for observer in hearers]
        for observer in self.observers:
            observer.run_started()
        # From now on a `setup` begins another run.
        self._has_started = True
        self._stages = self._lead()
        next(self._stages)

    def _end_step(self) -> None:
        stage = self.stage
        step = self.step
        step.step, step.rank = self.steps_done, self._trainer.global_rank
        step.stage, step.is_warmup = stage, stage is Stage.WARMUP
        self.steps_done += 1
        if stage is Stage.WINDOW:
            self.window_steps += 1
            if self.window_steps == 1:
                self._bypass.close()
        for hear_step in self._hearers["step_ended"]:
            hear_step()
        self.step, self.scalars = StepRecord(micro_batches=0), {}
        if self.steps_done == 1:
            reach("first_step")
            if self.ranks_agree:
                # Until here a collective may wait as long as another rank builds and compiles.
                timeout = timedelta(seconds=self.schedule.collective_timeout_s)
                for group in distributed_c10d._world.pg_map:
                    distributed_c10d._set_pg_timeout(timeout, group)
        next(self._stages, None)
        if self.stage is stage:
            for work in self._hearers["between_steps"]:
                work()

    def _lead(self) -> Iterator[None]:
        """Lead the run through its stages; goes on whenever a step has ended."""
        if self.schedule.warmup_steps:
            while self.steps_done < self.schedule.warmup_steps or not self._is_pace_steady():
                yield
        self._open_window()
        while not self._is_window_complete():
            yield
        self._close_window()
        if self.schedule.probe_steps:
            self.stage, self.probes_left = Stage.PROBE, self.schedule.probe_plan()
            self.probes_left += [kind for observer in self.observers for kind in observer.own_probes]
            self.run.probe = Probe(requested_steps=self.schedule.probe_steps, is_complete=False)
            while self.probes_left:
                self._switch_probe(self.probes_left.pop(0))
                yield
            self._switch_probe(None)
            self.run.probe.is_complete = True
        self.stage = Stage.DONE
        self._trainer.should_stop = True

    def _is_window_complete(self) -> bool:
        if self._agreed_steps is not None:
            return self.window_steps >= self._agreed_steps
        return self.schedule.is_window_complete(self.window_steps, self.window_elapsed_s - self.paused_s)

    def _is_pace_steady(self) -> bool:
        """Whether the window may open: for ranks and a window of a given length, once rank 0 has a steady pace."""
        if not self.ranks_agree or not self.schedule.min_window_s:
            return True
        if (self.steps_done - self.schedule.warmup_steps) % PACE_STEPS:
            return False
        synchronize(self.device)
        self._rounds_ns.append(perf_counter_ns())
        steps = self._trainer.strategy.broadcast(planned_steps(self._rounds_ns, self.schedule.min_window_s))
        if steps is not None:
            self._agreed_steps = max(self.schedule.steps or 1, steps)
        return steps is not None

    def _open_window(self) -> None:
        if self.steps_done:
            self._bypass.close()
        if self._trainer.training:
            # A callback may have changed it at the begin of an epoch.
            self.run.window.micro_batches = self._trainer.accumulate_grad_batches
        if self.ranks_agree:
            self._agreed_steps = self._agreed_steps or self.schedule.steps
            self.run.window.pace_steps = self.steps_done - self.schedule.warmup_steps
        if self.only_watches:
            self.run.gc_policy = "left alone"
        else:
            self.run.gc_policy = "collected and frozen, off in the window"
            self.run.collector.full_s = quiet_collector(self._collector)
        for observer in self.observers:
            observer.before_window()
        if self._agreed_steps is not None:
            self._trainer.strategy.barrier()
        self.run.window.replaced_functions = replaced_functions()
        synchronize(self.device)
        self.stage = Stage.WINDOW
        for observer in self.observers:
            observer.window_opened()
        self._window_start_ns = perf_counter_ns()
        reach("window_opened")
        self.run.window.first_step = self.steps_done

    def _close_window(self, ends_training: bool = False) -> None:
        synchronize(self.device)
        self.raw_wall_s = self.window_elapsed_s
        if ends_training and self.timer is not None:
            # The end of the epoch, perhaps with a validation or a checkpoint, came after the last step.
            self.raw_wall_s -= self.timer.timeline.since_step_s()
        self.run.window.steps = self.window_steps
        batches = self._trainer.num_training_batches
        if math.isfinite(batches):
            self.run.window.loader_batches = int(batches)
        self.stage = Stage.DONE
        opening = self.run.window.replaced_functions or []
        self.run.window.replaced_functions = list(dict.fromkeys([*opening, *replaced_functions()]))
        for observer in self.observers:
            observer.window_closed()
        self._collector.close()

    def repeat_probe(self) -> None:
        """Take one more probe step of the running kind."""
        if self.probe_kind is not None:
            self.probes_left.insert(0, self.probe_kind)

    def _switch_probe(self, kind: ProbeKind | None) -> None:
        """End the running probe steps, if any, and begin those of `kind`, if any, unless they are running."""
        if kind is self.probe_kind:
            return
        if self.probe_kind is not None:
            for observer in self.observers:
                observer.probe_ended(self.probe_kind)
        self.probe_kind = kind
        if kind is not None:
            for observer in self.observers:
                observer.probe_begins(kind)

    def _finish(self) -> None:
        if self.stage is Stage.WINDOW:
            self._close_window(ends_training=True)
        # Training may have ended before the probe steps did.
        self._switch_probe(None)
        self._end_run(None)
