"""Each callback in a user's own Trainer: it measures, changes nothing and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import os
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning.demos.boring_classes
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from refusals import usage_error
from strangers import ByHand, Data, OwnLoaders, Regression, SlowBatches
from tables import cases

from lmbench.callbacks import (
    MeasurementSession,
    MemoryRecorder,
    PhaseTimer,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
)
from lmbench.instruments.window import Schedule
from lmbench.records.load import load_run
from lmbench.records.vocabulary import PHASES

from conftest import measure, quiet_trainer

WATCHERS = (PhaseTimer, MemoryRecorder, ThroughputMeter, TrainingCheck, SyncFinder, RunRecorder)


@pytest.fixture
def recorder(tmp_path):
    return RunRecorder(str(tmp_path / "results"))


def watchers(kinds, recorder=None):
    return [recorder if kind is RunRecorder else kind() for kind in kinds]


def results(recorder):
    return [load_run(path) for path in sorted(Path(recorder.results_dir).glob("*"), key=os.path.getmtime)]


def train(*callbacks, module=Regression, data=None, **flags):
    """Train two epochs in a user's own Trainer; returns the trainer and the final weights."""
    seed_everything(0, verbose=False)
    module = module()
    trainer = quiet_trainer(*callbacks, **{"max_epochs": 2, "limit_val_batches": 0, **flags})
    trainer.fit(module, datamodule=data or Data())
    return trainer, [weight.detach().clone() for weight in module.parameters()]


class Witness(Callback):
    """Notes at every step the state that a user would notice."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        gradients = [parameter.grad is not None for parameter in pl_module.parameters()]
        self.seen.append((batch_idx, trainer.global_step, gradients, gc.isenabled(), trainer.precision))


@cases("kinds | module", ((TrainingCheck,), Regression), (WATCHERS[::-1], Regression), (WATCHERS, ByHand))
def test_watchers_change_nothing_and_leave_nothing(kinds, module, recorder):
    bare, watched, profiler = Witness(), Witness(), SimpleProfiler()
    bare_trainer, expected = train(bare, module=module)
    observers = watchers(kinds, recorder)
    trainer, weights = train(watched, *observers, profiler=profiler, module=module)
    assert {(run.outcome, run.record.window.tokens_reason is None) for run in results(recorder)} <= {("ok", False)}
    assert all(map(torch.equal, weights, expected))
    assert watched.seen == bare.seen
    assert trainer.profiler is profiler
    assert trainer.callbacks == [watched, *observers]
    assert profiler.recorded_durations["run_training_batch"]
    assert trainer.global_step == bare_trainer.global_step == (24 if module is ByHand else 12)
    assert trainer.lightning_module.__dict__.keys() == bare_trainer.lightning_module.__dict__.keys()
    assert not any(m._forward_hooks for m in trainer.lightning_module.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in trainer.lightning_module.parameters())
    hooks, expected = ([len(o._optimizer_step_post_hooks) for o in t.optimizers] for t in (trainer, bare_trainer))
    assert hooks == expected


def test_a_trainer_of_pytorch_lightning_is_refused_in_one_line():
    flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pytorch_lightning.Trainer(accelerator="cpu", callbacks=[PhaseTimer()], **flags)
    with usage_error(r"of pytorch_lightning, .* import lightning\.pytorch"):
        trainer.fit(pytorch_lightning.demos.boring_classes.BoringModel())


def test_a_recorder_writes_a_result(recorder):
    train(recorder)
    (result,) = results(recorder)
    run = result.record
    assert (result.outcome, run.mode, run.zero_grad, run.window.steps) == ("ok", "train_step", "native", 7)
    assert run.model.name == "strangers.Regression"


def test_every_fit_is_a_run_of_its_own_in_one_trainer_and_the_next(recorder):
    timer = copy.deepcopy(PhaseTimer())
    module = Regression()
    first, second = (quiet_trainer(timer, recorder, limit_val_batches=0) for _ in range(2))
    for trainer, epochs in ((first, 2), (first, 4), (second, 2)):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, datamodule=Data())
        assert [record.step for record in timer.records] == list(range(12))
        assert sum(record.is_warmup for record in timer.records) == 5
    assert [(len(result.steps), result.outcome) for result in results(recorder)] == [(12, "ok")] * 3


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


class Predicting(Regression):
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    test_step = predict_step


@cases("further", "test", "predict")
def test_what_is_not_measured_leaves_the_facts_of_the_fit_before_it(further, recorder):
    timer, module = PhaseTimer(), Predicting()
    trainer = quiet_trainer(timer, recorder, max_steps=9)
    trainer.fit(module, datamodule=Data())
    getattr(trainer, further)(module, Data().train_dataloader())
    assert (len(timer.records), recorder.run.outcome, recorder.run.window.steps) == (9, "ok", 4)
    assert [result.path for result in results(recorder)] == [recorder.folder.path]


def test_a_subclass_of_a_callback_may_call_the_hooks_that_it_lacks():
    class Counter(PhaseTimer):
        started = 0

        def on_train_batch_start(self, *arguments):
            super().on_train_batch_start(*arguments)
            self.started += 1

    counter = Counter()
    train(counter)
    assert counter.started == len(counter.records) == 12


MINE = partial(ValueError, "mine"), ValueError, ("error", "mine")
# Lightning turns it into SystemExit.
CTRL_C = KeyboardInterrupt, SystemExit, ("interrupted", "stopped by SIGINT (Ctrl-C)")


@cases(
    "position | hook | error | raised | ended",
    (0, "on_train_batch_start", *MINE),
    (1, "on_after_backward", *MINE),
    (2, "on_before_optimizer_step", *MINE),
    (2, "on_train_batch_start", *CTRL_C),
)
def test_an_exception_is_recorded_passed_on_and_leaves_nothing_behind(position, hook, error, raised, ended, recorder):
    def fail(trainer, *_):
        if trainer.global_step == 7:
            raise error()

    raising, callbacks = Callback(), [recorder, PhaseTimer()]
    setattr(raising, hook, fail)
    callbacks.insert(position, raising)
    trainer = quiet_trainer(*callbacks)
    with pytest.raises(raised):
        trainer.fit(Regression(), SlowBatches())
    (result,) = results(recorder)
    assert (result.outcome, result.record.error.message, len(result.steps)) == (*ended, 7)
    assert isinstance(trainer.profiler, PassThroughProfiler)
    assert trainer.callbacks == callbacks


def test_steps_without_a_loss_are_skipped_ones_so_that_phases_sum_to_the_step(recorder):
    module = partial(Regression, answer="none")
    train(PhaseTimer(), recorder, module=module)
    # A timer without a recorder knows it, too.
    train(alone := PhaseTimer(), module=module)
    (run,) = results(recorder)
    phases = run.record.phases
    assert {step.is_skipped == (step.loss is None) for step in [*run.steps, *alone.records]} == {True}
    assert (phases.backward.n, run.record.window.skipped_count) == (phases.step.n, 4)
    means_s = [phase.mean_s for name in PHASES if (phase := getattr(phases, name)) is not None]
    assert sum(means_s) == pytest.approx(phases.step.mean_s, rel=0.01)


class Adding(Callback):
    """Adds another callback, behind all that are there."""

    def __init__(self, added):
        self.added = added

    def on_fit_start(self, trainer, pl_module):
        trainer.callbacks.append(self.added)


def test_a_callback_that_another_one_adds_stays_and_steps_end_once(recorder):
    train(Adding(witness := Witness()), recorder)
    (run,) = results(recorder)
    assert (len(witness.seen), {step.micro_batches for step in run.steps}) == (12, {1})


def test_an_exception_before_setup_does_not_touch_the_last_result(recorder):
    class Unprepared(Data):
        def prepare_data(self):
            raise ValueError("no data")

    trainer = quiet_trainer(recorder, max_steps=7)
    trainer.fit(Regression(), SlowBatches())
    with pytest.raises(ValueError, match="no data"):
        trainer.fit(Regression(), datamodule=Unprepared())
    assert [result.outcome for result in results(recorder)] == ["ok"]


def test_predicting_and_an_empty_loader_leave_no_result(recorder):
    quiet_trainer(recorder).predict(Predicting(), Data().train_dataloader())
    train(recorder, data=Data(batches=0))
    assert results(recorder) == []


def test_a_measuring_session_in_ones_own_trainer_is_obeyed_twice():
    timer, session = PhaseTimer(), MeasurementSession(Schedule(warmup_steps=1, steps=4, probe_steps=1))
    trainer = quiet_trainer(timer, TrainingCheck(), session)
    for _ in range(2):
        trainer.should_stop = False
        trainer.fit(Regression(), SlowBatches())
        assert (len(timer.records), session.run.window.steps) == (5, 4)
        assert session.run.probe.training.missing_gradients == []
    assert trainer.callbacks[-1] is session


def test_training_that_ends_among_the_probe_steps_leaves_no_marks(sleeper):
    measure(sleeper, schedule=Schedule(1, steps=3, probe_steps=4), max_steps=7)
    assert not any(child._forward_hooks for child in sleeper.modules())
