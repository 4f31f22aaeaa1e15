"""Named sizes, their parameter counts, and dimensions that override them."""

from __future__ import annotations

import torch
from refusals import usage_error
from tables import cases

from lmbench.model.transformer import Transformer
from lmbench.sizes import SIZES, ModelShape, resolve_shape

COUNTS = {"small": 128_625_408, "medium": 423_183_360, "large": 969_411_840, "xl": 1_998_235_200, "2.7B": 3_406_809_600}
COUNTS |= {"xl_2026": COUNTS["2.7B"], "10B": 12_832_823_808}


@cases("size", *SIZES)
def test_parameter_counts_are_those_of_the_real_modules(size):
    with torch.device("meta"):
        network = Transformer(SIZES[size], context_length=8)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == SIZES[size].parameter_count == COUNTS.get(size, count)


def test_a_size_may_be_named_in_letters_of_any_case():
    assert resolve_shape("2.7b") == SIZES["2.7B"] == resolve_shape("XL_2026")


def test_a_dimension_overrides_the_named_size_and_without_a_size_all_are_needed():
    assert resolve_shape("small", 300, d_ff=1000) == ModelShape(768, 1000, 12, 12, vocab_size=300)
    assert resolve_shape(None, d_model=8, d_ff=8, num_layers=1, num_heads=2).head_dim == 4
    with usage_error("d_ff, num_heads must be given"):
        resolve_shape(None, d_model=8, num_layers=1)
