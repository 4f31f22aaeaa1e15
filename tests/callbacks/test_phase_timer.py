"""PhaseTimer and its session in a real Trainer, against phases of known length."""

from __future__ import annotations

import math
import statistics
import time

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lmbench.callbacks import MeasurementSession, Observer, PhaseTimer
from lmbench.errors import UsageError
from lmbench.instruments.clock import HostClock
from lmbench.instruments.schedule import Schedule
from lmbench.records.vocabulary import PHASES

from conftest import SlowBatches, quiet_trainer, ratio_to_slept

# Another phase's sleep in it, or one of its own in another, would make a ratio of 1.3 or more (0.7 or less).
CLOSE = 1.25


SCHEDULE = Schedule(warmup_steps=2, steps=8)


def measure(module, *callbacks, schedule=SCHEDULE, loader=None, val=None, **flags):
    timer, session = PhaseTimer(), MeasurementSession(schedule)
    quiet_trainer(timer, session, *callbacks, **flags).fit(module, loader or SlowBatches(), val)
    return [r for r in timer.records if r.stage == "window"], session, list(timer.records)


def median(records, name):
    return statistics.median_high(getattr(record, name) for record in records)


def test_each_phase_gets_its_own_time_and_they_sum_to_the_step_and_the_window(sleeper):
    batches = SlowBatches()
    window, session, every = measure(sleeper, loader=batches)
    for phase in ("forward", "backward", "optimizer"):
        assert ratio_to_slept(window, f"{phase}_s", sleeper.slept[phase]) < CLOSE, phase
    assert ratio_to_slept(window, "data_s", batches.slept["data"]) < CLOSE
    assert all(record.clip_s is None for record in window)
    assert math.fsum(record.step_s for record in window) == pytest.approx(session.raw_wall_s, rel=0.05)
    assert [record.step for record in every] == list(range(10))
    assert [record.is_warmup for record in every] == [True] * 2 + [False] * 8


def test_clipping_is_a_phase_of_its_own(sleeper):
    for record in measure(sleeper, gradient_clip_val=1.0)[0]:
        assert math.fsum(record.span_s(phase) or 0.0 for phase in PHASES) == pytest.approx(record.step_s)
        assert record.clip_s > 0


def test_accumulation_makes_one_step_of_its_micro_batches(sleeper):
    window, _, _ = measure(sleeper, accumulate_grad_batches=3)
    assert {record.micro_batches for record in window} == {3}
    for phase, sleeps in (("forward", 3), ("backward", 3), ("optimizer", 1)):
        assert ratio_to_slept(window, f"{phase}_s", sleeper.slept[phase], each=sleeps) < CLOSE


def test_a_short_last_group_says_how_short_it_is(sleeper):
    flags = {"accumulate_grad_batches": 3, "limit_train_batches": 4}
    window, _, _ = measure(sleeper, loader=SlowBatches(4), schedule=Schedule(0, 4), **flags)
    assert [record.micro_batches for record in window] == [3, 1, 3, 1]


def test_validation_inside_the_window_is_subtracted(sleeper):
    # Each lasts as long as two steps.
    val = SlowBatches(6)
    window, session, _ = measure(sleeper, val=val, val_check_interval=2, limit_val_batches=6)
    excluded_s = math.fsum(record.excluded_s for record in window)
    assert excluded_s >= 4 * 6 * (val.data_s + sleeper.forward_s)
    after = [record for record in window if record.excluded_s > val.data_s]
    assert len(after) == 4
    others = [record for record in window if record not in after]
    assert median(after, "step_s") / median(others, "step_s") < 2
    wall_s = session.raw_wall_s - excluded_s
    assert sum(record.step_s for record in window) == pytest.approx(wall_s, rel=0.05)


def test_a_checkpoint_inside_the_window_is_subtracted(sleeper, tmp_path):
    window, _, _ = measure(sleeper, ModelCheckpoint(tmp_path, every_n_train_steps=2), enable_checkpointing=True)
    assert sum(record.excluded_s > 0 for record in window) >= 3


def test_window_lasts_as_long_as_asked(sleeper):
    assert measure(sleeper, schedule=Schedule(1, 2, min_window_s=0.3))[1].raw_wall_s >= 0.3


def test_another_callbacks_time_belongs_to_the_step(sleeper):
    class Slow(Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.005)

    assert median(measure(sleeper, Slow())[0], "other_s") >= 0.005


def test_alone_in_a_strangers_trainer_it_only_watches(sleeper):
    trainer = quiet_trainer(timer := PhaseTimer(), max_steps=12)
    trainer.fit(sleeper, SlowBatches())
    assert trainer.global_step == 12
    assert [record.is_warmup for record in timer.records] == [True] * 5 + [False] * 7


def test_two_timers_are_refused(sleeper):
    with pytest.raises(UsageError, match="two PhaseTimers"):
        measure(sleeper, PhaseTimer())


def test_validate_measures_inference_steps(sleeper):
    timer, session = PhaseTimer(), MeasurementSession(Schedule(1, 4))
    quiet_trainer(timer, session).validate(sleeper, SlowBatches(6), verbose=False)
    window = [record for record in timer.records if record.stage == "window"]
    assert len(window) == 4
    assert all(record.backward_s is None and record.forward_s > 0 for record in window)


def test_a_slow_run_delivers_records_every_second(sleeper):
    sleeper.forward_s = 0.3
    delivered = []

    class Reader(Observer):
        def steps_recorded(self, records):
            delivered.append(self.session.steps_done)

    measure(sleeper, Reader(), schedule=Schedule(0, 6))
    assert delivered[0] <= 4


class QueuedDevice(HostClock):
    """A device that works off what it is given behind the host's back, as a GPU does."""

    name, has_lag = "events", True
    busy_until_s = 0.0

    def give(self, work_s):
        self.busy_until_s = self.stamp() + work_s

    def stamp(self):
        return max(self.busy_until_s, time.perf_counter())

    def seconds(self, start, end):
        return end - start

    def is_reached(self, stamp):
        return time.perf_counter() >= stamp

    def wait(self, _device):
        time.sleep(max(0.0, self.busy_until_s - time.perf_counter()))


@pytest.mark.parametrize(("work_s", "most_settling"), [(0.06, 2), (0.0, 1)])
def test_the_lag_probes_do_not_wait_for_dozens_of_long_steps(sleeper, monkeypatch, work_s, most_settling):
    """All of which the queue takes before the first of them is over."""
    device, asked = QueuedDevice(), []
    monkeypatch.setattr("lmbench.callbacks.phase_timer.make_clock", lambda name, on: device)
    for module in ("phase_timer", "session"):
        monkeypatch.setattr(f"lmbench.callbacks.{module}.synchronize", device.wait)
    sleeper.forward_s = sleeper.backward_s = sleeper.optimizer_s = 0.0
    step = sleeper.training_step

    def training_step(batch, batch_idx):
        asked.append(batch_idx)
        device.give(work_s)
        return step(batch, batch_idx)

    monkeypatch.setattr(sleeper, "training_step", training_step)
    batches = SlowBatches()
    batches.data_s = 0.0
    schedule = Schedule(warmup_steps=1, steps=6, probe_steps=3)
    _, session, _ = measure(sleeper, loader=batches, schedule=schedule)
    others = 1 + 6 + len(schedule.probe_plan()) - 1
    assert len(asked) - others in range(1, most_settling + 1)
    assert session.run.probe.verdicts.forward.verdict == ("queued" if work_s else "host-bound")
