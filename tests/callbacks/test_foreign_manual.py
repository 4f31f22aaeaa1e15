"""Manual optimization: phases that Lightning announces are timed, all others are recorded as unseen."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from strangers import ByHand, Sleeper, SlowBatches
from tables import cases
from torch import nn

from lmbench.callbacks import TrainingCheck
from lmbench.instruments.window import Schedule
from lmbench.records.vocabulary import PHASES

from conftest import assert_slept, measure


class Alone(ByHand):
    """Steps without `manual_backward`, and with PyTorch's bare optimizers."""

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        loss.backward()
        for optimizer in self.trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss}


class Lbfgs(ByHand):
    """The optimizer calls its closure several times and updates in between."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.net(batch).pow(2).mean()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class Fetching(Sleeper):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


@cases(
    "module | missing | exact",
    (Sleeper(), "clip", "forward backward optimizer"),
    (Fetching(), "transfer clip", "forward backward optimizer"),
    (ByHand(), "forward clip zero_grad", "backward optimizer other"),
    (ByHand(bypass="backward"), "forward backward clip zero_grad", "optimizer"),
    (Lbfgs(), "forward clip optimizer zero_grad", ""),
    (Alone(), "forward backward clip optimizer zero_grad", ""),
)
def test_phases_are_exact_or_missing_and_by_hand_the_missing_ones_are_unseen(module, missing, exact):
    batches = SlowBatches()
    window, session = measure(module, loader=batches, schedule=Schedule(1, 16))
    for record in window:
        assert [phase for phase in PHASES if getattr(record, f"{phase}_s") is None] == missing.split()
    is_automatic = module.automatic_optimization
    assert session.run.unseen_phases == ([] if is_automatic else missing.split())
    assert_slept(window, **batches.slept, **{phase: module.slept[phase] for phase in exact.split()})
    assert (window[-1].loss is not None) == (is_automatic or isinstance(module, Alone))


@cases("period", 1, 5)
def test_every_optimizers_parameters_are_checked_at_its_own_step(period):
    class Adversaries(LightningModule):
        """A generator and a critic in turn; each turn begins with zeroed gradients."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic, self.idle = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(2, 2)
            self.period = period

        def training_step(self, batch, batch_idx):
            generating, judging = self.optimizers()
            if batch_idx % self.period == 0:
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

    _, session = measure(Adversaries(), TrainingCheck(), schedule=Schedule(1, 3, probe_steps=1))
    training = session.run.probe.training
    assert training.parameters == 6
    assert training.missing_gradients == ["idle.weight", "idle.bias"]
    # The critic's bias cancels in the difference of its two outputs.
    assert training.unmoved_parameters == training.zero_gradients == ["critic.bias"]
