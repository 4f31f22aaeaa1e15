"""Each callback in a Trainer of somebody else's: it measures, changes nothing and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from strangers import ByHand, Data, OwnLoaders, Regression, Rows

from lmbench.callbacks import (
    MeasurementSession,
    MemoryRecorder,
    Observer,
    PhaseTimer,
    QuietHost,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
    TrainingCheck,
)
from lmbench.instruments.schedule import Schedule
from lmbench.records.load import load_run
from lmbench.records.step import StepRecord

from conftest import quiet_trainer

WATCHERS: dict[str, Any] = {
    "PhaseTimer": lambda folder: PhaseTimer(),
    "MemoryRecorder": lambda folder: MemoryRecorder(),
    "ThroughputMeter": lambda folder: ThroughputMeter(),
    "TrainingCheck": lambda folder: TrainingCheck(),
    "SyncFinder": lambda folder: SyncFinder(),
    "QuietHost": lambda folder: QuietHost(),
    "RunRecorder": lambda folder: RunRecorder(str(folder / "results")),
}


def runs(folder):
    return [load_run(path) for path in sorted((folder / "results").glob("*"), key=lambda p: p.stat().st_mtime_ns)]


def train(*callbacks, module=None, data=None, seed=0, **flags):
    """A stranger's training of two epochs; returns the trainer and the weights it ends with."""
    seed_everything(seed, verbose=False)
    module = module or Regression()
    trainer = quiet_trainer(*callbacks, **{"max_epochs": 2, "limit_val_batches": 0, **flags})
    trainer.fit(module, datamodule=data or Data())
    return trainer, {name: weight.detach().clone() for name, weight in module.state_dict().items()}


class Witness(Callback):
    """Sees in every step what a stranger would notice."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        gradients = [parameter.grad is not None for parameter in pl_module.parameters()]
        self.seen.append((batch_idx, trainer.global_step, gradients, gc.isenabled(), trainer.precision))


@pytest.mark.parametrize("names", [*itertools.combinations(WATCHERS, 1), tuple(WATCHERS), tuple(reversed(WATCHERS))])
def test_watchers_change_nothing_and_leave_nothing(names, tmp_path):
    bare, watched = Witness(), Witness()
    bare_trainer, expected = train(bare)
    profiler = SimpleProfiler()
    watchers = [WATCHERS[name](tmp_path) for name in names]
    trainer, weights = train(watched, *watchers, profiler=profiler)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert watched.seen == bare.seen
    assert trainer.profiler is profiler
    assert [type(c) for c in trainer.callbacks] == [Witness, *(type(w) for w in watchers)]
    assert profiler.recorded_durations["run_training_batch"]
    assert trainer.global_step == bare_trainer.global_step == 12
    assert trainer.lightning_module.__dict__.keys() == bare_trainer.lightning_module.__dict__.keys()
    assert not any(m._forward_hooks for m in trainer.lightning_module.modules())


@pytest.mark.parametrize("extra", [(), ("PhaseTimer",), ("PhaseTimer", "ThroughputMeter", "MemoryRecorder")])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_recorder_writes_a_result_alone_and_among_others(extra, is_first, tmp_path):
    others = [WATCHERS[name](tmp_path) for name in extra]
    recorder = RunRecorder(str(tmp_path / "results"))
    train(*([recorder, *others] if is_first else [*others, recorder]))
    (result,) = runs(tmp_path)
    assert result.outcome == "ok"
    assert result.record.mode == "train_step"
    assert result.record.zero_grad == "native"
    assert result.record.model.name == "strangers.Regression"
    assert [step.step for step in result.steps] == list(range(12))
    assert result.record.window.steps == 7
    in_window = [step.step_s for step in result.steps if not step.is_warmup]
    assert result.record.window.steps_sum_s == pytest.approx(sum(in_window))
    assert (result.record.window.tokens_reason is not None) == ("ThroughputMeter" in extra)


def test_every_fit_of_a_trainer_is_a_run_of_its_own(tmp_path):
    timer, recorder = PhaseTimer(), RunRecorder(str(tmp_path / "results"))
    module, trainer = Regression(), quiet_trainer(timer, recorder, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, datamodule=Data())
    first = list(timer.records)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=Data())
    assert [len(result.steps) for result in runs(tmp_path)] == [12, 12]
    assert [result.outcome for result in runs(tmp_path)] == ["ok", "ok"]
    assert [r.step for r in timer.records] == [r.step for r in first] == list(range(12))
    assert sum(r.is_warmup for r in timer.records) == 5


def test_fit_after_validate_with_a_sanity_check_measures_training_only(tmp_path):
    recorder = RunRecorder(str(tmp_path / "results"))
    trainer = quiet_trainer(recorder, max_steps=9, num_sanity_val_steps=2)
    module = OwnLoaders()
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    inference, training = runs(tmp_path)
    assert (inference.record.mode, training.record.mode) == ("inference", "train_step")
    assert len(inference.steps) == 6
    assert all(step.backward_s is None for step in inference.steps)
    assert len(training.steps) == 9
    # The epoch's validation lies between steps 5 and 6.
    assert [step.step for step in training.steps if step.excluded_s] == [6]


def test_trainers_of_one_process_do_not_meet(tmp_path):
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


def test_the_same_callbacks_serve_one_trainer_after_another(tmp_path):
    timer, recorder = PhaseTimer(), RunRecorder(str(tmp_path / "results"))
    for steps in (6, 8):
        train(timer, recorder, max_epochs=-1, max_steps=steps)
        assert len(timer.records) == steps
    assert [len(result.steps) for result in runs(tmp_path)] == [6, 8]


class Raises(Callback):
    def __init__(self, error: BaseException, hook: str, step: int = 7) -> None:
        self.error, self.hook, self.step = error, hook, step

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "hook"):
            return object.__getattribute__(self, "_raise")
        return object.__getattribute__(self, name)

    def _raise(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self.step:
            raise self.error


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step"])
def test_an_exception_is_recorded_passed_on_and_leaves_nothing_behind(place, hook, tmp_path):
    timer, recorder = PhaseTimer(), RunRecorder(str(tmp_path / "results"))
    callbacks: list[Callback] = [recorder, timer]
    callbacks.insert(place, Raises(ValueError("mine"), hook))
    trainer = quiet_trainer(*callbacks)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Regression(), Rows())
    (result,) = runs(tmp_path)
    assert (result.outcome, result.record.error.message) == ("error", "mine")
    assert len(result.steps) == 7
    assert isinstance(trainer.profiler, PassThroughProfiler)
    assert trainer.callbacks == callbacks
    # The next fit is a new run.
    callbacks.pop(place)
    trainer.callbacks = callbacks
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 6
    trainer.fit(Regression(), Rows())
    assert runs(tmp_path)[-1].outcome == "ok"


def test_ctrl_c_is_recorded_as_an_interruption(tmp_path):
    recorder = RunRecorder(str(tmp_path / "results"))
    trainer = quiet_trainer(Raises(KeyboardInterrupt(), "on_train_batch_start"), recorder)
    with pytest.raises(SystemExit):
        trainer.fit(Regression(), Rows())
    (result,) = runs(tmp_path)
    assert result.outcome == "interrupted"
    assert len(result.steps) == 7
    assert isinstance(trainer.profiler, PassThroughProfiler)


def test_an_exception_before_setup_does_not_touch_the_last_result(tmp_path):
    recorder = RunRecorder(str(tmp_path / "results"))
    trainer = quiet_trainer(recorder, max_steps=7)
    trainer.fit(Regression(), Rows())

    class Unprepared(Data):
        def prepare_data(self) -> None:
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        trainer.fit(Regression(), datamodule=Unprepared())
    (result,) = runs(tmp_path)
    assert result.outcome == "ok"


def test_predicting_records_nothing(tmp_path):
    class Predicting(Regression):
        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    quiet_trainer(RunRecorder(str(tmp_path / "results"))).predict(Predicting(), Data().train_dataloader())
    assert runs(tmp_path) == []


@pytest.mark.parametrize("steps", [2, 5])
def test_training_that_ends_in_the_warmup_says_that_nothing_was_measured(steps, tmp_path):
    train(RunRecorder(str(tmp_path / "results")), max_steps=steps)
    (result,) = runs(tmp_path)
    assert result.record.error.kind == "EmptyWindow"
    assert len(result.steps) == steps
    assert "fail" not in {guard.status for guard in result.record.guards if guard.name != "window_complete"}


def test_an_empty_loader_leaves_no_result(tmp_path):
    train(RunRecorder(str(tmp_path / "results")), data=Data(batches=0))
    assert runs(tmp_path) == []


def test_a_measuring_session_in_ones_own_trainer_is_obeyed_twice():
    timer, session = PhaseTimer(), MeasurementSession(Schedule(warmup_steps=1, steps=4, probe_steps=1))
    trainer = quiet_trainer(timer, TrainingCheck(), session)
    for _ in range(2):
        trainer.should_stop = False
        trainer.fit(Regression(), Rows())
        assert len(timer.records) == 5
        assert session.run.window.steps == 4
        assert session.run.probe.training.missing_gradients == []
    assert trainer.callbacks[-1] is session


def test_training_that_ends_among_the_probe_steps_leaves_no_marks():
    module = Regression()
    session = MeasurementSession(Schedule(warmup_steps=1, steps=3, probe_steps=4))
    quiet_trainer(PhaseTimer(), MemoryRecorder(), SyncFinder(), session, max_steps=7).fit(module, Rows())
    assert not any(child._forward_hooks for child in module.modules())
    assert session.run.window.steps == 3


def test_manual_optimization_is_left_as_it_was():
    def weights(*callbacks):
        return train(*callbacks, module=seeded(ByHand))[1]

    def seeded(kind):
        seed_everything(1, verbose=False)
        module = kind()
        module.forward_s = module.backward_s = module.optimizer_s = module.zero_s = 0.0
        return module

    timer = PhaseTimer()
    expected, watched = weights(), weights(timer)
    assert all(torch.equal(watched[name], expected[name]) for name in expected)
    module = timer._module
    assert all(parameter._post_accumulate_grad_hooks in (None, {}) for parameter in module.parameters())
    for optimizer in timer._trainer.optimizers:
        assert len(optimizer._optimizer_step_post_hooks) == 1


def test_an_observer_of_ones_own_hears_of_every_step():
    class Longest(Observer):
        longest_s = 0.0

        def steps_recorded(self, records: list[StepRecord]) -> None:
            self.longest_s = max(self.longest_s, *(record.step_s for record in records), 0.0)

    longest, timer = Longest(), PhaseTimer()
    train(longest, timer)
    assert longest.longest_s == max(record.step_s for record in timer.records)


def test_callbacks_can_be_copied_before_they_are_used():
    assert isinstance(copy.deepcopy(PhaseTimer()), PhaseTimer)
