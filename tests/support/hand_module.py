"""Small modules as users write them, whose memory can be counted by hand, or which cannot be predicted."""

from __future__ import annotations

import copy  # noqa: F401  (tests' expressions use it)
import itertools

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.checkpoint import checkpoint  # noqa: F401  (tests' expressions use it)
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


@torch.library.custom_op("hand::twice", mutates_args=())
def twice(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


twice.register_fake(torch.empty_like)


class TwoLayers(LightningModule):
    """All sizes are multiples of 512 bytes, so that a count by hand has whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(1024, 1024, bias=False) for _ in range(2))

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch).relu()).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)

    def train_dataloader(self):
        return DataLoader([torch.zeros(1024)] * 32, 8)


class Experts(TwoLayers):
    """The second layer stands for four experts, of which each row of the batch chooses one."""

    def training_step(self, batch, batch_idx):
        out = self.first(batch).relu()
        chosen = batch[:, :4].argmax(-1)
        return self.second(out).sum() + sum(self.second(out[chosen == expert]).sum() for expert in range(4))


class Masked(TwoLayers):
    """A Llama whose queries share keys and values; its batches have no mask, one of ones, or one with padding."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
            )
        )
        tokens, ones = torch.zeros(256, dtype=torch.int64), torch.ones(256, dtype=torch.int64)
        masks = {"none": {}, "ones": {"attention_mask": ones}, "padded": {"attention_mask": ones.cumsum(0) // 200}}
        self.row = {"input_ids": tokens, "labels": tokens, **masks[mask]}

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def train_dataloader(self):
        return DataLoader([self.row] * 32, 8)


class Pretrained(TwoLayers):
    """A masked language model of transformers from a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import AutoModelForMaskedLM

        self.first = self.second = None
        self.model = AutoModelForMaskedLM.from_pretrained(folder)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def train_dataloader(self):
        return DataLoader([torch.zeros(128, dtype=torch.int64)] * 32, 8)


class Packed(TwoLayers):
    """Its batches hold rows of several lengths, and a list of the lengths."""

    def training_step(self, batch, batch_idx):
        rows, lengths = batch
        return sum(self.second(self.first(part)).sum() for part in rows.split(lengths))

    def train_dataloader(self):
        return DataLoader(range(32), 8, collate_fn=lambda _: (torch.zeros(8, 1024), [3, 5]))


class Extra(TwoLayers):
    """Evaluates an expression in each step; None leaves the loss as it is."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.extra, self.mean, self.accuracy = extra, MeanMetric(), MulticlassAccuracy(1024, average="macro")

    def training_step(self, batch, batch_idx):
        out = self.second(self.first(batch).relu())
        loss = out.sum()
        value = eval(self.extra)
        return loss if value is None else value


class Stack(TwoLayers):
    """Six blocks of four MiB."""

    def __init__(self):
        LightningModule.__init__(self)

    def configure_model(self):
        self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()


class Ema(Callback):
    def on_fit_start(self, trainer, module):
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]


class Averaged(TwoLayers):
    def configure_callbacks(self):
        return [Ema(), ModelCheckpoint("nowhere", every_n_train_steps=1)]


class TiedAndMoved(TwoLayers):
    def __init__(self):
        super().__init__()
        self.second.weight = self.first.weight
        self.to("cpu", torch.bfloat16)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch.bfloat16(), batch_idx)


class Viewed(TwoLayers):
    """Keeps a view of a weight as it was before it was converted."""

    def __init__(self):
        super().__init__()
        self.row = self.first.weight[0]
        self.to("cpu", torch.bfloat16)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch.bfloat16(), batch_idx)


class ByHand(TwoLayers):
    """Steps after each third batch, and asserts what holds for values."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        assert batch.max() < 1
        assert not batch.isnan().any()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Rows(TwoLayers):
    """A table with sparse gradients, and batches from two loaders."""

    def __init__(self):
        LightningModule.__init__(self)
        self.table = nn.Embedding(1024, 1024, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.table(batch["a"][:, 0].long()).sum() + batch["b"].sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return {name: TwoLayers.train_dataloader(self) for name in "ab"}


class NoneFirst(TwoLayers):
    """Its first batch is None, as that of a `collate_fn` that leaves out samples may be."""

    def train_dataloader(self):
        return itertools.chain([None], super().train_dataloader())


class Lazy(TwoLayers):
    """Keeps a tensor that is no buffer, and so the host's."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(1024, 1024)
        self.second = nn.LazyLinear(1024, bias=False)

    def setup(self, stage):
        self.second(torch.zeros(1, 1024))


class Unready(Lazy):
    def setup(self, stage):
        pass


class Newton(TwoLayers):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())
