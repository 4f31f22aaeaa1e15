"""Each callback in a Trainer of somebody else's: it measures, changes nothing and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from strangers import ByHand, Data, OwnLoaders, Regression, Rows

from lmbench import callbacks
from lmbench.callbacks import MeasurementSession, PhaseTimer, RunRecorder, TrainingCheck
from lmbench.instruments.schedule import Schedule
from lmbench.records.load import load_run

from conftest import quiet_trainer

WATCHERS = (
    "PhaseTimer",
    "MemoryRecorder",
    "ThroughputMeter",
    "TrainingCheck",
    "SyncFinder",
    "QuietHost",
    "RunRecorder",
)


@pytest.fixture
def recorder(tmp_path):
    return RunRecorder(str(tmp_path / "results"))


def watchers(names, recorder):
    return [recorder if name == "RunRecorder" else getattr(callbacks, name)() for name in names]


def results(recorder):
    paths = Path(recorder.results_dir).glob("*")
    return [load_run(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]


def train(*callbacks, module=None, data=None, seed=0, **flags):
    """A stranger's training of two epochs; returns the trainer and the weights it ends with."""
    seed_everything(seed, verbose=False)
    module = module or Regression()
    trainer = quiet_trainer(*callbacks, **{"max_epochs": 2, "limit_val_batches": 0, **flags})
    trainer.fit(module, datamodule=data or Data())
    return trainer, {name: weight.detach().clone() for name, weight in module.state_dict().items()}


class Witness(Callback):
    """Sees in every step what a stranger would notice."""

    def __init__(self):
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        gradients = [parameter.grad is not None for parameter in pl_module.parameters()]
        self.seen.append((batch_idx, trainer.global_step, gradients, gc.isenabled(), trainer.precision))


@pytest.mark.parametrize("names", [*itertools.combinations(WATCHERS, 1), WATCHERS, WATCHERS[::-1]])
def test_watchers_change_nothing_and_leave_nothing(names, recorder):
    bare, watched, profiler = Witness(), Witness(), SimpleProfiler()
    bare_trainer, expected = train(bare)
    observers = watchers(names, recorder)
    trainer, weights = train(watched, *observers, profiler=profiler)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert watched.seen == bare.seen
    assert trainer.profiler is profiler
    assert trainer.callbacks == [watched, *observers]
    assert profiler.recorded_durations["run_training_batch"]
    assert trainer.global_step == bare_trainer.global_step == 12
    assert trainer.lightning_module.__dict__.keys() == bare_trainer.lightning_module.__dict__.keys()
    assert not any(m._forward_hooks for m in trainer.lightning_module.modules())


@pytest.mark.parametrize("extra", [(), ("PhaseTimer",), ("PhaseTimer", "ThroughputMeter", "MemoryRecorder")])
@pytest.mark.parametrize("order", [1, -1])
def test_a_recorder_writes_a_result_alone_and_among_others(extra, order, recorder):
    train(*watchers(("RunRecorder", *extra)[::order], recorder))
    (result,) = results(recorder)
    run = result.record
    assert (result.outcome, run.mode, run.zero_grad, run.window.steps) == ("ok", "train_step", "native", 7)
    assert run.model.name == "strangers.Regression"
    assert [step.step for step in result.steps] == list(range(12))
    assert run.window.steps_sum_s == pytest.approx(sum(step.step_s for step in result.steps if not step.is_warmup))
    assert (run.window.tokens_reason is not None) == ("ThroughputMeter" in extra)


def test_every_fit_of_a_trainer_is_a_run_of_its_own(recorder):
    timer = PhaseTimer()
    module, trainer = Regression(), quiet_trainer(timer, recorder, limit_val_batches=0)
    for epochs in (2, 4):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, datamodule=Data())
        assert [r.step for r in timer.records] == list(range(12))
        assert sum(r.is_warmup for r in timer.records) == 5
    assert [(len(result.steps), result.outcome) for result in results(recorder)] == [(12, "ok")] * 2


def test_fit_after_validate_with_a_sanity_check_measures_training_only(recorder):
    trainer, module = quiet_trainer(recorder, max_steps=9, num_sanity_val_steps=2), OwnLoaders()
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    inference, training = results(recorder)
    assert (inference.record.mode, training.record.mode) == ("inference", "train_step")
    assert (len(inference.steps), len(training.steps)) == (6, 9)
    assert all(step.backward_s is None for step in inference.steps)
    # The epoch's validation lies between steps 5 and 6.
    assert [step.step for step in training.steps if step.excluded_s] == [6]


def test_trainers_of_one_process_do_not_meet():
    timers = [PhaseTimer(), PhaseTimer()]
    first, second = (quiet_trainer(timer, max_steps=steps) for timer, steps in zip(timers, (7, 9), strict=True))

    class Nested(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                second.fit(Regression(), Rows())

    first.callbacks.insert(0, Nested())
    first.fit(Regression(), Rows())
    assert [len(timer.records) for timer in timers] == [7, 9]
    assert timers[0].session is not timers[1].session


def test_the_same_callbacks_serve_one_trainer_after_another(recorder):
    timer = copy.deepcopy(PhaseTimer())
    for steps in (6, 8):
        train(timer, recorder, max_epochs=-1, max_steps=steps)
        assert len(timer.records) == steps
    assert [len(result.steps) for result in results(recorder)] == [6, 8]


class Raises(Callback):
    """Raises in a hook, from the eighth step on."""

    def __init__(self, error, hook="on_train_batch_start"):
        def fail(trainer, *_, **__):
            if trainer.global_step >= 7:
                raise error

        setattr(self, hook, fail)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step"])
def test_an_exception_is_recorded_passed_on_and_leaves_nothing_behind(place, hook, recorder):
    callbacks: list[Callback] = [recorder, PhaseTimer()]
    callbacks.insert(place, Raises(ValueError("mine"), hook))
    trainer = quiet_trainer(*callbacks)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Regression(), Rows())
    (result,) = results(recorder)
    assert (result.outcome, result.record.error.message, len(result.steps)) == ("error", "mine", 7)
    assert isinstance(trainer.profiler, PassThroughProfiler)
    assert trainer.callbacks == callbacks
    # The next fit is a new run.
    callbacks.pop(place)
    trainer.callbacks = callbacks
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 6
    trainer.fit(Regression(), Rows())
    assert results(recorder)[-1].outcome == "ok"


def test_ctrl_c_is_recorded_as_an_interruption(recorder):
    trainer = quiet_trainer(Raises(KeyboardInterrupt()), recorder)
    with pytest.raises(SystemExit):
        trainer.fit(Regression(), Rows())
    (result,) = results(recorder)
    assert (result.outcome, len(result.steps)) == ("interrupted", 7)
    assert isinstance(trainer.profiler, PassThroughProfiler)


def test_an_exception_before_setup_does_not_touch_the_last_result(recorder):
    class Unprepared(Data):
        def prepare_data(self):
            raise ValueError("no data")

    trainer = quiet_trainer(recorder, max_steps=7)
    trainer.fit(Regression(), Rows())
    with pytest.raises(ValueError, match="no data"):
        trainer.fit(Regression(), datamodule=Unprepared())
    assert [result.outcome for result in results(recorder)] == ["ok"]


def test_predicting_and_an_empty_loader_leave_no_result(recorder):
    class Predicting(Regression):
        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    quiet_trainer(recorder).predict(Predicting(), Data().train_dataloader())
    train(recorder, data=Data(batches=0))
    assert results(recorder) == []


@pytest.mark.parametrize("steps", [2, 5])
def test_training_that_ends_in_the_warmup_says_that_nothing_was_measured(steps, recorder):
    train(recorder, max_steps=steps)
    (result,) = results(recorder)
    assert (result.record.error.kind, len(result.steps)) == ("EmptyWindow", steps)
    assert "fail" not in {guard.status for guard in result.record.guards if guard.name != "window_complete"}


def test_a_measuring_session_in_ones_own_trainer_is_obeyed_twice():
    timer, session = PhaseTimer(), MeasurementSession(Schedule(warmup_steps=1, steps=4, probe_steps=1))
    trainer = quiet_trainer(timer, TrainingCheck(), session)
    for _ in range(2):
        trainer.should_stop = False
        trainer.fit(Regression(), Rows())
        assert (len(timer.records), session.run.window.steps) == (5, 4)
        assert session.run.probe.training.missing_gradients == []
    assert trainer.callbacks[-1] is session


def test_training_that_ends_among_the_probe_steps_leaves_no_marks():
    module, session = Regression(), MeasurementSession(Schedule(warmup_steps=1, steps=3, probe_steps=4))
    quiet_trainer(PhaseTimer(), *watchers(WATCHERS[1:-1], None), session, max_steps=7).fit(module, Rows())
    assert not any(child._forward_hooks for child in module.modules())
    assert session.run.window.steps == 3


def test_manual_optimization_is_left_as_it_was():
    def trained(*callbacks):
        seed_everything(1, verbose=False)
        module = ByHand()
        module.forward_s = module.backward_s = module.optimizer_s = module.zero_s = 0.0
        return train(*callbacks, module=module)

    (_, expected), (trainer, watched) = trained(), trained(PhaseTimer())
    assert all(torch.equal(watched[name], expected[name]) for name in expected)
    for parameter in trainer.lightning_module.parameters():
        assert parameter._post_accumulate_grad_hooks in (None, {})
    for optimizer in trainer.optimizers:
        assert len(optimizer._optimizer_step_post_hooks) == 1


def test_an_observer_of_ones_own_hears_of_every_step():
    class Longest(callbacks.Observer):
        longest_s = 0.0

        def steps_recorded(self, records):
            self.longest_s = max(self.longest_s, *(record.step_s for record in records), 0.0)

    longest, timer = Longest(), PhaseTimer()
    train(longest, timer)
    assert longest.longest_s == max(record.step_s for record in timer.records)
