"""PhaseTimer and its session in a real Trainer, whose phases have a known length."""

from __future__ import annotations

import math
import statistics
from collections import UserList

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from planted_device import PlantedDevice
from refusals import usage_error
from strangers import ByHand, Sleeper, SlowBatches
from tables import cases

from lmbench.callbacks import PhaseTimer
from lmbench.device import DEVICES
from lmbench.instruments.window import Schedule

from conftest import assert_slept, measure


def total_s(window):
    return math.fsum(record.step_s for record in window)


@cases("""
- [flags, micro_batches]
- [{}, 1]
- [{gradient_clip_val: 1.0, accumulate_grad_batches: 3}, 3]
""")
def test_each_phase_gets_its_own_time_and_the_steps_sum_to_the_window(sleeper, flags, micro_batches):
    batches = SlowBatches()
    window, session = measure(sleeper, loader=batches, **flags)
    assert_slept(window, **sleeper.slept, **batches.slept)
    assert total_s(window) == pytest.approx(session.raw_wall_s, rel=0.05)
    assert [record.step for record in window] == list(range(2, 10))
    facts = {(record.micro_batches, record.clip_s is None) for record in window}
    assert facts == {(micro_batches, "gradient_clip_val" not in flags)}


def test_a_short_last_group_says_how_short_it_is(sleeper):
    flags = {"accumulate_grad_batches": 3, "limit_train_batches": 4}
    window, _ = measure(sleeper, loader=SlowBatches(4), schedule=Schedule(0, 4), **flags)
    assert [record.micro_batches for record in window] == [3, 1, 3, 1]


class ManyNone(SlowBatches):
    """Yields None in place of each third batch, as a `collate_fn` does that leaves out samples."""

    def __iter__(self):
        return (batch if index % 3 else None for index, batch in enumerate(super().__iter__()))


@cases("kind", Sleeper, ByHand)
def test_a_batch_of_none_is_no_step_and_no_micro_batch(kind):
    window, _ = measure(kind(), loader=ManyNone())
    assert [(record.micro_batches, record.step_s > 0.009) for record in window] == [(1, True)] * 8


def test_a_loader_of_nothing_but_none_ends_the_run(sleeper):
    window, session = measure(sleeper, loader=UserList([None] * 3))
    assert (window, session.steps_done) == ([], 0)


def test_a_loss_is_whole_also_where_a_callback_changes_the_number_of_micro_batches(sleeper):
    sleeper.training_step = lambda batch, batch_idx: sleeper.net(batch).sum() * 0 + 3
    scheduler = GradientAccumulationScheduler({0: 2, 2: 1})
    window, session = measure(sleeper, scheduler, loader=SlowBatches(6))
    assert {(record.micro_batches, record.loss) for record in window} == {(1, 3.0), (2, 3.0)}
    assert session.run.window.micro_batches == 2


def test_validation_inside_the_window_is_subtracted(sleeper):
    # Each validation lasts as long as two steps.
    sleeper.validation_step, val = sleeper.training_step, SlowBatches(6)
    window, session = measure(sleeper, val=val, val_check_interval=2, limit_val_batches=6)
    excluded_s = math.fsum(record.excluded_s for record in window)
    assert excluded_s >= 4 * 6 * (val.data_s + sleeper.forward_s)
    after, others = [], []
    for record in window:
        (after if record.excluded_s > val.data_s else others).append(record.step_s)
    assert len(after) == 4
    assert statistics.median(after) / statistics.median(others) < 2
    assert total_s(window) == pytest.approx(session.raw_wall_s - excluded_s, rel=0.05)


@cases("""
- [settings, has_validation]
- [{every_n_train_steps: 2}, false]
- [{}, true]
""")
def test_a_checkpoint_inside_the_window_is_subtracted_also_where_a_validation_ends(
    settings, has_validation, sleeper, tmp_path
):
    flags = {"val_check_interval": 2, "limit_val_batches": 2} if has_validation else {}
    sleeper.validation_step, val = sleeper.training_step, SlowBatches(2) if has_validation else None
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, **settings)
    window, _ = measure(sleeper, saving, val=val, enable_checkpointing=True, **flags)
    saved = [record for record in window if record.checkpoint_s]
    assert len(saved) >= 3
    for record in saved:
        assert bool(record.validation_s) == has_validation
        assert record.excluded_s == pytest.approx(record.checkpoint_s + (record.validation_s or 0.0), rel=0.5)
        assert record.excluded_s >= record.checkpoint_s + (record.validation_s or 0.0)


def test_two_timers_are_refused(sleeper):
    with usage_error("two PhaseTimers"):
        measure(sleeper, PhaseTimer())


@cases("""
- [work_s, most_settling]
- [0.06, 2]
- [0.0, 1]
""")
def test_the_lag_probes_do_not_wait_for_dozens_of_long_steps(sleeper, monkeypatch, work_s, most_settling):
    """The queue takes all of these steps before the first one has ended."""
    device, started = PlantedDevice(), []
    monkeypatch.setitem(DEVICES, "cpu", lambda _: device)
    sleeper.forward_s = sleeper.backward_s = sleeper.optimizer_s = 0.0
    step = sleeper.training_step

    def training_step(batch, batch_idx):
        started.append(batch_idx)
        device.give(work_s)
        return step(batch, batch_idx)

    monkeypatch.setattr(sleeper, "training_step", training_step)
    batches = SlowBatches()
    batches.data_s = 0.0
    schedule = Schedule(warmup_steps=1, steps=6, probe_steps=3)
    _, session = measure(sleeper, loader=batches, schedule=schedule)
    others = 1 + 6 + len(schedule.probe_plan()) - 1
    assert len(started) - others in range(1, most_settling + 1)
    assert session.run.probe.verdicts.forward.verdict == ("queued" if work_s else "host-bound")
