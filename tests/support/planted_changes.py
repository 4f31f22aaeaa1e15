"""A small language model with planted changes: of nothing, of how it trains, and cheats that look fast."""

from __future__ import annotations

import time

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

VOCAB, WIDTH, BATCH, LENGTH = 24, 24, 8, 16

#: The same function and the same training, written otherwise.
NOTHING = (
    "none", "named", "residual first", "loss by log_softmax", "linear by hand", "loop optimizer", "scaled twice",
    "float tokens", "padded", "hooks",
)  # fmt: skip
#: Other trainings, each as fast as its author says.
TRAINS_OTHERWISE = (
    "a third of the rate", "sgd", "half of the tokens", "every second update", "large eps", "embedding nudged",
    "rounded weights", "noisy gradients", "sometimes detached", "wrong targets",
)  # fmt: skip
#: Changes whose speed is not real.
CHEATS = (
    "skipped steps", "cached output", "patched clock", "patched event", "fewer tokens", "frozen half", "detached loss",
    "constant batch", "no optimizer", "fewer layers",
)  # fmt: skip


class Batches:
    """Sequences in which a token mostly follows from the one before, the same ones for a seed."""

    def __init__(self, change):
        self.change = change

    def __iter__(self):
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
        batch_size = BATCH // 2 if self.change == "fewer tokens" else BATCH
        while True:
            tokens = torch.randint(VOCAB, (batch_size, LENGTH + 1), generator=generator)
            for position in range(LENGTH):
                is_rule = torch.rand(batch_size, generator=generator) < 0.9
                tokens[is_rule, position + 1] = (5 * tokens[is_rule, position] + 3) % VOCAB
            yield tokens[:, :-1], tokens[:, 1:]
            while self.change == "constant batch":
                yield tokens[:, :-1], tokens[:, 1:]


class Changed(LightningModule):
    """A stack of residual blocks with one change of those above."""

    def __init__(self, change: str = "none"):
        super().__init__()
        self.change = change
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)
        if change == "hooks":
            self.head.register_forward_hook(lambda *_: None)
        if change == "patched clock":
            clock = time.perf_counter_ns
            time.perf_counter_ns = lambda: clock() * 9 // 10
        if change == "patched event":
            torch.cuda.Event.elapsed_time = lambda *_: 1.0

    def forward(self, tokens):
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if self.change == "fewer layers" and index == 3:
                continue
            step = functional.relu(x @ block.weight.T + block.bias if self.change == "linear by hand" else block(x))
            if self.change in ("frozen half", "sometimes detached") and index == 2:
                is_cut = self.change == "frozen half" or self.global_step % 2
                x, step = (x.detach(), step.detach()) if is_cut else (x, step)
            x = step + x if self.change == "residual first" else x + step
        return self.head(x)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        kept = getattr(self, "kept", None)
        if self.change == "skipped steps" and self.global_step % 2 and kept is not None:
            return kept * 1.0 + 0.0 * self.head.bias.sum()
        if self.change == "cached output" and kept is not None:
            return kept + sum(0.0 * parameter.sum() for parameter in self.parameters())
        if self.change == "float tokens":
            tokens = tokens.double().long()
        logits, targets = self(tokens).flatten(0, 1), targets.flatten()
        if self.change == "half of the tokens":
            logits, targets = logits[: len(targets) // 2], targets[: len(targets) // 2]
        if self.change == "wrong targets":
            targets = torch.where(torch.arange(len(targets), device=targets.device) % 8 == 0, 0, targets)
        if self.change == "padded":
            logits = torch.cat([logits, torch.full((len(logits), 8), -1e9)], dim=1)
        if self.change == "loss by log_softmax":
            loss = -functional.log_softmax(logits, -1).gather(1, targets[:, None]).mean()
        else:
            loss = functional.cross_entropy(logits, targets)
        self.kept = loss.detach()
        if self.change == "detached loss":
            return self.kept + 0.0 * self.head.bias.sum()
        return 2 * loss / 2 if self.change == "scaled twice" else loss

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if self.change == "noisy gradients":
                parameter.grad += 5 * parameter.grad.std(unbiased=False) * torch.randn_like(parameter.grad)
        if self.change == "embedding nudged":
            # The probe finds a gradient and a weight that moved.
            self.embedding.weight.grad *= 1e-12

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        self.calls = getattr(self, "calls", 0) + 1
        if self.change == "no optimizer" or (self.change == "every second update" and self.calls % 2):
            closure()
        else:
            optimizer.step(closure=closure)
        if self.change == "rounded weights":
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_((parameter * 64).round() / 64)

    def configure_optimizers(self):
        if self.change == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.01)
        rate = 0.003 if self.change == "a third of the rate" else 0.01
        eps = 0.01 if self.change == "large eps" else 1e-8
        return torch.optim.AdamW(self.parameters(), lr=rate, eps=eps, foreach=self.change != "loop optimizer")

    def train_dataloader(self):
        return Batches(self.change)

    def tokens_per_batch(self, batch):
        return batch[0].numel()
