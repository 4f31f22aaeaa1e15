"""Padding in a batch, told beside the tokens per second, the batch that FLOPs are counted on, and dtypes of weights."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import torch
from fit_process import measure_here
from lightning.pytorch.loggers.logger import DummyLogger
from refusals import usage_error
from strangers import OwnLoaders, TokenModel
from tables import cases

from lmbench.instruments.subject import describe_model, note_peak, padding_of, tensors_of
from lmbench.precision import named_gpu
from lmbench.records.run import RunEnvironment, RunRecord

IDS = torch.arange(8)
LABELS = torch.tensor([3, 4, -100, -100, -100, -100, -100, -100])


@dataclass
class Rows:
    texts: list[str]
    labels: tuple[torch.Tensor]


@cases(
    "batch | padding",
    ({"input_ids": IDS, "attention_mask": IDS < 6, "labels": LABELS}, 2),
    # What is added to scores is no padding.
    ({"attention_mask": torch.zeros(1, 1, 8, 8), "labels": LABELS}, 6),
    ((IDS, [LABELS]), 6),
    (UserDict(labels=LABELS), 6),
    (Rows(["a text"], (LABELS,)), 6),
    # Log-mels at their floor, an adjacency and a tensor without elements are no labels.
    ((IDS, torch.full((8,), -100.0), torch.eye(2).to_sparse(), torch.empty(0, dtype=torch.int64)), 0),
)
def test_padding_is_what_the_mask_or_the_labels_leave_out(batch, padding):
    assert padding_of(batch) == (padding, 8)


class Padded(TokenModel):
    def training_step(self, batch):
        return super().training_step((batch["input_ids"], batch["labels"]))


def test_the_share_of_padding_is_one_of_tokens_where_batches_differ_in_length_and_is_told_beside_their_rate():
    full = {"input_ids": IDS[None, :2], "labels": IDS[None, :2]}
    batches = [full, {"input_ids": IDS[None], "labels": LABELS[None]}] * 10
    run = measure_here(Padded(), batches, warmup_steps=2)
    assert run.record.data.padding_fraction == 6 / 10
    assert "60.0 % of them padding" in str(run)


@cases("""
- [counted, share, text]
- [2, 0.0, '']
- [8, 0.75, 75.0 % of them padding]
""")
def test_padding_that_tokens_per_batch_leaves_out_is_not_taken_off_twice(counted, share, text):
    class Counting(Padded):
        def tokens_per_batch(self, batch):
            return counted

    run = measure_here(Counting(), [{"input_ids": IDS[None], "labels": LABELS[None]}] * 5)
    assert run.record.data.padding_fraction == share
    assert text in str(run)
    assert ("of them padding" in str(run)) == bool(text)


@dataclass
class Packed:
    """Sequences of several lengths in one row, as an attention of variable lengths takes them."""

    is_counted: torch.Tensor
    ids: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]


class Flattened(TokenModel):
    """Takes a pair, a mapping or a dataclass of ids and targets, with other tensors before them."""

    def training_step(self, batch):
        return super().training_step([t[None] for t in tensors_of(batch) if t.dtype is torch.int64][-2:])


def test_without_input_ids_tokens_are_the_integers_that_an_embedding_can_look_up():
    pair, text = (IDS, IDS), {"weights": torch.ones(8), "source": IDS, "target": IDS}
    packed = Packed(IDS < 6, IDS, IDS, [5, 3])
    for batch in (pair, text, packed):
        record = measure_here(Flattened(), [batch] * 5, steps=2, warmup_steps=1).record
        assert (record.window.tokens, record.flops.per_token_flops) == (2 * 8, 3 * 2 * 8 * 50)


class Labelled(TokenModel):
    """Looks up the class of an image, which is the larger tensor."""

    def training_step(self, batch):
        pixels, labels = batch
        return (self.body[0](labels).sum() - pixels.sum()).square()


def test_labels_beside_a_larger_input_are_no_tokens():
    record = measure_here(Labelled(), [(torch.ones(8, 4), IDS)] * 5, steps=2, warmup_steps=1).record
    assert record.window.tokens is None
    assert record.window.tokens_reason.endswith("no nn.Embedding can look up the largest tensor of a batch")


class Growing(TokenModel):
    """Its product grows with the length of the sequences, which is short in the first batch."""

    def training_step(self, batch):
        weights = self.body[1].weight
        rows = self.body[0](batch["input_ids"])
        return (rows @ rows.mT @ rows @ weights.mT).square().mean()


def test_flops_are_counted_on_a_batch_as_long_as_those_of_the_window():
    batches = [{"input_ids": torch.ones(1, 4 if index == 0 else 16, dtype=torch.long)} for index in range(20)]
    record = measure_here(Growing(), batches, steps=4, warmup_steps=2).record
    assert record.flops.per_token_flops == 3 * (2 * 2 * 16 * 8 + 2 * 8 * 50)


class Asking(TokenModel):
    """Asks its Trainer for the learning rate, and gives each loss to a logger of its own."""

    def training_step(self, batch):
        assert self.trainer.optimizers[0].param_groups[0]["lr"] > 0
        loss = super().training_step((batch["input_ids"], batch["input_ids"]))
        if self.logger:
            self.logger.log_metrics({"mine": float(loss)})
        return loss


class Noting(DummyLogger):
    def __init__(self):
        super().__init__()
        self.losses = []

    def log_metrics(self, metrics, step=None):
        self.losses += [metrics["mine"]] if "mine" in metrics else []


def test_flops_of_a_step_that_asks_its_trainer_are_counted_and_its_loggers_get_no_fake_number():
    logger = Noting()
    record = measure_here(Asking(), [{"input_ids": IDS[None]}] * 5, {"logger": logger}).record
    assert (record.flops.per_token_flops, record.flops.reason) == (3 * 2 * 8 * 50, None)
    assert len(logger.losses) == 4


@cases("method", "tokens_per_batch", "flops_per_token")
def test_a_count_below_0_is_refused(method):
    module = OwnLoaders()
    setattr(module, method, lambda *_: -5)
    with usage_error(rf"{method}\(.*\) returned -5; it must return a whole number, 0 or more"):
        measure_here(module)


def test_a_batch_without_tokens_tells_no_flops_a_token():
    class Without(OwnLoaders):
        def tokens_per_batch(self, batch):
            return 0

    record = measure_here(Without(), steps=4).record
    assert (record.outcome, record.window.tokens, record.flops.per_token_flops) == ("ok", None, None)


@cases("""
- [precision, halved, dtype, peak]
# 450 of 850 parameters, or 400.
- [bf16-true, 1, "bfloat16, float32", bf16]
- [32-true, 1, "bfloat16, float32", bf16]
- [bf16-mixed, 0, "float32, bfloat16", bf16]
- [bf16-true, null, float32, fp32]
- [32-true, null, null, fp32]
""")
def test_weights_of_another_dtype_than_the_precisions_are_told_and_most_of_them_set_the_peak(
    precision, halved, dtype, peak
):
    module = TokenModel()
    module.describe = lambda: {"dtype": "mine"}
    if halved is not None:
        module.body[halved].to(torch.bfloat16)
    run = RunRecord(1, "ok", environment=RunEnvironment(), precision=precision, matmul_precision="highest")
    run.environment.gpu.name = "NVIDIA H200"
    run.model = describe_model(module, [], precision)
    note_peak(run)
    assert (run.model.dtype, run.flops.peak_flops_per_s) == (dtype, named_gpu("NVIDIA H200").flops_per_s(peak))
