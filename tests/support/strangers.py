"""Somebody else's code: LightningModules and data, of which all but one know nothing of lmbench."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import F1Score

from lmbench.model.language_model import LanguageModel


class Data(LightningDataModule):
    """Epochs of a few batches, the last one short."""

    def __init__(self, batch_size: int = 4, width: int = 16, batches: int = 6):
        super().__init__()
        self.batch_size, self.width, self.batches = batch_size, width, batches

    def train_dataloader(self):
        rows = self.batch_size * self.batches - self.batch_size // 2
        return DataLoader(TensorDataset(torch.randn(max(rows, 0), self.width)), self.batch_size)

    def val_dataloader(self):
        return self.train_dataloader()


#: What a training step may return by mistake.
WRONG_ANSWERS = {"nothing": lambda loss: None, "no loss": lambda loss: {"out": loss}, "number": float}


class Regression(LightningModule):
    """What a Lightning user writes: logs, hyperparameters, a schedule, a validation."""

    def __init__(self, width: int = 16, answer: str = "loss"):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))
        self.width, self.answer = width, answer

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train_loss", loss, prog_bar=True)
        if self.answer == "none" and batch_idx % 2:
            return None
        if self.answer in WRONG_ANSWERS:
            return WRONG_ANSWERS[self.answer](loss)
        return {"loss": loss, "extra": batch_idx} if self.answer == "dict" else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OwnLoaders(Regression):
    """Brings its data with it."""

    def train_dataloader(self):
        return Data(width=self.width).train_dataloader()

    def val_dataloader(self):
        return Data(width=self.width).val_dataloader()


class Watching(OwnLoaders):
    """Writes down what there is of W&B in this process in the middle of the window and at the end of training."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 6:
            self.note("window")
        return super().training_step(batch, batch_idx)

    def teardown(self, stage):
        self.note("end")

    def note(self, when):
        state = {
            "modules": [name for name in sys.modules if name.partition(".")[0] == "wandb"],
            "threads": [thread.name for thread in threading.enumerate() if thread.daemon],
            # But the guard that waits for this process's end.
            "children": [child.cmdline() for child in psutil.Process().children() if "guard" not in child.cmdline()],
            "variables": [name for name in os.environ if name.startswith("WANDB")],
        }
        Path(f"{os.environ['STATE_FILE']}.{when}").write_text(json.dumps(state))


class Needy(Regression):
    def __init__(self, width: int, depth: int):
        super().__init__(width)


class Untyped(Regression):
    def __init__(self, width, depth=None):
        super().__init__(width)


class TokenModel(LightningModule):
    """Eats lmbench's batches and says nothing about tokens or FLOPs."""

    def __init__(self, vocab_size: int = 50, context_length: int = 2048):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))
        self.vocab_size, self.context_length = vocab_size, context_length
        self.kept = []

    def training_step(self, batch):
        tokens, targets = batch
        loss = nn.functional.cross_entropy(self.body(tokens).flatten(0, 1), targets.flatten())
        self.kept = [loss.detach()]
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Telling(TokenModel):
    """Tells both, in its own way."""

    def tokens_per_batch(self, batch):
        return torch.tensor(batch[0].numel() - 1)

    def flops_per_token(self):
        return 1000


class Sleeping:
    """Sleeps `<part>_s` for each part, and notes how long that really took: longer on a busy machine."""

    def __init__(self):
        super().__init__()
        self.slept = {}

    def sleep(self, part):
        start_s = time.perf_counter()
        time.sleep(getattr(self, f"{part}_s"))
        self.slept.setdefault(part, []).append(time.perf_counter() - start_s)


class SlowBatches(Sleeping):
    """An endless loader (or one of `count` batches) that sleeps before each batch."""

    data_s = 0.002

    def __init__(self, count: int = 10**9):
        super().__init__()
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            self.sleep("data")
            yield torch.randn(4, 16)


class Sleeper(Sleeping, LightningModule):
    """Each phase sleeps a time of its own, so that a record can be checked against it."""

    forward_s, backward_s, optimizer_s = 0.004, 0.006, 0.003

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])

    def training_step(self, batch, batch_idx):
        self.sleep("forward")
        return self.net(batch).pow(2).mean()

    def backward(self, loss, *args, **kwargs):
        self.sleep("backward")
        loss.backward()

    def optimizer_of(self, part):
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        # Runs when the update is over, still inside the optimizer's step.
        optimizer.register_step_post_hook(lambda *_: self.sleep("optimizer"))
        return optimizer

    def configure_optimizers(self):
        return self.optimizer_of(self)


class ByHand(Sleeper):
    """Two optimizers by hand; the first one's backward or step may go around Lightning."""

    other_s = 0.0045

    def __init__(self, bypass: str = ""):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1))
        self.bypass = bypass

    def training_step(self, batch, batch_idx):
        inputs = batch[0] if isinstance(batch, list | tuple) else batch
        for optimizer, bypass in zip(self.optimizers(), (self.bypass, ""), strict=True):
            self.sleep("other")
            loss = self.net(inputs).pow(2).mean()
            optimizer.zero_grad()
            self.sleep("other")
            if bypass == "backward":
                loss.backward()
            else:
                self.manual_backward(loss)
            if bypass == "optimizer":
                optimizer.optimizer.step()
            else:
                optimizer.step()

    def configure_optimizers(self):
        return [self.optimizer_of(layer) for layer in self.net]


class TokenPairs(LightningDataModule):
    """Somebody's own tokens, in lmbench's form."""

    def __init__(self, context_length: int = 4):
        super().__init__()
        self.context_length = context_length

    def train_dataloader(self):
        tokens = torch.randint(50, (40, self.context_length + 1))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 2)


class OneBatch(Regression):
    """The same batch for ever."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(32, self.width)), 4)


class Failing(OwnLoaders):
    def training_step(self, batch, batch_idx):
        raise ArithmeticError("the module's own")


class Miscounting(OwnLoaders):
    def tokens_per_batch(self, batch):
        return 1.5


class Misjudging(OwnLoaders):
    def flops_per_token(self):
        return "many"


class Reading(TokenModel):
    """Looks at a value in its step, which a fake tensor does not have."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss if loss.item() > 0 else -loss


class Choosing(TokenModel):
    """Lets its weights choose how many tokens it works on, which no fake tensor tells."""

    def training_step(self, batch):
        tokens, targets = batch
        return super().training_step((tokens[: int((self.body[1].weight < 9).all())], targets[:1]))


class Scoring(TokenModel):
    """Has a metric for each class, which checks that targets are classes."""

    def __init__(self, vocab_size: int = 50):
        super().__init__(vocab_size)
        self.score = F1Score("multiclass", num_classes=vocab_size, average="macro")

    def training_step(self, batch):
        tokens, targets = batch
        self.score(tokens, targets)
        self.log("score", self.score)
        return super().training_step(batch)


class HalfFrozen(TokenModel):
    def configure_model(self):
        self.body[0].requires_grad_(False)


class TokensByHand(TokenModel):
    automatic_optimization = False

    def training_step(self, batch):
        loss = super().training_step(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Variation(LanguageModel):
    """lmbench's own model with something changed."""
