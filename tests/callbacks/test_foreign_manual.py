"""Manual optimization: what Lightning announces is timed, the rest is said to be unseen and never guessed."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from strangers import ByHand
from torch import nn

from lmbench.callbacks import MeasurementSession, PhaseTimer, RunRecorder, TrainingCheck
from lmbench.instruments.schedule import Schedule
from lmbench.records.load import load_run
from lmbench.records.vocabulary import PHASES
from lmbench.report.run import details

from conftest import Sleeper, SlowBatches, quiet_trainer, ratio_to_slept

SCHEDULE = Schedule(warmup_steps=1, steps=16)

# Another part's sleep in a phase would make a ratio of 1.3 or more.
CLOSE = 1.25


def measure(module, *callbacks, schedule=SCHEDULE, loader=None, **flags):
    torch.manual_seed(0)
    timer, session = PhaseTimer(), MeasurementSession(schedule)
    quiet_trainer(timer, *callbacks, session, **flags).fit(module, loader or SlowBatches())
    return [record for record in timer.records if record.stage == "window"], session.run


def test_backward_and_update_are_exact_and_the_rest_is_other():
    module, batches = ByHand(), SlowBatches()
    window, facts = measure(module, loader=batches)
    assert facts.unseen_phases == ["forward", "clip", "zero_grad"]
    assert ratio_to_slept(window, "backward_s", module.slept["backward"], each=2) < CLOSE
    assert ratio_to_slept(window, "optimizer_s", module.slept["optimizer"], each=2) < CLOSE
    assert ratio_to_slept(window, "data_s", batches.slept["data"]) < CLOSE
    assert ratio_to_slept(window, "other_s", module.slept["forward"], module.slept["zero"], each=2) < CLOSE
    for record in window:
        assert record.forward_s is record.zero_grad_s is record.clip_s is None
        assert math.fsum(record.span_s(phase) or 0.0 for phase in PHASES) == pytest.approx(record.step_s)


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_a_phase_that_partly_goes_around_lightning_is_unseen(phase):
    window, facts = measure(ByHand(bypass=phase))
    assert phase in facts.unseen_phases
    assert all(record.span_s(phase) is None for record in window)


def test_without_manual_backward_and_with_the_bare_optimizer_nothing_is_claimed():
    class Alone(ByHand):
        def training_step(self, batch, batch_idx):
            loss = self.second(self.first(batch)).pow(2).mean()
            loss.backward()
            for optimizer in self.trainer.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return {"loss": loss}

    window, facts = measure(Alone())
    assert facts.unseen_phases == ["forward", "backward", "clip", "optimizer", "zero_grad"]
    assert {phase for phase in PHASES if window[-1].span_s(phase) is not None} == {"data", "transfer", "other"}
    assert all(record.loss > 0 for record in window)


def test_a_closure_is_not_the_update():
    class WithClosure(ByHand):
        def training_step(self, batch, batch_idx):
            def closure():
                self.sleep("forward")
                self.manual_backward(self.second(self.first(batch)).pow(2).mean())

            self.optimizers()[0].step(closure=closure)

    module = WithClosure()
    window, facts = measure(module)
    assert facts.unseen_phases == ["forward", "clip", "zero_grad"]
    assert ratio_to_slept(window, "backward_s", module.slept["backward"]) < CLOSE
    assert ratio_to_slept(window, "optimizer_s", module.slept["optimizer"]) < CLOSE
    assert ratio_to_slept(window, "other_s", module.slept["forward"]) >= 1


def test_an_optimizer_that_calls_its_closure_again_hides_the_update():
    class Lbfgs(ByHand):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.second(self.first(batch)).pow(2).mean()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    window, facts = measure(Lbfgs())
    assert "optimizer" in facts.unseen_phases
    assert all(record.optimizer_s is None for record in window)
    assert min(record.backward_s for record in window) >= ByHand.backward_s


def test_a_module_that_fetches_its_own_batches_has_its_wait_as_data():
    class Fetching(Sleeper):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            self.sleep("forward")
            return self.net(batch).pow(2).mean()

        # With it Lightning would look for an iterator there as well.
        validation_step = LightningModule.validation_step

    module, batches = Fetching(), SlowBatches()
    window, facts = measure(module, loader=batches)
    assert facts.unseen_phases == []
    assert ratio_to_slept(window, "data_s", batches.slept["data"]) < CLOSE
    assert ratio_to_slept(window, "forward_s", module.slept["forward"]) < CLOSE
    assert ratio_to_slept(window, "backward_s", module.slept["backward"]) < CLOSE
    assert all(record.transfer_s is None for record in window)


def test_every_optimizers_parameters_are_checked_at_its_own_step():
    class Adversaries(LightningModule):
        """A generator and a discriminator, whose gradients are cleared before the other's turn."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic, self.idle = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(2, 2)

        def training_step(self, batch, batch_idx):
            generating, judging = self.optimizers()
            self.turn(generating, lambda: -self.critic(self.generator(batch)).mean())
            fake = self.generator(batch).detach()
            self.turn(judging, lambda: (self.critic(fake) - self.critic(batch)).pow(2).mean())
            generating.zero_grad()

        def turn(self, optimizer, loss):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]

    _, facts = measure(Adversaries(), TrainingCheck(), schedule=Schedule(1, 3, probe_steps=1))
    training = facts.probe.training
    assert training.parameters == 6
    assert training.missing_gradients == ["idle.weight", "idle.bias"]
    assert training.unmoved_parameters == ["critic.bias"]
    # A difference of two judgements does not depend on the critic's bias.
    assert training.zero_gradients == ["critic.bias"]


def test_the_result_and_the_screen_say_what_is_unseen(tmp_path):
    quiet_trainer(RunRecorder(str(tmp_path)), max_steps=8).fit(ByHand(), SlowBatches())
    (path,) = tmp_path.iterdir()
    run = load_run(path).record
    assert run.unseen_phases == ["forward", "clip", "zero_grad"]
    assert run.phases.forward is None
    line = {line.label: line.text for line in details(run)}["unseen"]
    assert "forward, clip, zero_grad: the module optimizes by hand" in line
    assert {guard.name: guard.status for guard in run.guards}["other_share"] == "n/a"


def test_automatic_optimization_hides_nothing(sleeper):
    _, facts = measure(sleeper)
    assert facts.unseen_phases == []
