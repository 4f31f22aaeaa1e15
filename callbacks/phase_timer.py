"""Times the phases of every step without making the host wait for the device."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median
from typing import Any, Literal

import torch

from lmbench.callbacks.events import Outputs
from lmbench.callbacks.logger_sink import LoggerSink
from lmbench.callbacks.observer import Observer
from lmbench.errors import UsageError
from lmbench.instruments.scalars import ScalarRing
from lmbench.instruments.timeline import HOST_BOUND_LAG_S, ProbeMarks, Step, Timeline, lag_verdicts
from lmbench.instruments.training import loss_scale, loss_scaler
from lmbench.instruments.window import ProbeKind
from lmbench.interruption import held
from lmbench.records.field import mean_of
from lmbench.records.step import GRADIENT_NORM, StepRecord
from lmbench.records.summary import summarize_steps
from lmbench.records.vocabulary import BACKWARD_MODES, EXCLUDED, STAGES, Stage
from lmbench.report.units import milliseconds

# Steps, and seconds of steps, that a SIGKILL may lose at most.
FLUSH_STEPS = 50
FLUSH_S = 1.0
# Device scalars after which finished steps are read, so that the ring is not full: some 1000 copies at most are queued.
FLUSH_SCALARS = 2000
# Settling steps at most: a queue that has not filled again by then will not.
MAX_SETTLE_STEPS = 50
# Settling steps of several ranks, which must all take the same number, whatever the queue of each.
SETTLE_STEPS_OF_RANKS = 10
# Share of the window's median lag that the settling steps wait for; the rest follows during the lag probes.
SETTLED_FRACTION = 0.8
# No phase of a device-bound step uses up a lag as long as this, so the settling steps wait for no more.
AMPLE_LAG_S = 0.05


class PhaseTimer(Observer):
    """Times the device span, host span and lag of every phase, and finds phases in which the device waits for the host.

    Recorded in one StepRecord a step, which every observer gets by `steps_recorded`:

    - `step_s`, `<phase>_s`: device seconds of the step and of its phases.
    - `step_host_s`, `<phase>_host_s`: host seconds of the same.
    - `lag_step_s`, `lag_<phase>_s`: seconds that the device is behind the host at the end; null on a CPU.
    - `loss`: return value of `training_step`, or its `loss` entry, averaged over micro-batches; null without one.
    - `is_skipped`: whether the fp16 scaler skipped the update, or `training_step` returned no loss to train with.
    - `excluded_s`: seconds of validation, checkpoints and record writing, which are in no span.

    Recorded for the run:

    - `clock`: name of the clock.
    - `probe.steps`, `probe.marked_modules`, `probe.verdicts`: the lag probes and their verdict by phase.

    Attributes:
        records: the last 10 000 StepRecords of the latest run.

    Args:
        clock: `events` (device events, no synchronize in the window) or `sync` (a synchronize at every border: the
            second instrument, which slows the run and stays out of timing tables). On a CPU both are the host clock.

    Raises:
        UsageError: the run has a second PhaseTimer.
    """

    def __init__(self, clock: Literal["events", "sync"] = "events") -> None:
        self.clock = clock
        self.records = deque[StepRecord]()

    def __repr__(self) -> str:
        phases = summarize_steps(self.records)
        if phases.step is None:
            return f"{type(self).__name__}: no step of a window yet"
        means = ", ".join(f"{span} {milliseconds(phase.mean_s)}" for span, phase in phases.items())
        return f"{type(self).__name__}, mean of {phases.step.n} steps in ms: {means}"

    def prepare(self) -> None:
        self.records = self.session.records
        self._is_running = False
        self._losses = list[int]()
        if self.session.timer not in (None, self):
            raise UsageError("two PhaseTimers in one run; lmbench adds one itself: set it with --timer.*")
        self.session.timer = self

    def run_started(self) -> None:
        clock = self.device.clock(self.clock)
        self.run.clock = clock.name
        self._ring = ScalarRing(self.device)
        self._scaler = loss_scaler(self.trainer)
        # The first step counts as skipped if it lowers this scale.
        self._scale = loss_scale(self.trainer)
        self.timeline = Timeline(clock)
        self._is_running = True
        self._restart()
        self.session.track.listen(self.timeline.border, self.undo)
        if self.trainer.loggers:
            # Behind all other observers, so that it logs complete facts.
            self.session.attach(LoggerSink())

    def batch_ended(self, outputs: Outputs, batch: Any) -> None:
        loss = outputs.get("loss")
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
            self._losses.append(self._ring.put(loss))

    def run_closing(self, exception: BaseException | None) -> None:
        if self._is_running:
            if exception is None:
                # Training may have ended before the window opened.
                self.device.synchronize()
            self._deliver()

    # the session's events

    def window_opened(self) -> None:
        self._deliver()
        self._restart()

    def step_ended(self) -> None:
        # Lightning passes on the loss divided by the number of micro-batches, which a callback may change each epoch.
        divisor = self.trainer.accumulate_grad_batches if self.trainer.training else 1
        facts = Step(self.session.step, divisor, self._losses)
        self._losses = []
        for (name, _), value in self.session.scalars.items():
            slot = self._ring.put(value) if isinstance(value, torch.Tensor) else value
            facts.scalars.setdefault(name, []).append(slot)
        if self._scaler is not None and self._scaler._scale is not None:
            facts.scale_slot = self._ring.put(self._scaler._scale)
        self._since_flush += 1
        self._scalars_since_flush += len(facts.loss_slots) + len(self.session.scalars)
        self.timeline.end_step(facts)
        if self.session.probe_kind is ProbeKind.SETTLE and not self._is_settled():
            self.session.repeat_probe()

    def between_steps(self) -> None:
        if self.session.stage is Stage.PROBE:
            return
        is_due = self._since_flush >= FLUSH_STEPS or self._scalars_since_flush >= FLUSH_SCALARS
        if is_due or time.monotonic() - self._flushed_at >= FLUSH_S:
            self.timeline.border(EXCLUDED)
            self._deliver()
            self.timeline.border("other")

    def window_closed(self) -> None:
        self._deliver()
        self.timeline.calibrate()

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind is ProbeKind.SETTLE:
            window = self.session.window_records
            self._window_lag_s = median([r.lag_step_s for r in window if r.lag_step_s is not None] or [0.0])
            self._window_step_s = median([r.step_s for r in window if r.step_s is not None] or [0.0])
            self.device.synchronize()
            self._restart()
            self._settling_from, self._settling_since_s = self.session.steps_done, time.monotonic()
        elif kind is ProbeKind.LAG:
            self._marks = self.undo.enter_context(ProbeMarks(self.module, self.timeline.note))

    def _is_settled(self) -> bool:
        """Whether the device is as far behind the host as it was in the window, or at least AMPLE_LAG_S behind.

        Several ranks take a fixed number of steps. A device that kept up with the host in the window is settled at
        once. A queue that takes dozens of long steps has finished none of them when all are issued. So the lag is also
        estimated: the issued steps last as long as the window's, and the device has worked on them since settling
        began.
        """
        settle_steps = self.session.steps_done - self._settling_from
        if self.session.ranks_agree:
            return settle_steps >= SETTLE_STEPS_OF_RANKS
        queued_s = settle_steps * self._window_step_s - (time.monotonic() - self._settling_since_s)
        if min(queued_s, self._window_lag_s) >= AMPLE_LAG_S or settle_steps >= MAX_SETTLE_STEPS:
            return True
        lags_s = [step.record.lag_step_s or 0.0 for step in self.timeline.drain()]
        is_host_bound = self._window_lag_s < HOST_BOUND_LAG_S
        return is_host_bound or max(lags_s, default=0.0) >= SETTLED_FRACTION * self._window_lag_s

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind is not ProbeKind.LAG:
            return
        self._marks.close()
        self.device.synchronize()
        steps = [step for step in self.timeline.drain() if step.record.stage == "probe"]
        steps = steps[-self.session.schedule.probe_steps :]
        probe = self.run.probe
        probe.steps = len(steps)
        probe.marked_modules = self._marks.count
        probe.verdicts = lag_verdicts(steps)
        self._restart()

    # delivery

    def _restart(self) -> None:
        self.timeline.start(self.session.track.current)
        self._note_flush()

    def _note_flush(self) -> None:
        self._since_flush, self._scalars_since_flush, self._flushed_at = 0, 0, time.monotonic()

    def _deliver(self) -> None:
        """Hand over the finished steps of warm-up and window."""
        # A Ctrl-C between draining the timeline and handing the records over would lose steps.
        with held():
            records = [self._record(step) for step in self.timeline.drain() if step.record.stage in STAGES]
            self.records.extend(records)
            if records:
                for observer in self.session.observers:
                    observer.steps_recorded(records)
        self._note_flush()

    def _record(self, facts: Step) -> StepRecord:
        record = facts.record
        losses = [self._ring.get(slot) for slot in facts.loss_slots]
        record.loss = facts.loss_divisor * sum(losses) / len(losses) if losses else None
        for name, slots in facts.scalars.items():
            values = [slot if isinstance(slot, float) else self._ring.get(slot) for slot in slots]
            if name == GRADIENT_NORM:
                record.gradient_norm = math.hypot(*values)
            else:
                record.scalars[name] = mean_of(values)
        # GradScaler lowers its scale exactly when it found an infinity and skipped the update.
        scale = self._scale if facts.scale_slot is None else self._ring.get(facts.scale_slot)
        # Without a loss, Lightning skips the backward pass too.
        is_due = self.module.automatic_optimization and self.run.mode in BACKWARD_MODES
        record.is_skipped = scale < self._scale or (is_due and record.backward_s is None)
        self._scale = scale
        return record
