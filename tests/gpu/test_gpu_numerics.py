"""Sums and edges of operators on a GPU: as they are worked out, and where their formulas have them."""

from __future__ import annotations

import pytest
import torch

from lmbench.numerics.experiment.operators import CASES, SMALL_FORMATS, Setting, thresholds
from lmbench.numerics.experiment.sums import published_sum, reduce, run_loop
from lmbench.numerics.formats import FORMATS
from lmbench.numerics.loops import add_in_a_loop
from lmbench.reference.published import load_accumulations

pytestmark = pytest.mark.gpu


def test_published_sums_and_every_pair_of_formats_add_up_as_worked_out():
    device = torch.device("cuda")
    for each in load_accumulations():
        assert published_sum([each], device).differing == {}
    for one in FORMATS.values():
        for other in FORMATS.values():
            assert run_loop(300, 0.1, one, other, device) == add_in_a_loop(300, 0.1, one, other).total, (one, other)
    for of in SMALL_FORMATS:
        assert reduce(1_000_000, 0.01, of, of, device) == of.rounded(1_000_000 * of.rounded(0.01))


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.0])
def test_operators_fail_where_their_formulas_say(eps):
    setting = Setting(1024, eps, torch.device("cuda"))
    rows = [row for case in CASES for of in SMALL_FORMATS for row in thresholds(case, of, setting)]
    for row in rows:
        if row.formula is not None:
            near, far = sorted((row.holds_to, row.fails_from))
            assert near * (1 - 2**-8) <= row.formula <= far * (1 + 2**-8), row
        elif row.dtype == "float16" and "written" not in row.form:
            assert row.fails_from is None, row
