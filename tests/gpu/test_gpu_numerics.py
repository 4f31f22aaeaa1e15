"""Sums and overflows on a GPU: as published, and where the CPU has them."""

from __future__ import annotations

import pytest
import torch

from lmbench.numerics import DTYPES, FORMS, overflows_from, published_sums

pytestmark = pytest.mark.gpu


def test_published_sums_add_up_as_printed():
    assert [row[-1] for row in published_sums(torch.device("cuda")).rows] == ["equal"] * 4


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.operator} {form.form}")
def test_operators_fail_where_they_do_on_a_cpu(form):
    for dtype in DTYPES:
        on_cpu, on_gpu = (overflows_from(form, dtype, 1024, torch.device(name)) for name in ("cpu", "cuda"))
        # Sums and exponentials are rounded on the way.
        assert on_gpu == (None if on_cpu is None else pytest.approx(on_cpu, rel=2**-6)), dtype
