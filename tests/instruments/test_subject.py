"""Padding in a batch, told beside the tokens per second."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from fit_process import measure_here
from strangers import TokenModel

from lmbench.instruments.subject import padding_fraction

IDS = torch.arange(8)
LABELS = torch.tensor([3, 4, -100, -100, -100, -100, -100, -100])


@pytest.mark.parametrize(
    ("batch", "share"),
    [
        ({"input_ids": IDS, "attention_mask": IDS < 6, "labels": LABELS}, 0.25),
        ((IDS, [LABELS]), 0.75),
        (UserDict(labels=LABELS), 0.75),
        # Log-mels at their floor, an adjacency and a tensor without elements are no labels.
        ((IDS, torch.full((8,), -100.0), torch.eye(2).to_sparse(), torch.empty(0, dtype=torch.int64)), 0.0),
    ],
)
def test_padding_is_what_the_mask_or_the_labels_leave_out(batch, share):
    assert padding_fraction(batch) == share


class Padded(TokenModel):
    def training_step(self, batch):
        return super().training_step((batch["input_ids"], batch["labels"]))


def test_tokens_per_second_tell_how_many_are_padding():
    run = measure_here(Padded(), [{"input_ids": IDS[None], "labels": LABELS[None]}] * 20)
    assert run.record.data.padding_fraction == 0.75
    assert "75.0 % of them padding" in str(run)
